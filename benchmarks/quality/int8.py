"""Measures a run's network in 8-bit integers: size of the file and test accuracy in ONNX Runtime.

Activations are scaled by their range on a few training batches.

    python -m benchmarks.quality.int8 runs/mnist-fnn-rls-seed0 --data-dir DATA
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path

import onnxruntime
import torch

import rlsprune
from rlsprune.app.config.experiment import RunConfig
from rlsprune.app.data.batches import Batches
from rlsprune.app.experiments.recipe import load_data, make_recipe
from rlsprune.app.run.folder import RunFolder

CALIBRATION = 8  # batches of the training split


def accuracy(path: Path, batches: Batches) -> float:
    """Computes the percentage of images that the file's network classifies correctly."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    found = [(torch.as_tensor(session.run(None, {name: x.numpy()})[0]).argmax(1) == y) for x, y in batches]
    return 100 * float(torch.cat(found).float().mean())


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("--data-dir")
    args = parser.parse_args()
    folder = RunFolder(args.run)
    config = replace(RunConfig.from_dict(folder.read_json("config")), data_dir=args.data_dir, device="cpu")
    data = load_data(config)
    recipe = make_recipe(config, data)
    training = recipe.training_batches(data.train, torch.Generator().manual_seed(0), len(data.train))
    networks = {"unpruned": recipe.build_model(), "pruned": rlsprune.load(folder.model, into=recipe.build_model())}
    print("| network | file | test accuracy |\n|---|---:|---:|")
    with tempfile.TemporaryDirectory() as temporary:
        for name, model in networks.items():
            exact, small = Path(temporary) / f"{name}.onnx", Path(temporary) / f"{name}-int8.onnx"
            rlsprune.export_onnx(model, recipe.example(2), exact)
            rlsprune.quantize_onnx(exact, small, itertools.islice(training, CALIBRATION))
            for kind, path in (("float32", exact), ("int8", small)):
                test = accuracy(path, recipe.evaluation_batches(data.test)) if name == "pruned" else None
                shown = "-" if test is None else f"{test:.2f} %"
                print(f"| {name}, {kind} | {path.stat().st_size / 1000:.0f} kB | {shown} |")


if __name__ == "__main__":
    main()
