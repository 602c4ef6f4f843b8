"""Selects features by removing those whose removal raises the held-out loss least."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator
from sklearn.feature_selection import SelectorMixin
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from rlsprune.model.arguments import check_argument, is_count
from rlsprune.model.scaling import Scaling
from rlsprune.optim.rls import RLS
from rlsprune.prune.features import Elimination, Fold
from rlsprune.sklearn.training import (
    check_training,
    class_numbers,
    cross_entropy,
    feature_count,
    make_network,
    seeded,
    squared_error,
    train_epochs,
)

__all__ = ["FeatureSelector"]

_FEW_CLASSES = 20  # up to so many different whole numbers always count as classes


class FeatureSelector(SelectorMixin, BaseEstimator):
    """Selects the features that small networks need.

    It trains a small network on each of several folds. It removes features one by one, always the one whose removal
    raises the held-out loss of all folds least after a refit of the other features. Then it trains the networks for a
    few more epochs, and repeats until one feature is left. ``"auto"`` keeps the fewest features whose held-out loss is
    within one standard error of the best.

    Args:
        n_features_to_select: Features to keep: a count, a share of them, or ``"auto"``.
        task: ``"classification"``, ``"regression"``, or ``"auto"``, which decides by the targets. More than 20
            different numbers mean regression, but integers with two rows each or more on average mean classes.
        hidden_layer_sizes: Widths of the networks' hidden layers.
        step: The share of the features that is removed between two trainings, at least one feature.
        folds: Number of networks to train.
        epochs: Epochs of the first training.
        recovery_epochs: Epochs of training after each step.
        lr: η, the learning rate of RLS. It falls to zero in each training.
        weight_decay: The weight decay of RLS.
        batch_size: Rows per step. None takes a twentieth of the rows, and at least 32.
        random_state: Seeds the folds, the weights and the order of the rows.

    Attributes:
        support_: A mask of the selected features.
        ranking_: 1 for the selected features, 2 for the one that was removed last, and so on.
        order_: All features, the most important first.
        n_features_: The number of selected features.
        held_out_loss_: Number of features → mean held-out loss and its standard error, for every size at which the
            networks were trained.

    Examples:
        >>> from sklearn.datasets import make_friedman1
        >>> from rlsprune.sklearn import FeatureSelector
        >>> table, target = make_friedman1(300, n_features=10, random_state=0)
        >>> FeatureSelector(random_state=0).fit(table, target).get_support(indices=True).tolist()
        [0, 1, 2, 3, 4]
    """

    def __init__(
        self,
        n_features_to_select: int | float | str = "auto",
        *,
        task: str = "auto",
        hidden_layer_sizes: Sequence[int] = (32,),
        step: float = 0.15,
        folds: int = 5,
        epochs: int = 20,
        recovery_epochs: int = 5,
        lr: float = 0.2,
        weight_decay: float = 1e-3,
        batch_size: int | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.n_features_to_select = n_features_to_select
        self.task = task
        self.hidden_layer_sizes = hidden_layer_sizes
        self.step = step
        self.folds = folds
        self.epochs = epochs
        self.recovery_epochs = recovery_epochs
        self.lr = lr
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Ranks the features of a table ``(rows, features)`` by their importance for a target ``(rows,)``."""
        check_argument("folds", self.folds, self.folds >= 2, "at least 2")
        check_argument("step", self.step, 0 < self.step < 1, "in (0, 1)")
        kinds = ("auto", "classification", "regression")
        check_argument("task", self.task, self.task in kinds, f"one of {', '.join(kinds)}")
        check_training(self.hidden_layer_sizes, self.epochs, self.batch_size)
        again = self.recovery_epochs
        check_argument("recovery_epochs", again, is_count(again, 0), "0, or a number of epochs")
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        wanted = feature_count("n_features_to_select", self.n_features_to_select, X.shape[1], "auto")
        kind = _looks_like(y) if self.task == "auto" else self.task
        rows = torch.tensor(X)
        with seeded(self.random_state) as seed:
            if kind == "regression":
                column = torch.from_numpy(y.astype(np.float64)[:, None])
                targets, outputs, loss = Scaling.of(column).scaled(column).float(), 1, squared_error
                splits = KFold(min(self.folds, len(X)), shuffle=True, random_state=seed).split(X)
            else:
                classes, numbers = class_numbers(y)
                targets, outputs, loss = torch.from_numpy(numbers), len(classes), cross_entropy
                splits = _class_folds(numbers, self.folds, seed)
            folds = [
                Fold(
                    make_network(X.shape[1], self.hidden_layer_sizes, outputs), torch.from_numpy(a), torch.from_numpy(b)
                )
                for a, b in splits
            ]
            self._eliminate(Elimination(folds, Scaling.of(rows).scaled(rows).float(), targets, loss), folds, wanted)
        return self

    def _eliminate(self, elimination: Elimination, folds: Sequence[Fold], wanted: int | None) -> None:
        self._train(elimination, folds, self.epochs)
        curve = {len(elimination.left): elimination.held_out()}
        while len(elimination.left) > 1:
            elimination.take(max(1, math.floor(self.step * len(elimination.left))))
            self._train(elimination, folds, self.recovery_epochs)
            curve[len(elimination.left)] = elimination.held_out()
        best = min(curve, key=lambda size: curve[size][0])
        enough = [size for size in curve if curve[size][0] <= sum(curve[best])]
        self.n_features_ = wanted or min(enough)
        order = [*elimination.left, *reversed(elimination.gone)]
        self.order_ = np.array(order)
        self.ranking_ = np.ones(len(order), dtype=np.int64)
        self.ranking_[order[self.n_features_ :]] = np.arange(2, len(order) - self.n_features_ + 2)
        self.support_ = self.ranking_ == 1
        self.held_out_loss_ = curve

    def _train(self, elimination: Elimination, folds: Sequence[Fold], epochs: int) -> None:
        networks = nn.ModuleList([fold.network for fold in folds])
        optimizer = RLS(networks, lr=self.lr, weight_decay=self.weight_decay)  # one step for all
        rows = [elimination.rows(fold.train) for fold in folds]
        for _ in train_epochs(list(networks), optimizer, rows, elimination.loss, epochs, self.batch_size):
            pass
        optimizer.close()

    def _get_support_mask(self) -> npt.NDArray[np.bool_]:
        check_is_fitted(self)
        mask: npt.NDArray[np.bool_] = self.support_
        return mask

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags


def _class_folds(numbers: npt.NDArray[Any], folds: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """Splits rows into folds, with all classes in proportion if each has at least two rows."""
    rarest = int(np.bincount(numbers).min())
    kind: Callable[..., Any] = StratifiedKFold if rarest >= 2 else KFold
    count = min(folds, rarest if rarest >= 2 else len(numbers))
    splits: Iterator[tuple[Any, Any]] = kind(count, shuffle=True, random_state=seed).split(numbers, numbers)
    return splits


def _looks_like(y: npt.NDArray[Any]) -> str:
    """Returns "regression" if numbers have fractions or there are too many different ones, else "classification"."""
    count = len(np.unique(y))
    many = count > _FEW_CLASSES and (y.dtype.kind == "f" or (y.dtype.kind in "ui" and 2 * count > len(y)))
    return "regression" if many or type_of_target(y, input_name="y").startswith("continuous") else "classification"
