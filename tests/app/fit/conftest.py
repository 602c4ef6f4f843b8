"""A module with networks and tiny data, as a user has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

MODULE = """
from torch import nn

width = 3

def mlp():
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))

def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3),
    )

class Branching(nn.Sequential):
    def forward(self, inputs):
        outputs = super().forward(inputs)
        return outputs if outputs.sum() > 0 else outputs * 2

def branching():
    return Branching(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))

def no_bias():
    return nn.Sequential(nn.Linear(12, 32, bias=False), nn.ReLU(), nn.Linear(32, 3))

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, inputs):
        return self.outer(inputs + self.inner(inputs))

def rigid():
    return nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 3))

def wide():
    return nn.Linear(12, 7)

def nothing():
    return None

def of_width(inputs):
    return nn.Linear(inputs, 3)
"""


@pytest.fixture
def networks(tmp_path: Path) -> Path:
    """A file of networks."""
    path = tmp_path / "networks.py"
    path.write_text(MODULE)
    return path


def table(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Three classes that differ in the first features; the others are noise."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    features = random.random((count, 12)).astype(np.float32)
    features[np.arange(count), labels] += 1
    return features, labels


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    path = tmp_path / "table.npz"
    (x_train, y_train), (x_test, y_test) = table(240, 0), table(60, 1)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return path


def write_images(folder: Path, count: int, size: int = 8) -> None:
    """Grey images whose brightness tells their class."""
    from PIL import Image

    random = np.random.default_rng(0)
    for label, name in enumerate(("dark", "light", "middle")):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 60, (size, size)) + (0, 180, 90)[label]
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")
