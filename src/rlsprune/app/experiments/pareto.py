"""From a run's finished network to smaller and smaller ones: accuracy against size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlsprune.app.config.experiment import RunConfig
from rlsprune.app.experiments.figures import draw_front
from rlsprune.app.experiments.recipe import load_data, make_recipe
from rlsprune.app.run.folder import RunFolder
from rlsprune.io import modelfile
from rlsprune.optim.rls import RLS
from rlsprune.shrinking import FrontPoint, Progress, shrink
from rlsprune.training.loop import evaluate

__all__ = ["FrontSettings", "shrink_run"]

Point = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class FrontSettings:
    """How a run's network is shrunk; see `rlsprune.shrink`."""

    max_drop: float | None
    """In points of accuracy."""
    target: float | None
    """The share of the parameters to end at."""
    ratio: float
    recovery_epochs: int
    lr: float
    """η of the RLS that recovers."""


def shrink_run(
    config: RunConfig,
    source: RunFolder,
    out: Path,
    settings: FrontSettings,
    *,
    on_point: Callable[[Point], object] = lambda point: None,
    on_progress: Progress | None = None,
) -> Mapping[str, Any]:
    """Shrinks a run's network, and writes the front, its picture and the chosen network, anew with each point.

    Every choice is made on images held out of the training split; those of the test split are only looked at.

    Args:
        config: The run's; the device and the folder of the data may be others.
        source: The finished run.
        out: The folder for pareto.json, pareto.png and model.safetensors.
        settings: How.
        on_point: Told about each network on the way.
        on_progress: As of `rlsprune.shrink`.

    Returns:
        What stands in pareto.json.

    Raises:
        ValueError: The folder holds a front already.
        FloatingPointError: Recovery diverged.
    """
    if (out / "pareto.json").exists():
        raise ValueError(f"{out} holds a front already: give another --out, or delete that folder")
    out.mkdir(parents=True, exist_ok=True)
    config = replace(config, gate="valid")
    data = load_data(config)
    assert data.valid is not None
    torch.set_num_threads(config.threads)
    recipe = make_recipe(config, data)
    model = recipe.in_layout(modelfile.load(source.model, into=recipe.build_model()))
    test = recipe.evaluation_batches(data.test)
    points: list[Point] = []

    def note(point: FrontPoint, network: nn.Module) -> None:
        points.append({**asdict(point), "accuracy": evaluate(network, test, recipe.loss).accuracy})
        if point.within:
            modelfile.save(network, out / "model.safetensors", metadata={"config": config.to_dict()})
        written(finished=False)
        on_point(points[-1])

    def written(finished: bool) -> Mapping[str, Any]:
        front = sorted(points, key=lambda point: -int(point["params"]))
        chosen = max(number for number, point in enumerate(front) if point["within"])
        result = {
            "run": dict(recipe.title),
            "settings": asdict(settings),
            "finished": finished,
            "chosen": chosen,
            "front": front,
        }
        if len(points) > 1:
            draw_front(front, chosen, f"{config.experiment}, {config.method}, seed {config.seed}", out / "pareto.png")
        RunFolder(out).write_json("pareto", result)
        return result

    torch.manual_seed(config.seed)
    shrink(
        model,
        recipe.training_batches(data.train, torch.Generator().manual_seed(config.seed), len(data.train)),
        target=None if settings.target is None else {"params": settings.target},
        max_drop=settings.max_drop,
        valid=recipe.evaluation_batches(data.valid),
        loss=recipe.loss,
        optimizer=lambda network: RLS(network, lr=settings.lr),
        ratio=settings.ratio,
        recovery_epochs=settings.recovery_epochs,
        on_point=note,
        on_progress=on_progress,
    )
    return written(finished=True)
