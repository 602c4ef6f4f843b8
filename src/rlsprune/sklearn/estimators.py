"""Networks that shrink while they train, as scikit-learn's classifier and regressor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from rlsprune.model.arguments import check_argument
from rlsprune.model.calls import bare_copy
from rlsprune.model.scaling import Scaling
from rlsprune.model.selector import kept_inputs
from rlsprune.optim.rls import RLS
from rlsprune.prune.features import RowLoss
from rlsprune.prune.pruner import Pruner
from rlsprune.sklearn.training import (
    FloatArray,
    check_training,
    class_numbers,
    cross_entropy,
    feature_count,
    make_network,
    seeded,
    squared_error,
    train_epochs,
)

__all__ = ["PrunedClassifier", "PrunedRegressor"]

_PRUNING = 0.7  # the share of the epochs in which prunes may happen
_ANYTHING = 1e9  # a tolerance that accepts any loss


class _PrunedNetwork(BaseEstimator):
    """The common base of `PrunedClassifier` and `PrunedRegressor`."""

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
        """Stores the settings; `fit` checks them.

        Args:
            hidden_layer_sizes: Widths of the hidden layers before pruning.
            target: Pruning ends at this share of the parameters. None prunes input features only, and only if
                `n_features` is given.
            n_features: Number or share of input features to keep, whatever the loss; None leaves it to the loss.
            epochs: Total number of training epochs.
            ratio: ξ, the largest share of a layer that one event removes.
            tolerance: Distance above its minimum at which the held-out loss still counts as recovered, as a share of
                the loss of guessing.
            patience: Number of epochs without recovery after which the last prune is undone.
            validation_fraction: The share of the rows that is held out to check whether the network has recovered.
            lr: η, the learning rate of RLS.
            weight_decay: The weight decay of RLS.
            batch_size: Rows per step. None takes a twentieth of the rows, and at least 32.
            random_state: Seeds the weights and the order of the rows.
        """
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

    def _fit(self, X: FloatArray, targets: Tensor, outputs: int, loss: RowLoss, guessing: float) -> None:
        """Trains on scaled columns, prunes on the way, and puts the scaling into the first layer."""
        check_training(self.hidden_layer_sizes, self.epochs, self.batch_size)
        share, wanted = self.validation_fraction, feature_count("n_features", self.n_features, X.shape[1], None)
        check_argument("validation_fraction", share, 0 < share < 1, "in (0, 1)")
        count = max(1, round(share * len(X)))
        check_argument(
            "validation_fraction", share, count < len(X), f"less, to leave some of {len(X)} rows to train on"
        )
        table = torch.tensor(X)
        scaling = Scaling.of(table)
        inputs = scaling.scaled(table).float()
        with seeded(self.random_state):
            network = make_network(X.shape[1], self.hidden_layer_sizes, outputs)
            layer = network[0]
            assert isinstance(layer, nn.Linear)
            order = torch.randperm(len(inputs))
            held, own = order[:count], order[count:]
            optimizer = RLS(network, lr=self.lr, weight_decay=self.weight_decay)
            pruner = self._pruner(network, optimizer, inputs, wanted)
            rows = [(inputs[own], targets[own])]
            for epoch in train_epochs([network], optimizer, rows, loss, self.epochs, self.batch_size):
                if pruner is None:
                    continue
                if epoch > self._last_prune:
                    pruner.stop()
                with torch.no_grad():
                    held_out = float(loss(network.eval()(inputs[held]), targets[held]).mean())
                # A loss near zero that doubles is still near zero, so the tolerance is a share of the guessing loss.
                pruner.step(guessing + held_out)
                if epoch == self._last_prune:  # the epochs may have been too few for all the prunes needed
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
        first = small[0]
        assert isinstance(first, nn.Linear)
        scaling.add_to_reader(first)
        self.model_ = small

    def _pruner(self, network: nn.Module, optimizer: RLS, inputs: Tensor, wanted: int | None) -> Pruner | None:
        target: dict[str, float] = {} if self.target is None else {"params": self.target}
        warmup, columns, ratio = max(1, self.epochs // 8), inputs.shape[1], self.ratio
        if wanted is not None and wanted < columns:
            target["inputs"] = wanted
            events = 0.7 * max(1, self._last_prune - warmup)  # some events remove less than their share
            ratio = min(0.9, max(ratio, 1 - (wanted / columns) ** (1 / events)))
        if not target:
            return None
        met = "inputs" in target  # a requested number of features is met, whatever the loss
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
        """Returns the last epoch with prunes; after it the network settles."""
        return math.ceil(_PRUNING * self.epochs)

    def _outputs(self, X: Any) -> FloatArray:
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        with torch.no_grad():
            outputs: FloatArray = self.model_(torch.tensor(X)).numpy()
        return outputs


class PrunedClassifier(ClassifierMixin, _PrunedNetwork):
    """A fully-connected classifier that gets smaller while it learns.

    Attributes:
        classes_: The class labels.
        model_: The small network, in float64. It maps unscaled rows to a score for each class.
        support_: A mask of the input features that the network reads.
        n_parameters_: The number of its parameters.

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
        self.classes_, numbers = class_numbers(y)
        shares = np.bincount(numbers) / len(numbers)
        guessing = float(-(shares * np.log(shares)).sum())
        self._fit(X, torch.from_numpy(numbers), len(self.classes_), cross_entropy, guessing)
        return self

    def decision_function(self, X: Any) -> FloatArray:
        """Returns a score for each class; with two classes, the score of the second minus that of the first."""
        outputs = self._outputs(X)
        return outputs[:, 1] - outputs[:, 0] if len(self.classes_) == 2 else outputs

    def predict_proba(self, X: Any) -> FloatArray:
        """Returns the probability of each class."""
        probabilities: FloatArray = torch.from_numpy(self._outputs(X)).softmax(1).numpy()
        return probabilities

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """Returns the most likely class of each row."""
        numbers = self._outputs(X).argmax(1)
        chosen: npt.NDArray[Any] = self.classes_[numbers]
        return chosen


class PrunedRegressor(RegressorMixin, _PrunedNetwork):
    """A fully-connected regressor that gets smaller while it learns.

    Attributes:
        model_: The small network, in float64. It maps unscaled rows to numbers.
        support_: A mask of the input features that the network reads.
        n_parameters_: The number of its parameters.

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
        column = torch.from_numpy(y.astype(np.float64)[:, None])
        scaling = Scaling.of(column)
        self._fit(X, scaling.scaled(column).float(), 1, squared_error, 1.0)
        last = self.model_[-1]
        assert isinstance(last, nn.Linear)
        scaling.add_to_writer(last)
        return self

    def predict(self, X: Any) -> FloatArray:
        """Returns the predicted number of each row."""
        return self._outputs(X)[:, 0]
