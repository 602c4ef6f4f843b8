"""Checks that P stays symmetric and positive definite over a long run in float32.

Records the mean inputs of a hidden layer while a small network trains on the embedded digits, and replays them at
several scales into float32 and float64 copies of P for a number of updates. Prints the health of the float32 copy on
the way.

    python -m benchmarks.quality.soak_inverse --steps 200000 --scales 1e-6,1e-3,1,1e3,1e6
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
from rlsprune.optim.entries import form_of, initial_entry, inverse_step
from rlsprune.optim.layer_step import MOST_ROUNDED, WIND_UP_LIMIT

MEAN_SCALE = 0.1  # k
BATCH = 16


def record(width: int, epochs: int) -> Tensor:
    """Records the mean input, with the bias's 1, of the second layer in every step of a training run."""
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


def soak(means: Tensor, steps: int, forgetting: float, rank: int | None, scales: list[float]) -> bool:
    """Replays the inputs at every scale and prints P's health ten times; returns False if P was ever unhealthy.

    Inputs that training would refuse as too large for P in float32 are used anyway, and counted.
    """
    factors = torch.tensor(scales, dtype=torch.float64).unsqueeze(1)
    dtypes = (torch.float32, torch.float64)
    entries = [initial_entry(factors.to(dtype) * means[0].to(dtype), 1.0, rank) for dtype in dtypes]
    told, always = torch.zeros(len(scales), dtype=torch.long), True
    print(f"\nforgetting {forgetting:g}, rank {rank or 'whole'}")
    print("    steps  inputs times  too large  smallest    largest  asymmetry  error vs float64  healthy")
    for step in range(1, steps + 1):
        x = means[step % len(means)].double() * factors
        for entry, dtype in zip(entries, dtypes, strict=True):
            inverse = inverse_step([[entry]])
            _, energy = inverse.look([x.to(dtype)], MEAN_SCALE)
            inverse.update_(forgetting, WIND_UP_LIMIT, None)
            if dtype == torch.float32:
                told += energy >= MOST_ROUNDED / torch.finfo(dtype).eps
        if step % max(1, steps // 10) == 0:
            forms = [form_of(entry) for entry in entries]
            eigenvalues, asymmetry = forms[0].eigenvalues(), forms[0].asymmetry()
            P, exact = (form.dense().double() for form in forms)
            errors = torch.linalg.matrix_norm(P - exact) / torch.linalg.matrix_norm(exact)
            for scale, count, values, error in zip(scales, told, eigenvalues, errors, strict=True):
                healthy = bool(values.min() > 0) and asymmetry == 0
                always &= healthy
                line = f"{step:9,}  {scale:12g}  {int(count):9,}  {values.min():.2e}  {values.max():.3e}"
                print(f"{line}  {asymmetry:9.1g}  {error:16.1e}  {healthy}", flush=True)
    return always


def main() -> int:
    """Returns 0 if P was healthy throughout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=96, help="inputs of the layer")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of training that are recorded")
    parser.add_argument("--rank", type=int, default=16, help="0 for P whole")
    parser.add_argument("--forgetting", default="1,0.999")
    parser.add_argument("--scales", default="1", help="comma-separated factors of the inputs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    means = record(options.width, options.epochs)
    print(
        f"{len(means):,} mean inputs of {means.shape[1]} values recorded in {options.epochs} epochs, batches of {BATCH}"
    )
    results = [
        soak(means, options.steps, forgetting, options.rank or None, list(map(float, options.scales.split(","))))
        for forgetting in map(float, options.forgetting.split(","))
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
