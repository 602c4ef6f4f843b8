"""Shrinks the network of a finished run step by step and records accuracy against size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlsprune.app.config.experiment import RunConfig
from rlsprune.app.config.fit import FitConfig
from rlsprune.app.experiments.figures import draw_front
from rlsprune.app.experiments.recipe import load_data, make_recipe
from rlsprune.app.fit.fit import load_own_data, make_own_recipe
from rlsprune.app.run.folder import RunFolder
from rlsprune.app.run.recipe import Recipe
from rlsprune.app.run.share import Share
from rlsprune.distributed.ranks import find_ranks
from rlsprune.distributed.torchrun import leads
from rlsprune.io import modelfile
from rlsprune.optim.rls import RLS
from rlsprune.shrinking import FrontPoint, Progress, shrink

__all__ = ["FrontSettings", "shrink_run"]

Point = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class FrontSettings:
    """The settings with which a run's network is shrunk; see `rlsprune.shrink`."""

    max_drop: float | None
    """The largest drop in points of the run's score: of accuracy, or hundredths of R²."""
    target: float | None
    """The share of the parameters to keep."""
    ratio: float
    recovery_epochs: int
    lr: float
    """η of RLS in the recovery."""


def shrink_run(
    config: RunConfig | FitConfig,
    source: RunFolder,
    out: Path,
    settings: FrontSettings,
    *,
    on_point: Callable[[Point], object] = lambda point: None,
    on_progress: Progress | None = None,
) -> Mapping[str, Any]:
    """Shrinks a run's network, and rewrites the front, its picture and the chosen network with each point.

    Each of several processes takes its part of the batches, and rank 0 writes.

    Every choice is made on examples held out of the training split here, although most runs have trained on them
    before. The test split is only measured.

    Args:
        config: The run's configuration; the device and the data folder may differ from the run's.
        source: The folder of the finished run.
        out: The folder for pareto.json, pareto.png and model.safetensors.
        settings: The settings of shrinking.
        on_point: Callback for each network on the way, on rank 0.
        on_progress: Callback for progress, as in `rlsprune.shrink`.

    Returns:
        The contents of pareto.json.

    Raises:
        ValueError: The folder already holds a front, or the data are not those of the run.
        FloatingPointError: Recovery diverged.
    """
    if (out / "pareto.json").exists():
        raise ValueError(f"{out} already holds a front: give another --out, or delete that folder")
    share = Share(find_ranks())
    if leads():
        out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(config.threads)
    recipe, model = _opened(config, source)
    data, metric = recipe.data, recipe.scoring.metric
    assert data.valid is not None
    test, valid = (recipe.evaluation_batches(split) for split in (data.test, data.valid))
    sign = 1 if metric.higher_is_better else -1
    points: list[Point] = []

    def score(network: nn.Module, batches: Iterable[Any] = valid) -> float:
        return sign * recipe.scoring(network, batches, recipe.loss, share).scores[metric.name]

    def note(point: FrontPoint, network: nn.Module) -> None:
        scores = {"score": sign * point.score, "score_pruned": sign * point.score_pruned}
        points.append({**asdict(point), **scores, metric.name: sign * score(network, test)})
        if not leads():
            return
        if point.within:
            metadata = {"config": config.to_dict()}
            modelfile.save(recipe.delivered(network), out / "model.safetensors", metadata=metadata)
        written(finished=False)
        on_point(points[-1])

    def written(finished: bool) -> Mapping[str, Any]:
        front = sorted(points, key=lambda point: -int(point["params"]))
        chosen = max(number for number, point in enumerate(front) if point["within"])
        result = {
            "run": dict(recipe.title),
            "metric": metric.name,
            "settings": asdict(settings),
            "finished": finished,
            "chosen": chosen,
            "front": front,
        }
        if not leads():
            return result
        if len(points) > 1:
            title = f"{config.experiment}, {config.method}, seed {config.seed}"
            draw_front(front, chosen, title, metric, out / "pareto.png")
        RunFolder(out).write_json("pareto", result)
        return result

    torch.manual_seed(config.seed)
    shrink(
        model,
        share.divided(recipe.training_batches(data.train, torch.Generator().manual_seed(config.seed), len(data.train))),
        target=None if settings.target is None else {"params": settings.target},
        max_drop=None if settings.max_drop is None else metric.points(settings.max_drop),
        loss=recipe.loss,
        score=score,
        optimizer=lambda network: RLS(network, lr=settings.lr),
        ratio=settings.ratio,
        recovery_epochs=settings.recovery_epochs,
        on_point=note,
        on_progress=on_progress,
    )
    return written(finished=True)


def _opened(config: RunConfig | FitConfig, source: RunFolder) -> tuple[Recipe, nn.Module]:
    """Builds the recipe of a finished run, with examples held out, and its network in the form in which it trained."""
    if isinstance(config, FitConfig):
        of_fit = replace(config, weights=str(source.model))
        if config.gate != "valid":
            load_own_data(config)  # raises unless they are still those of the run
            of_fit = replace(of_fit, gate="valid", classes=(), images=(0, 0))
        recipe = make_own_recipe(of_fit, load_own_data(of_fit))
        model = recipe.build_model()
        recipe.prepare(model)
        return recipe, recipe.in_layout(model)
    started = replace(config, gate="valid")
    recipe = make_recipe(started, load_data(started))
    return recipe, recipe.in_layout(modelfile.load(source.model, into=recipe.build_model()))
