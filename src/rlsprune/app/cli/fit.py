"""`rlsprune fit`: a user's own network on the user's own data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlsprune.app.cli import folders, options
from rlsprune.app.cli.execute import Shown, execute
from rlsprune.app.cli.speech import say
from rlsprune.app.config.base import BATCH_NORM_RATE, LEARNING_RATES, OPTIMIZERS
from rlsprune.app.config.fit import FitConfig, make_fit_config, names_function
from rlsprune.app.config.losses import LOSSES
from rlsprune.app.config.metrics import METRICS, TASKS
from rlsprune.app.config.settings import OURS

if TYPE_CHECKING:
    from rlsprune.app.run.folder import RunFolder
    from rlsprune.app.run.observer import Observer

__all__ = ["EXAMPLES", "fit"]

EXAMPLES = """Examples: `rlsprune fit my_module:build_model --data photos/` (a sub-folder per class) ·
`rlsprune fit nets.py:mlp --data table.npz --target 0.2 --epochs 40` ·
`rlsprune fit my_module:build_model --data photos/ --image-size 64 --weights trained.safetensors --optimizer adamw` ·
`rlsprune fit nets.py:mlp --data houses.csv --label price --baseline` (and the unpruned network beside it) ·
`rlsprune fit nets.py:cnn --data my_data.py:datasets --int8` (own Datasets; an 8-bit model, too) ·
`rlsprune fit my_module:build_model --data photos/ --weights trained.pt --max-drop 0.5` ·
`rlsprune fit --resume runs/build_model-photos-seed0`"""

_WITH_RESUME = {"resume", "device", "on_fault", "logger", "quiet", "as_json"}
_RATES = "; ".join(f"{name} {scratch:g}, with --weights {tuned:g}" for name, (scratch, tuned) in LEARNING_RATES.items())
_RATES += f"; rls with batch norm {BATCH_NORM_RATE:g}"


def fit(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="module:function or path/to/file.py:function; the function returns the network."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="A folder of images with a sub-folder per class (or train/ and test/ with such sub-folders); a .csv "
            "or .parquet file (or a folder with train.csv and test.csv); or an .npz file with x_train, y_train, "
            "x_test, y_test. Or module:function that returns your own torch Datasets, (train, test).",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            help=f"{', '.join(TASKS[:-1])} or {TASKS[-1]}. Default: guessed from the labels.",
            autocompletion=options.completing(TASKS),
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", help="The column of a table to predict; repeat it for several. Default: the last."),
    ] = None,
    drop_columns: Annotated[
        str | None, typer.Option("--drop-columns", help="Columns of a table to leave out, separated by commas.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            help=f"The score that counts: {', '.join(METRICS)}. Default: accuracy; r2 for numbers; f1 for "
            "several labels. With two classes, f1 and average-precision are those of the second by name.",
            autocompletion=options.completing(tuple(METRICS)),
        ),
    ] = None,
    class_weights: Annotated[
        str | None,
        typer.Option(
            "--class-weights",
            help="The weight of each class in the loss: balanced, numbers (1,5,2), or names with numbers "
            "(cat=1,dog=5).",
        ),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option("--weights", help="Start from these weights: a .safetensors or .pt file.")
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer", help=f"One of {', '.join(OPTIMIZERS)}.", autocompletion=options.completing(OPTIMIZERS)
        ),
    ] = "rls",
    lr: Annotated[
        float | None,
        typer.Option("--lr", help=f"Learning rate. Default: {_RATES}."),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            "--target",
            help=f"Pruning ends at this share of the parameters. Default: {OURS.target:g}, none with --max-drop.",
        ),
    ] = None,
    features: Annotated[
        int | None,
        typer.Option("--features", help="The number of a table's columns to keep. Default: as many as pruning leaves."),
    ] = None,
    max_drop: Annotated[
        float | None,
        typer.Option(
            "--max-drop",
            help="Train the unpruned network (or take --weights as they are), then find the smallest one whose "
            "held-out score is at most this many points worse. A point is 0.01 of R², or one unit of mae and rmse.",
        ),
    ] = None,
    recovery_epochs: Annotated[
        int | None,
        typer.Option("--recovery-epochs", help="With --max-drop: epochs of training after each round. Default: 2."),
    ] = None,
    ratio: Annotated[
        float, typer.Option("--ratio", help="ξ: the largest share of a layer that one event removes.")
    ] = OURS.ratio,
    tolerance: options.Tolerance = None,
    allocate: Annotated[
        bool | None,
        typer.Option("--allocate/--no-allocate", help=f"{options.ALLOCATE} Default: yes, with --gate valid."),
    ] = None,
    epochs: Annotated[int, typer.Option("--epochs", help="The number of epochs, including those of pruning.")] = 20,
    warmup_epochs: Annotated[
        int | None,
        typer.Option(
            "--warmup-epochs",
            help="q: the number of epochs before the first prune. Default: a tenth of all, 1 with --weights.",
        ),
    ] = None,
    gate: options.GateName = None,
    loss: Annotated[
        str | None,
        typer.Option(
            "--loss",
            help="cross-entropy or mse for classes, mse or huber for numbers, bce for several labels. Default: the "
            "first of these.",
            autocompletion=options.completing(tuple(LOSSES)),
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Examples per minibatch.")] = 64,
    image_size: Annotated[
        int | None,
        typer.Option("--image-size", help="Crop images to a square and scale it to this many pixels a side."),
    ] = None,
    channels: Annotated[
        int | None, typer.Option("--channels", help="1 for grey images, 3 for colour. Default: grey if all images are.")
    ] = None,
    augment: Annotated[
        str | None,
        typer.Option(
            "--augment",
            help="Vary the training images: crop (shift by up to 4 pixels) or crop+flip (also mirror half of them). "
            "A number after crop sets the pixels, as in crop2.",
            autocompletion=options.completing(("crop", "crop+flip", "crop2")),
        ),
    ] = None,
    average: Annotated[
        float,
        typer.Option("--average", help="Keep the moving average of the weights over this many epochs; 0 for none."),
    ] = 1.0,
    no_prune: Annotated[bool, typer.Option("--no-prune", help="Train without pruning.")] = False,
    baseline: Annotated[
        bool,
        typer.Option("--baseline", help="Also train the unpruned network in the same way, and compare with it."),
    ] = False,
    int8: Annotated[
        bool,
        typer.Option("--int8", help="Also write model-int8.onnx, in 8-bit integers, and measure its score."),
    ] = False,
    standardise: Annotated[
        bool,
        typer.Option(
            "--standardise/--no-standardise",
            help="Train on columns of a table scaled to mean 0 and deviation 1. The saved model takes them unscaled.",
        ),
    ] = True,
    seed: Annotated[int, typer.Option("--seed", help="The seed of initialisation, shuffling and splitting.")] = 0,
    out: options.Out = None,
    device: options.Device = None,
    threads: options.Threads = None,
    on_fault: options.OnFault = None,
    deterministic: options.Deterministic = False,
    bfloat16: options.Bfloat16 = False,
    resume: options.Resume = None,
    logger: options.Logger = None,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Train your own network and prune it while it trains; get the small model, its ONNX file and a report."""
    shown = Shown(quiet=quiet, as_json=as_json, loggers=options.loggers(logger))
    if resume is not None:
        folders.refuse_other_options(context, _WITH_RESUME)
        _execute(_resumed(resume, device, on_fault), resume, shown)
        return
    if model is None or data is None:
        raise ValueError("give a model and --data, for example: rlsprune fit my_module:build_model --data photos/")
    machine = options.resolve(device, threads, None, False)
    config = make_fit_config(
        model,
        data,
        task=task,
        label=tuple(label or ()),
        drop_columns=tuple(drop_columns.split(",")) if drop_columns else (),
        metric=metric,
        class_weights=class_weights,
        weights=weights,
        optimizer=optimizer,
        lr=lr,
        ratio=ratio,
        target=OURS.target if target is None and max_drop is None else target,
        features=features,
        max_drop=max_drop,
        recovery_epochs=recovery_epochs,
        tolerance=tolerance,
        allocate=allocate,
        epochs=epochs,
        warmup_epochs=warmup_epochs,
        gate=gate,
        loss=loss,
        batch_size=batch_size,
        image_size=image_size,
        channels=channels,
        augment=augment,
        average=average,
        method="none" if no_prune else None,
        int8=int8,
        baseline=baseline,
        standardise=standardise,
        seed=seed,
        device=machine["device"],
        threads=machine["threads"],
        on_fault=on_fault,
        deterministic=deterministic,
        bfloat16=bfloat16,
    )
    of_data = data.rpartition(":")[2] if names_function(data) else Path(data).stem
    name = f"{model.rpartition(':')[2]}-{of_data}-seed{seed}"
    _execute(config, folders.new_folder(name, out), shown)


def _resumed(path: Path, device: str | None, on_fault: str | None) -> FitConfig:
    from rlsprune.app.run.folder import RunFolder

    values = RunFolder(path).read_json("config")
    if "import_from" not in values:
        raise ValueError(f"{path} holds a run of `rlsprune run`: resume it with `rlsprune run --resume {path}`")
    config = FitConfig.from_dict(values)
    device = options.usable_device(device or config.device)
    return replace(config, device=device, on_fault=on_fault or config.on_fault)


def _execute(config: FitConfig, path: Path, shown: Shown) -> None:
    from rlsprune.app.fit.fit import missing_onnx_packages

    if missing := missing_onnx_packages():
        if config.int8:
            raise ValueError(f'--int8 needs {", ".join(missing)}: pip install "rlsprune[onnx]"')
        say(
            f'No model.onnx will be written: {", ".join(missing)} not installed; pip install "rlsprune[onnx]"', err=True
        )

    def train(folder: RunFolder, observer: Observer) -> dict[str, Any]:
        from rlsprune.app.cli import terminal
        from rlsprune.app.fit.fit import fit as run_fit
        from rlsprune.io.export import ExportError

        try:
            return run_fit(config, folder, observer, lambda: terminal.observer(shown.hidden))
        except ExportError as error:  # the trained model was saved
            say(f"No model.onnx was written: {error}", err=True)
            return folder.read_summary()

    execute("fit", path, train, shown)
