"""The networks of the experiments."""

from rlsprune.app.models.fnn import FNN
from rlsprune.app.models.mini_vgg import MiniVGG
from rlsprune.app.models.resnet import ResNet

__all__ = ["FNN", "MiniVGG", "ResNet"]
