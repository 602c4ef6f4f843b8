"""A network that another one learns from."""

import copy

import pytest
import torch
from torch import nn

from rlsprune.train.loop import mean_squared_error
from rlsprune.train.teacher import Teacher


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_teachers_part_is_the_share_of_its_outputs_that_is_missed(share: float, scale: float) -> None:
    torch.manual_seed(0)
    master, model = nn.Linear(6, 4).double(), nn.Linear(6, 4).double()
    inputs, labels = torch.rand(32, 6).double(), torch.randint(4, (32,))
    outputs, targets = scale * model(inputs), scale * master(inputs)
    missed = sum((z - t).dot(z - t) for z, t in zip(outputs, targets, strict=True))
    whole = sum(t.dot(t) for t in targets)
    given = mean_squared_error(outputs, labels)
    with torch.no_grad():
        master.weight.mul_(scale)
        master.bias.mul_(scale)
    mixed = Teacher(master, share).mix(given, inputs, outputs)
    torch.testing.assert_close(mixed, (1 - share) * given + share * missed / whole / 2)
    assert mixed.requires_grad


def test_a_teacher_stays_as_the_network_was_and_leaves_it_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)).train()
    before, inputs, zero = copy.deepcopy(model).eval(), torch.rand(16, 6), torch.zeros(())
    teacher = Teacher(model, 1.0)
    with torch.no_grad():
        model[3].weight.add_(1.0)
    model(inputs)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert teacher.mix(zero, inputs, before(inputs)).item() == 0


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_is_between_none_and_all(share: float) -> None:
    with pytest.raises(ValueError, match="distill="):
        Teacher(nn.Linear(2, 2), share)


def test_what_is_no_tensor_cannot_be_imitated() -> None:
    with pytest.raises(TypeError, match="gives a dict"):
        Teacher(nn.Linear(2, 2), 0.5).mix(torch.zeros(()), torch.rand(1, 2), {"logits": torch.rand(1, 2)})  # type: ignore[arg-type]
