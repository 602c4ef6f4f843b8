"""The training half of Algorithm 1: equations (11)-(22), in float64, with explicit unfolding.

The paper writes a layer as Y = f(X W) with W of shape (inputs, outputs). That layout is used here; `to_paper` and
`to_torch` translate. The bias is the weight of an input that is always 1, and is the last row of W and of P.

Left out on purpose: a guard against the wind-up of P with λ < 1, diagonal blocks, gradient accumulation, and every
parameter that belongs to no linear or convolutional layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


def paper_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Eq. (15): the squared error of the last layer's linear outputs, halved, per sample."""
    return ((outputs - targets) ** 2).sum() / (2 * len(outputs))


def groups_of(layer: Layer) -> int:
    return 1 if isinstance(layer, nn.Linear) else layer.groups


def to_paper(layer: Layer, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Eq. (12): a weight (or its gradient) as (groups, inputs, outputs per group), the bias as the last input row."""
    matrices = []
    for g in range(groups_of(layer)):
        outputs = range(g * len(weight) // groups_of(layer), (g + 1) * len(weight) // groups_of(layer))
        columns = []
        for j in outputs:
            column = weight[j].flatten()
            columns.append(column if bias is None else torch.cat([column, bias[j].reshape(1)]))
        matrices.append(torch.stack(columns, dim=1))
    return torch.stack(matrices)


def to_torch(layer: Layer, matrices: Tensor) -> tuple[Tensor, Tensor | None]:
    """The inverse of `to_paper`: weight and bias as the layer holds them."""
    columns = [matrices[g, :, j] for g in range(matrices.shape[0]) for j in range(matrices.shape[2])]
    if layer.bias is None:
        return torch.stack(columns).reshape(layer.weight.shape), None
    weight = torch.stack([column[:-1] for column in columns]).reshape(layer.weight.shape)
    return weight, torch.stack([column[-1] for column in columns])


def pad(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, inputs: Tensor) -> Tensor:
    """The batch with the border that the convolution sees around it."""
    borders: list[tuple[int, int]] = []
    for axis, (size, dilation) in enumerate(zip(layer.kernel_size, layer.dilation, strict=True)):
        if layer.padding == "valid":
            borders.append((0, 0))
        elif layer.padding == "same":
            total = dilation * (size - 1)
            borders.append((total // 2, total - total // 2))
        else:
            assert not isinstance(layer.padding, str)
            borders.append((layer.padding[axis], layer.padding[axis]))
    # functional.pad counts dimensions from the last one.
    flat = [side for border in reversed(borders) for side in border]
    if layer.padding_mode == "zeros":
        return functional.pad(inputs, flat)
    return functional.pad(inputs, flat, mode=layer.padding_mode)


def patches(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, inputs: Tensor) -> list[Tensor]:
    """Eq. (11): for every output position (u, v), its receptive field in every sample: (M, C, H, W) each."""
    if inputs.dim() == len(layer.kernel_size) + 1:
        inputs = inputs.unsqueeze(0)  # torch lets a single sample come without a batch dimension
    padded = pad(layer, inputs)
    reach = [d * (k - 1) + 1 for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
    counts = [(n - r) // s + 1 for n, r, s in zip(padded.shape[2:], reach, layer.stride, strict=True)]
    fields = []
    for position in itertools.product(*(range(count) for count in counts)):
        window = [
            slice(u * s, u * s + r, d) for u, s, r, d in zip(position, layer.stride, reach, layer.dilation, strict=True)
        ]
        fields.append(padded[(slice(None), slice(None), *window)])
    return fields


def unfold(layer: Layer, inputs: Tensor) -> Tensor:
    """The X of eqs. (11) and (14), one row per sample and position: (groups, rows, inputs), the bias's 1 last."""
    if isinstance(layer, nn.Linear):
        X = inputs.reshape(1, -1, layer.in_features)
    else:
        by_group = []
        for g in range(layer.groups):
            channels = slice(g * layer.in_channels // layer.groups, (g + 1) * layer.in_channels // layer.groups)
            by_group.append(torch.cat([field[:, channels].flatten(1) for field in patches(layer, inputs)]))
        X = torch.stack(by_group)
    if layer.bias is None:
        return X
    return torch.cat([X, torch.ones(*X.shape[:2], 1, dtype=X.dtype)], dim=2)


class ReferenceRLS:
    """Equations (16)-(22) for every linear and convolutional layer of a float64 model.

    Attributes:
        lr: η by layer name; change it between steps to follow a schedule.
        P: by layer name, the inverse autocorrelation (n, n), or (groups, n, n) if the layer has several groups;
            the bias row is the last.
        Psi: by layer name, the velocity as (groups, n, outputs per group); `velocity` gives it in torch's layout.
        mean_input: by layer name, the x of the last step as (groups, n).
        h: by layer name, the h of the last step as (groups,).
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Mapping[str, float] = 1.0,  # η, η^l
        momentum: float = 0.5,  # α
        forgetting: float = 1.0,  # λ
        mean_scale: float = 0.1,  # k
        p0: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        self.model = model
        self.momentum, self.forgetting, self.mean_scale = momentum, forgetting, mean_scale
        self.weight_decay = weight_decay
        self.layers: dict[str, Layer] = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, LAYERS) and module.weight.requires_grad
        }
        self._check_model()
        self.lr = {name: lr if isinstance(lr, int | float) else lr[name] for name in self.layers}
        self.P: dict[str, Tensor] = {}
        self.Psi: dict[str, Tensor] = {}
        self.mean_input: dict[str, Tensor] = {}
        self.h: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            W = to_paper(layer, layer.weight.detach(), None if layer.bias is None else layer.bias.detach())
            groups, n, _ = W.shape
            identity = p0 * torch.eye(n, dtype=torch.float64)
            self.P[name] = identity if groups == 1 else torch.stack([identity] * groups)
            self.Psi[name] = torch.zeros_like(W)

    def _check_model(self) -> None:
        """Refuse what the reference would get wrong."""
        covered = set()
        for name, layer in self.layers.items():
            if layer.bias is not None and not layer.bias.requires_grad:
                raise ValueError(f"layer {name!r}: the bias is frozen but the weight is not")
            for parameter in layer.parameters():
                if parameter in covered:
                    raise ValueError(f"layer {name!r} shares a parameter with another layer")
                covered.add(parameter)
        for name, parameter in self.model.named_parameters():
            if parameter.dtype != torch.float64:
                raise ValueError(f"parameter {name!r} is {parameter.dtype}, not float64")
            if parameter.requires_grad and parameter not in covered:
                raise ValueError(f"parameter {name!r} belongs to no linear or convolutional layer")

    def step(self, inputs: Any, targets: Any, loss_fn: Callable[[Any, Any], Tensor] = paper_loss) -> float:
        """One pass of Algorithm 1's loop without its pruning: forward, backward, update. Returns J(W_{t-1})."""
        captured: dict[str, list[Tensor]] = {name: [] for name in self.layers}
        hooks = [
            layer.register_forward_pre_hook(lambda _, args, name=name: captured[name].append(args[0].detach().clone()))
            for name, layer in self.layers.items()
        ]
        self.model.zero_grad(set_to_none=True)
        try:
            loss = loss_fn(self.model(inputs), targets)
            loss.backward()
        finally:
            for hook in hooks:
                hook.remove()
        with torch.no_grad():
            for name, layer in self.layers.items():
                if layer.weight.grad is not None:  # a layer that took no part in the loss stays as it is
                    # A layer called several times in one forward has the rows of all its calls.
                    X = torch.cat([unfold(layer, call) for call in captured[name]], dim=1)
                    self._update(name, layer, X)
        return loss.item()

    def _update(self, name: str, layer: Layer, X: Tensor) -> None:
        assert layer.weight.grad is not None
        W = to_paper(layer, layer.weight, layer.bias)
        gradient = to_paper(layer, layer.weight.grad, None if layer.bias is None else layer.bias.grad)
        groups, n, _ = W.shape
        P = self.P[name].reshape(groups, n, n)
        λ, k, α, η = self.forgetting, self.mean_scale, self.momentum, self.lr[name]
        new_W, new_Psi, new_P, means, hs = [], [], [], [], []
        for g in range(groups):
            x = X[g].sum(dim=0) / len(X[g])  # eqs. (19) and (20)
            u = P[g] @ x  # eq. (17)
            h = λ + k * torch.dot(x, u)  # eq. (18)
            Psi = α * self.Psi[name][g] - η / h * (P[g] @ gradient[g])  # eq. (21), with P_{t-1}
            new_Psi.append(Psi)
            # Eq. (22), after the decoupled weight decay. The bias is a row of W and decays with it.
            new_W.append((1 - η * self.weight_decay) * W[g] + Psi)
            new_P.append(P[g] / λ - k / (λ * h) * torch.outer(u, u))  # eq. (16)
            means.append(x)
            hs.append(h)
        weight, bias = to_torch(layer, torch.stack(new_W))
        layer.weight.copy_(weight)
        if layer.bias is not None and bias is not None:
            layer.bias.copy_(bias)
        self.Psi[name] = torch.stack(new_Psi)
        self.P[name] = torch.stack(new_P).reshape(self.P[name].shape)
        self.mean_input[name] = torch.stack(means)
        self.h[name] = torch.stack(hs)

    def velocity(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Ψ of a layer in the shapes of its weight and bias."""
        return to_torch(self.layers[name], self.Psi[name])


class Ridge(NamedTuple):
    """A regression Y ≈ X weightᵀ + bias, and the inverse of its regularised autocorrelation (bias row last)."""

    weight: Tensor
    bias: Tensor
    P: Tensor


def closed_form_ridge(
    X: Tensor,
    Y: Tensor,
    p0: float = 1.0,
    forgetting: float = 1.0,
    start: tuple[Tensor, Tensor] | None = None,
) -> Ridge:
    """Eqs. (3)-(5) with A_0 = I/p0, solved at once, the intercept as an input that is always 1.

    This is where RLS stands after it saw the rows of X one at a time with k = 1, α = 0, η = 1 and eq. (15)'s loss.

    Args:
        X: inputs, one row per sample, in the order seen.
        Y: targets, one row per sample.
        p0: the start of P; 1/p0 is the weight of the ridge.
        forgetting: λ; sample i of t counts λ^(t-i), the ridge λ^t.
        start: weight (outputs, inputs) and bias the recursion began with; None for zeros.
    """
    t, n = X.shape[0], X.shape[1] + 1
    W0 = torch.zeros(n, Y.shape[1], dtype=torch.float64)
    if start is not None:
        W0 = torch.cat([start[0].T, start[1].reshape(1, -1)])
    A = forgetting**t * torch.eye(n, dtype=torch.float64) / p0
    b = forgetting**t * W0 / p0
    for i in range(t):
        x = torch.cat([X[i], torch.ones(1, dtype=torch.float64)])
        A = A + forgetting ** (t - 1 - i) * torch.outer(x, x)
        b = b + forgetting ** (t - 1 - i) * torch.outer(x, Y[i])
    W = torch.linalg.solve(A, b)
    return Ridge(W[:-1].T, W[-1], torch.linalg.inv(A))
