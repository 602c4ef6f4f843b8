"""The networks of the files in this folder, at full size."""

from torch import nn


def small_fnn() -> nn.Module:
    """Twelve features, three classes; the run in ``run/`` trains it."""
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 10), nn.ReLU(), nn.Linear(10, 3))


def small_cnn() -> nn.Module:
    """Convolutions, a batch norm and a flatten; ``model.safetensors`` is a pruned one."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 9, 5),
    )
