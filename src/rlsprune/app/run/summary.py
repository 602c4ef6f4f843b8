"""The summary of a run in a few numbers."""

from __future__ import annotations

import base64
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlsprune.model.latency import latencies, ratio_quartiles
from rlsprune.model.selector import kept_features
from rlsprune.optim.rls import RLS

if TYPE_CHECKING:
    from rlsprune.app.run.execute import Run

__all__ = ["summarise", "tail"]

_LATENCY_BATCHES = (1, 64)  # numbers of inputs
_MEASURED_INPUTS = 5000  # eigenvalues of a P of this size take half a minute, of one twice as large minutes


def summarise(run: Run) -> dict[str, Any]:
    """Summarises a run for its summary.json, and measures the latency of the network as it is now."""
    metrics, events = run.record.metrics, run.record.events
    last, final = tail(metrics, events), metrics[-1]
    names = [metric.name for metric in run.recipe.scoring.metrics]
    kept = next(iter(kept_features(run.model).values()), None)
    networks = [run.recipe.in_layout(run.recipe.build_model()), run.result]
    examples = {batch: run.recipe.example(batch) for batch in _LATENCY_BATCHES}
    times = {batch: latencies([(network, x) for network in networks]) for batch, x in examples.items()}
    unpruned_ms, latency_ms = map(statistics.median, times[_LATENCY_BATCHES[-1]])
    return {
        **run.recipe.title,
        "epochs": run.done,
        "task": run.recipe.scoring.task,
        "metric": run.recipe.scoring.metric.name,
        **{name: final[name] for name in names},
        "loss": final["test_loss"],
        **{f"mean_{name}": statistics.fmean(line[name] for line in last) for name in names},
        "mean_loss": statistics.fmean(line["test_loss"] for line in last),
        "nodes_percent": final["nodes_percent"],
        "weights_percent": final["weights_percent"],
        "flops_percent": final["flops_percent"],
        "latency_ms": latency_ms,
        "latency_unpruned_ms": unpruned_ms,
        "latency_batch": _LATENCY_BATCHES[-1],
        "speedups": [{"batch": batch, **_speedup(*pair)} for batch, pair in times.items()],
        "seconds": sum(line["seconds"] for line in metrics),
        "cpu_seconds": run.clock.used,
        "events": sum(event["kind"] == "prune" for event in events),
        "missed_target": run.method.missed_target(),
        "kept_inputs": kept,
        "kept_columns": [run.data.columns[index] for index in kept] if kept and run.data.columns else None,
        "input_shape": list(run.data.shape),
        "mean_input": None if kept is None else _mean_image(run.data.test.images),
        "layers": run.layers(),
        "health": _health(run.optimizer),
    }


def tail(metrics: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]] = ()) -> Sequence[Mapping[str, Any]]:
    """Returns the epochs that a summary averages: the last ten, or the last tenth of a run of fewer than a hundred.

    Epochs before a roll-back do not count, because their network was discarded.
    """
    rolled_back = max((event["epoch"] for event in events if event["kind"] == "roll-back"), default=0)
    last = metrics[-min(10, max(1, len(metrics) // 10)) :]
    return [line for line in last if line["epoch"] >= rolled_back]


def _health(optimizer: Optimizer) -> list[dict[str, Any]] | None:
    """Returns the health of P per layer, without very wide layers; None if there is no P. NaN becomes None for JSON."""
    if not isinstance(optimizer, RLS):
        return None
    rows = (asdict(health) | {"healthy": health.healthy} for health in optimizer.check(_MEASURED_INPUTS).values())
    return [{key: None if _not_finite(value) else value for key, value in row.items()} for row in rows]


def _mean_image(images: Tensor) -> str | None:
    """Encodes the mean of 8-bit images in base64, to show on it the pixels that are read; None for other inputs."""
    if images.dtype != torch.uint8:
        return None
    mean = images.float().mean(0).round().to(torch.uint8).cpu()
    return base64.b64encode(mean.numpy().tobytes()).decode("ascii")


def _speedup(unpruned: Sequence[float], pruned: Sequence[float]) -> dict[str, float]:
    """Computes the speedup of the pruned network: median and quartiles over rounds measured in turns."""
    low, median, high = ratio_quartiles(unpruned, pruned)
    return {"median": median, "low": low, "high": high}


def _not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
