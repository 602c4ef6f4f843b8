"""Groups of the channels of a network that must go together, and their places in every layer."""

from rlsprune.graph.build import find_groups, open_attention_of
from rlsprune.graph.cuts import Cuts, plan_cuts
from rlsprune.graph.groups import ChannelGraph, Group
from rlsprune.graph.members import Member

__all__ = ["ChannelGraph", "Cuts", "Group", "Member", "find_groups", "open_attention_of", "plan_cuts"]
