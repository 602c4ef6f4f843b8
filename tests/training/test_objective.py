"""What recovery minimises with class labels, against the same written out in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlsprune.training.objective import taught


def written_out(output: Tensor, labels: Tensor, given: Tensor) -> float:
    """A fifth is the labels' cross-entropy, the rest four times the divergence of the scores divided by four."""
    total = 0.0
    for scores, label, wanted in zip(output.tolist(), labels.tolist(), given.tolist(), strict=True):

        def shares(values: list[float], temperature: float) -> list[float]:
            powers = [math.exp(value / temperature) for value in values]
            return [power / sum(powers) for power in powers]

        apart = sum(q * math.log(q / p) for p, q in zip(shares(scores, 4), shares(wanted, 4), strict=True))
        total += 0.2 * -math.log(shares(scores, 1)[label]) + 0.8 * 4 * apart
    return total / len(labels)


def test_the_loss_with_labels_is_the_closed_form() -> None:
    torch.manual_seed(0)
    output, given = 5 * torch.randn(7, 5, dtype=torch.float64), 5 * torch.randn(7, 5, dtype=torch.float64)
    labels = torch.randint(5, (7,))
    assert taught(output, labels, given).item() == pytest.approx(written_out(output, labels, given), rel=1e-6)


def test_classes_may_lie_before_the_places() -> None:
    torch.manual_seed(0)
    output, given, labels = torch.randn(3, 5, 4), torch.randn(3, 5, 4), torch.randint(5, (3, 4))
    flat = [scores.movedim(1, -1).flatten(0, 1) for scores in (output, given)]
    assert taught(output, labels, given).item() == pytest.approx(
        taught(flat[0], labels.flatten(), flat[1]).item(), rel=1e-5
    )


def test_places_whose_label_is_minus_100_do_not_count() -> None:
    torch.manual_seed(0)
    output, given, labels = torch.randn(3, 5, 4), torch.randn(3, 5, 4), torch.randint(5, (3, 4))
    labels[0], labels[2, 1:] = -100, -100
    counted = labels >= 0
    kept = [scores.movedim(1, -1)[counted] for scores in (output, given)]
    assert taught(output, labels, given).item() == pytest.approx(
        taught(kept[0], labels[counted], kept[1]).item(), rel=1e-5
    )
