"""Estimators for scikit-learn: networks that shrink while they train, and a feature selector.

All three take tables as they are (they scale the columns themselves), work in a ``Pipeline`` and in a grid search, and
give the same result for the same ``random_state``.
"""

from rlsprune.sklearn.estimators import PrunedClassifier, PrunedRegressor
from rlsprune.sklearn.selector import FeatureSelector

__all__ = ["FeatureSelector", "PrunedClassifier", "PrunedRegressor"]
