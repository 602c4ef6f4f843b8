"""Tables from their declaration to the page, on the embedded digits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlsprune.app.experiments.jobs import RunFailedError
from rlsprune.app.experiments.queue import PlannedRun
from rlsprune.app.experiments.recipe import run
from rlsprune.app.experiments.registry import BASELINES
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.tables import draw as drawing
from rlsprune.app.tables import plan, queue
from rlsprune.app.tables.draw import draw, table_page
from rlsprune.app.tables.plan import TABLES, Cell, Table, Tuned
from rlsprune.app.tables.queue import TableQueue, next_rate
from rlsprune.app.tables.records import Records, Tuning
from rlsprune.training.guard import FaultError

RECORDS = Path(__file__).parents[3] / "docs" / "results" / "tables"
DRAWN = sorted(path.parent.name for path in RECORDS.glob("*/table.md"))
SMALL = {"train_images": 300, "test_images": 100}
DIGITS = Table(
    title="FNN on the digits, equal epochs",
    experiment="digits-fnn",
    methods=("rls", "scratch", "l1-norm"),
    sizes=(0.3,),
    seeds=(0,),
    options={"epochs": 3, "warmup_epochs": 0, **SMALL},
    tuning={"epochs": 2},
    trials=2,
)
TIMED = Table(
    title="FNN on the digits, equal processor time",
    experiment="digits-fnn",
    methods=("l1-norm",),
    sizes=(0.3,),
    seeds=(0,),
    timed="digits",
    options={"warmup_epochs": 0, **SMALL},
)


class InProcess:
    """Runs in this process, which saves the start of another."""

    def execute(self, planned: PlannedRun) -> None:
        """A fault is what the exit code of a process would tell."""
        try:
            run(planned.config, RunFolder(planned.folder))
        except FaultError as error:
            raise RunFailedError(f"the run in {planned.folder} failed with exit code 4: {error}") from error

    def end(self) -> None:
        """Nothing is under way."""


def test_rls_may_prune_further_than_its_gate_lets_it_where_a_table_says_so() -> None:
    table = TABLES["mnist"]
    found = table.config(Cell("rls", "ours", "rls", 0.01), Tuned()).pruning
    assert found is not None
    assert found.tolerance == table.tolerance == 1.0
    own = TABLES["cifar10"].config(Cell("rls", "ours", "rls", 0.06), Tuned()).pruning
    assert own is not None
    assert own.tolerance == 0.05


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_is_a_run_of_its_own_at_the_size_of_its_column(name: str) -> None:
    table = TABLES[name]
    cells = table.cells()
    assert len({cell.label for cell in cells}) == len(cells)
    for cell in cells:
        config = table.config(cell, Tuned(0.5, 0.5), **({} if table.timed is None else {"cpu_seconds": 9.0}))
        assert (config.recipe, config.optimizer, config.seed, config.rate) == (
            *(cell.recipe, cell.optimizer, cell.seed),
            0.5,
        )
        if cell.method in BASELINES:
            assert (config.rival_target, config.rival_target_of) == (cell.size, table.target_of)
        elif cell.method == "rls":
            assert config.pruning is not None
            assert (config.pruning.target, config.pruning.target_of) == (cell.size, table.target_of)
        assert config.cpu_seconds == (None if table.timed is None else 9.0)


def test_in_a_table_of_equal_time_the_tuned_prune_comes_after_a_share_of_the_time() -> None:
    cell = Cell("l1-norm", "ours", "sgd", 0.05)
    by_epochs = TABLES["mnist"].config(cell, Tuned(0.1, 0.4))
    assert (by_epochs.prune_epoch, by_epochs.prune_share) == (11, None)
    assert TABLES["mnist-time"].config(cell, Tuned(0.1, 0.4), cpu_seconds=9.0).prune_share == 0.4
    assert TABLES["mnist-time"].config(cell, Tuned(0.1), cpu_seconds=9.0).prune_share is None


def test_rls_comes_before_what_waits_for_it() -> None:
    for table in TABLES.values():
        seen: set[Cell] = set()
        for cell in table.cells():
            seen.add(cell)
            if cell.method == "scratch" and table.timed is None:
                assert table.source_of(cell) in seen


def test_five_sizes_three_seeds_and_random_choice_on_mnist() -> None:
    for name in ("mnist", "mnist-time"):
        assert len(TABLES[name].sizes) == 5
        assert len(TABLES[name].seeds) == 3
        assert {"random", "l1-norm", "scratch", "none"} <= set(TABLES[name].methods)


def test_rates_are_looked_for_where_it_gets_better() -> None:
    assert next_rate({0.5: 90.0, 1.0: 91.0, 2.0: 92.0}) == 4.0
    assert next_rate({0.5: 93.0, 1.0: 91.0, 2.0: None}) == 0.25
    assert next_rate({0.5: 90.0, 1.0: 91.0, 2.0: 89.0}) == pytest.approx(0.5**0.5)
    assert next_rate({0.5: 90.0, 1.0: 91.0, 2.0: None}) == pytest.approx(0.5**0.5)
    assert next_rate({1.0: 91.0, 2.0: 90.0, 0.5: 89.0}) == pytest.approx(2**0.5)


def test_a_trial_that_failed_is_not_chosen_and_ties_go_to_the_lower_loss(tmp_path: Path) -> None:
    cell = Cell("l1-norm", "ours", "sgd", 0.1)
    tuning = Tuning(tmp_path / "tuning.json")
    with pytest.raises(ValueError, match="no trial of l1-norm-ours-sgd"):
        tuning.best(cell)
    tuning.add(cell, Tuned(4.0), None)
    for rate, accuracy, loss in ((1.0, 90.0, 0.3), (2.0, 90.0, 0.2), (0.5, 80.0, 0.1)):
        tuning.add(cell, Tuned(rate), {"accuracy": accuracy, "loss": loss})
    again = Tuning(tmp_path / "tuning.json")
    assert again.best(cell) == Tuned(2.0)
    assert again.tried(cell, Tuned(4.0))
    assert not again.tried(cell, Tuned(4.0, 0.5))


def test_table_is_tuned_run_and_drawn_and_what_is_finished_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (plan, queue, drawing):
        monkeypatch.setattr(module, "TABLES", {"digits": DIGITS, "digits-time": TIMED})
    monkeypatch.setattr(queue, "RATES", (1.0, 1e6))
    said: list[str] = []
    shared: dict[str, Any] = {"machine": {"threads": 1}, "say": said.append, "runner": InProcess()}
    made = TableQueue(name="digits", runs=tmp_path / "r", records=tmp_path / "k", **shared)
    with pytest.raises(ValueError, match="no trial"):
        made.run(1)
    made.tune()
    trials = made.tuning.trials
    assert {way: len(own) for way, own in trials.items()} == dict.fromkeys(trials, 2), "as many for every method"
    assert len(trials) == 3
    config = RunFolder(tmp_path / "r" / "tuning-digits-fnn" / "l1-norm-ours-sgd-0.1").read_json("config")
    assert config["test_on"] == "held-out"
    [diverged] = [trial for trial in trials["rls-ours-rls"] if trial["lr"] == 1e6]
    assert diverged["accuracy"] is None
    assert str(tmp_path) not in "".join(said), "a record has no path of a machine in it"

    records = Records(tmp_path / "k" / "digits")
    replace(made, methods=("l1-norm",)).run(1)
    assert [cell.method for cell in DIGITS.cells() if records.done(cell)] == ["l1-norm"]
    made.run(1)
    assert all(records.done(cell) for cell in DIGITS.cells())
    kept = records.config(Cell("scratch", "ours", "rls", 0.3))
    assert kept.shape_from == "rls-ours-rls-0.3-seed0".replace("0.3", "30")
    assert kept.data_dir is None
    page = draw("digits", tmp_path / "k")
    assert (tmp_path / "k" / "digits" / "table.png").read_bytes().startswith(b"\x89PNG")
    summary = records.summary(Cell("l1-norm", "ours", "sgd", 0.3))
    assert summary is not None
    assert f"{summary['accuracy']:.2f} (1)" in page
    assert 28 < summary["weights_percent"] <= 30.5

    said.clear()
    made.run(1)
    assert said == [], "everything is finished"
    timed = TableQueue(name="digits-time", runs=tmp_path / "r", records=tmp_path / "k", **shared)
    timed.run(1)
    of_rls = records.summary(Cell("rls", "ours", "rls", 0.3))
    found = Records(tmp_path / "k" / "digits-time").summary(Cell("l1-norm", "ours", "sgd", 0.3))
    assert of_rls is not None
    assert found is not None
    limit = round(of_rls["cpu_seconds"], 1)
    assert limit <= found["cpu_seconds"] < limit + 1


def test_a_run_that_failed_is_shown_and_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plan, queue, drawing):
        monkeypatch.setattr(module, "TABLES", {"digits": DIGITS})
    records = Records(tmp_path / "digits")
    for cell in DIGITS.cells():
        records.keep_failure(cell, "exit code 4")
    page = table_page("digits", tmp_path)
    assert page.count("diverged") == 3
    TableQueue(name="digits", runs=tmp_path / "r", records=tmp_path, machine={}, say=pytest.fail).run(1)


def test_what_failed_is_tried_again_if_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "TABLES", {"digits": replace(DIGITS, trials=1)})
    first = DIGITS.cells()[0]
    tuning = Tuning(tmp_path / f"tuning-{DIGITS.experiment}.json")
    for way in DIGITS.ways():
        tuning.add(way, Tuned(0.1), None if way.way == first.way else {"accuracy": 1.0, "loss": 1.0})
    records = Records(tmp_path / "digits")
    records.keep_failure(first, "exit code 4")
    made = TableQueue(
        name="digits",
        runs=tmp_path / "r",
        records=tmp_path,
        machine={"threads": 1},
        say=str,
        limit=1,
        retry=True,
        runner=InProcess(),
    )
    made.tune()
    trials = made.tuning.trials[first.way]
    assert [trial["lr"] for trial in trials] == [0.1]
    assert trials[0]["accuracy"] is not None
    made.run(1)
    assert records.failure(first) is None
    assert records.summary(first) is not None


@pytest.mark.parametrize("name", DRAWN)
def test_tables_of_the_documentation_are_those_of_the_records(name: str) -> None:
    assert table_page(name, RECORDS) == (RECORDS / name / "table.md").read_text(encoding="utf-8")
    for record in (RECORDS / name).glob("*/config.json"):
        assert json.loads(record.read_text())["data_dir"] is None
