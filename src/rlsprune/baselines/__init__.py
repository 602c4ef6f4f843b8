"""The methods that ours is compared with, each as its authors describe it; all plug into a training run alike."""

from rlsprune.baselines.depgraph import DepGraph
from rlsprune.baselines.l1_norm import L1Norm
from rlsprune.baselines.net_slimming import NetSlimming, initialise_scales
from rlsprune.baselines.soft_pruning import SoftPruning
from rlsprune.baselines.weight_level import WeightLevel

__all__ = ["DepGraph", "L1Norm", "NetSlimming", "SoftPruning", "WeightLevel", "initialise_scales"]
