"""Make PyTorch networks smaller, while they train or after they are trained, by recursive least squares."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsprune.graph.groups import Group as Group
    from rlsprune.io.export import export_onnx as export_onnx
    from rlsprune.io.export import export_program as export_program
    from rlsprune.io.modelfile import load as load
    from rlsprune.io.modelfile import save as save
    from rlsprune.io.quantize import quantize_onnx as quantize_onnx
    from rlsprune.model.cost import profile as profile
    from rlsprune.model.selector import kept_features as kept_features
    from rlsprune.model.selector import strip_inputs as strip_inputs
    from rlsprune.optim.rls import RLS as RLS
    from rlsprune.prune.event import PruneEvent as PruneEvent
    from rlsprune.prune.pruner import Pruner as Pruner
    from rlsprune.shrinking import shrink as shrink
    from rlsprune.statistics.inputs import InputStatistics as InputStatistics

__version__ = "0.1.0"

# Public names load on first use, so that the command line answers before torch is imported.
_HOMES = {
    "Group": "rlsprune.graph.groups",
    "InputStatistics": "rlsprune.statistics.inputs",
    "PruneEvent": "rlsprune.prune.event",
    "Pruner": "rlsprune.prune.pruner",
    "RLS": "rlsprune.optim.rls",
    "export_onnx": "rlsprune.io.export",
    "export_program": "rlsprune.io.export",
    "kept_features": "rlsprune.model.selector",
    "load": "rlsprune.io.modelfile",
    "profile": "rlsprune.model.cost",
    "quantize_onnx": "rlsprune.io.quantize",
    "save": "rlsprune.io.modelfile",
    "shrink": "rlsprune.shrinking",
    "strip_inputs": "rlsprune.model.selector",
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
    "kept_features",
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
