"""Compares feature selection on tables of scikit-learn: ours beside four usual methods, at equal numbers of features.

Every method sees only the training half. Two judges that differ from the methods, an RBF support vector machine and a
random forest, are then trained on the chosen columns and tested on the other half, by accuracy, or R² for numbers, in
percent. For Friedman1, whose first five columns determine the target, the columns that each method keeps are counted
too.

    python -m benchmarks.quality.features run --seeds 0,1,2,3,4 --out docs/results/features
    python -m benchmarks.quality.features draw --out docs/results/features

Runs that are in the folder are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn import datasets
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.feature_selection import RFE, mutual_info_classif, mutual_info_regression
from sklearn.linear_model import LinearRegression, LogisticRegression, lars_path
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR, l1_min_c

from benchmarks.common import clock
from rlsprune.sklearn import FeatureSelector, PrunedRegressor

Array = npt.NDArray[Any]
TRUE = 5  # number of true features of Friedman1
PATH = 20  # number of regularisation strengths on the L1 path


@dataclass(frozen=True)
class Case:
    """A table, and the numbers of features at which methods are compared."""

    load: Callable[[int], tuple[Array, Array]]
    """Function that returns the table and the target for a seed."""
    counts: tuple[int, ...]
    numbers: bool = False
    """Whether the target is a number."""


def _shipped(name: str, seed: int) -> tuple[Array, Array]:
    table, target = getattr(datasets, name)(return_X_y=True)
    return table, target


def _friedman(columns: int, seed: int) -> tuple[Array, Array]:
    table, target = datasets.make_friedman1(1000, n_features=columns, noise=1.0, random_state=seed)
    return table, target


CASES = {
    "breast cancer": Case(partial(_shipped, "load_breast_cancer"), (2, 4, 8)),
    "wine": Case(partial(_shipped, "load_wine"), (2, 3, 5)),
    "digits": Case(partial(_shipped, "load_digits"), (5, 10, 20)),
    "diabetes": Case(partial(_shipped, "load_diabetes"), (2, 3, 5), numbers=True),
    "friedman1, 20 columns": Case(partial(_friedman, 20), (3, 5, 8), numbers=True),
    "friedman1, 50 columns": Case(partial(_friedman, 50), (3, 5, 8), numbers=True),
}


def ours(table: Array, target: Array, numbers: bool, seed: int) -> tuple[Array, int]:
    """Returns the order of the features, best first, and the number that is needed."""
    task = "regression" if numbers else "classification"
    selector = FeatureSelector(task=task, random_state=seed).fit(table, target)
    return selector.order_, int(selector.n_features_)


def mutual_information(table: Array, target: Array, numbers: bool, seed: int) -> tuple[Array, int | None]:
    """Ranks each feature by its own mutual information with the target."""
    scores = (mutual_info_regression if numbers else mutual_info_classif)(table, target, random_state=seed)
    return np.argsort(-scores, kind="stable"), None


def l1(table: Array, target: Array, numbers: bool, seed: int) -> tuple[Array, int | None]:
    """Ranks features by their entry into the path of a falling L1 penalty: Lasso, or logistic regression."""
    scaled = StandardScaler().fit_transform(table)
    if numbers:
        _, _, coefficients = lars_path(scaled, target - target.mean(), method="lasso")
        steps = coefficients.T
    else:
        start = l1_min_c(scaled, target, loss="log")
        steps = []
        for strength in start * np.logspace(0.05, 3, PATH):
            model = LogisticRegression(C=strength, l1_ratio=1.0, solver="saga", max_iter=300, random_state=seed)
            steps.append(np.abs(model.fit(scaled, target).coef_).max(0))
    there = np.abs(np.stack(steps)) > 1e-9
    entered = np.where(there.any(0), there.argmax(0), len(there))
    return np.lexsort((-np.abs(steps[-1]), entered)), None


def elimination(table: Array, target: Array, numbers: bool, seed: int) -> tuple[Array, int | None]:
    """Ranks features by recursive elimination with the weights of a linear model."""
    model = LinearRegression() if numbers else LogisticRegression(max_iter=1000)
    found = RFE(model, n_features_to_select=1).fit(StandardScaler().fit_transform(table), target)
    return np.argsort(found.ranking_, kind="stable"), None


def forest(table: Array, target: Array, numbers: bool, seed: int) -> tuple[Array, int | None]:
    """Ranks features by the importances of a random forest."""
    kind = RandomForestRegressor if numbers else RandomForestClassifier
    model = kind(200, random_state=seed).fit(table, target)
    return np.argsort(-model.feature_importances_, kind="stable"), None


METHODS = {
    "FeatureSelector": ours,
    "mutual information": mutual_information,
    "L1": l1,
    "recursive elimination": elimination,
    "random forest": forest,
}


def judge(name: str, numbers: bool, seed: int, train: tuple[Array, Array], test: tuple[Array, Array]) -> float:
    """Returns the score in percent of a model that is independent of the selection."""
    if name == "forest":
        model: Any = (RandomForestRegressor if numbers else RandomForestClassifier)(100, random_state=seed)
    else:
        machine = make_pipeline(StandardScaler(), SVR() if numbers else SVC())
        step = "svr" if numbers else "svc"
        model = GridSearchCV(machine, {f"{step}__C": [1, 10]}, cv=3)
    table, target = train
    if not numbers:
        return 100 * float(model.fit(table, target).score(*test))
    mean, deviation = target.mean(), target.std()
    model.fit(table, (target - mean) / deviation)
    return 100 * float(model.score(test[0], (test[1] - mean) / deviation))


def run_case(name: str, case: Case, seed: int) -> dict[str, Any]:
    """Runs all methods on one split of one table."""
    table, target = case.load(seed)
    x, x_test, y, y_test = train_test_split(
        table, target, test_size=0.5, random_state=seed, stratify=None if case.numbers else target
    )
    judges = ("svm", "forest")
    whole = {each: judge(each, case.numbers, seed, (x, y), (x_test, y_test)) for each in judges}
    result: dict[str, Any] = {"table": name, "seed": seed, "columns": x.shape[1], "all": whole, "methods": {}}
    for method, choose in METHODS.items():
        started = clock()
        order, needed = choose(x, y, case.numbers, seed)
        seconds = clock() - started
        scores = {
            str(count): {
                each: judge(each, case.numbers, seed, (x[:, order[:count]], y), (x_test[:, order[:count]], y_test))
                for each in judges
            }
            for count in case.counts
        }
        result["methods"][method] = {
            "order": [int(feature) for feature in order],
            "needed": needed,
            "seconds": round(seconds, 2),
            "scores": scores,
        }
    if name.startswith("friedman1"):
        kept = np.flatnonzero(PrunedRegressor(random_state=seed).fit(x, y).support_)
        result["pruned_regressor"] = [int(feature) for feature in kept]
    return result


def run(out: Path, seeds: Sequence[int], tables: Sequence[str]) -> None:
    """Makes the missing runs."""
    out.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for name in tables:
            path = out / f"{name.replace(', ', '-').replace(' ', '-')}-seed{seed}.json"
            if path.exists():
                continue
            result = run_case(name, CASES[name], seed)
            path.write_text(json.dumps(result) + "\n", encoding="utf-8")
            times = [f"{method} {found['seconds']} s" for method, found in result["methods"].items()]
            print(f"{name}, seed {seed}: {', '.join(times)}", flush=True)


def draw(out: Path) -> None:
    """Prints the tables in Markdown."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*.json"))]
    for each, title in (("svm", "RBF support vector machine"), ("forest", "random forest")):
        print(f"\n**{title}**\n")
        print(f"| table | features | {' | '.join(METHODS)} | all |\n|---|---:|{'---:|' * (len(METHODS) + 1)}")
        for name, case in CASES.items():
            runs = [run for run in found if run["table"] == name]
            if not runs:
                continue
            whole = _mean([run["all"][each] for run in runs])
            for count in case.counts:
                cells = [
                    _mean([run["methods"][method]["scores"][str(count)][each] for run in runs]) for method in METHODS
                ]
                print(f"| {name} | {count} | {' | '.join(cells)} | {whole} |")
    print("\n| Friedman1 | true columns kept, of 5 | noise kept |\n|---|---:|---:|")
    for name in (name for name in CASES if name.startswith("friedman1")):
        runs = [run for run in found if run["table"] == name]
        if not runs:
            continue
        selected = [run["methods"]["FeatureSelector"] for run in runs]
        _friedman_row(f'{name}: `FeatureSelector("auto")`', [each["order"][: each["needed"]] for each in selected])
        _friedman_row(f"{name}: `PrunedRegressor()`", [run["pruned_regressor"] for run in runs])
        for method in METHODS:
            _friedman_row(f"{name}: {method}, the first five", [run["methods"][method]["order"][:TRUE] for run in runs])


def _friedman_row(title: str, kept: Sequence[Sequence[int]]) -> None:
    true = [sum(feature < TRUE for feature in features) for features in kept]
    noise = [sum(feature >= TRUE for feature in features) for features in kept]
    print(f"| {title} | {statistics.fmean(true):.1f} | {statistics.fmean(noise):.1f} |")


def _mean(values: Sequence[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.1f} ± {spread:.1f}"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "draw"))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--tables", default=";".join(CASES), help="names, separated by ;")
    parser.add_argument("--out", type=Path, default=Path("features"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "run":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="sklearn")  # solvers that stop short of convergence
            run(options.out, [int(seed) for seed in options.seeds.split(",")], options.tables.split(";"))
    else:
        draw(options.out)


if __name__ == "__main__":
    main()
