"""The networks of the paper's experiments."""

from rlsprune.models.fnn import FNN
from rlsprune.models.mini_vgg import MiniVGG

__all__ = ["FNN", "MiniVGG"]
