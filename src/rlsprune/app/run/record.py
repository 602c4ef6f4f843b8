"""The record of a run: a line per epoch and a line per event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsprune.app.config.metrics import METRICS, Metric
from rlsprune.app.run.counting import percent, total
from rlsprune.app.run.earlier import in_todays_words
from rlsprune.app.run.method import Retained
from rlsprune.app.run.scores import Scored
from rlsprune.prune.event import PruneEvent

__all__ = ["Record", "layer_rows", "total_percent"]


class Record:
    """The metrics and events of a run so far, in the form of its files.

    Args:
        metric: The score that counts.
    """

    def __init__(self, metric: Metric = METRICS["accuracy"]) -> None:
        self.metric = metric
        self.metrics: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []

    def add_event(self, epoch: int, event: PruneEvent, before: Scored, after: Scored) -> dict[str, Any]:
        """Adds an event that happened at an epoch's end."""
        name = self.metric.name
        recovered = self.metric.at_least_as_good(after.scores[name], before.scores[name])
        line = {
            "epoch": epoch,
            "kind": event.kind,
            "loss": event.loss,
            f"{name}_before": before.scores[name],
            f"{name}_after": after.scores[name],
            "epochs_to_recover": 0 if recovered else None,
            "layers": [{"name": name, "before": old, "after": new} for name, old, new in event.layers],
        }
        self.events.append(line)
        return line

    def add_epoch(self, metrics: dict[str, Any]) -> None:
        """Adds an epoch's line, and notes the events from which its score has recovered."""
        self.metrics.append(metrics)
        for event in self.events:
            waited = metrics["epoch"] - event["epoch"]
            name = self.metric.name
            recovered = self.metric.at_least_as_good(metrics[name], event[f"{name}_before"])
            if event["epochs_to_recover"] is None and waited > 0 and recovered:
                event["epochs_to_recover"] = waited

    def state_dict(self) -> dict[str, Any]:
        """Returns both lists."""
        return {"metrics": self.metrics, "events": self.events}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from both lists, including those of an earlier version's checkpoint."""
        self.metrics, self.events = (list(map(in_todays_words, state[name])) for name in ("metrics", "events"))


def layer_rows(counts: Mapping[str, Retained], unpruned: Mapping[str, Retained]) -> list[dict[str, Any]]:
    """Makes a row per layer: its present sizes as numbers and as percentages of the unpruned network."""
    return [
        {
            "name": name,
            "channels": count.channels,
            "nodes": count.nodes,
            "weights": count.weights,
            "nodes_percent": percent(count.nodes, unpruned[name].nodes),
            "weights_percent": percent(count.weights, unpruned[name].weights),
        }
        for name, count in counts.items()
    ]


def total_percent(counts: Mapping[str, Retained], unpruned: Mapping[str, Retained]) -> tuple[float, float]:
    """Computes the percentages of nodes and weights that are left of the whole network."""
    now, full = total(counts), total(unpruned)
    return percent(now.nodes, full.nodes), percent(now.weights, full.weights)
