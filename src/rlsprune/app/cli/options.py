"""The options that several commands share."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rlsprune.app.config.base import GATES, OPTIMIZERS, check_choice
from rlsprune.app.config.losses import LOSSES_OF
from rlsprune.app.config.recipes import RECIPES
from rlsprune.app.config.settings import ON_FAULT, OURS, TARGETS
from rlsprune.app.experiments.registry import EXPERIMENTS, METHODS, PRESETS
from rlsprune.app.run.loggers import LOGGERS


def _choices(names: Iterable[str]) -> str:
    return ", ".join(names)


def completing(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Returns a function that completes a name, or the last of several names separated by commas."""

    def offer(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names if name.startswith(last)]

    return offer


ExperimentName = Annotated[
    str,
    typer.Argument(
        help=f"One of {_choices(tuple(EXPERIMENTS))}.",
        show_default=True,
        autocompletion=completing(tuple(EXPERIMENTS)),
    ),
]
MethodName = Annotated[
    str, typer.Option("--method", help=f"The pruning method: {_choices(METHODS)}.", autocompletion=completing(METHODS))
]
OptimizerName = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        help=f"One of {_choices(OPTIMIZERS)}. Default: sgd for the rivals, rls for all others.",
        autocompletion=completing(OPTIMIZERS),
    ),
]
PresetName = Annotated[
    str,
    typer.Option(
        "--preset",
        help="The length of training: short (made for a CPU) or paper (200 epochs).",
        autocompletion=completing(PRESETS),
    ),
]
RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        help=f"The way to train: {_choices(RECIPES)} (images, loss, schedule, average of the weights, epochs). "
        "Default: ours for rls and scratch, paper for all others.",
        autocompletion=completing(RECIPES),
    ),
]
LearningRate = Annotated[
    float | None, typer.Option("--lr", help="The learning rate. Default: one that suits experiment and optimizer.")
]
CpuSeconds = Annotated[
    float | None,
    typer.Option(
        "--cpu-seconds",
        help="The processor time in seconds, instead of --epochs. The rate falls and pruning ends by the time used.",
    ),
]
Epochs = Annotated[int | None, typer.Option("--epochs", help="The number of epochs. Default: the preset's.")]
Ratio = Annotated[
    float | None,
    typer.Option("--ratio", help="ξ of rls and rls-paper: the largest share of a layer that one event removes."),
]
RivalRatio = Annotated[
    float | None,
    typer.Option(
        "--rival-ratio", help="The share of a layer, or of the weights, that the rivals remove. Default: the paper's."
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
        help=f"The quantity of which --target is a share: {_choices(TARGETS)}. Default: params.",
        autocompletion=completing(TARGETS),
    ),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        help="A loss up to this share above the lowest loss at any prune counts as recovered. "
        f"Default: {OURS.tolerance}.",
    ),
]
ALLOCATE = (
    "Prune most where that raises the held-out loss least, instead of the share ξ of every layer. An event raises this "
    "loss by at most a quarter."
)
Allocate = Annotated[
    bool | None, typer.Option("--allocate/--no-allocate", help=f"{ALLOCATE} Default: the experiment's.")
]
Warmup = Annotated[
    int | None,
    typer.Option("--warmup-epochs", help="q: the number of epochs before the first prune. Default: the preset's."),
]
PruneEpoch = Annotated[
    int | None,
    typer.Option("--prune-epoch", help="The epoch after which the one-shot methods prune. Default: q + 1."),
]
GateName = Annotated[
    str | None,
    typer.Option(
        "--gate",
        help="The loss that must recover before the next prune: train (the epoch's mean), batch (the last minibatch) "
        "or valid (held-out images).",
        autocompletion=completing(GATES),
    ),
]
LossName = Annotated[
    str | None,
    typer.Option(
        "--loss",
        help="mse (Eq. 15 of the paper) or cross-entropy. Default: mse; cross-entropy for the ResNet.",
        autocompletion=completing(LOSSES_OF["classification"]),
    ),
]
BatchSize = Annotated[int | None, typer.Option("--batch-size", help="Images per minibatch. Default: the preset's.")]
TrainImages = Annotated[
    int | None, typer.Option("--train-images", help="The number of images to train on. Default: the preset's.")
]
TestImages = Annotated[
    int | None, typer.Option("--test-images", help="The number of images to test on. Default: the preset's.")
]
Augment = Annotated[
    bool | None,
    typer.Option(
        "--augment/--no-augment",
        help="Shift images at random, and mirror those of CIFAR-10. Default: the recipe's.",
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="The folder of the data sets. Default: RLSPRUNE_DATA, then the cache folder."),
]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Read data files whose checksum is not the published one.")]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="The device to compute on: cpu, cuda, cuda:1, mps. Default: a resumed run's own device, else cuda if "
        "there is one, else cpu. Another device may give other numbers.",
        autocompletion=completing(("cpu", "cuda", "mps")),
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="The number of torch's threads. Default: the idle cores, divided by --jobs."),
]
OnFault = Annotated[
    str | None,
    typer.Option(
        "--on-fault",
        help="The response to a NaN, an infinity or a diverging loss: raise (stop), skip (leave the batch out) or "
        "rollback (return to the last checkpoint and halve the learning rate). Default: raise.",
        autocompletion=completing(ON_FAULT),
    ),
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Use only deterministic algorithms, so that results repeat.")
]
Bfloat16 = Annotated[
    bool,
    typer.Option(
        "--bfloat16",
        help="Run the forward passes of training in bfloat16 by autocast, which is faster if the device has it.",
    ),
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="The number of runs at a time.")]
Seed = Annotated[int, typer.Option("--seed", help="The seed of initialisation and shuffling.")]
Seeds = Annotated[str, typer.Option("--seeds", help="Seeds, separated by commas. Each makes a run.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The folder for the results.")]
Logger = Annotated[
    list[str] | None,
    typer.Option(
        "--logger",
        help=f"Also log the run to one of {', '.join(LOGGERS)}. Repeat it for several.",
        autocompletion=completing(LOGGERS),
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Resume = Annotated[Path | None, typer.Option("--resume", help="Resume the run in this folder, with its own settings.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")]


def loggers(given: list[str] | None) -> tuple[str, ...]:
    """Returns the requested loggers, each once.

    Raises:
        ValueError: There is no logger of that name.
    """
    for name in given or ():
        check_choice("logger", name, LOGGERS)
    return tuple(dict.fromkeys(given or ()))


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
    bfloat16: Bfloat16 = False,
) -> None:
    """Declares the options of training that `run`, `compare` and `sweep` share."""


def with_training(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of training to a command, which gets them as one argument `training`."""
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
    """Converts the options of training to arguments of `make_config`."""
    machine = ("device", "threads", "data_dir", "no_verify")
    device, threads, data_dir, no_verify = (training[name] for name in machine)
    others = {name: value for name, value in training.items() if name not in machine}
    return others | resolve(device, threads, data_dir, no_verify, jobs)


def resolve(
    device: str | None, threads: int | None, data_dir: Path | None, no_verify: bool, jobs: int = 1
) -> dict[str, Any]:
    """Returns the fields of a run's config that depend on the machine."""
    import torch

    jobs *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's processes on this machine

    return {
        "device": usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu")),
        "threads": max(1, _free_cores() // jobs) if threads is None else threads,
        "data_dir": None if data_dir is None else str(data_dir),
        "verify": not no_verify,
    }


def _free_cores() -> int:
    """Counts idle cores. Threads that wait for a busy core slow a small network down twentyfold."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy = round(os.getloadavg()[0]) if hasattr(os, "getloadavg") else 0
    return max(1, cores - busy)


def usable_device(name: str) -> str:
    """Returns the name of the device if this machine has it.

    Raises:
        ValueError: The machine does not have it.
    """
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"--device {name} cannot be used here ({first}): give another, such as cpu") from error
    return name


def numbers(option: str, text: str, kind: type[int] | type[float]) -> list[Any]:
    """Parses numbers separated by commas."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{option} {text} is not valid: give numbers separated by commas, such as 0,1,2") from error
