"""Does P stay symmetric and positive definite over a long run in float32?

Records the mean inputs of a hidden layer while a small network trains on the embedded digits, and replays them into
float32 and float64 copies of P until so many updates are done. Prints the health of the float32 copy as it goes.

    python -m benchmarks.quality.soak_inverse --steps 200000
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import rlsprune
from rlsprune.app.config.losses import mean_squared_error
from rlsprune.app.data import Batches, load
from rlsprune.app.models import FNN
from rlsprune.optim.functional import gain, rank_one_downdate_
from rlsprune.optim.layer_step import WIND_UP_LIMIT

MEAN_SCALE = 0.1  # k
BATCH = 16


def record(width: int, epochs: int) -> Tensor:
    """The mean input, with the bias's 1, of the second layer in every step of a training run."""
    torch.manual_seed(0)
    data = load("digits")
    model = FNN((784, width, 48, 10))
    optimizer = rlsprune.RLS(model)
    means: list[Tensor] = []

    def keep(_: object, inputs: tuple[Tensor, ...]) -> None:
        means.append(torch.cat([inputs[0].detach().mean(0), torch.ones(1)]))

    model.get_submodule("fc2").register_forward_pre_hook(keep)
    batches = Batches(data.train.images, data.train.labels, BATCH, seed=0, flat=True)
    for _ in range(epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            mean_squared_error(model(images), labels).backward()
            optimizer.step()
    return torch.stack(means)


def update_(P: Tensor, x: Tensor, forgetting: float) -> None:
    """Eqs. (16) to (18)."""
    u, excitation = gain(P, x[None].to(P.dtype))
    h = forgetting + MEAN_SCALE * excitation
    rank_one_downdate_(P, u, h, mean_scale=MEAN_SCALE, forgetting=forgetting, limit=WIND_UP_LIMIT)


def soak(means: Tensor, steps: int, forgetting: float) -> bool:
    """Replays the inputs and prints a line per tenth of the way; False if P was ever unhealthy."""
    P, exact = (torch.eye(means.shape[1], dtype=dtype)[None] for dtype in (torch.float32, torch.float64))
    always = True
    print(f"\nforgetting {forgetting:g}\n    steps  smallest    largest  asymmetry  error vs float64  healthy")
    for step in range(1, steps + 1):
        for copy in (P, exact):
            update_(copy, means[step % len(means)], forgetting)
        if step % max(1, steps // 10) == 0:
            eigenvalues = torch.linalg.eigvalsh(P.double())
            smallest, largest = eigenvalues.min().item(), eigenvalues.max().item()
            asymmetry = (P - P.mT).abs().max().item()
            error = (P.double() - exact).norm() / exact.norm()
            healthy = smallest > 0 and asymmetry == 0
            always &= healthy
            print(
                f"{step:9,}  {smallest:.2e}  {largest:.3e}  {asymmetry:9.1g}  {error:16.1e}  {healthy}",
                flush=True,
            )
    return always


def main() -> int:
    """0 if P was healthy all the way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=96, help="inputs of the layer")
    parser.add_argument("--epochs", type=int, default=8, help="of training that is recorded")
    options = parser.parse_args()
    torch.set_num_threads(1)
    means = record(options.width, options.epochs)
    print(
        f"{len(means):,} mean inputs of {means.shape[1]} values recorded in {options.epochs} epochs, batches of {BATCH}"
    )
    results = [soak(means, options.steps, forgetting) for forgetting in (1.0, 0.9999)]
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
