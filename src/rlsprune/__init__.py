"""Train a PyTorch network and make it smaller in the same run, by recursive least squares."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsprune.optim.rls import RLS as RLS

__version__ = "0.1.0"

# Public names load on first use, so that the command line answers before torch is imported.
_HOMES = {"RLS": "rlsprune.optim.rls"}
__all__ = ["RLS", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
