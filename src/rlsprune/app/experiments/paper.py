"""The figures of the paper's tables 1 to 3, for comparison with ours."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TABLES", "PaperColumn"]


@dataclass(frozen=True)
class PaperColumn:
    """One method in one of the paper's tables."""

    nodes: tuple[float, ...]
    """Percent retained, per layer from the input on, and in total."""
    weights: tuple[float, ...]
    """Percent retained, per layer behind the input, and in total."""
    accuracy: tuple[float, float]
    """Accuracy of the unpruned and the pruned network."""
    loss: tuple[float, float]
    """Loss of the unpruned and the pruned network."""


_FULL_FNN = (100.0,) * 5
_FULL_VGG = (100.0,) * 9
_SOFT_FNN = (70.0,) * 4
_SOFT_VGG = (70.0,) * 8
_HALF_NODES = (100.0, 50.0, 50.0, 50.0, 50.0, 50.0, 50.0, 100.0, 50.7)
_HALF_WEIGHTS = (50.0, 25.0, 25.0, 25.0, 25.0, 25.0, 50.0, 25.1)

TABLES: dict[int, dict[str, PaperColumn]] = {
    1: {
        "l1-norm": PaperColumn((100.0, 30.0, 30.0, 100.0, 53.8), (30.0, 9.0, 30.0, 21.7), (98.9, 98.4), (0.016, 0.020)),
        "net-slimming": PaperColumn(
            (100.0, 35.9, 16.6, 100.0, 53.4), (35.9, 6.0, 16.6, 24.1), (98.8, 98.4), (0.024, 0.027)
        ),
        "soft-pruning": PaperColumn(_FULL_FNN, _SOFT_FNN, (98.9, 98.8), (0.016, 0.017)),
        "weight-level": PaperColumn(_FULL_FNN, (32.0, 26.3, 74.8, 30.0), (98.8, 98.8), (0.016, 0.016)),
        "rls-paper": PaperColumn(
            (33.0, 37.1, 60.0, 100.0, 41.1), (12.3, 22.2, 60.0, 16.4), (99.3, 98.5), (0.011, 0.020)
        ),
    },
    2: {
        "l1-norm": PaperColumn(_HALF_NODES, _HALF_WEIGHTS, (89.7, 86.3), (0.084, 0.108)),
        "net-slimming": PaperColumn(
            (100.0, 32.8, 95.3, 91.4, 78.9, 7.4, 49.4, 100.0, 66.6),
            (32.8, 31.3, 87.1, 72.1, 5.9, 3.7, 49.4, 7.5),
            (88.1, 84.9),
            (0.103, 0.124),
        ),
        "soft-pruning": PaperColumn(_FULL_VGG, _SOFT_VGG, (89.7, 84.7), (0.083, 0.123)),
        "weight-level": PaperColumn(
            _FULL_VGG, (90.0, 81.4, 93.6, 92.8, 91.5, 44.4, 84.1, 50.0), (89.9, 89.9), (0.083, 0.084)
        ),
        "rls-paper": PaperColumn(
            (100.0, 62.5, 46.9, 48.4, 50.0, 25.0, 68.3, 100.0, 51.5),
            (62.5, 29.3, 22.7, 24.2, 12.5, 17.1, 68.3, 17.3),
            (91.4, 88.3),
            (0.070, 0.101),
        ),
    },
    3: {
        "l1-norm": PaperColumn(_HALF_NODES, _HALF_WEIGHTS, (94.5, 93.7), (0.049, 0.055)),
        "net-slimming": PaperColumn(
            (100.0, 45.3, 93.8, 78.9, 68.0, 16.4, 49.4, 100.0, 67.0),
            (45.3, 42.5, 74.0, 53.6, 11.2, 8.1, 49.4, 11.1),
            (92.3, 91.2),
            (0.077, 0.081),
        ),
        "soft-pruning": PaperColumn(_FULL_VGG, _SOFT_VGG, (94.5, 94.4), (0.049, 0.050)),
        "weight-level": PaperColumn(
            _FULL_VGG, (92.0, 74.6, 87.7, 95.6, 97.0, 44.1, 91.8, 50.0), (94.5, 94.5), (0.048, 0.048)
        ),
        # fc2's 4.2 is a misprint for 34.2: its weights are as many percent as fc1's nodes.
        "rls-paper": PaperColumn(
            (100.0, 45.3, 37.5, 35.9, 39.8, 17.2, 34.2, 100.0, 39.3),
            (45.3, 17.0, 13.5, 14.3, 6.8, 5.9, 34.2, 6.5),
            (94.7, 94.1),
            (0.043, 0.052),
        ),
    },
}
