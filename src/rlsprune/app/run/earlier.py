"""Names that earlier versions used in a run's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["in_todays_words"]

_RENAMED = {
    "precision": "accuracy",
    "precision_before": "accuracy_before",
    "precision_after": "accuracy_after",
    "final_precision": "final_accuracy",
    "given_precision": "given_accuracy",
    "spread": "allocate",
}


def in_todays_words(values: Mapping[str, Any]) -> dict[str, Any]:
    """Renames the keys of an object from a run's files to those of this version; present names are kept."""
    renamed = {_RENAMED.get(name, name): value for name, value in values.items()}
    if "final_accuracy" in renamed:  # a summary, whose other accuracy and loss were means of the last epochs
        renamed |= {"mean_accuracy": renamed.get("accuracy"), "mean_loss": renamed.get("loss")}
        renamed["accuracy"] = renamed.pop("final_accuracy")
    pruning = renamed.get("pruning")
    return renamed if not isinstance(pruning, dict) else {**renamed, "pruning": in_todays_words(pruning)}
