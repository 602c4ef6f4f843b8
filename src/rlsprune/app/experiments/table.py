"""A comparison as Markdown tables, aligned so that they read well in a terminal too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["aligned", "comparison_table"]


def comparison_table(comparison: Mapping[str, Any]) -> str:
    """Returns our figures in the form of the paper's table, the costs of all runs, and the paper's own figures."""
    seeds = comparison["seeds"]
    number = comparison["paper_table"]
    parts = [
        f"## {comparison['title']}: "
        + (f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of seeds {', '.join(map(str, seeds))}"),
        "Retained nodes / weights in percent; n and w are those of the unpruned network.",
        _layer_table(comparison),
        "Accuracy and loss on the test set, (unpruned, pruned), and the costs; the unpruned networks last.",
        _result_table(comparison),
    ]
    if comparison["paper"]:
        parts += [
            f'The paper\'s Table {number}, 200 epochs (its word for accuracy is "precision").',
            _paper_table(comparison),
        ]
    return "\n\n".join(parts) + "\n"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Formats a Markdown table whose first row is the head; all columns but the first are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(_padded(row, widths)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (width + 1) + ("-" if not column else ":") for column, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *others = zip(row, widths, strict=True)
    return [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]


def _layer_table(comparison: Mapping[str, Any]) -> str:
    methods = comparison["methods"]
    full = _full(comparison)
    rows = [["Layer", "n", "w", *methods]]
    for number, layer in enumerate(full):
        cells = [_share(column["layers"][number]) for column in methods.values()]
        rows.append([layer["name"], f"{layer['nodes']:.0f}", f"{layer['weights']:.0f}" if number else "-", *cells])
    totals = [
        f"{column['nodes_percent']['mean']:.1f} / {column['weights_percent']['mean']:.1f}"
        for column in methods.values()
    ]
    nodes, weights = (sum(layer[key] for layer in full) for key in ("nodes", "weights"))
    rows.append(["Total", f"{nodes:.0f}", f"{weights:.0f}", *totals])
    return aligned(rows)


def _full(comparison: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the layers of the unpruned network."""
    layers: list[dict[str, Any]] = next(iter(comparison["unpruned"].values()))["layers"]
    return layers


def _share(layer: Mapping[str, Any]) -> str:
    weights = "-" if layer["name"] == "input" else f"{layer['weights_percent']:.1f}"
    return f"{layer['nodes_percent']:.1f} / {weights}"


def _result_table(comparison: Mapping[str, Any]) -> str:
    head = [
        "Method",
        "runs",
        "epochs",
        "accuracy %",
        "loss",
        "nodes %",
        "weights %",
        "FLOPs %",
        "latency ms",
        "run s",
        "events",
        "lost per event",
        "epochs to recover",
    ]
    columns = {**comparison["methods"], **comparison["unpruned"]}
    return aligned([head, *([label, *_results(column)] for label, column in columns.items())])


def _results(column: Mapping[str, Any]) -> list[str]:
    lost = column["lost_per_event"]
    return [
        str(column["runs"]),
        f"{column['epochs']['mean']:g}",
        _beside_unpruned(column, "accuracy", 2),
        _beside_unpruned(column, "loss", 3),
        _number(column["nodes_percent"], 1),
        _number(column["weights_percent"], 1),
        _number(column["flops_percent"], 1),
        f"{column['latency_unpruned_ms']['mean']:.2f} → {column['latency_ms']['mean']:.2f}",
        f"{column['seconds']['mean']:.0f}",
        f"{column['events']['mean']:g}",
        "-" if lost is None else f"{lost:.2f}",
        _recovery(column),
    ]


def _beside_unpruned(column: Mapping[str, Any], key: str, digits: int) -> str:
    pruned, twin = _number(column[key], digits), column.get("unpruned")
    return pruned if twin is None else f"({twin[key]['mean']:.{digits}f}, {pruned})"


def _number(value: Mapping[str, float], digits: int) -> str:
    deviation = f" ± {value['deviation']:.{digits}f}" if value["deviation"] else ""
    return f"{value['mean']:.{digits}f}{deviation}"


def _recovery(column: Mapping[str, Any]) -> str:
    mean, never = column["epochs_to_recover"], column["never_recovered"]
    parts = [] if mean is None else [f"{mean:.1f}"]
    return ", ".join(parts + ([f"{never} never"] if never else [])) or "-"


def _paper_table(comparison: Mapping[str, Any]) -> str:
    paper = comparison["paper"]
    names = [layer["name"] for layer in _full(comparison)]
    rows = [["Layer", *paper]]
    for number, name in enumerate([*names, "Total"]):
        weights = [f"{column['weights'][number - 1]:.1f}" if number else "-" for column in paper.values()]
        cells = [
            f"{column['nodes'][number]:.1f} / {share}" for column, share in zip(paper.values(), weights, strict=True)
        ]
        rows.append([name, *cells])
    for title, key, digits in (("accuracy %", "accuracy", 1), ("loss", "loss", 3)):
        pairs = [column[key] for column in paper.values()]
        rows.append([title, *(f"({unpruned:.{digits}f}, {pruned:.{digits}f})" for unpruned, pruned in pairs)])
    return aligned(rows)
