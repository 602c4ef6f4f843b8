"""Evidence: results fit on a page, their numbers are those of the runs that are kept, every claim has a record."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from pathlib import Path

import pytest

from benchmarks.quality.recovery import WHEN, table
from rlsprune.app.run.folder import RunFolder

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RUNS = DOCS / "results"
RECORDS = sorted(path for path in (DOCS / "records").glob("*.md") if path.name != "index.md")
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (DOCS / "results.md").read_text(encoding="utf-8")


def fields(record: Path) -> dict[str, str]:
    """Of the table that a record begins with."""
    return dict(re.findall(r"^\| (\w+) \| (.+) \|$", record.read_text(encoding="utf-8"), re.MULTILINE))


def rows(page: str) -> list[list[str]]:
    """The cells of all tables, without emphasis."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip().strip("*") for cell in line.strip("|").split("|")] for line in lines]


def test_results_fit_on_a_page() -> None:
    assert len(RESULTS.splitlines()) <= 150


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_record_can_be_run_again(record: Path) -> None:
    """That its commands are understood is tested with those of all other pages."""
    given = fields(record)
    assert list(given)[:4] == ["claim", "date", "seeds", "machine"]
    assert given["date"] == record.name[:10]
    text = record.read_text(encoding="utf-8")
    assert re.search(
        r"^```sh\n(?:pip install .+\n)?(rlsprune|python -m benchmarks|python examples/)", text, re.MULTILINE
    )
    named = re.findall(r"`(docs/[^`]+)`", given["files"])
    assert named or given["files"].startswith("none: the benchmark prints")
    for path in named:
        assert (ROOT / path).exists(), path


def test_index_has_every_record_newest_first() -> None:
    index = (DOCS / "records" / "index.md").read_text(encoding="utf-8")
    linked = re.findall(r"^\| (\S+) \| \[([^]]+)\]\(([^)]+)\): (.+) \|$", index, re.MULTILINE)
    assert sorted(name for _, _, name, _ in linked) == [path.name for path in RECORDS]
    dates = [date for date, *_ in linked]
    assert dates == sorted(dates, reverse=True)
    for date, title, name, claim in linked:
        record = DOCS / "records" / name
        assert (date, claim) == (fields(record)["date"], fields(record)["claim"])
        assert record.read_text(encoding="utf-8").startswith(f"# {title}\n")


def test_every_kept_run_belongs_to_a_record() -> None:
    named = " ".join(fields(record)["files"] for record in RECORDS)
    kept = {path.parents[1].name for path in RUNS.glob("*/*/config.json")}
    assert kept
    assert not [name for name in kept if not re.search(rf"docs/results/{name}\b(?!-)", named)]


TRAINED = {
    ("`rls`", "9.7 %"): "mnist-fnn/rls-seed*",
    ("`scratch`, as many epochs", "9.7 %"): "mnist-fnn/scratch-seed*",
    ("`scratch`, as much time", "9.7 %"): "mnist-fnn-long/scratch-seed*",
    ("one-shot L1, the same images, as much time", "9.8 %"): "mnist-fnn-l1/ten-percent-seed*",
    ("`rls`", "4.9 %"): "mnist-fnn-small/rls-seed*",
    ("`scratch`, as many epochs", "4.9 %"): "mnist-fnn-small/scratch-seed*",
    ("`scratch`, as much time", "4.9 %"): "mnist-fnn-small-long/scratch-seed*",
    ("one-shot L1, the same images, as much time", "4.8 %"): "mnist-fnn-l1/five-percent-seed*",
    ("`rls`", "5.6 %"): "cifar10-vgg-all/rls-seed*",
    ("`rls`", "2.0 %"): "svhn-vgg-all/rls-seed*",
    ("`scratch`, as many epochs", "2.0 %"): "svhn-vgg-all/scratch-seed*",
}
"""Name and weights of a row → the runs that it is the mean of."""


EXAMPLE = "`examples/mnist.py`"


def test_the_row_of_the_example_is_that_of_its_log() -> None:
    """In the results, and in the README."""
    log = (RUNS / "mnist-example" / "seeds-0-1-2.log").read_text(encoding="utf-8")
    accuracies = [float(number) for number in re.findall(r"([\d.]+) % accuracy", log)]
    mean, deviation = statistics.fmean(accuracies), statistics.stdev(accuracies)
    (row,) = [row for row in rows(RESULTS) if row[0].startswith(EXAMPLE)]
    assert row[1:] == ["9.7 %", f"{mean:.2f} ± {deviation:.2f} %", "28", str(len(accuracies))]
    assert f"| **{mean:.2f} %** with 9.7 % of the weights |" in README


def test_numbers_of_the_readme_are_in_the_results() -> None:
    table = README.split("\n## Results")[1].split("\n## ")[0]
    numbers = re.findall(r"\d\d\.\d\d(?= %)|\d\d\.\d\d(?= %\*\*)", table)
    evidence = RESULTS + "".join(path.read_text(encoding="utf-8") for path in RECORDS)
    assert len(numbers) >= 8
    assert not [number for number in numbers if number not in evidence]


def test_rows_of_results_are_those_of_the_runs() -> None:
    drawn = {}
    for name, pattern in TRAINED.items():
        folders = [RunFolder(path) for path in sorted(RUNS.glob(pattern))]
        summaries = [folder.read_json("summary") for folder in folders]
        accuracies = [summary["mean_accuracy"] for summary in summaries]
        deviation = f" ± {statistics.stdev(accuracies):.2f}" if len(folders) > 1 else ""
        weights = f"{statistics.fmean(summary['weights_percent'] for summary in summaries):.1f} %"
        accuracy = f"{statistics.fmean(accuracies):.2f}{deviation} %"
        drawn[name] = [weights, accuracy, str(len(folders[0].read_lines("metrics"))), str(len(folders))]
    shown = {(row[0], row[1]): row[1:] for row in rows(RESULTS) if len(row) == 5}
    assert {name: shown.get(name) for name in drawn} == drawn
    ours = {name for name in shown if name[0].startswith(("`", "one-shot")) and EXAMPLE not in name[0]}
    assert ours == set(drawn), "a row without runs"


def test_rows_of_trained_networks_are_those_of_the_records() -> None:
    folder = RUNS / "trained-networks"
    found: dict[str, dict[int, float]] = {}
    for name in ("resnet20-half", "resnet20-front", "resnet56"):
        content = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for row in (row for row in content["rows"] if row["target"] == 0.5):
            found.setdefault(f"{name.partition('-')[0]} {row['method']}", {})[row["seed"]] = row["accuracy"]
    shown = {row[0]: row[2] for row in rows(RESULTS) if len(row) == 4}
    for network in ("20", "56"):
        accuracies = list(found.pop(f"resnet{network} rlsprune.shrink").values())
        drawn = f"{statistics.fmean(accuracies):.2f} ± {statistics.stdev(accuracies):.2f} %"
        assert shown[f"ResNet-{network}, `rlsprune.shrink`"] == drawn
    best = max(max(values.values()) for values in found.values())
    assert shown["ResNet-20, torch-pruning's best (L1; at 46.9 % of the FLOPs)"] == f"{best:.2f} %"
    assert shown["ResNet-20, torch-pruning, random channels"] == f"{found['resnet20 random'][0]:.2f} %"


TRAINED_NETWORKS = (DOCS / "records" / "2026-11-19-trained-networks.md").read_text(encoding="utf-8")


def test_the_front_of_resnet56_is_that_of_its_runs() -> None:
    content = json.loads((RUNS / "trained-networks" / "resnet56-front.json").read_text(encoding="utf-8"))
    page = TRAINED_NETWORKS
    shown = rows(page[page.index("The same for ResNet-56") :])
    for label in ("`rlsprune.shrink`", "L1", "L2", "Taylor (with labels)", "BN scale", "random"):
        own = [
            row for row in content["rows"] if row["method"] == label.partition(" (")[0].strip("`") and row["seed"] == 0
        ]
        own.sort(key=lambda row: -row["target"])
        assert [label, *(f"{row['accuracy']:.2f}" for row in own)] in shown
    assert ["torch-pruning: FLOPs left", *(f"{100 * row['flops']:.1f} %" for row in own)] in shown


PARTS = {
    "all of it": "all of it",
    "the same share of every layer (48.2, 48.6 and 75.0 % of the FLOPs)": "same share of every layer",
    "widths by what they save of the parameters, not of the FLOPs": "widths by parameters",
    "channels by the L1 norm of their weights": "channels by L1",
    "channels at random": "channels at random",
    "each layer refitted to its own outputs (`Pruner` without batch norm)": "refitted to each layer's own outputs",
    "only layers that lose inputs refitted, to the whole network": "only layers that lose inputs refitted",
    "classifier not refitted": "classifier not refitted",
    "sums not made up for, ReLU not looked at": "sums not made up for",
    "ReLU not looked at": "ReLU not looked at",
    "no refit": "no refit",
    "all of it, with the statistics that training mode computes": "all of it, statistics taken anew",
    "the same, batch norms not made consistent": "the same, batch norms not consistent",
}
"""What the page calls a part → what the benchmark calls it."""


def test_what_each_part_is_worth_is_that_of_its_record() -> None:
    page = TRAINED_NETWORKS
    shown = rows(page[page.index("## What each part is worth") : page.index("## EfficientNet-Lite0")])[1:]
    for column, (network, digits) in enumerate([("resnet20", 2), ("resnet56", 2), ("efficientnet-lite0", 0)], 1):
        content = json.loads((RUNS / "trained-networks" / f"{network}-parts.json").read_text(encoding="utf-8"))
        accuracies = {PARTS[cells[0]]: cells[column] for cells in shown}
        assert accuracies == {row["method"]: f"{row['accuracy']:.{digits}f}" for row in content["rows"]}


@pytest.mark.parametrize("network", ["resnet20", "resnet56"])
def test_networks_trained_on_are_those_of_their_runs(network: str) -> None:
    folder = RUNS / "trained-networks"
    runs, tuned = (
        json.loads((folder / f"{name}-after-training.json").read_text(encoding="utf-8"))["rows"]
        for name in (network, "resnet20")
    )
    record, page = (
        path.read_text(encoding="utf-8")
        for path in (DOCS / "records" / "2026-11-19-after-training.md", DOCS / "trained-networks.md")
    )
    for when, compared in itertools.product(WHEN, (True, False)):
        drawn = rows(table(runs, tuned, when, compared))
        assert not [row for row in drawn if row not in rows(record)]
    assert not [row for row in rows(table(runs, tuned, "trained", True)) if row not in rows(page)]


def test_results_of_networks_trained_on_are_those_of_their_record() -> None:
    record = (DOCS / "records" / "2026-11-19-after-training.md").read_text(encoding="utf-8")
    shown = rows(RESULTS[RESULTS.index("### Trained on") : RESULTS.index("## Pruned while it trains")])[1:]
    assert len(shown) == 4
    assert not [row for row in shown if f"| {row[2].removesuffix(' %')} ({row[3]}) |" not in record]


def test_the_long_training_is_that_of_its_run() -> None:
    content = json.loads((RUNS / "trained-networks" / "resnet56-ten-epochs.json").read_text(encoding="utf-8"))
    (row,) = content["rows"]
    for page in ("records/2026-11-19-after-training.md", "trained-networks.md", "results.md"):
        assert f"{row['trained']:.2f} %" in (DOCS / page).read_text(encoding="utf-8")


def test_agreement_of_efficientnet_is_that_of_its_runs() -> None:
    content = json.loads((RUNS / "trained-networks" / "efficientnet-lite0.json").read_text(encoding="utf-8"))
    page = TRAINED_NETWORKS
    shown = {(cells[0], cells[-1]) for cells in rows(page[page.index("EfficientNet-Lite0 (ImageNet)") :])}
    names = {"rlsprune.shrink": "`rlsprune.shrink`"}
    for row in content["rows"]:
        assert row["seed"] == 1
        assert (names.get(row["method"], row["method"]), f"{row['accuracy']:.0f} %") in shown


def test_tuned_rivals_are_those_of_the_drawn_table() -> None:
    """The accuracies in the results and, with what each run took, in the record."""
    drawn = rows((RUNS / "tables" / "mnist" / "table.md").read_text(encoding="utf-8"))
    record = rows((DOCS / "records" / "2026-11-18-tuned-rivals.md").read_text(encoding="utf-8"))
    assert not [row for row in drawn if row not in record]
    accuracies = [row for row in drawn if len(row) == len(drawn[0])]
    assert len(accuracies) >= 9
    assert not [row for row in accuracies if row not in rows(RESULTS)]


def test_the_zoo_s_table_is_that_of_its_runs_and_no_error_is_foreign() -> None:
    page = (DOCS / "records" / "2026-11-19-zoo.md").read_text(encoding="utf-8")
    found = [json.loads(path.read_text()) for path in sorted((RUNS / "zoo").glob("*.json"))]
    assert len(found) == 166
    assert not [one["network"] for one in found if "foreign_error" in one or "too_slow" in one or "unavailable" in one]
    table = {row[0]: row for row in rows(page) if "/" in row[0]}
    assert sorted(table) == sorted(one["network"] for one in found)
    for one in found:
        if "own_error" not in one:
            left = [f"{100 * share:.0f}" if share else "–" for share in (one["left"], one["blocks_left"])]
            assert table[one["network"]][3:5] == left, one["network"]
    heads = {"Bert", "Roberta", "GPT2", "ViT", "Beit", "DistilBert", "OPT", "Bart", "Electra", "CLIPText", "Dinov2"}
    rotary = {"Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Olmo", "Cohere"}
    blocks = {
        one["network"].partition("/")[2]: one.get("blocks_left") for one in found if "transformers" in one["network"]
    }
    assert all(blocks[name] <= 0.65 for name in heads)
    assert all(blocks[name] <= 0.71 for name in rotary | {"Mixtral"})
    passes = [one["making_seconds"] / one["pass_seconds"] for one in found if "own_error" not in one]
    assert len(passes) == 164
    assert max(passes) <= 30


@pytest.mark.parametrize("network", ["vgg", "resnet20"])
def test_optimizers_against_time_are_those_of_their_curves(network: str) -> None:
    """Every optimizer has three rates; the last loss of each stands in the record, the best one's first."""
    curves = json.loads((RUNS / f"convergence-all-{network}.json").read_text(encoding="utf-8"))
    shown = rows((DOCS / "records" / "2026-11-18-convergence-all.md").read_text(encoding="utf-8"))
    for name in {curve["name"] for curve in curves}:
        own = [curve for curve in curves if curve["name"] == name]
        losses = [curve["progress"][-1][2] for curve in own]
        best = own[losses.index(min(losses))]
        row = [name, f"{best['lr']:g}", str(best["progress"][-1][0]), f"{min(losses):.3f}"]
        (found,) = [cells for cells in shown if cells[:4] == row]
        assert found[4] == ", ".join(f"{loss:.3f}" if loss < 10 else f"{loss:.1f}" for loss in losses)
