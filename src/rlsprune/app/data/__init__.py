"""Data sets: readers of the original files, their locations, downloads on request, and batches on the device."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsprune.app.data.batches import Batches
    from rlsprune.app.data.catalog import ENTRIES
    from rlsprune.app.data.datasets import Dataset, Split, load
    from rlsprune.app.data.download import get
    from rlsprune.app.data.errors import DataError

__all__ = ["ENTRIES", "Batches", "DataError", "Dataset", "Split", "get", "load"]

# Loaded on first use: listing and downloading data does not need torch.
_MODULES = {
    "ENTRIES": "catalog",
    "Batches": "batches",
    "DataError": "errors",
    "Dataset": "datasets",
    "Split": "datasets",
    "get": "download",
    "load": "datasets",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
