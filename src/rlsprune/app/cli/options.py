"""The options that several commands share."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rlsprune.app.config.base import GATES, OPTIMIZERS
from rlsprune.app.config.losses import LOSSES
from rlsprune.app.config.recipes import RECIPES
from rlsprune.app.config.settings import ON_FAULT, OURS, TARGETS
from rlsprune.app.experiments.registry import EXPERIMENTS, METHODS, PRESETS


def _choices(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def _completing(names: tuple[str, ...]) -> Callable[[str], list[str]]:
    """What a shell offers for the beginning of a name."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


ExperimentName = Annotated[
    str,
    typer.Argument(
        help=f"One of {_choices(tuple(EXPERIMENTS))}.",
        show_default=True,
        autocompletion=_completing(tuple(EXPERIMENTS)),
    ),
]
MethodName = Annotated[
    str, typer.Option("--method", help=f"One of {_choices(METHODS)}.", autocompletion=_completing(METHODS))
]
OptimizerName = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        help=f"One of {_choices(OPTIMIZERS)}. Default: sgd for the rivals, rls for all else.",
        autocompletion=_completing(OPTIMIZERS),
    ),
]
PresetName = Annotated[
    str,
    typer.Option(
        "--preset",
        help=f"How long to train: {_choices(PRESETS)}. paper: 200 epochs; short: for a CPU.",
        autocompletion=_completing(PRESETS),
    ),
]
RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        help=f"How to train: {_choices(RECIPES)} (images, loss, schedule, average of the weights, epochs). Default: "
        "ours for rls and scratch, paper for all else.",
        autocompletion=_completing(RECIPES),
    ),
]
LearningRate = Annotated[
    float | None, typer.Option("--lr", help="The learning rate. Default: what suits experiment and optimizer.")
]
CpuSeconds = Annotated[
    float | None,
    typer.Option(
        "--cpu-seconds",
        help="Processor time to train for, instead of --epochs; the rate falls and pruning ends by the time used.",
    ),
]
Epochs = Annotated[int | None, typer.Option("--epochs", help="Epochs to train, instead of the preset's.")]
Ratio = Annotated[
    float | None, typer.Option("--ratio", help="ξ of rls and rls-paper: the share of a layer that may go at an event.")
]
RivalRatio = Annotated[
    float | None,
    typer.Option(
        "--rival-ratio", help="What the rivals remove of a layer, or of the weights. Default: the paper's share."
    ),
]
Target = Annotated[
    float | None,
    typer.Option(
        "--target",
        help="The share of the parameters at which rls stops, or that a rival leaves. Default: the experiment's.",
    ),
]
TargetOf = Annotated[
    str | None,
    typer.Option(
        "--target-of",
        help=f"What --target is a share of: {_choices(TARGETS)}. Default: params.",
        autocompletion=_completing(TARGETS),
    ),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        help=f"How far above the least loss at a prune is recovered, as a share of it. Default: {OURS.tolerance}.",
    ),
]
ALLOCATE = "Take from each layer what costs the held-out loss least, instead of ξ from all."
Allocate = Annotated[
    bool | None, typer.Option("--allocate/--no-allocate", help=f"{ALLOCATE} Default: the experiment's.")
]
Warmup = Annotated[
    int | None, typer.Option("--warmup-epochs", help="q: epochs before the first prune, instead of the preset's.")
]
PruneEpoch = Annotated[
    int | None,
    typer.Option("--prune-epoch", help="The epoch after which the one-shot methods prune. Default: q + 1."),
]
GateName = Annotated[
    str | None,
    typer.Option(
        "--gate",
        help=f"The loss that has to recover before the next prune: {_choices(GATES)} "
        "(the epoch's mean, its last minibatch, held-out images).",
        autocompletion=_completing(GATES),
    ),
]
LossName = Annotated[
    str | None,
    typer.Option(
        "--loss",
        help=f"One of {_choices(tuple(LOSSES))}; mse is Eq. (15) of the paper. The ResNet and fit have the other.",
        autocompletion=_completing(tuple(LOSSES)),
    ),
]
BatchSize = Annotated[int | None, typer.Option("--batch-size", help="Images per minibatch, instead of the preset's.")]
TrainImages = Annotated[int | None, typer.Option("--train-images", help="Train on so many images only.")]
TestImages = Annotated[int | None, typer.Option("--test-images", help="Test on so many images only.")]
Augment = Annotated[
    bool | None,
    typer.Option(
        "--augment/--no-augment",
        help="Shift images (and mirror CIFAR-10's) at random. Default: the recipe's.",
    ),
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Where the data lie. Default: RLSPRUNE_DATA, then the cache folder.")
]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Read data files whose checksum is not the published one.")]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Default: that of the run that is gone on with, else cuda if there is one, else cpu. On another "
        "device than before, the numbers may differ.",
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", help="Torch's threads. Default: all cores, shared by --jobs.")
]
OnFault = Annotated[
    str | None,
    typer.Option(
        "--on-fault",
        help=f"At a NaN, an infinity or a loss that diverges: {_choices(ON_FAULT)} (stop, leave the batch out, or go "
        "back to the last checkpoint with half the step). Default: raise.",
    ),
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Only algorithms that give the same numbers every time.")
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs at a time.")]
Seed = Annotated[int, typer.Option("--seed", help="Of initialisation and shuffling.")]
Seeds = Annotated[str, typer.Option("--seeds", help="Seeds, separated by commas: a run each.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The folder for the results.")]
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Write curves and histograms for TensorBoard into the run's folder.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


def _training(
    preset: PresetName = "short",
    recipe: RecipeName = None,
    optimizer: OptimizerName = None,
    lr: LearningRate = None,
    epochs: Epochs = None,
    cpu_seconds: CpuSeconds = None,
    warmup_epochs: Warmup = None,
    target: Target = None,
    target_of: TargetOf = None,
    tolerance: Tolerance = None,
    allocate: Allocate = None,
    gate: GateName = None,
    loss: LossName = None,
    batch_size: BatchSize = None,
    train_images: TrainImages = None,
    test_images: TestImages = None,
    augment: Augment = None,
    data_dir: DataDir = None,
    no_verify: NoVerify = False,
    device: Device = None,
    threads: Threads = None,
    on_fault: OnFault = None,
    deterministic: Deterministic = False,
) -> None:
    """What `run`, `compare` and `sweep` can be told about how to train."""


def with_training(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of training to a command, which gets them together as its argument `training`."""
    own, shared = (inspect.signature(function, eval_str=True).parameters for function in (command, _training))
    parameters = [parameter for name, parameter in own.items() if name != "training"] + list(shared.values())

    @functools.wraps(command)
    def wrapper(**given: Any) -> None:
        training = {name: given.pop(name) for name in shared}
        command(**given, training=training)

    wrapper.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def settings(training: Mapping[str, Any], jobs: int = 1) -> dict[str, Any]:
    """The options of training as `make_config` takes them."""
    machine = ("device", "threads", "data_dir", "no_verify")
    device, threads, data_dir, no_verify = (training[name] for name in machine)
    others = {name: value for name, value in training.items() if name not in machine}
    return others | resolve(device, threads, data_dir, no_verify, jobs)


def resolve(
    device: str | None, threads: int | None, data_dir: Path | None, no_verify: bool, jobs: int = 1
) -> dict[str, Any]:
    """The fields of a run's config that depend on the machine."""
    import torch

    jobs *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's processes on this machine

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "device": usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu")),
        "threads": threads or max(1, cores // jobs),
        "data_dir": None if data_dir is None else str(data_dir),
        "verify": not no_verify,
    }


def usable_device(name: str) -> str:
    """The device, if this machine has it.

    Raises:
        ValueError: It has not.
    """
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"--device {name} cannot be used here ({first}): give another, such as cpu") from error
    return name


def numbers(option: str, text: str, kind: type[int] | type[float]) -> list[Any]:
    """Numbers separated by commas."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{option} {text} is not valid: give numbers separated by commas, such as 0,1,2") from error
