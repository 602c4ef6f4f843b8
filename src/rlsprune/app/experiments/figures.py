"""Pictures of comparisons, sweeps, costs, fronts, and the pixels that are read."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np

from rlsprune.app.config.metrics import Metric
from rlsprune.io.atomic import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_comparison", "draw_costs", "draw_front", "draw_pixels", "draw_sweep"]

_PANELS = (
    ("nodes_percent", "retained nodes (%)"),
    ("weights_percent", "retained weights (%)"),
    ("accuracy", "accuracy (%)"),
)


_COSTS = (("weights_percent", "retained weights (%)"), ("flops_percent", "FLOPs (%)"), ("seconds", "run (s)"))


def draw_comparison(comparison: Mapping[str, Any], path: Path) -> None:
    """Draws accuracy against weights, FLOPs and run time, with a point per method; unpruned networks are hollow.

    Args:
        comparison: The result of `compare_runs`.
        path: The picture's file; its ending determines the format.
    """
    figure = _figure(12, 4.2)
    figure.suptitle(comparison["title"])
    points = [(label, column, True) for label, column in comparison["methods"].items()]
    points += [(label, column, False) for label, column in comparison["unpruned"].items()]
    for axes, (key, title) in zip(figure.subplots(1, len(_COSTS), sharey=True), _COSTS, strict=True):
        for number, (label, column, pruned) in enumerate(points):
            cost, accuracy = column[key], column["accuracy"]
            axes.errorbar(
                cost["mean"],
                accuracy["mean"],
                xerr=cost["deviation"],
                yerr=accuracy["deviation"],
                marker="osD^v<>P*XhH"[number % 12],
                markersize=9 if label == "rls" else 6,
                color=f"C{number % 10}",
                markerfacecolor=None if pruned else "none",
                linestyle="none",
                label=label,
            )
        axes.set_xlabel(title)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("test accuracy (%)")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    _save(figure, path)


def draw_sweep(curves: Mapping[str, Sequence[Mapping[str, Any]]], title: str, path: Path) -> None:
    """Draws retained nodes, retained weights and accuracy over the epochs.

    Args:
        curves: The metrics of each run by its label in the legend.
        title: The title above the panels.
        path: The picture's file; its ending determines the format.
    """
    figure = _figure(12, 3.6)
    figure.suptitle(title)
    for axes, (key, label) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for name, metrics in curves.items():
            axes.plot([line["epoch"] for line in metrics], [line[key] for line in metrics], label=name)
        axes.set(xlabel="epoch", ylabel=label)
        axes.grid(alpha=0.3)
        if key == "accuracy":
            # With the first epochs of training, the rest would look flat.
            values = [line[key] for metrics in curves.values() for line in metrics[len(metrics) // 10 :]]
            axes.set_ylim(max(0.0, np.percentile(values, 2) - 1), min(100.0, max(values) + 0.5))
    figure.axes[0].legend(title="ξ")
    _save(figure, path)


def draw_costs(curves: Mapping[str, Sequence[Mapping[str, Sequence[float]]]], title: str, path: Path) -> None:
    """Draws accuracy against weights, FLOPs and processor time, with a line per method and a point per size.

    Args:
        curves: For each method and each size, largest first, the accuracies and costs of its runs.
        title: The title above the panels.
        path: The picture's file; its ending determines the format.
    """
    figure = _figure(14, 4.6)
    figure.suptitle(title)
    costs = (*_COSTS[:2], ("cpu_seconds", "processor time (s)"))
    for axes, (key, label) in zip(figure.subplots(1, len(costs), sharey=True), costs, strict=True):
        for number, (name, points) in enumerate(curves.items()):
            axes.errorbar(
                [np.mean(point[key]) for point in points],
                [np.mean(point["accuracy"]) for point in points],
                yerr=[np.std(point["accuracy"], ddof=1) if len(point["accuracy"]) > 1 else 0.0 for point in points],
                marker="osD^v<>P*XhH"[number % 12],
                markersize=4,
                color=f"C{number % 10}",
                linewidth=2.0 if name.startswith("rls") else 1.0,
                label=name,
            )
        axes.set(xlabel=label, xscale="log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3, which="both")
    figure.axes[0].set_ylabel("accuracy (%)")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    _save(figure, path)


def draw_front(points: Sequence[Mapping[str, Any]], chosen: int, title: str, metric: Metric, path: Path) -> None:
    """Draws the score against the remaining parameters and FLOPs, right after each event and after recovery.

    Args:
        points: The points of `shrink_run`, the whole network first.
        chosen: Index of the point that was kept.
        title: The title above the panels.
        metric: The score.
        path: The picture's file; its ending determines the format.
    """
    figure = _figure(10, 4)
    figure.suptitle(title)
    for axes, (key, label) in zip(
        figure.subplots(1, 2, sharey=True), (("params", "parameters (%)"), ("flops", "FLOPs (%)")), strict=True
    ):
        shares = [100 * point[key] / points[0][key] for point in points]
        axes.plot(shares, [point[metric.name] for point in points], "o-", label="test")
        axes.plot(shares, [point["score"] for point in points], "s--", alpha=0.6, label="held-out")
        axes.plot(shares, [point["score_pruned"] for point in points], ".", label="held-out, right after the prune")
        axes.axvline(shares[chosen], color="gray", linestyle=":", label="chosen")
        axes.set(xlabel=label, xscale="log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3, which="both")
    figure.axes[0].set_ylabel(f"{metric.label}{metric.unit and ' (%)'}")
    figure.axes[0].legend()
    _save(figure, path)


def draw_pixels(summary: Mapping[str, Any], path: Path) -> None:
    """Draws the mean image, with the pixels that the network no longer reads marked red.

    Args:
        summary: The summary of a run on grey images that has pruned its inputs.
        path: The picture's file.
    """
    kept = summary["kept_inputs"]
    mean = np.frombuffer(base64.b64decode(summary["mean_input"]), np.uint8).reshape(summary["input_shape"])[0]
    gone = np.ones(mean.size, dtype=bool)
    gone[list(kept)] = False
    figure = _figure(8, 4)
    left, right = figure.subplots(1, 2)
    left.imshow(mean, cmap="gray_r")
    left.set_title("mean image")
    right.imshow(mean, cmap="gray_r")
    right.imshow(
        np.ma.masked_where(~gone.reshape(mean.shape), gone.reshape(mean.shape)), cmap="Reds", alpha=0.55, vmin=0
    )
    right.set_title(f"{len(kept)} of {mean.size} pixels are read (not red)")
    for axes in (left, right):
        axes.set_axis_off()
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # not pyplot, which opens windows and shares state with the user's figures

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    with mpl.rc_context({"svg.hashsalt": "rlsprune"}), replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
