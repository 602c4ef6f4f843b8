"""What each part of `rls` is worth: leaves one out, or puts one in, and looks at images that no run has trained on.

`python benchmarks/ablation.py mnist-fnn --seeds 0,1,2` prints a table: precision on validation images, which are
training images of the data set that are left out of the runs. The test images are not looked at. Finished runs are kept
in --out and not made again.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlsprune import data
from rlsprune.data.datasets import Dataset
from rlsprune.experiments.config import HELD_OUT_SHARE, RunConfig, make_config
from rlsprune.experiments.registry import EXPERIMENTS, experiment
from rlsprune.experiments.run import make_recipe
from rlsprune.train.folder import RunFolder
from rlsprune.train.run import train_and_prune

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "as it is": {},
    "no input noise": {"training": {"input_noise": 0.0}},
    "more input noise": {"training": {"input_noise": 0.3}},
    "mixup": {"training": {"mixup": 1.0, "input_noise": 0.0}},
    "average": {"training": {"average": 1.0}},
    "average of half an epoch": {"training": {"average": 0.5}},
    "mixup and average": {"training": {"mixup": 1.0, "input_noise": 0.0, "average": 1.0}},
    "light mixup and average": {"training": {"mixup": 0.2, "input_noise": 0.0, "average": 1.0}},
    "mixup, noise and average": {"training": {"mixup": 1.0, "average": 1.0}},
    "rate falls in 70 %": {"training": {"lr_decay": 0.7}},
    "rate stays": {"training": {"lr_decay": 0.0}},
    "prunes up to 70 %": {"pruning": {"settle": 0.3}},
    "not compensated": {"pruning": {"compensate": False}},
    "training P": {"pruning": {"statistics": "training"}},
    "l1 scores": {"pruning": {"criterion": "l1"}},
    "paper's scores": {"pruning": {"criterion": "rls"}},
    "slices P": {"pruning": {"inverse": "slice"}},
    "half as much at a time": {"pruning": {"ratio": 0.125}},
    "twice as much at a time": {"pruning": {"ratio": 0.5}},
    "gate: training loss": {"pruning": {"gate": "train"}},
}
"""Name → what is changed in the settings of `rls`."""


def config_of(variant: str, options: argparse.Namespace, seed: int) -> RunConfig:
    """The run of a variant."""
    changes = VARIANTS[variant]
    given = {"epochs": options.epochs, "train_images": options.train_images, "data_dir": options.data_dir}
    config = make_config(options.experiment, "rls", seed=seed, verify=not options.no_verify, **given)
    assert config.pruning is not None
    pruning = replace(config.pruning, **({"target": options.target} | changes.get("pruning", {})))
    training = replace(config.training, **changes.get("training", {}))
    return replace(config, pruning=pruning, training=training, gate=pruning.gate)


def validation_data(config: RunConfig, count: int) -> Dataset:
    """The run's training images, and others of the training split where the test images would be."""
    loaded = data.load(experiment(config.experiment).dataset, config.data_dir, config.verify)
    images = min(config.train_images or len(loaded.train), len(loaded.train) - count)
    split = loaded.take(images + count).hold_out(count, seed=1)
    assert split.valid is not None
    split = replace(split, test=split.valid, valid=None)
    return split.hold_out(round(HELD_OUT_SHARE * images)) if config.gate == "valid" else split


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment", choices=list(EXPERIMENTS))
    parser.add_argument("--variants", default=",".join(VARIANTS), help="some of: " + ", ".join(VARIANTS))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--train-images", type=int)
    parser.add_argument("--valid-images", type=int, default=5000)
    parser.add_argument("--target", type=float, default=0.05, help="share of the parameters at which pruning ends")
    parser.add_argument("--data-dir")
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"))
    options = parser.parse_args()

    print(f"| {options.experiment} | precision % | loss | weights % | seconds |\n|---|---:|---:|---:|---:|")
    for variant in options.variants.split(","):
        summaries = []
        for seed in map(int, options.seeds.split(",")):
            config = config_of(variant, options, seed)
            folder = RunFolder(options.out / options.experiment / f"{variant.replace(' ', '-')}-seed{seed}")
            if not folder.finished:
                train_and_prune(make_recipe(config, validation_data(config, options.valid_images)), folder)
            summaries.append(folder.read_json("summary"))
        columns = [
            ", ".join(f"{summary['final_precision']:.2f}" for summary in summaries),
            *(f"{statistics.fmean(s[name] for s in summaries):.3g}" for name in ("loss", "weights_percent", "seconds")),
        ]
        print("| " + " | ".join([variant, *columns]) + " |", flush=True)


if __name__ == "__main__":
    main()
