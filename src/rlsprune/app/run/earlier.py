"""What earlier versions called the things that a run writes down."""

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
    """An object of a run's files under the names of this version; what has them already is left as it is."""
    renamed = {_RENAMED.get(name, name): value for name, value in values.items()}
    if "final_accuracy" in renamed:  # of a summary, whose other accuracy and loss were means of the last epochs
        renamed |= {"mean_accuracy": renamed.get("accuracy"), "mean_loss": renamed.get("loss")}
        renamed["accuracy"] = renamed.pop("final_accuracy")
    pruning = renamed.get("pruning")
    return renamed if not isinstance(pruning, dict) else {**renamed, "pruning": in_todays_words(pruning)}
