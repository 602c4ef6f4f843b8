from typing import Any

import pytest

from rlsprune.app.run.record import Record
from rlsprune.app.run.scores import Scored
from rlsprune.app.run.summary import tail
from rlsprune.prune.event import LayerChange, PruneEvent


def lines(count: int) -> list[dict[str, Any]]:
    return [{"epoch": epoch, "accuracy": float(epoch)} for epoch in range(1, count + 1)]


@pytest.mark.parametrize(("epochs", "averaged"), [(1, 1), (9, 1), (20, 2), (99, 9), (100, 10), (200, 10)])
def test_tail_is_the_last_ten_epochs_or_the_last_tenth(epochs: int, averaged: int) -> None:
    assert [line["epoch"] for line in tail(lines(epochs))] == list(range(epochs - averaged + 1, epochs + 1))


def test_tail_leaves_out_what_a_roll_back_threw_away() -> None:
    events = [{"epoch": 199, "kind": "roll-back"}, {"epoch": 150, "kind": "prune"}]
    assert [line["epoch"] for line in tail(lines(200), events)] == [199, 200]


def scored(accuracy: float) -> Scored:
    return Scored(0.1, {"accuracy": accuracy})


def event() -> PruneEvent:
    return PruneEvent(2, 0.5, 10, 5, 20, 10, (LayerChange("fc1", 4, 2),))


def test_recovery_is_counted_from_the_event_to_the_first_epoch_as_good_as_before() -> None:
    record = Record()
    record.add_event(2, event(), before=scored(90.0), after=scored(80.0))
    for epoch, accuracy in ((2, 80.0), (3, 89.0), (4, 90.0), (5, 95.0)):
        record.add_epoch({"epoch": epoch, "accuracy": accuracy})
    assert record.events[0]["epochs_to_recover"] == 2
    assert record.events[0]["layers"] == [{"name": "fc1", "before": 4, "after": 2}]


def test_an_event_that_lost_nothing_has_recovered_at_once_and_one_that_lost_may_never() -> None:
    record = Record()
    record.add_event(1, event(), scored(90.0), scored(90.0))
    record.add_event(1, event(), scored(90.0), scored(60.0))
    record.add_epoch({"epoch": 1, "accuracy": 60.0})
    record.add_epoch({"epoch": 2, "accuracy": 89.9})
    assert [entry["epochs_to_recover"] for entry in record.events] == [0, None]
