"""Modules whose code uses the weights of their layers in functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from rlsprune.model.fitted import fit_views

CALLS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "by position": lambda layer, x: F.linear(x, layer.weight, layer.bias),
    "all by name": lambda layer, x: F.linear(input=x, weight=layer.weight, bias=layer.bias),
    "weight and bias by name": lambda layer, x: F.linear(x, weight=layer.weight, bias=layer.bias),
    "in another order": lambda layer, x: F.linear(weight=layer.weight, bias=layer.bias, input=x),
}


class Using(nn.Module):
    """Has a layer, and does not call it."""

    def __init__(self, call: Callable[[nn.Linear, Tensor], Tensor], bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3, bias=bias)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_layers_are_called_however_their_weights_are_given(
    call: Callable[[nn.Linear, Tensor], Tensor], bias: bool
) -> None:
    module, x = Using(call, bias), torch.randn(5, 4)
    expected, seen = module(x), []
    fit_views(module, ["layer"])
    module.layer.register_forward_hook(lambda layer, args, output: seen.append(args[0]))
    assert torch.equal(module(x), expected)
    assert len(seen) == 1
    assert seen[0] is x


def test_a_function_with_another_bias_is_not_the_layer_s() -> None:
    module, x, seen = Using(lambda layer, x: F.linear(input=x, weight=layer.weight), bias=True), torch.randn(5, 4), []
    fit_views(module, ["layer"])
    module.layer.register_forward_hook(lambda layer, args, output: seen.append(args[0]))
    assert torch.equal(module(x), x @ module.layer.weight.T)
    assert not seen
