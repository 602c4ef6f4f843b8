import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rlsprune.app.config.losses import LOSSES, mean_squared_error
from rlsprune.training.loop import evaluate, train_epoch


def test_loss_is_equation_15() -> None:
    outputs = torch.tensor([[1.0, 0.0, 2.0], [0.5, 0.5, 0.0]])
    labels = torch.tensor([2, 0])
    # (1² + 0 + 1² + 0.5² + 0.5² + 0) / (2·2)
    assert mean_squared_error(outputs, labels).item() == pytest.approx(2.5 / 4)


def test_evaluation_weights_every_image_alike_whatever_the_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5))
    inputs, labels = torch.randn(10, 5), torch.randint(3, (10,))
    whole = evaluate(model, [(inputs, labels)], mean_squared_error)
    parts = evaluate(model, [(inputs[:7], labels[:7]), (inputs[7:], labels[7:])], mean_squared_error)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.accuracy == whole.accuracy
    expected = (model.eval()(inputs).argmax(1) == labels).float().mean().item() * 100
    assert whole.accuracy == pytest.approx(expected)


def test_evaluation_puts_the_mode_back() -> None:
    model = nn.Linear(2, 2).train()
    evaluate(model, [(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))], LOSSES["cross-entropy"])
    assert model.training


def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda inputs, labels: mean_squared_error(model(inputs), labels)


def test_callbacks_come_before_and_after_every_step() -> None:
    model = nn.Linear(2, 2)
    start = model.weight.sum().item()
    calls: list[tuple[str, float, bool]] = []

    def note(name: str) -> None:
        calls.append((name, model.weight.sum().item(), model.weight.grad is not None))

    batch = (torch.ones(4, 2), torch.tensor([0, 1, 0, 1]))
    seen = []
    train_epoch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        [batch, batch],
        loss_of(model),
        after_backward=lambda: note("backward"),
        after_step=lambda: note("step"),
        on_batch=lambda number, loss: seen.append((number, float(loss))),
    )
    assert [name for name, _, _ in calls] == ["backward", "step", "backward", "step"]
    assert all(has_gradient for _, _, has_gradient in calls)
    assert calls[0][1] == start
    assert calls[1][1] != start
    assert [number for number, _ in seen] == [1, 2]


def test_epoch_loss_is_the_mean_over_images_and_the_last_batch_s() -> None:
    model = nn.Linear(2, 2)
    batches = [
        (torch.ones(3, 2), torch.zeros(3, dtype=torch.long)),
        (torch.zeros(1, 2), torch.ones(1, dtype=torch.long)),
    ]
    losses = [mean_squared_error(model(inputs), labels).item() for inputs, labels in batches]
    frozen = torch.optim.SGD(model.parameters(), lr=0.0)
    result = train_epoch(model, frozen, batches, loss_of(model))
    assert result.mean == pytest.approx((3 * losses[0] + losses[1]) / 4)
    assert result.last == pytest.approx(losses[1])


def test_training_that_diverged_is_an_error() -> None:
    model = nn.Linear(2, 2)
    batches = [(torch.full((2, 2), math.inf), torch.zeros(2, dtype=torch.long))]
    with pytest.raises(FloatingPointError, match="NaN or an infinity"):
        train_epoch(model, torch.optim.SGD(model.parameters()), batches, loss_of(model))


def test_no_batches_is_an_error() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="no batch"):
        train_epoch(model, torch.optim.SGD(model.parameters()), [], loss_of(model))
