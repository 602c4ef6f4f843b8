"""Which runs a table takes. Light to import: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from rlsprune.app.config.experiment import RunConfig, make_config
from rlsprune.app.config.recipes import optimizer_of, recipe_of
from rlsprune.app.experiments.registry import BASELINES, ZEROING

__all__ = ["ONE_SHOT", "TABLES", "Cell", "Table", "Tuned"]

ONE_SHOT = tuple(method for method in BASELINES if method != "soft-pruning")
"""The methods that prune once, in an epoch that is tuned like the rate."""

_ALL = ("rls", "scratch", "l1-norm", "depgraph", "net-slimming", "random", "soft-pruning", "weight-level", "none")
_STRUCTURED = tuple(method for method in _ALL if method not in ZEROING)


@dataclass(frozen=True)
class Tuned:
    """What tuning chose for a method, a recipe and an optimizer."""

    lr: float | None = None
    """None for the default."""
    prune_at: float | None = None
    """The share of the epochs after which a one-shot method prunes; None for the recipe's q + 1."""


@dataclass(frozen=True)
class Cell:
    """One run of a table."""

    method: str
    recipe: str
    optimizer: str
    size: float | None
    """The share of the parameters or FLOPs that is left; None for an unpruned network."""
    seed: int = 0

    @property
    def way(self) -> str:
        """What is tuned together: method, recipe and optimizer."""
        return f"{self.method}-{self.recipe}-{self.optimizer}"

    @property
    def label(self) -> str:
        """The name of its folder."""
        size = "whole" if self.size is None else f"{100 * self.size:g}"
        return f"{self.way}-{size}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Methods at several sizes, trained alike."""

    title: str
    experiment: str
    methods: tuple[str, ...]
    sizes: tuple[float, ...]
    """Shares that are left."""
    seeds: tuple[int, ...] = (0, 1, 2)
    recipes: tuple[str, ...] = ("ours",)
    optimizers: tuple[str, ...] | None = None
    """None for each method's own."""
    target_of: str = "params"
    timed: str | None = None
    """The table whose `rls`, of the same size and seed, sets the processor time; None for as many epochs as it has."""
    tolerance: float | None = None
    """How far the loss may rise between prunes of `rls`; None for its default, which may end above a small size."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of every run, as `make_config` takes them."""
    tuning: Mapping[str, Any] = field(default_factory=dict)
    """Of the runs that rates are chosen by, at the middle size, in addition."""
    trials: int = 6
    """For every method, recipe and optimizer."""

    @property
    def tuned_size(self) -> float:
        """The size at which rates are chosen."""
        return sorted(self.sizes)[len(self.sizes) // 2]

    def cells(self) -> list[Cell]:
        """All runs, cheapest first; `rls` before the others of its size and seed, which may wait for it."""
        found: list[Cell] = []
        for seed, size in product(self.seeds, (*sorted(self.sizes), None)):
            for method, recipe in product(self.methods, self.recipes):
                if (method == "none") is (size is None):
                    found += [Cell(method, recipe, name, size, seed) for name in self._optimizers(method)]
        return found

    def ways(self) -> list[Cell]:
        """One cell for each combination that is tuned, at the size at which it is tuned."""
        ways = {cell.way: cell for cell in self.cells() if cell.seed == self.seeds[0]}
        return [
            Cell(cell.method, cell.recipe, cell.optimizer, None if cell.size is None else self.tuned_size)
            for cell in ways.values()
        ]

    def config(self, cell: Cell, choice: Tuned, **settings: Any) -> RunConfig:
        """The run of a cell.

        Args:
            cell: One of `cells`.
            choice: What tuning chose.
            **settings: As `make_config` takes them, on top of the table's options.
        """
        own = {**self.options, "seed": cell.seed, "lr": choice.lr, **settings}
        if cell.method == "rls" or cell.method in BASELINES:
            own |= {"target": cell.size, "target_of": self.target_of}
        if cell.method == "rls":
            own["tolerance"] = self.tolerance
        config = make_config(self.experiment, cell.method, recipe=cell.recipe, optimizer=cell.optimizer, **own)
        if choice.prune_at is None:
            return config
        if config.cpu_seconds is not None:
            return replace(config, prune_share=choice.prune_at)
        return replace(config, prune_epoch=max(1, round(choice.prune_at * config.epochs)))

    def _optimizers(self, method: str) -> tuple[str, ...]:
        own = (optimizer_of(method, None),)
        if self.optimizers is None or method == "rls-paper":
            # The unpruned network is the twin of rls and of the rivals.
            return ("rls", "sgd") if method == "none" else own
        return self.optimizers

    def source_of(self, cell: Cell) -> Cell:
        """The run of `rls` whose shape `scratch` takes."""
        return Cell("rls", recipe_of("rls"), optimizer_of("rls", None), cell.size, cell.seed)


_MNIST_SIZES = (0.2, 0.1, 0.05, 0.02, 0.01)
_MNIST_TUNING = {"train_images": 10000, "epochs": 10}
_LONG = {"preset": "paper", "batch_size": 64, "warmup_epochs": 0, "bfloat16": True}
_ALL_IMAGES = {"cifar10-vgg": {"epochs": 28, **_LONG}, "svhn-vgg": {"epochs": 20, **_LONG}}
_IMAGE_TUNING = {"train_images": 10000, "epochs": 8}


def _timed(table: Table, source: str) -> Table:
    return Table(
        title=f"{table.title.removesuffix(', equal epochs')}, equal processor time",
        experiment=table.experiment,
        methods=tuple(method for method in table.methods if method != "rls"),
        sizes=table.sizes,
        seeds=table.seeds,
        target_of=table.target_of,
        timed=source,
        options={name: value for name, value in table.options.items() if name != "epochs"},
        tuning=table.tuning,
        trials=table.trials,
    )


_MNIST = Table(
    title="FNN on MNIST, equal epochs",
    experiment="mnist-fnn",
    methods=_ALL,
    sizes=_MNIST_SIZES,
    tolerance=1.0,
    tuning=_MNIST_TUNING,
)
_CROSSING = Table(
    title="FNN on MNIST: method × recipe × optimizer, equal epochs",
    experiment="mnist-fnn",
    methods=("rls", "scratch", "l1-norm", "random", "none"),
    sizes=(0.05,),
    tolerance=1.0,
    recipes=("paper", "ours"),
    optimizers=("rls", "sgd", "adamw"),
    tuning=_MNIST_TUNING,
)


def _images(name: str, title: str, size: float, target_of: str = "params") -> Table:
    return Table(
        title=f"{title}, all images, equal epochs",
        experiment=name,
        methods=_STRUCTURED,
        sizes=(size,),
        seeds=(0,),
        target_of=target_of,
        options=_ALL_IMAGES[name],
        tuning=_IMAGE_TUNING,
        trials=4,
    )


_CIFAR10 = _images("cifar10-vgg", "Mini-VGG on CIFAR-10", 0.06)
_SVHN = _images("svhn-vgg", "Mini-VGG on SVHN", 0.02)

TABLES: Mapping[str, Table] = {
    "mnist": _MNIST,
    "mnist-time": _timed(_MNIST, "mnist"),
    "mnist-crossing": _CROSSING,
    "cifar10": _CIFAR10,
    "cifar10-time": _timed(_CIFAR10, "cifar10"),
    "cifar10-flops": _images("cifar10-vgg", "Mini-VGG on CIFAR-10, equal FLOPs", 0.16, "flops"),
    "svhn": _SVHN,
    "svhn-time": _timed(_SVHN, "svhn"),
    "svhn-flops": _images("svhn-vgg", "Mini-VGG on SVHN, equal FLOPs", 0.08, "flops"),
}
"""By name. On an FNN the FLOPs are twice the weights, so that equal weights are equal FLOPs."""
