"""The estimators for scikit-learn pass scikit-learn's own checks, and select and shrink."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine, make_friedman1
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn
from torch.nn import functional as F  # noqa: N812

from rlsprune.prune.features import inverse_autocorrelation, removal_losses
from rlsprune.sklearn import FeatureSelector, PrunedClassifier, PrunedRegressor

QUICK = [
    FeatureSelector(epochs=2, recovery_epochs=1, folds=2, hidden_layer_sizes=(8,), step=0.4),
    PrunedClassifier(epochs=20, hidden_layer_sizes=(16,), target=0.7),
    PrunedRegressor(epochs=20, hidden_layer_sizes=(16,), target=0.7),
]


@parametrize_with_checks(QUICK)
def test_scikit_learns_own_checks(estimator: object, check: object) -> None:
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks([FeatureSelector(), PrunedClassifier(), PrunedRegressor()])
def test_scikit_learns_own_checks_with_default_settings(estimator: object, check: object) -> None:
    check(estimator)


def test_friedmans_five_features_are_found_and_no_noise() -> None:
    table, target = make_friedman1(300, n_features=12, noise=1.0, random_state=0)
    selector = FeatureSelector(folds=3, epochs=12, recovery_epochs=4, step=0.3, random_state=0).fit(table, target)
    assert selector.get_support(indices=True).tolist() == [0, 1, 2, 3, 4]
    assert sorted(selector.ranking_.tolist()) == [1] * 5 + list(range(2, 9))
    assert selector.order_[5:].tolist() == sorted(range(5, 12), key=lambda feature: selector.ranking_[feature])
    losses = selector.held_out_loss_
    assert min(losses, key=lambda size: losses[size][0]) == 5


def test_copies_of_a_feature_go_and_the_last_of_them_stays() -> None:
    random = np.random.default_rng(0)
    table = random.normal(size=(400, 8))
    table[:, 5] = table[:, 0] + 0.01 * random.normal(size=400)
    table[:, 6] = table[:, 0] + 0.01 * random.normal(size=400)
    labels = (table[:, 0] + table[:, 1] > 0).astype(int)
    selector = FeatureSelector(2, folds=2, epochs=8, recovery_epochs=3, random_state=0)
    kept = set(selector.fit(table, labels).get_support(indices=True).tolist())
    assert 1 in kept
    assert len(kept & {0, 5, 6}) == 1


def test_features_are_eliminated_on_the_device_of_the_inputs() -> None:
    """On the meta device, which has shapes and no values: tensors made elsewhere would not meet it."""
    inputs, targets = torch.randn(20, 6, device="meta"), torch.randn(20, 1, device="meta")
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 1)).to("meta")
    P = inverse_autocorrelation(inputs)
    found = removal_losses(model, P, inputs, targets, lambda outputs, wanted: (outputs - wanted).square().mean(-1))
    assert (found.shape, found.device.type, P.shape, P.device.type) == ((6,), "meta", (7, 7), "meta")


def test_loss_without_a_feature_is_that_of_the_least_squares_refit() -> None:
    """Against the refit itself, in float64: regress the feature on the others, and put that in its place."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(200, 6).double(), torch.randn(200, 1).double()
    inputs[:, 3] = inputs[:, 0] - 0.5 * inputs[:, 1] + 0.3 * inputs[:, 3]
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 1)).double()

    def loss(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (outputs - wanted).square().mean(-1)

    found = removal_losses(model, inverse_autocorrelation(inputs), inputs, targets, loss)
    ones = torch.ones(200, 1).double()
    for feature in range(6):
        others = torch.cat([inputs[:, [i for i in range(6) if i != feature]], ones], 1)
        replaced = inputs.clone()
        replaced[:, feature] = others @ torch.linalg.lstsq(others, inputs[:, feature]).solution
        with torch.no_grad():
            wanted = F.mse_loss(model(replaced), targets)
        assert float(found[feature]) == pytest.approx(float(wanted), rel=5e-3)


def test_selector_in_a_pipeline_and_a_grid_search() -> None:
    table, labels = load_breast_cancer(return_X_y=True, as_frame=True)
    selector = FeatureSelector(epochs=6, recovery_epochs=2, folds=2, step=0.4, random_state=0)
    pipeline = make_pipeline(selector, StandardScaler(), LogisticRegression(max_iter=500))
    search = GridSearchCV(pipeline, {"featureselector__n_features_to_select": [1, 6]}, cv=2).fit(table, labels)
    assert search.best_params_ == {"featureselector__n_features_to_select": 6}
    assert search.best_score_ > 0.92
    best = search.best_estimator_.named_steps["featureselector"]
    assert len(best.get_feature_names_out()) == 6
    assert set(best.set_output(transform="pandas").transform(table).columns) == set(table.columns[best.support_])


def test_classifier_gets_small_and_stays_good() -> None:
    table, labels = load_wine(return_X_y=True)
    names = np.array(["barolo", "grignolino", "barbera"])[labels]
    classifier = PrunedClassifier(random_state=1)
    assert cross_val_score(classifier, table, names, cv=2).mean() > 0.85
    classifier.fit(table, names)
    full = 13 * 64 + 64 + 64 * 32 + 32 + 32 * 3 + 3
    assert classifier.n_parameters_ <= 0.25 * full
    assert classifier.support_.sum() < 13
    assert np.allclose(classifier.predict_proba(table).sum(1), 1)
    again = pickle.loads(pickle.dumps(classifier))
    assert (again.predict(table) == classifier.predict(table)).all()
    with torch.no_grad():
        scores = classifier.model_(torch.from_numpy(table))
    assert (classifier.classes_[scores.argmax(1)] == classifier.predict(table)).all(), "it takes rows as they are"


def test_regressor_reads_as_few_columns_as_asked_for() -> None:
    table, target = load_diabetes(return_X_y=True, scaled=False)
    regressor = PrunedRegressor(n_features=4, target=None, random_state=0)
    regressor.fit(table[:300], target[:300])
    assert regressor.support_.sum() == 4
    assert regressor.score(table[300:], target[300:]) > 0.35
    unread = table[300:].copy()
    unread[:, ~regressor.support_] = 1e9
    assert np.array_equal(regressor.predict(unread), regressor.predict(table[300:]))


def test_random_state_decides_everything_and_torchs_own_is_left_alone() -> None:
    table, target = make_friedman1(80, random_state=0)
    before = torch.get_rng_state()
    one, same = (clone(QUICK[2]).set_params(random_state=3).fit(table, target) for _ in range(2))
    other = clone(QUICK[2]).set_params(random_state=4).fit(table, target)
    assert np.array_equal(one.predict(table), same.predict(table))
    assert not np.array_equal(one.predict(table), other.predict(table))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_features_to_select": 0}, 'n_features_to_select=0 is not valid: it must be "auto", a count, or a share'),
        ({"task": "ranking"}, "task='ranking' is not valid"),
        ({"folds": 1}, "folds=1 is not valid: it must be at least 2"),
        ({"step": 1.0}, "step=1.0 is not valid"),
        ({"epochs": -3}, "epochs=-3 is not valid"),
        ({"recovery_epochs": -1}, "recovery_epochs=-1 is not valid"),
        ({"batch_size": -1}, "batch_size=-1 is not valid"),
        ({"hidden_layer_sizes": 8}, "hidden_layer_sizes=8 is not valid"),
    ],
)
def test_bad_settings_are_told(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        FeatureSelector(**changes).fit(np.random.rand(20, 3), np.arange(20) % 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("n_features", value) for value in (-1, 0, "x", 2.5)),
        *(("hidden_layer_sizes", value) for value in (8, "ab", (8, 0))),
        ("epochs", 1.5),
        ("batch_size", -1),
        ("validation_fraction", 0.9),  # of four rows
    ],
)
def test_bad_settings_of_a_network_are_told(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r} is not valid".replace("(", r"\(").replace(")", r"\)")):
        PrunedClassifier(**{name: value}).fit(np.random.rand(4, 3), np.arange(4) % 2)


@pytest.mark.parametrize(("epochs", "target"), [(1, 0.2), (2, None), (2, 0.2)])
def test_as_few_columns_as_asked_for_even_in_few_epochs(epochs: int, target: float | None) -> None:
    table, number = make_friedman1(200, n_features=200, random_state=0)
    regressor = PrunedRegressor(n_features=5, epochs=epochs, target=target, random_state=0).fit(table, number)
    assert regressor.support_.sum() == 5


@pytest.mark.parametrize("estimator", [PrunedClassifier(), FeatureSelector()])
def test_one_class_is_refused(estimator: PrunedClassifier | FeatureSelector) -> None:
    with pytest.raises(ValueError, match="y has one class only"):
        estimator.fit(np.random.rand(20, 3), np.zeros(20))


def test_whole_numbers_are_amounts_if_there_are_many() -> None:
    """As in load_diabetes: floating-point numbers without fractions."""
    table = np.random.default_rng(0).normal(size=(120, 3))
    amounts = np.round(100 + 30 * table[:, 0])
    quick = {"folds": 2, "epochs": 1, "recovery_epochs": 0, "random_state": 0}
    asked = FeatureSelector(task="regression", **quick).fit(table, amounts)
    for target in (amounts, amounts.astype(int)):
        assert FeatureSelector(**quick).fit(table, target).held_out_loss_ == asked.held_out_loss_
    classes = (table[:, 0] > 0).astype(float)
    asked = FeatureSelector(task="classification", **quick).fit(table, classes)
    assert FeatureSelector(**quick).fit(table, classes).held_out_loss_ == asked.held_out_loss_
