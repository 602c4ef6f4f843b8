"""The networks of the experiments."""

from rlsprune.models.fnn import FNN
from rlsprune.models.mini_vgg import MiniVGG
from rlsprune.models.resnet import ResNet

__all__ = ["FNN", "MiniVGG", "ResNet"]
