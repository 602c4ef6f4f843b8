"""What each part of `rls` is worth: leaves one out, or puts one in, and looks at images that no run has trained on.

`python -m benchmarks.quality.ablation mnist-fnn --seeds 0,1,2` prints a table: accuracy on validation images, which are
training images of the data set that are left out of the runs. The test images are not looked at. Each variant is `rls`
as `rlsprune run` has it with one thing changed. "Worst event" is the highest cost of an event of any seed, in
points of accuracy. Time is a ratio to the first variant's. Finished runs are kept in --out and not made again.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlsprune.app import data
from rlsprune.app.config.experiment import RunConfig, make_config
from rlsprune.app.data.datasets import Dataset
from rlsprune.app.experiments.jobs import check_settings
from rlsprune.app.experiments.recipe import make_recipe
from rlsprune.app.experiments.registry import EXPERIMENTS, experiment
from rlsprune.app.run.build import hold_out
from rlsprune.app.run.execute import train_and_prune
from rlsprune.app.run.folder import RunFolder

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "as it is": {},
    "no average": {"training": {"average": 0.0}},
    "average of two epochs": {"training": {"average": 2.0}},
    "images as they are": {"run": {"augment": None}},
    "moved by up to 1": {"run": {"augment": "crop1"}},
    "moved by up to 2": {"run": {"augment": "crop2"}},
    "moved by up to 2, mirrored": {"run": {"augment": "crop2+flip"}},
    "moved by up to 4, mirrored": {"run": {"augment": "crop+flip"}},
    "rate falls from 15 %": {"training": {"lr_decay": 0.85}},
    "rate falls from 60 %": {"training": {"lr_decay": 0.4}},
    "rate stays": {"training": {"lr_decay": 0.0}},
    **{f"{share} % at a time": {"pruning": {"ratio": share / 100}} for share in (10, 20, 25, 30, 40, 60)},
    **{f"tolerance {share:g}": {"pruning": {"tolerance": share}} for share in (0, 0.02, 0.05, 0.1, 0.2)},
    "the same of every layer": {"pruning": {"allocate": False}},
    "where it costs least": {"pruning": {"allocate": True}},
    "prunes up to 80 %": {"pruning": {"settle": 0.2}},
    "gate: training loss": {"pruning": {"gate": "train", "allocate": False}},
    "not compensated": {"pruning": {"compensate": False}},
    "training P": {"pruning": {"statistics": "training"}},
    "P by its Schur complement": {"pruning": {"inverse": "schur"}},
    "P sliced": {"pruning": {"inverse": "slice"}},
    "P starts anew": {"pruning": {"inverse": "reset"}},
    "k = 0.1": {"training": {"mean_scale": 0.1}},
    "k = 0.01": {"training": {"mean_scale": 0.01}},
    "k = 0.001": {"training": {"mean_scale": 0.001}},
    "first prune after epoch 1": {"run": {"warmup_epochs": 0}},
    "first prune after epoch 4": {"run": {"warmup_epochs": 3}},
    "l1 scores": {"pruning": {"criterion": "l1"}},
    "the paper's scores": {"pruning": {"criterion": "rls"}},
    "held out to the end": {"pruning": {"reunite": False}},
}
"""Name → what is changed in the settings of `rls`, those of the run itself under "run"."""


def config_of(variant: str, options: argparse.Namespace, seed: int) -> RunConfig:
    """The run of a variant."""
    changes = VARIANTS[variant]
    names = ("epochs", "train_images", "target", "data_dir")
    given = {name: getattr(options, name) for name in names}
    config = make_config(options.experiment, "rls", seed=seed, verify=not options.no_verify, **given)
    assert config.pruning is not None
    pruning = replace(config.pruning, **changes.get("pruning", {}))
    training = replace(config.training, **changes.get("training", {}))
    own = {"gate": pruning.gate, "bfloat16": options.bfloat16, **changes.get("run", {})}
    return replace(config, pruning=pruning, training=training, **own)


def validation_data(config: RunConfig, count: int) -> Dataset:
    """The run's training images, and others of the training split where the test images would be."""
    loaded = data.load(experiment(config.experiment).dataset, config.data_dir, config.verify)
    images = min(config.train_images or len(loaded.train), len(loaded.train) - count)
    split = loaded.take(images + count).hold_out(count, seed=1)
    assert split.valid is not None
    split = replace(split, test=split.valid, valid=None)
    return hold_out(config, split)


def summary_of(variant: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Of a variant's run, which is made if it has not been, with what each event cost right away."""
    config = config_of(variant, options, seed)
    name = f"{variant.replace(' ', '-')}-{options.valid_images}-seed{seed}"
    folder = RunFolder(options.out / options.experiment / name)
    check_settings(folder.path, config)
    if not folder.finished:
        train_and_prune(make_recipe(config, validation_data(config, options.valid_images)), folder)
    events = [event for event in folder.read_lines("events") if event["kind"] == "prune"]
    return folder.read_json("summary") | {"lost": [e["accuracy_before"] - e["accuracy_after"] for e in events]}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment", choices=list(EXPERIMENTS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--train-images", type=int)
    parser.add_argument("--valid-images", type=int, default=5000)
    parser.add_argument("--target", type=float, help="share of the parameters at which pruning ends")
    parser.add_argument("--bfloat16", action="store_true", help="forward passes of training in bfloat16")
    parser.add_argument("--data-dir")
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"))
    options = parser.parse_args()

    head, *others = options.variants
    as_first = config_of(head, options, 0)
    first = None
    print(f"| {options.experiment} | accuracy % | loss | weights % | events | worst event | time |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for variant in [head, *(other for other in others if config_of(other, options, 0) != as_first)]:
        summaries = [summary_of(variant, options, seed) for seed in map(int, options.seeds.split(","))]
        means = {name: statistics.fmean(s[name] for s in summaries) for name in ("loss", "weights_percent", "seconds")}
        first = first or means["seconds"]
        lost = [points for summary in summaries for points in summary["lost"]]
        columns = [
            ", ".join(f"{summary['accuracy']:.2f}" for summary in summaries),
            f"{means['loss']:.4f}",
            f"{means['weights_percent']:.1f}",
            ", ".join(str(len(summary["lost"])) for summary in summaries),
            f"{max(lost, default=0):.1f}",
            f"{means['seconds'] / first:.2f}",
        ]
        print("| " + " | ".join([variant, *columns]) + " |", flush=True)


if __name__ == "__main__":
    main()
