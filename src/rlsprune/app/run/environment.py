"""The software and hardware of a run, for its environment.json."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any

import torch

import rlsprune

__all__ = ["describe_environment"]

_PACKAGES = ("torch", "torch-pruning", "numpy", "safetensors", "scipy", "mlxtend")


def describe_environment() -> dict[str, Any]:
    """Returns the versions and hardware on which the numbers and times of a run depend."""
    return {
        "rlsprune": rlsprune.__version__,
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:  # noqa: PTH123 (read line by line)
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor()
