"""What a run writes down: a line per epoch and a line per event."""

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
    """The metrics and events of a run so far, in the form in which they stand in its files.

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
        """Adds an epoch's line, and notes which events its score has made up for."""
        self.metrics.append(metrics)
        for event in self.events:
            waited = metrics["epoch"] - event["epoch"]
            name = self.metric.name
            recovered = self.metric.at_least_as_good(metrics[name], event[f"{name}_before"])
            if event["epochs_to_recover"] is None and waited > 0 and recovered:
                event["epochs_to_recover"] = waited

    def state_dict(self) -> dict[str, Any]:
        """Both lists."""
        return {"metrics": self.metrics, "events": self.events}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from both lists, also those of a checkpoint of an earlier version."""
        self.metrics, self.events = (list(map(in_todays_words, state[name])) for name in ("metrics", "events"))


def layer_rows(counts: Mapping[str, Retained], unpruned: Mapping[str, Retained]) -> list[dict[str, Any]]:
    """Per layer what is left, as numbers and as percentages of the unpruned network."""
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
    """Nodes and weights that are left of the whole network, as percentages."""
    now, full = total(counts), total(unpruned)
    return percent(now.nodes, full.nodes), percent(now.weights, full.weights)
