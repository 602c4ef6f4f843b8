"""The gate is Algorithm 1's; patience is ours."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reference.pruning import Gate as ReferenceGate
from rlsprune.prune.gate import Decision, Gate


@given(st.lists(st.floats(0, 1)), st.integers(0, 5))
def test_the_gate_opens_when_algorithm_1_says_so(losses: list[float], warmup: int) -> None:
    gate, reference = Gate(warmup, patience=None), ReferenceGate(warmup)
    for loss in losses:
        decision = gate.step(loss)
        assert (decision is Decision.PRUNE) == reference.step(loss)
        if decision is Decision.PRUNE:
            gate.pruned(loss, changed=True)
        assert gate.loss == reference.recorded


def test_patience_counts_epochs_without_recovery_since_the_last_prune() -> None:
    gate = Gate(1, patience=2)
    assert gate.step(1.0) is Decision.TRAIN
    assert gate.step(1.0) is Decision.PRUNE
    gate.pruned(1.0, changed=True)
    assert [gate.step(2.0), gate.step(0.9)] == [Decision.TRAIN, Decision.PRUNE]
    gate.pruned(0.9, changed=True)
    assert [gate.step(0.9), gate.step(0.95)] == [Decision.TRAIN, Decision.ROLL_BACK]


def test_a_tolerance_lets_the_loss_rise_by_a_share() -> None:
    gate = Gate(0, patience=None, tolerance=0.1)
    assert gate.step(1.0) is Decision.PRUNE
    gate.pruned(1.0, changed=True)
    assert gate.step(1.11) is Decision.TRAIN
    assert gate.step(1.09) is Decision.PRUNE
    assert gate.recovered
    gate.pruned(1.09, changed=True)
    assert gate.step(1.11) is Decision.TRAIN, "the loss does not drift away step by step"
    assert gate.step(1.09) is Decision.PRUNE


def test_an_event_that_changed_nothing_needs_no_recovery() -> None:
    gate = Gate(0, patience=1)
    gate.step(1.0)
    gate.pruned(1.0, changed=False)
    assert [gate.step(2.0) for _ in range(3)] == [Decision.TRAIN] * 3


def test_a_tolerance_lets_a_negative_loss_rise_too() -> None:
    gate = Gate(0, patience=None, tolerance=0.1)
    gate.pruned(-1.0, changed=True)
    assert gate.step(-0.89) is Decision.TRAIN
    assert gate.step(-0.91) is Decision.PRUNE
