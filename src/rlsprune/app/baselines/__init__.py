"""The methods that ours is compared with, each as its authors describe it, behind the same interface to a run."""

from rlsprune.app.baselines.depgraph import DepGraph
from rlsprune.app.baselines.l1_norm import L1Norm
from rlsprune.app.baselines.net_slimming import NetSlimming, initialise_scales
from rlsprune.app.baselines.random_choice import RandomChoice
from rlsprune.app.baselines.soft_pruning import SoftPruning
from rlsprune.app.baselines.weight_level import WeightLevel

__all__ = ["DepGraph", "L1Norm", "NetSlimming", "RandomChoice", "SoftPruning", "WeightLevel", "initialise_scales"]
