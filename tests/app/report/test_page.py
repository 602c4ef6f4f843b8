"""The page tells what the run's files hold, and nothing in them can run or break it."""

import base64
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsprune.app.cli.main import main
from rlsprune.app.report import write_report
from rlsprune.app.report.figures import draw_network, ranges
from rlsprune.app.report.page import _describe
from rlsprune.app.report.runs import ReportedLayer, read_runs
from rlsprune.app.run.folder import RunFolder
from rlsprune.io.atomic import FileError

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """The tags, the data and the text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.data: Any = None
        self._in_data = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._in_data = dict(attributes).get("id") == "data"

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data, self._in_data = json.loads(data), False
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_headline_and_curves_are_the_runs_own(runs: dict[str, Path], tmp_path: Path) -> None:
    page = Page(write_report([runs["rls"]], tmp_path / "page.html"))
    folder = RunFolder(runs["rls"])
    summary, metrics = folder.read_json("summary"), folder.read_lines("metrics")
    assert f"{100 / summary['weights_percent']:.2f}× smaller" in page.text
    assert f"{100 / summary['flops_percent']:.2f}× fewer FLOPs" in page.text
    one, many = summary["speedups"]
    assert (one["batch"], many["batch"]) == (1, 64)
    assert one["low"] <= one["median"] <= one["high"]
    assert f"{many['median']:.2f}× faster" in page.text
    assert f"for 64 inputs, quartiles {many['low']:.2f}–{many['high']:.2f}; " in page.text
    assert f"{one['median']:.2f}× ({one['low']:.2f}–{one['high']:.2f}) for 1" in page.text
    assert f"{metrics[-1]['accuracy']:.2f} % test accuracy" in page.text
    for name in ("train_loss", "test_loss", "weights_percent"):
        assert page.data[0]["series"][name] == pytest.approx([line[name] for line in metrics], rel=1e-5)
    assert page.data[0]["series"]["score"] == pytest.approx([line["accuracy"] for line in metrics], rel=1e-5)
    assert page.data[0]["series"]["gate_level"][0] is None, "before the first prune there is no level"
    assert [event["epoch"] for event in page.data[0]["events"]] == [e["epoch"] for e in folder.read_lines("events")]
    for layer in summary["layers"]:
        curve = next(curve for curve in page.data[0]["layers"] if curve["name"] == layer["name"])
        assert curve["values"][-1] == pytest.approx(layer["nodes_percent"], rel=1e-5)
    assert page.text.count("✓ healthy") == 3


def test_accuracy_is_compared_with_that_of_the_unpruned_network_and_with_nothing_else(
    copy: Path, tmp_path: Path
) -> None:
    folder = RunFolder(copy)
    summary = folder.read_json("summary")
    before = f"{folder.read_lines('events')[0]['accuracy_before']:.2f} %"

    def tile(**changes: float) -> str:
        folder.write_json("summary", {**summary, **changes})
        page = Page(write_report([copy], tmp_path / "page.html")).text
        return page[page.index("% test accuracy") : page.index("Curves")]

    assert tile() == "% test accuracy "
    assert before not in tile(), "a network that is still learning is no yardstick"
    assert "91.25 % unpruned, trained alike" in tile(unpruned_accuracy=91.25)
    assert "90.50 % with the given weights, unpruned" in tile(given_accuracy=90.5)


def test_several_runs_are_side_by_side(runs: dict[str, Path], tmp_path: Path) -> None:
    page = Page(write_report(list(runs.values()), tmp_path / "page.html"))
    assert [run["label"] for run in page.data] == ["rls", "l1-norm"]
    assert "The runs side by side" in page.text
    assert len([row for row in page.all("figure") if row.get("class") == "network"]) == 2


def test_page_is_small_and_asks_for_nothing(runs: dict[str, Path], tmp_path: Path) -> None:
    path = write_report(list(runs.values()), tmp_path / "page.html")
    page = Page(path)
    assert path.stat().st_size < 100_000
    fetched = [tag.get("src") or tag.get("href") for name in ("script", "img", "link") for tag in page.all(name)]
    assert all(address is None or address.startswith("data:") for address in fetched)
    policy = next(tag["content"] for tag in page.all("meta") if tag.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")


def test_nothing_in_a_run_becomes_markup(copy: Path, tmp_path: Path) -> None:
    folder = RunFolder(copy)
    summary, metrics, events = folder.read_json("summary"), folder.read_lines("metrics"), folder.read_lines("events")
    for line in (summary, *metrics, *events):
        for layer in line["layers"]:
            layer["name"] += NASTY
    for row in summary["health"]:
        row["name"] += NASTY
    folder.write_json("summary", summary)
    folder.write_lines("metrics", metrics)
    folder.write_lines("events", events)
    folder.write_json("config", {**folder.read_json("config"), "experiment": NASTY, "method": NASTY, NASTY: NASTY})
    folder.write_json("environment", {"python": NASTY})
    named = copy.rename(tmp_path / "<img src=x onerror=alert(1)>")
    plain = Page(write_report([named], tmp_path / "plain.html"))
    assert len(plain.all("script")) == 2
    assert all("onerror" not in tag for tag in plain.all("img"))
    assert plain.all("h1") == [{}]
    assert NASTY in plain.text
    assert plain.data[0]["layers"][0]["name"] == "input" + NASTY


def test_run_in_progress_is_shown_as_such(unfinished: Path, tmp_path: Path) -> None:
    page = Page(write_report([unfinished], tmp_path / "page.html"))
    assert "In progress: epoch 2 of 4" in page.text
    assert "is measured when the run ends" in page.text


def test_run_that_has_just_begun_is_shown(unfinished: Path, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        (unfinished / name).unlink()
    assert "In progress: epoch 0 of 4" in Page(write_report([unfinished], tmp_path / "page.html")).text


def test_run_of_an_older_version_is_shown(copy: Path, tmp_path: Path) -> None:
    folder = RunFolder(copy)
    new = {"gate_level", "layers"}
    folder.write_lines(
        "metrics", [{k: v for k, v in line.items() if k not in new} for line in folder.read_lines("metrics")]
    )
    new = {"health", "input_shape", "mean_input"}
    folder.write_json("summary", {k: v for k, v in folder.read_json("summary").items() if k not in new})
    page = Page(write_report([copy], tmp_path / "page.html"))
    assert "inputs" in page.text
    assert "Health of P" not in page.text
    assert page.data[0]["layers"] == []


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def changed(name: str, value: object) -> Callable[[Path], None]:
    """Sets a value in the first line, or the only object, of a file."""

    def change(path: Path) -> None:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        lines[0] = json.dumps(json.loads(lines[0]) | {name: value})
        path.write_text("\n".join(lines) + "\n")

    return change


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("config.json", cut, "not JSON"),
    ("config.json", Path.unlink, "there is no such file"),
    ("metrics.jsonl", cut, "not JSON"),
    ("metrics.jsonl", Path.unlink, "there is no such file"),
    ("metrics.jsonl", lambda path: path.write_text("[1]\n"), "is not a JSON object"),
    ("metrics.jsonl", lambda path: path.write_bytes(b"\xff\xfe\x00"), "cannot be read"),
    ("metrics.jsonl", changed("accuracy", "high"), "accuracy 'high'"),
    ("metrics.jsonl", changed("epoch", 7), "epoch 7, not 1"),
    ("metrics.jsonl", changed("layers", [{"nodes": 3}]), "layers"),
    ("metrics.jsonl", changed("layers", [{"name": "a", "nodes": -3, "weights": 1}]), "nodes -3"),
    ("events.jsonl", changed("epoch", None), "epoch None"),
    ("events.jsonl", changed("layers", "all"), "layers"),
    ("summary.json", cut, "not JSON"),
    ("summary.json", changed("kept_inputs", ["a"]), "kept_inputs"),
    ("summary.json", changed("kept_inputs", [99999]), "input 99999 of 784"),
    ("summary.json", changed("input_shape", [1, 10**9, 10**9]), "input_shape"),
    ("summary.json", changed("input_shape", [2] * 99), "input_shape"),
    ("summary.json", changed("layers", [{"name": "a", "nodes": 10**400, "weights": 1}]), "not a count"),
    ("summary.json", changed("mean_input", "§"), "mean_input"),
    ("summary.json", changed("mean_input", "AAAA"), "3 of 784"),
    ("summary.json", changed("health", [{"name": "a", "inputs": 1, "trace": "x"}]), "trace 'x'"),
    ("environment.json", cut, "not JSON"),
]


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGES, ids=[f"{name}: {said}" for name, _, said in DAMAGES])
def test_damaged_file_is_one_clear_error(
    copy: Path, name: str, damage: Callable[[Path], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(copy / name)
    assert main(["report", str(copy)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(copy / name) in error
    assert said in error
    assert not (copy / "report.html").exists()


def test_numbers_that_are_not_finite_leave_a_gap(copy: Path, tmp_path: Path) -> None:
    changed("train_loss", float("nan"))(copy / "metrics.jsonl")
    page = Page(write_report([copy], tmp_path / "page.html"))
    assert page.data[0]["series"]["train_loss"][0] is None


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("summary.json", {"accuracy": 10**400}),
        ("summary.json", {"latency_ms": 5e-324}),
        ("summary.json", {"layers": [{"name": "a", "nodes": 9, "weights": 9, "nodes_percent": 1e-320}]}),
        ("config.json", {"experiment": "\ud800"}),
        ("config.json", {"epochs": 10**400}),
    ],
)
def test_absurd_values_do_not_keep_the_page_from_being_written(
    file: str, change: dict[str, Any], copy: Path, tmp_path: Path
) -> None:
    content = json.loads((copy / file).read_text())
    (copy / file).write_text(json.dumps(content | change))
    assert Page(write_report([copy], tmp_path / "page.html")).data


def test_too_large_a_picture_is_left_out(copy: Path, tmp_path: Path) -> None:
    summary = json.loads((copy / "summary.json").read_text())
    changes = {"kept_inputs": [1], "input_shape": [1, 4096, 4096], "mean_input": None}
    (copy / "summary.json").write_text(json.dumps(summary | changes))
    page = Page(write_report([copy], tmp_path / "page.html"))
    assert not page.all("img")
    assert "1 of 16,777,216 inputs" in page.text


def test_no_run_and_a_run_twice_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run"):
        write_report([], tmp_path / "page.html")
    with pytest.raises(ValueError, match="twice"):
        write_report([runs["rls"], runs["rls"] / "." / "checkpoint" / ".."], tmp_path / "page.html")
    with pytest.raises(FileError, match=r"config\.json"):
        write_report([tmp_path], tmp_path / "page.html")


def test_runs_of_the_same_name_keep_apart(runs: dict[str, Path], tmp_path: Path) -> None:
    twins = [Path(shutil.copytree(runs["l1-norm"], tmp_path / parent / "same")) for parent in ("a", "b")]
    assert [run.label for run in read_runs(twins)] == [str(twin) for twin in twins]


def test_picture_shows_exactly_the_pixels_that_are_read(runs: dict[str, Path], tmp_path: Path) -> None:
    summary = RunFolder(runs["rls"]).read_json("summary")
    page = Page(write_report([runs["rls"]], tmp_path / "page.html"))
    (picture,) = page.all("img")
    assert f"{len(summary['kept_inputs'])} of 784" in (picture["alt"] or "")
    content = base64.b64decode((picture["src"] or "").removeprefix("data:image/png;base64,"))
    pixels = matplotlib.image.imread(io.BytesIO(content), format="png")
    assert pixels.shape == (28, 28, 3)
    grey = (pixels[..., 0] == pixels[..., 1]) & (pixels[..., 1] == pixels[..., 2])
    assert np.flatnonzero(grey).tolist() == summary["kept_inputs"]


def test_network_is_to_scale() -> None:
    layers = [
        ReportedLayer("input", 800, 0, 50.0, 0.0, 50),
        ReportedLayer("a", 640, 2000, 20.0, 10.0, 40),
        ReportedLayer("b", 10, 400, 100.0, 20.0, 10),
    ]
    first, second, last = draw_network(layers)
    assert [part.before for part in (first, second, last)] == [250, 500, 25]  # of 100, 200 and 10 channels
    assert [part.after for part in (first, second, last)] == [125, 100, 25]
    assert (first.before_next, first.after_next) == (second.before, second.after)
    assert (last.before_next, last.after_next) == (None, None)
    assert (layers[1].full_channels, layers[1].full_nodes, layers[1].full_weights) == (200, 3200, 20000)


@given(st.sets(st.integers(0, 60)))
def test_ranges_name_every_index_and_no_other(indices: set[int]) -> None:
    told: list[int] = []
    for part in filter(None, ranges(sorted(indices)).split(", ")):
        first, _, last = part.partition("–")
        told += range(int(first), int(last or first) + 1)
    assert told == sorted(indices)


def test_command_writes_into_the_run_or_where_it_is_told(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(copy)]) == 0
    assert str(copy / "report.html") in capsys.readouterr().out
    assert main(["report", str(copy), "--out", str(tmp_path / "other.html")]) == 0
    ours, other = ((folder / name).read_text() for folder, name in ((copy, "report.html"), (tmp_path, "other.html")))
    without_time = [re.sub(r"Written by .*", "", text) for text in (ours, other)]
    assert without_time[0] == without_time[1]
    assert main(["report", str(copy), "--out", str(tmp_path / "no" / "such.html")]) == 1
    assert "make it first" in capsys.readouterr().err


def test_assets_are_part_of_the_package() -> None:
    for name in ("template.html", "page.css", "page.js"):
        assert files("rlsprune.app.report").joinpath(name).is_file()
    assert "</script" not in files("rlsprune.app.report").joinpath("page.js").read_text(encoding="utf-8").lower()


def test_report_says_what_to_install() -> None:
    code = "import sys; sys.modules['jinja2'] = None; "
    code += "from rlsprune.app.cli.main import main; sys.exit(main(['report', 'x']))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert 'pip install "rlsprune[cli]"' in result.stderr


def test_run_of_fit_says_how_to_use_it_and_what_it_reads(fitted: Path, tmp_path: Path) -> None:
    page = write_report([fitted], tmp_path / "page.html").read_text()
    summary = RunFolder(fitted).read_summary()
    for line in (
        "from predict import Model",
        "model = Model()",
        "model.predict(&#34;rows.csv&#34;)",
        "model-int8.onnx",
    ):
        assert line in page
    assert f"{summary['int8_accuracy']:.2f} %" in page
    kept = summary["kept_inputs"]
    assert 0 < len(kept) < 8
    read = page[page.index('<ul class="names">') : page.index("that are not read")]
    assert [f"feature {index}<" in read for index in range(8)] == [index in kept for index in range(8)]


def test_a_network_alone_is_not_said_to_be_ready_for_use(runs: dict[str, Path], tmp_path: Path) -> None:
    assert "Use it" not in write_report([runs["rls"]], tmp_path / "page.html").read_text()


def test_no_table_has_cells_for_layers_that_are_not_there(runs: dict[str, Path], fitted: Path, tmp_path: Path) -> None:
    page = write_report([runs["rls"], fitted], tmp_path / "page.html").read_text()
    assert page.count('<table class="layers">') == 2
    alike = write_report([runs["rls"], runs["l1-norm"]], tmp_path / "alike.html").read_text()
    assert alike.count('<table class="layers">') == 1


def test_many_layers_that_change_alike_are_named_together() -> None:
    layers = [(f"conv{number}", 16, 10) for number in range(5)] + [("fc", 8, 6), ("out", 3, 3)]
    assert _describe({"layers": layers}) == "5 layers, conv0 … conv4: 16 → 10, fc 8 → 6"
