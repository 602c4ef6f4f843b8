"""For scikit-learn: networks that shrink while they train, and a selector of features that is made of them.

All three take whole tables as they are (columns are scaled inside), work in a ``Pipeline`` and a grid search, and give
the same result for the same ``random_state``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from numbers import Integral
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.feature_selection import SelectorMixin
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from rlsprune.model.arguments import check_argument
from rlsprune.model.calls import bare_copy
from rlsprune.model.selector import kept_inputs
from rlsprune.optim.rls import RLS
from rlsprune.prune.features import Elimination, Fold, RowLoss
from rlsprune.prune.pruner import Pruner

__all__ = ["FeatureSelector", "PrunedClassifier", "PrunedRegressor"]

_Table = npt.NDArray[np.float64]
_LEAST_BATCH, _MOST_BATCHES = 32, 20
_PRUNING = 0.7  # the share of the epochs in which prunes may come
_ANYTHING = 1e9  # a tolerance
_FEW_CLASSES = 20  # so many different whole numbers are always taken for classes


class FeatureSelector(SelectorMixin, BaseEstimator):
    """Selects the features that networks need, by taking away the ones that are missed least.

    A small network is trained on each of several folds. The feature goes whose removal costs the held-out rows of all
    folds least, after the refit that lets the other features stand in for it; the networks are trained on for a few
    epochs; and so on, down to one. ``"auto"`` keeps the fewest features whose held-out loss is within a standard error
    of the best.

    Args:
        n_features_to_select: How many; a float: that share of them; ``"auto"``: as many as are needed.
        task: ``"classification"``, ``"regression"``, or ``"auto"`` for what the targets look like: more than 20
            different numbers are amounts, whole ones too, unless they are integers of which each stands for two rows.
        hidden_layer_sizes: Of the networks.
        step: The share of the features that goes between two trainings, one at least.
        folds: How many networks.
        epochs: Of training at first.
        recovery_epochs: Of training after each step.
        lr: η of RLS; it falls to zero in each training.
        weight_decay: Of RLS.
        batch_size: Rows per step; None: 32, or a twentieth of the rows if that is more.
        random_state: Of the folds, the networks and the order of the rows.

    Attributes:
        support_: Which features are selected.
        ranking_: 1 for those, 2 for the one that went last before them, and so on.
        order_: All features, the one that was left last first.
        n_features_: How many are selected.
        held_out_loss_: Number of features → mean held-out loss of the networks and its standard error, for every size
            at which they were trained.

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
        """Ranks the features of a table ``(rows, features)`` by what they tell of a target ``(rows,)``."""
        check_argument("folds", self.folds, self.folds >= 2, "at least 2")
        check_argument("step", self.step, 0 < self.step < 1, "in (0, 1)")
        kinds = ("auto", "classification", "regression")
        check_argument("task", self.task, self.task in kinds, f"one of {', '.join(kinds)}")
        _check_training(self.hidden_layer_sizes, self.epochs, self.batch_size)
        again = self.recovery_epochs
        check_argument("recovery_epochs", again, again == 0 or _is_count(again), "0, or a number of epochs")
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        wanted = self._wanted(X.shape[1])
        kind = _looks_like(y) if self.task == "auto" else self.task
        with _seeded(self.random_state) as seed:
            inputs = torch.from_numpy(_Scale(X).scaled(X)).float()
            if kind == "regression":
                targets, outputs, loss = _targets(y.astype(np.float64)), 1, _squared
                splits = KFold(min(self.folds, len(X)), shuffle=True, random_state=seed).split(X)
            else:
                check_classification_targets(y)
                classes, numbers = np.unique(y, return_inverse=True)
                if len(classes) < 2:
                    raise ValueError(f"y has one class only, {classes[0]}: give rows of two classes or more")
                targets, outputs, loss = torch.from_numpy(numbers), len(classes), _entropy
                splits = _class_folds(numbers, self.folds, seed)
            folds = [
                Fold(_network(X.shape[1], self.hidden_layer_sizes, outputs), torch.from_numpy(a), torch.from_numpy(b))
                for a, b in splits
            ]
            self._eliminate(Elimination(folds, inputs, targets, loss), folds, wanted)
        return self

    def _wanted(self, count: int) -> int | None:
        """How many features are asked for; None for as many as are needed."""
        asked = self.n_features_to_select
        if asked == "auto":
            return None
        whole = isinstance(asked, Integral) and int(asked) >= 1
        share = isinstance(asked, float) and 0 < asked <= 1
        check_argument("n_features_to_select", asked, whole or share, '"auto", a count, or a share in (0, 1]')
        if isinstance(asked, float):
            return max(1, round(asked * count))
        return min(int(asked), count)

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
        for _ in _epochs([fold.network for fold in folds], optimizer, rows, elimination.loss, epochs, self.batch_size):
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


class _PrunedNetwork(BaseEstimator):
    """What `PrunedClassifier` and `PrunedRegressor` share."""

    def __init__(
        self,
        *,
        hidden_layer_sizes: Sequence[int] = (64, 32),
        target: float | None = 0.2,
        n_features: int | float | None = None,
        epochs: int = 40,
        ratio: float = 0.2,
        tolerance: float = 0.03,
        patience: int = 5,
        validation_fraction: float = 0.15,
        lr: float = 0.1,
        weight_decay: float = 1e-3,
        batch_size: int | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.target = target
        self.n_features = n_features
        self.epochs = epochs
        self.ratio = ratio
        self.tolerance = tolerance
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.lr = lr
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.random_state = random_state

    def _fit(self, X: _Table, targets: Tensor, outputs: int, loss: RowLoss, guessing: float) -> None:
        """Trains on scaled columns, prunes on the way, and puts the scaling into the first layer."""
        _check_training(self.hidden_layer_sizes, self.epochs, self.batch_size)
        share, wanted = self.validation_fraction, self._wanted(X.shape[1])
        check_argument("validation_fraction", share, 0 < share < 1, "in (0, 1)")
        count = max(1, round(share * len(X)))
        check_argument("validation_fraction", share, count < len(X), f"less, to leave some of {len(X)} rows to learn")
        scale = _Scale(X)
        inputs = torch.from_numpy(scale.scaled(X)).float()
        with _seeded(self.random_state):
            network = _network(X.shape[1], self.hidden_layer_sizes, outputs)
            layer = network[0]
            assert isinstance(layer, nn.Linear)
            order = torch.randperm(len(inputs))
            held, own = order[:count], order[count:]
            optimizer = RLS(network, lr=self.lr, weight_decay=self.weight_decay)
            pruner = self._pruner(network, optimizer, inputs, wanted)
            rows = [(inputs[own], targets[own])]
            for epoch in _epochs([network], optimizer, rows, loss, self.epochs, self.batch_size):
                if pruner is None:
                    continue
                if epoch > self._last_prune:
                    pruner.stop()
                with torch.no_grad():
                    held_out = float(loss(network.eval()(inputs[held]), targets[held]).mean())
                # A loss near zero that doubles is still near zero: the tolerance is of what there is to learn.
                pruner.step(guessing + held_out)
                if epoch == self._last_prune:  # too few epochs, perhaps, for all the prunes that it takes
                    while layer.weight.shape[1] > (wanted or X.shape[1]):
                        pruner.calibrate([inputs[own]])
                        if pruner.prune() is None:
                            break
            if pruner is not None and pruner.history:
                pruner.finish()
            self.n_parameters_ = sum(parameter.numel() for parameter in network.parameters())
            if pruner is not None:
                pruner.close()
            optimizer.close()
        kept = kept_inputs(layer)
        self.support_ = np.zeros(X.shape[1], dtype=bool)
        self.support_[slice(None) if kept is None else kept.numpy()] = True
        small = bare_copy(network).double().eval()
        assert isinstance(small, nn.Sequential)
        self.model_ = scale.taken_in(small)

    def _wanted(self, columns: int) -> int | None:
        """How many features are asked for; None for as pruning sees fit."""
        asked = self.n_features
        if asked is None:
            return None
        share = isinstance(asked, float) and 0 < asked <= 1
        check_argument("n_features", asked, share or _is_count(asked), "None, a count, or a share in (0, 1]")
        return max(1, round(asked * columns)) if share else min(int(asked), columns)

    def _pruner(self, network: nn.Module, optimizer: RLS, inputs: Tensor, wanted: int | None) -> Pruner | None:
        target: dict[str, float] = {} if self.target is None else {"params": self.target}
        warmup, columns, ratio = max(1, self.epochs // 8), inputs.shape[1], self.ratio
        if wanted is not None and wanted < columns:
            target["inputs"] = wanted
            events = 0.7 * max(1, self._last_prune - warmup)  # some take less than their share
            ratio = min(0.9, max(ratio, 1 - (wanted / columns) ** (1 / events)))
        if not target:
            return None
        met = "inputs" in target  # a number that is asked for is met, whatever it costs
        return Pruner(
            network,
            optimizer,
            inputs[:1],
            ratio=self.ratio,
            input_ratio=ratio,
            warmup_epochs=warmup,
            tolerance=_ANYTHING if met else self.tolerance,
            patience=None if met else self.patience,
            target=target,
        )

    @property
    def _last_prune(self) -> int:
        """The network settles after that epoch."""
        return math.ceil(_PRUNING * self.epochs)

    def _outputs(self, X: Any) -> _Table:
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        with torch.no_grad():
            outputs: _Table = self.model_(torch.tensor(X)).numpy()
        return outputs


class PrunedClassifier(ClassifierMixin, _PrunedNetwork):
    """A fully-connected network that gets smaller while it learns classes.

    Args:
        hidden_layer_sizes: Before anything is pruned.
        target: The share of the parameters at which pruning ends; None: inputs alone are pruned, if `n_features`
            says so.
        n_features: How many input features are kept, or the share, whatever the loss; None: as pruning sees fit.
        epochs: In all.
        ratio: ξ, the share of a layer that one prune takes at most.
        tolerance: How far above its least the held-out loss still counts as recovered, as a share of what guessing
            loses.
        patience: Epochs without recovery after which the last prune is undone.
        validation_fraction: The share of the rows that prunes wait for.
        lr: η of RLS.
        weight_decay: Of RLS.
        batch_size: Rows per step; None: 32, or a twentieth of the rows if that is more.
        random_state: Of the network and the order of the rows.

    Attributes:
        classes_: The labels.
        model_: The small network, in float64: from rows as they are to a score for each class.
        support_: Which input features it reads.
        n_parameters_: How many it has left.

    Examples:
        >>> from sklearn.datasets import load_wine
        >>> from rlsprune.sklearn import PrunedClassifier
        >>> table, labels = load_wine(return_X_y=True)
        >>> small = PrunedClassifier(random_state=0).fit(table, labels)
        >>> small.score(table, labels) > 0.95
        True
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Trains and prunes on a table ``(rows, features)`` and labels ``(rows,)``."""
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class only, {self.classes_[0]!r}: a classifier needs two at least")
        shares = np.bincount(numbers) / len(numbers)
        guessing = float(-(shares * np.log(shares)).sum())
        self._fit(X, torch.from_numpy(numbers), len(self.classes_), _entropy, guessing)
        return self

    def decision_function(self, X: Any) -> _Table:
        """A score for each class; of two classes, how far the second is ahead."""
        outputs = self._outputs(X)
        return outputs[:, 1] - outputs[:, 0] if len(self.classes_) == 2 else outputs

    def predict_proba(self, X: Any) -> _Table:
        """The probability of each class."""
        probabilities: _Table = torch.from_numpy(self._outputs(X)).softmax(1).numpy()
        return probabilities

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The likeliest class of each row."""
        numbers = self._outputs(X).argmax(1)
        chosen: npt.NDArray[Any] = self.classes_[numbers]
        return chosen


class PrunedRegressor(RegressorMixin, _PrunedNetwork):
    """A fully-connected network that gets smaller while it learns a number.

    Args:
        hidden_layer_sizes: Before anything is pruned.
        target: The share of the parameters at which pruning ends; None: inputs alone are pruned, if `n_features`
            says so.
        n_features: How many input features are kept, or the share, whatever the loss; None: as pruning sees fit.
        epochs: In all.
        ratio: ξ, the share of a layer that one prune takes at most.
        tolerance: How far above its least the held-out loss still counts as recovered, as a share of what guessing
            loses.
        patience: Epochs without recovery after which the last prune is undone.
        validation_fraction: The share of the rows that prunes wait for.
        lr: η of RLS.
        weight_decay: Of RLS.
        batch_size: Rows per step; None: 32, or a twentieth of the rows if that is more.
        random_state: Of the network and the order of the rows.

    Attributes:
        model_: The small network, in float64: from rows as they are to the number.
        support_: Which input features it reads.
        n_parameters_: How many it has left.

    Examples:
        >>> from sklearn.datasets import load_wine
        >>> from rlsprune.sklearn import PrunedRegressor
        >>> table, _ = load_wine(return_X_y=True)
        >>> small = PrunedRegressor(epochs=20, random_state=0).fit(table[:, 1:], table[:, 0])
        >>> small.predict(table[:3, 1:]).shape
        (3,)
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Trains and prunes on a table ``(rows, features)`` and numbers ``(rows,)``."""
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        scale = _Scale(y[:, None])
        self._fit(X, torch.from_numpy(scale.scaled(y[:, None])).float(), 1, _squared, 1.0)
        layer = self.model_[-1]
        assert isinstance(layer, nn.Linear)
        with torch.no_grad():
            layer.weight.mul_(scale.deviation[:, None])
            layer.bias.mul_(scale.deviation).add_(scale.mean)
        return self

    def predict(self, X: Any) -> _Table:
        """The number of each row."""
        return self._outputs(X)[:, 0]


class _Scale:
    """Means and deviations of the columns of a table; 1 for a constant one."""

    def __init__(self, table: _Table) -> None:
        self.mean = torch.from_numpy(table.mean(0))
        deviation = torch.from_numpy(table.std(0))
        constant = deviation <= 1e-9 * torch.from_numpy(np.abs(table).max(0))
        self.deviation = torch.where(constant, 1.0, deviation)

    def scaled(self, table: _Table) -> _Table:
        """To mean 0 and deviation 1."""
        scaled: _Table = (table - self.mean.numpy()) / self.deviation.numpy()
        return scaled

    @torch.no_grad()
    def taken_in(self, network: nn.Sequential) -> nn.Sequential:
        """The same network for unscaled columns: its first layer scales."""
        layer = network[0]
        assert isinstance(layer, nn.Linear)
        kept = kept_inputs(layer)
        columns: Any = slice(None) if kept is None else kept
        layer.weight.div_(self.deviation[columns])
        layer.bias.sub_(layer.weight @ self.mean[columns])
        return network


def _network(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    widths = [inputs, *hidden]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


def _check_training(hidden: Sequence[int], epochs: int, batch_size: int | None) -> None:
    sizes = isinstance(hidden, Sequence | np.ndarray) and all(map(_is_count, hidden))
    check_argument("hidden_layer_sizes", hidden, sizes, "a size for each hidden layer, (32,) say")
    check_argument("epochs", epochs, _is_count(epochs), "at least 1")
    check_argument("batch_size", batch_size, batch_size is None or _is_count(batch_size), "None or at least 1")


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _epochs(
    networks: Sequence[nn.Module],
    optimizer: RLS,
    rows: Sequence[tuple[Tensor, Tensor]],
    loss: RowLoss,
    epochs: int,
    batch_size: int | None,
) -> Iterator[int]:
    """Trains networks side by side, each on its own rows, at a rate that falls to zero; yields each epoch's number."""
    rates = [group["lr"] for group in optimizer.param_groups]
    count = min(len(inputs) for inputs, _ in rows)
    size = batch_size or max(_LEAST_BATCH, count // _MOST_BATCHES)
    batches = math.ceil(count / size)
    for epoch in range(1, epochs + 1):
        orders = [torch.randperm(len(inputs)) for inputs, _ in rows]
        for network in networks:
            network.train()
        for number in range(batches):
            left = 1 - ((epoch - 1) * batches + number) / (epochs * batches)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * left
            total = torch.zeros(())
            for network, order, (inputs, targets) in zip(networks, orders, rows, strict=True):
                batch = order[number * size : min((number + 1) * size, count)]
                total = total + loss(network(inputs[batch]), targets[batch]).mean()
            optimizer.zero_grad()
            total.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        yield epoch


@contextmanager
def _seeded(random_state: int | np.random.RandomState | None) -> Iterator[int]:
    """Random numbers of torch from here on; those of the caller are put back."""
    seed = int(check_random_state(random_state).randint(2**31 - 1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield seed


def _class_folds(numbers: npt.NDArray[Any], folds: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """Each class in proportion, where there are enough of each."""
    rarest = int(np.bincount(numbers).min())
    kind: Callable[..., Any] = StratifiedKFold if rarest >= 2 else KFold
    count = min(folds, rarest if rarest >= 2 else len(numbers))
    splits: Iterator[tuple[Any, Any]] = kind(count, shuffle=True, random_state=seed).split(numbers, numbers)
    return splits


def _looks_like(y: npt.NDArray[Any]) -> str:
    """Numbers are amounts if they have fractions, or if there are too many different ones for classes."""
    count = len(np.unique(y))
    many = count > _FEW_CLASSES and (y.dtype.kind == "f" or (y.dtype.kind in "ui" and 2 * count > len(y)))
    return "regression" if many or type_of_target(y, input_name="y").startswith("continuous") else "classification"


def _targets(y: _Table) -> Tensor:
    return torch.from_numpy(_Scale(y[:, None]).scaled(y[:, None])).float()


def _entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(-1)
