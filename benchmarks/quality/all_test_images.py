"""Evaluates finished networks on all test images; the short presets use 2,000, which resolve only whole points.

    python -m benchmarks.quality.all_test_images RUN-OF-RLS RUN-OF-SCRATCH … --data-dir DATA

The difference to the first run is computed on the same images. Its standard error counts only images that exactly one
of the two networks gets right.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import rlsprune
from rlsprune.app.config.experiment import RunConfig
from rlsprune.app.experiments.recipe import load_data, make_recipe
from rlsprune.app.run.folder import RunFolder
from rlsprune.model.modes import evaluating


def found(folder: RunFolder, data_dir: str | None, verify: bool) -> tuple[Tensor, float]:
    """Returns a mask of the test images that a run's network gets right, and its loss."""
    config = RunConfig.from_dict(folder.read_json("config"))
    # The shape comes from the file, not from another network.
    config = replace(config, test_images=None, shape_from=None, device="cpu", verify=verify)
    config = replace(config, data_dir=data_dir or config.data_dir)
    data = load_data(config)
    recipe = make_recipe(config, data)
    model = recipe.in_layout(rlsprune.load(folder.model, into=recipe.build_model()))
    with evaluating(model):
        outputs = torch.cat([model(images) for images, _ in recipe.evaluation_batches(data.test)])
        return outputs.argmax(-1) == data.test.labels, float(recipe.loss(outputs, data.test.labels))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--data-dir")
    parser.add_argument("--no-verify", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| run | images | accuracy % | loss | difference to the first |\n|---|---:|---:|---:|---:|")
    first: Tensor | None = None
    for run in options.runs:
        right, loss = found(RunFolder(run), options.data_dir, not options.no_verify)
        first = right if first is None else first
        difference = 100 * (right.double() - first.double())
        error = difference.std() / len(difference) ** 0.5
        shown = "-" if right is first else f"{difference.mean():+.2f} ± {error:.2f}"
        print(f"| {run} | {len(right)} | {100 * right.double().mean():.2f} | {loss:.4f} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
