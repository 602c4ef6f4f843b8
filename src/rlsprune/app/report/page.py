"""The report page: the values of its template, and the file."""

from __future__ import annotations

import base64
import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

import rlsprune
from rlsprune.app.config.metrics import Metric
from rlsprune.app.report.figures import draw_inputs, draw_network
from rlsprune.app.report.runs import NUMBERS, ReportedLayer, ReportedRun, read_runs
from rlsprune.io.atomic import replacing

__all__ = ["render", "write_report"]

_NOT_DRAWN = ("seconds", "nodes_percent")


def write_report(
    folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], *, reload_seconds: int | None = None
) -> Path:
    """Writes the page of one run, or of several overlaid, as one HTML file that opens offline.

    Args:
        folders: The folders of the runs, which may still be in progress.
        out: The file; an existing one is replaced.
        reload_seconds: Seconds after which the open page reloads itself; None to never reload.

    Returns:
        The file.

    Raises:
        FileError: A run's file is missing or damaged.
    """
    page = render(read_runs(folders), reload_seconds)
    with replacing(out) as path:
        path.write_text(page, encoding="utf-8", errors="replace")  # JSON may hold half a character
    return Path(out)


def render(runs: Sequence[ReportedRun], reload_seconds: int | None = None) -> str:
    """Returns the page's text."""
    script, style = _asset("page.js"), _asset("page.css")
    unit = "nodes" if any(layer.channels is None for run in runs for layer in run.layers) else "channels"
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"breakable": _breakable, "count": _count, "number": _number, "times": _times}
    return environment.from_string(_asset("template.html")).render(
        title=_title(runs),
        score=" / ".join(dict.fromkeys(run.metric.label for run in runs)),
        runs=[_view(run, unit) for run in runs],
        unit=unit,
        data=[_curves(run) for run in runs],
        alike=len({tuple((layer.name, layer.full_weights) for layer in run.layers) for run in runs}) == 1,
        script=Markup(script),
        style=Markup(style),
        # Only this script runs, and nothing is fetched, whatever a run's files hold.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
        reload_seconds=reload_seconds,
        written=datetime.now(UTC).astimezone(),
        version=rlsprune.__version__,
    )


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _title(runs: Sequence[ReportedRun]) -> str:
    subjects = dict.fromkeys(_subject(run) for run in runs)
    return ", ".join(subjects) if len(runs) == 1 else f"{', '.join(subjects)}: {len(runs)} runs"


def _subject(run: ReportedRun) -> str:
    return str(run.config.get("experiment") or run.label)


def _view(run: ReportedRun, unit: str) -> dict[str, Any]:
    """Returns the values of a run for the template; widths count channels, or nodes in older files."""
    summary = run.summary or {}
    last = run.metrics[-1] if run.metrics else dict.fromkeys(NUMBERS)
    unpruned_ms, pruned_ms = summary.get("latency_unpruned_ms"), summary.get("latency_ms")
    speedups = summary.get("speedups", [])
    layers = run.layers
    return {
        "label": run.label,
        "about": " · ".join(_about(run)),
        "path": str(run.path),
        "finished": run.summary is not None,
        "done": len(run.metrics),
        "epochs": run.epochs,
        "smaller": _ratio(100, last["weights_percent"]),
        "weights_percent": last["weights_percent"],
        "cheaper": _ratio(100, last["flops_percent"]),
        "flops_percent": last["flops_percent"],
        "faster": speedups[-1]["median"] if speedups else _ratio(unpruned_ms, pruned_ms),
        "speedups": speedups,
        "unpruned_ms": unpruned_ms,
        "pruned_ms": pruned_ms,
        "latency_batch": summary.get("latency_batch"),
        "metric": run.metric,
        "score": run.metric.text(last["score"]),
        "loss": last["test_loss"],
        "compared_with": _compared_with(summary, run.metric),
        "seconds": sum(line["seconds"] or 0 for line in run.metrics),
        "prunes": sum(event["kind"] == "prune" for event in run.events),
        "events": [
            event
            | {"text": _describe(event)}
            | {name: run.metric.text(event[name]) for name in ("score_before", "score_after")}
            for event in run.events
        ],
        "layers": {layer.name: layer for layer in layers},
        "total": _total(layers, unit),
        "network": draw_network(layers, unit),
        "inputs": draw_inputs(run),
        "health": summary.get("health"),
        "use": _use(run),
        "config": list(_flat(run.config)),
        "environment": list(_flat(run.environment)),
    }


def _use(run: ReportedRun) -> dict[str, Any] | None:
    """Returns the files that deploy a finished network and how to call it; None if there are none."""
    models = {"model.onnx": "score", "model-int8.onnx": "int8_score"}
    found = [(run.path / name, score) for name, score in models.items() if (run.path / name).is_file()]
    if run.summary is None or not found or not (run.path / "predict.py").is_file():
        return None
    shape = run.summary.get("input_shape") or []
    images = len(shape) == 3 and shape[0] in (1, 3)
    return {
        "needs": "onnxruntime pillow" if images else "onnxruntime",
        "call": '["photo.jpg"]' if images else '"rows.csv"' if run.config.get("columns") else "rows",
        "files": [
            {"name": path.name, "size": _size(path.stat().st_size), "score": run.metric.text(run.summary[score])}
            for path, score in found
        ],
    }


def _compared_with(summary: Mapping[str, Any], metric: Metric) -> tuple[str, str] | None:
    """Returns the score of the unpruned network and a description of it; None if none was measured."""
    twins = {"unpruned_score": "unpruned, trained alike", "given_score": "with the given weights, unpruned"}
    found = ((metric.text(summary[name]), what) for name, what in twins.items() if summary.get(name) is not None)
    return next(found, None)


def _about(run: ReportedRun) -> Iterator[str]:
    config = run.config
    for name in ("method", "optimizer"):
        if config.get(name):
            yield f"{name} {config[name]}"
    if config.get("seed") is not None:
        yield f"seed {config['seed']}"


def _total(layers: Sequence[ReportedLayer], unit: str) -> dict[str, float | None]:
    def sums(name: str) -> int | None:
        values = [getattr(layer, name) for layer in layers]
        return None if None in values else sum(values)

    size, full_size = sums(unit), sums(f"full_{unit}")
    weights, full_weights = sums("weights"), sums("full_weights")
    share = _ratio(size, full_size)
    percentage = None if share is None else 100 * share
    sizes = {"size": size, "full_size": full_size, "weights": weights, "full_weights": full_weights}
    return {**sizes, "size_percent": percentage}


def _curves(run: ReportedRun) -> dict[str, Any]:
    """Returns the curves of a run for the page's script."""
    seconds = list(itertools.accumulate(line["seconds"] or 0 for line in run.metrics))
    names = list(dict.fromkeys(layer.name for line in run.metrics for layer in line["layers"]))
    shares = [{layer.name: layer.nodes_percent for layer in line["layers"]} for line in run.metrics]
    return {
        "label": run.label,
        "metric": run.metric.label,
        "unit": run.metric.unit,
        "epoch": [line["epoch"] for line in run.metrics],
        "time": [round(second, 2) for second in seconds],
        "series": {name: [_short(line[name]) for line in run.metrics] for name in NUMBERS if name not in _NOT_DRAWN},
        "layers": [{"name": name, "values": [_short(share.get(name)) for share in shares]} for name in names],
        "events": [{"epoch": event["epoch"], "kind": event["kind"], "text": _describe(event)} for event in run.events],
    }


def _describe(event: Mapping[str, Any]) -> str:
    """Describes in words what was pruned; layers that changed alike are named together."""
    alike: dict[tuple[int, int], list[str]] = {}
    for name, before, after in event["layers"]:
        if before != after:
            alike.setdefault((before, after), []).append(name)
    changes = (f"{_together(names)} {before} → {after}" for (before, after), names in alike.items())
    return ", ".join(changes) or "weights set to zero"


def _together(names: Sequence[str]) -> str:
    return f"{len(names)} layers, {names[0]} … {names[-1]}:" if len(names) > 3 else " and ".join(names)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", "–" if value is None else str(value)


def _size(count: int) -> str:
    """Formats the size of a file."""
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _short(value: float | None) -> float | None:
    """Rounds to six digits, which is more than a curve shows and makes the page smaller."""
    return None if value is None else float(f"{value:.6g}")


def _breakable(name: str) -> Markup:
    """Lets a layer's name break after its dots and underscores."""
    return Markup(re.sub(r"([._])", r"\1<wbr>", str(escape(name))))


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _number(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else f"{value:{form}}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×" if value < 10 else f"{value:.1f}×"
