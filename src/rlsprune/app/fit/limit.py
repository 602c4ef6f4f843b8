"""`fit --max-drop`: trains a network unpruned, or takes a given one, and shrinks it as far as its score allows.

To a run this is a method like any other, which prunes once, after the last epoch.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlsprune.app.config.base import LEARNING_RATES
from rlsprune.app.config.fit import FitConfig
from rlsprune.app.run.build import build_optimizer
from rlsprune.app.run.recipe import Recipe
from rlsprune.app.run.share import Share
from rlsprune.app.run.unpruned import NoPruning
from rlsprune.distributed.ranks import find_ranks
from rlsprune.io import modelfile
from rlsprune.model.counts import count
from rlsprune.prune.event import Measures, PruneEvent
from rlsprune.shrinking import shrink

__all__ = ["ShrinkAtTheEnd", "limited"]


@dataclass(frozen=True)
class _Limit:
    """Shrinks a network as far as the run's limit allows, by its score on held-out examples."""

    config: FitConfig
    recipe: Recipe

    def __call__(self, network: nn.Module) -> None:
        config, recipe = self.config, self.recipe
        metric, data = recipe.scoring.metric, recipe.data
        assert data.valid is not None
        assert config.max_drop is not None
        sign, valid = 1 if metric.higher_is_better else -1, recipe.evaluation_batches(data.valid)
        share, rate = Share(find_ranks()), LEARNING_RATES[config.optimizer][1]
        torch.manual_seed(config.seed)
        shrink(
            network,
            share.divided(
                recipe.training_batches(data.train, torch.Generator().manual_seed(config.seed), len(data.train))
            ),
            target=None if config.pruning.target is None else {"params": config.pruning.target},
            max_drop=metric.points(config.max_drop),
            loss=recipe.loss,
            score=lambda model: sign * recipe.scoring(model, valid, recipe.loss, share).scores[metric.name],
            optimizer=lambda model: build_optimizer(config, model, rate),
            ratio=config.pruning.ratio,
            recovery_epochs=config.recovery_epochs,
            on_progress=lambda stage, done, total: None,  # the run has its own display
        )


class ShrinkAtTheEnd(NoPruning):
    """Trains unpruned and shrinks the network that is kept at the end.

    Args:
        model: The network.
        optimizer: The optimizer of its parameters.
        example_inputs: A batch of its input.
        make_smaller: Function that shrinks a network in place.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, example_inputs: Tensor, make_smaller: Callable[[nn.Module], None]
    ) -> None:
        super().__init__(model, example_inputs)
        self._optimizer, self._make_smaller, self._epoch = optimizer, make_smaller, 0
        self._average: nn.Module | None = None

    def follow(self, copy: nn.Module) -> None:
        """Shrinks the average of the weights at the end, because it is the network that is kept."""
        self._average = copy

    def end_epoch(self, epoch: int, loss: float) -> PruneEvent | None:
        """Notes the epoch; pruning waits for `finish`."""
        self._epoch = epoch
        return None

    def finish(self) -> PruneEvent | None:
        """Shrinks the network that is kept; the other one gets its shape and weights."""
        before = self._measures()
        if self._average is not None:
            self.model.load_state_dict(self._average.state_dict())
        self._make_smaller(self.model)
        after = self._measures()
        if after == before:
            return None
        if self._average is not None:
            _copy_shape(self.model, self._average)
        self._optimizer.state.clear()  # it belongs to tensors of other shapes
        return PruneEvent.between(before, after, self._epoch, None, "prune", {})

    def _measures(self) -> Measures:
        params, flops = count(self.model, self.example_inputs)
        return Measures(params, flops, {name: layer.channels for name, layer in self.retained().items()})


def limited(config: FitConfig, recipe: Recipe) -> Recipe:
    """Makes the recipe of a run with a limit on the drop of the score."""
    metric, data = recipe.scoring.metric, recipe.data
    assert data.valid is not None
    assert config.max_drop is not None
    one = 100 / len(data.valid)
    if metric.unit == " %" and one > config.max_drop:
        warnings.warn(
            f"--max-drop {config.max_drop:g} is less than one of the {len(data.valid)} held-out examples, which is "
            f"{one:.2g} points: give more data or allow a larger drop",
            stacklevel=2,
        )
    limit = _Limit(config, recipe)

    def build(model: nn.Module, optimizer: Optimizer, example_inputs: Tensor) -> ShrinkAtTheEnd:
        return ShrinkAtTheEnd(model, optimizer, example_inputs, limit)

    return replace(recipe, build_method=build, trains=config.weights is None)


def _copy_shape(source: nn.Module, copy: nn.Module) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        modelfile.save(source, path)
        modelfile.load(path, into=copy)
