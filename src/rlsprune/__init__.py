"""Train a PyTorch network and make it smaller in the same run, by recursive least squares."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsprune.graph.groups import Group as Group
    from rlsprune.inputs import strip_inputs as strip_inputs
    from rlsprune.io import export_onnx as export_onnx
    from rlsprune.io import export_program as export_program
    from rlsprune.io import load as load
    from rlsprune.io import save as save
    from rlsprune.optim.rls import RLS as RLS
    from rlsprune.optim.statistics import InputStatistics as InputStatistics
    from rlsprune.profile import profile as profile
    from rlsprune.prune.event import PruneEvent as PruneEvent
    from rlsprune.prune.pruner import Pruner as Pruner
    from rlsprune.quantize import quantize_onnx as quantize_onnx
    from rlsprune.train.shrink import shrink as shrink

__version__ = "0.1.0"

# Public names load on first use, so that the command line answers before torch is imported.
_HOMES = {
    "Group": "rlsprune.graph.groups",
    "InputStatistics": "rlsprune.optim.statistics",
    "PruneEvent": "rlsprune.prune.event",
    "Pruner": "rlsprune.prune.pruner",
    "RLS": "rlsprune.optim.rls",
    "export_onnx": "rlsprune.io",
    "export_program": "rlsprune.io",
    "load": "rlsprune.io",
    "profile": "rlsprune.profile",
    "quantize_onnx": "rlsprune.quantize",
    "save": "rlsprune.io",
    "shrink": "rlsprune.train.shrink",
    "strip_inputs": "rlsprune.inputs",
}
__all__ = [
    "RLS",
    "Group",
    "InputStatistics",
    "PruneEvent",
    "Pruner",
    "__version__",
    "export_onnx",
    "export_program",
    "load",
    "profile",
    "quantize_onnx",
    "save",
    "shrink",
    "strip_inputs",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
