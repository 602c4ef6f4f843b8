"""Does P stay symmetric and positive definite over a long run in float32?

Records the mean inputs of a hidden layer while a small network trains on the embedded digits, and replays them into
float32 and float64 copies of P until so many updates are done. Prints the health of the float32 copy as it goes.

    python -m benchmarks.quality.soak_inverse --steps 200000 --scales 1e-6,1,1e6
    python -m benchmarks.quality.soak_inverse --steps 200000 --rank 0  # P whole
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import rlsprune
from rlsprune.app.config.losses import mean_squared_error
from rlsprune.app.data import Batches, load
from rlsprune.app.models import FNN
from rlsprune.optim.entries import form_of, initial_entry
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


def soak(means: Tensor, steps: int, forgetting: float, rank: int | None, scale: float) -> bool:
    """Replays the inputs and prints a line per tenth of the way; False if P was ever unhealthy."""
    copies = [form_of(initial_entry(means[:1].to(dtype), 1.0, rank)) for dtype in (torch.float32, torch.float64)]
    always = True
    print(f"\nforgetting {forgetting:g}, rank {rank or 'whole'}, inputs times {scale:g}")
    print("    steps  smallest    largest  asymmetry  error vs float64  healthy")
    for step in range(1, steps + 1):
        x = scale * means[step % len(means)].unsqueeze(0)
        for form in copies:
            own = x.to(form.like.dtype)
            form.look(own, MEAN_SCALE)
            form.update_(forgetting, WIND_UP_LIMIT, None)
        if step % max(1, steps // 10) == 0:
            eigenvalues, asymmetry = copies[0].eigenvalues(), copies[0].asymmetry()
            P, exact = (form.dense().double() for form in copies)
            error = ((P - exact).norm() / exact.norm()).item()
            healthy = bool(eigenvalues.min() > 0) and asymmetry == 0
            always &= healthy
            extremes = f"{eigenvalues.min():.2e}  {eigenvalues.max():.3e}"
            print(f"{step:9,}  {extremes}  {asymmetry:9.1g}  {error:16.1e}  {healthy}", flush=True)
    return always


def main() -> int:
    """0 if P was healthy all the way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=96, help="inputs of the layer")
    parser.add_argument("--epochs", type=int, default=8, help="of training that is recorded")
    parser.add_argument("--rank", type=int, default=16, help="0 for P whole")
    parser.add_argument("--forgetting", default="1,0.999")
    parser.add_argument("--scales", default="1", help="what the inputs are multiplied with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    means = record(options.width, options.epochs)
    print(
        f"{len(means):,} mean inputs of {means.shape[1]} values recorded in {options.epochs} epochs, batches of {BATCH}"
    )
    results = [
        soak(means, options.steps, forgetting, options.rank or None, scale)
        for forgetting in map(float, options.forgetting.split(","))
        for scale in map(float, options.scales.split(","))
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
