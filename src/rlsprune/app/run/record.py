"""What a run writes down: a line per epoch, a line per event, and the summary's means."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlsprune.app.config.metrics import METRICS, Metric
from rlsprune.app.run.counting import percent, total
from rlsprune.app.run.earlier import in_todays_words
from rlsprune.app.run.method import Retained
from rlsprune.app.run.scores import Scored
from rlsprune.model.latency import ratio_quartiles
from rlsprune.optim.rls import RLS
from rlsprune.prune.event import PruneEvent

__all__ = ["Record", "health_rows", "layer_rows", "mean_image", "speedup_row", "tail", "total_percent"]


_MEASURED_INPUTS = 5000  # eigenvalues of so large a P take half a minute, of one twice as large minutes


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


def tail(metrics: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]] = ()) -> Sequence[Mapping[str, Any]]:
    """The epochs that a summary averages: the last ten, or the last tenth of a run of fewer than a hundred.

    Epochs before a roll-back do not count: they are of a network that was thrown away.
    """
    rolled_back = max((event["epoch"] for event in events if event["kind"] == "roll-back"), default=0)
    last = metrics[-min(10, max(1, len(metrics) // 10)) :]
    return [line for line in last if line["epoch"] >= rolled_back]


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


def health_rows(optimizer: Optimizer) -> list[dict[str, Any]] | None:
    """Per layer the health of P, but for very wide ones; None if the optimizer keeps none. NaN is no JSON: None."""
    if not isinstance(optimizer, RLS):
        return None
    rows = (asdict(health) | {"healthy": health.healthy} for health in optimizer.check(_MEASURED_INPUTS).values())
    return [{key: None if _not_finite(value) else value for key, value in row.items()} for row in rows]


def mean_image(images: Tensor) -> str | None:
    """The bytes of the mean of 8-bit images in base64, to show on it which pixels are read; None for other inputs."""
    if images.dtype != torch.uint8:
        return None
    mean = images.float().mean(0).round().to(torch.uint8).cpu()
    return base64.b64encode(mean.numpy().tobytes()).decode("ascii")


def speedup_row(unpruned: Sequence[float], pruned: Sequence[float]) -> dict[str, float]:
    """How many times faster the pruned network is: the median and the quartiles over rounds measured in turns."""
    low, median, high = ratio_quartiles(unpruned, pruned)
    return {"median": median, "low": low, "high": high}


def _not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def total_percent(counts: Mapping[str, Retained], unpruned: Mapping[str, Retained]) -> tuple[float, float]:
    """Nodes and weights that are left of the whole network, as percentages."""
    now, full = total(counts), total(unpruned)
    return percent(now.nodes, full.nodes), percent(now.weights, full.weights)
