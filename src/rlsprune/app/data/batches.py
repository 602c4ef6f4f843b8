"""Batches that are made on the device from images stored there as bytes, or from features."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlsprune.app.data.augmentation import parse_augmentation


class Batches:
    """Shuffled batches of images and labels, epoch after epoch.

    Pixels become float32 in [0, 1] and are not centred, because RLS learns from mean inputs, which centring would make
    nearly zero. All random numbers of an epoch are drawn from a CPU generator when its iteration starts. Batches are
    therefore the same on every device, and an epoch that was left early does not change the next.

    Args:
        images: uint8, whose values are divided by 255, or floating point, whose values are taken as they are; of any
            shape (N, …), or (N, C, H, W) for augmentation.
        labels: (N,), or floating-point targets (N, outputs), on the same device.
        batch_size: images per batch; the last batch of an epoch may be smaller.
        seed: the seed of the shuffling and the augmentation.
        generator: a CPU generator to use instead of `seed`.
        shuffle: whether each epoch has a new order; False for the given order.
        drop_last: whether to leave out a smaller last batch.
        images_per_epoch: the number of images per epoch, different ones each time; None for all.
        augment: "crop" shifts by up to 4 pixels, with black coming in ("crop2" by up to 2); "crop+flip" also mirrors
            every second image.
        channels_last: whether to use the memory format in which convolutions are faster on a CPU.
        flat: whether to return (N, features), whatever the shape.

    Examples:
        >>> from rlsprune.app.data import Batches, load
        >>> data = load("digits")
        >>> batches = Batches(data.train.images, data.train.labels, 128, seed=0)
        >>> images, labels = next(iter(batches))
        >>> images.shape, images.dtype, len(batches)
        (torch.Size([128, 1, 28, 28]), torch.float32, 32)
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        batch_size: int,
        *,
        seed: int = 0,
        generator: torch.Generator | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        images_per_epoch: int | None = None,
        augment: str | None = None,
        channels_last: bool = False,
        flat: bool = False,
    ) -> None:
        if (images.dtype != torch.uint8 and not images.is_floating_point()) or images.ndim < 2:
            raise ValueError(
                f"images must be uint8 or floating point of shape (N, …), not {images.dtype} of {tuple(images.shape)}"
            )
        if images.ndim != 4 and (augment is not None or channels_last):
            raise ValueError(f"augment and channels_last are for images (N, C, H, W), not {tuple(images.shape)}")
        if len(labels) != len(images) or (labels.ndim != 1 and not labels.is_floating_point()):
            raise ValueError(f"labels must have shape ({len(images)},) like the images, not {tuple(labels.shape)}")
        if labels.device != images.device:
            raise ValueError(f"images are on {images.device} and labels on {labels.device}; move both to one device")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        if images_per_epoch is not None and not (shuffle and 1 <= images_per_epoch <= len(images)):
            raise ValueError(f"images_per_epoch {images_per_epoch} must be in 1…{len(images)}, with shuffle on")
        if drop_last and len(images) < batch_size:
            raise ValueError(f"drop_last leaves no batch: {len(images)} images, batch_size {batch_size}")
        if generator is not None and generator.device.type != "cpu":
            raise ValueError(f"generator must be on the CPU, not on {generator.device}")
        self.images = images
        self.labels = labels
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.images_per_epoch = len(images) if images_per_epoch is None else images_per_epoch
        self.augment = None if augment is None else parse_augmentation(augment)
        self.generator = generator if generator is not None else torch.Generator().manual_seed(seed)
        self.flat = flat
        self._format = torch.channels_last if channels_last else torch.contiguous_format

    def __len__(self) -> int:
        """Returns the number of batches per epoch."""
        full, rest = divmod(self.images_per_epoch, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterates over one epoch."""
        count, device = len(self.images), self.images.device
        order = torch.randperm(count, generator=self.generator).to(device) if self.shuffle else None
        shifts = flips = None
        if self.augment is not None:
            shifts = torch.randint(2 * self.augment.shift + 1, (2, count), generator=self.generator).to(device)
        if self.augment is not None and self.augment.flip:
            flips = torch.randint(2, (count,), generator=self.generator).bool().to(device)
        return self._batches(order, shifts, flips)

    def _batches(
        self, order: Tensor | None, shifts: Tensor | None, flips: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(len(self)):
            batch = slice(number * self.batch_size, min((number + 1) * self.batch_size, self.images_per_epoch))
            if order is None:
                images, labels = self.images[batch], self.labels[batch]
            else:
                images, labels = (x.index_select(0, order[batch]) for x in (self.images, self.labels))
            if shifts is not None and self.augment is not None:
                images = shifted(images, shifts[0, batch], shifts[1, batch], self.augment.shift)
            if flips is not None:
                images = torch.where(flips[batch, None, None, None], images.flip(-1), images)
            values = images.to(torch.float32, memory_format=self._format)
            if images.dtype == torch.uint8:
                values = values.div_(255)
            yield values.flatten(1) if self.flat else values, labels

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the generator. Taken between epochs, it makes a resumed run see the same batches."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state of `state_dict`."""
        self.generator.set_state(state["generator"].cpu())


def shifted(images: Tensor, down: Tensor, right: Tensor, margin: int) -> Tensor:
    """Pads each image with black pixels on every side and cuts a window of its original size out of it.

    Args:
        images: (B, C, H, W).
        down: (B,), the window's top row in the padded image; `margin` gives the image itself.
        right: (B,), the same for its left column.
        margin: Width of the padding in pixels.
    """
    height, width = images.shape[-2:]
    # A view of all windows, (B, C, shifts, shifts, H, W), from which one per image is copied.
    windows = pad(images, (margin,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(len(images), device=images.device), :, down, right]
