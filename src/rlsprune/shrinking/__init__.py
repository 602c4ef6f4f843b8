"""Shrinking of trained networks in closed form."""

from rlsprune.model.progress import Progress
from rlsprune.shrinking.front import FrontPoint, Score, Shrunk
from rlsprune.shrinking.search import shrink

__all__ = ["FrontPoint", "Progress", "Score", "Shrunk", "shrink"]
