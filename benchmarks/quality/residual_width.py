"""Measures the cost of cutting the residual width of a transformer, in every block at once.

The network and the sentences are those of ``benchmarks.quality.sentences``. Channels of the residual stream are removed
from every LayerNorm, in the order of their outputs times the weights that read them on calibration sentences, smallest
first. *sliced* computes the norm over the channels that stay. *compensated* computes mean and variance as if the
removed channels had their mean sum and sum of squares, which is exact if these do not vary. Nothing is refitted. A
share of the channels is about the same share of the encoder's parameters.

    python -m benchmarks.quality.residual_width --folder FOLDER --record docs/results/residual-width.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.quality.sentences import Case, load_case
from rlsprune.model.tensors import complement

SHARES = (0.95, 0.9, 0.8, 0.7)


def norms(case: Case) -> list[nn.LayerNorm]:
    """Returns every norm of the residual stream."""
    return [module for module in case.model.modules() if isinstance(module, nn.LayerNorm)]


@torch.no_grad()
def energies(case: Case, batches: int) -> tuple[Tensor, list[Tensor]]:
    """Scores channels by their effect on the layers that read them; also returns the norms' mean inputs and squares."""
    found = norms(case)
    outputs = [torch.zeros(norm.normalized_shape[0], dtype=torch.float64) for norm in found]
    inputs = [torch.zeros(2, norm.normalized_shape[0], dtype=torch.float64) for norm in found]

    def watch(place: int, args: tuple[Tensor, ...], output: Tensor) -> None:
        outputs[place] += output.double().square().flatten(0, -2).mean(0)
        x = args[0].double().flatten(0, -2)
        inputs[place] += torch.stack([x.mean(0), x.square().mean(0)])

    handles = [
        norm.register_forward_hook(lambda _, args, output, place=place: watch(place, args, output))
        for place, norm in enumerate(found)
    ]
    for batch in case.batches[:batches]:
        case.model(**batch)
    for handle in handles:
        handle.remove()
    readers = sum(
        layer.weight.double().square().sum(0)
        for layer in case.model.bert.encoder.modules()
        if isinstance(layer, nn.Linear) and layer.in_features == len(outputs[0])
    )
    return sum(outputs) * readers, [each / batches for each in inputs]


@contextmanager
def without(case: Case, gone: Tensor, means: list[Tensor], compensated: bool) -> Iterator[None]:
    """Removes channels from every norm of the network while the block runs."""

    def smaller(norm: nn.LayerNorm, args: tuple[Tensor, ...], _: Tensor, known: Tensor) -> Tensor:
        x = args[0]
        stay = complement(x.shape[-1], gone)
        kept = x[..., stay]
        total, squares, count = kept.sum(-1, keepdim=True), kept.square().sum(-1, keepdim=True), len(stay)
        if compensated:
            total, squares = total + known[0, gone].sum().float(), squares + known[1, gone].sum().float()
            count = x.shape[-1]
        mean = total / count
        spread = (squares / count - mean.square() + norm.eps).rsqrt()
        result = torch.zeros_like(x)
        result[..., stay] = (kept - mean) * spread * norm.weight[stay] + norm.bias[stay]
        return result

    handles = [
        norm.register_forward_hook(lambda module, args, output, known=known: smaller(module, args, output, known))
        for norm, known in zip(norms(case), means, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--batches", type=int, default=8, help="batches of 32 sentences to calibrate and to test on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    case = load_case(args.folder)
    case.test = case.test[: args.batches]
    case.own = case.embed(case.model)
    scores, means = energies(case, args.batches)
    found = []
    for share in SHARES:
        gone = scores.argsort()[: round((1 - share) * len(scores))].sort().values
        for compensated in (False, True):
            with without(case, gone, means, compensated):
                judged = case.judged(case.model)
            found.append({"share": share, "norm": "compensated" if compensated else "sliced", **judged})
            print(found[-1], flush=True)
    if args.record:
        args.record.write_text(json.dumps({"batches": args.batches, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
