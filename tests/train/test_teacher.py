"""A network that another one learns from."""

import copy

import pytest
import torch
from torch import Tensor, nn

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
    mixed = Teacher(master, share, inputs).mix(given, inputs, outputs)
    torch.testing.assert_close(mixed, (1 - share) * given + share * missed / whole / 2)
    assert mixed.requires_grad


def test_a_teacher_stays_as_the_network_was_and_leaves_it_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)).train()
    before, inputs, zero = copy.deepcopy(model).eval(), torch.rand(16, 6), torch.zeros(())
    teacher = Teacher(model, 1.0, inputs)
    with torch.no_grad():
        model[3].weight.add_(1.0)
    model(inputs)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert teacher.mix(zero, inputs, before(inputs)).item() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_in_half_precision_are_squared_in_full(dtype: torch.dtype) -> None:
    inputs, outputs = torch.full((256, 2), 10.0, dtype=dtype), torch.full((256, 2), 11.0, dtype=dtype)
    mixed = Teacher(nn.Identity(), 0.5, inputs).mix(torch.zeros(()), inputs, outputs)
    assert mixed.item() == pytest.approx(0.5 * 0.01 / 2)


def test_a_teacher_that_is_silent_is_followed_to_zero() -> None:
    silent = nn.Linear(2, 2)
    nn.init.zeros_(silent.weight)
    nn.init.zeros_(silent.bias)
    inputs = torch.rand(4, 2)
    assert Teacher(silent, 1.0, inputs).mix(torch.ones(()), inputs, torch.zeros(4, 2)).item() == 0


class Named(nn.Linear):
    """Gives its output by name."""

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": super().forward(inputs)}


def test_what_is_no_tensor_cannot_be_imitated() -> None:
    with pytest.raises(TypeError, match=r"gives a dict.* distill=0"):
        Teacher(Named(2, 2), 0.5, torch.rand(1, 2))
