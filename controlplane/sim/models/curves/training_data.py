"""Data sets that come with scikit-learn and Python, ready to be learnt from."""

from __future__ import annotations

from functools import cache, partial
from pydoc_data import topics
from typing import Any

import numpy as np
from sklearn import datasets
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.preprocessing import LabelBinarizer, StandardScaler

from controlplane.sim.models.curves.objectives import FloatArray


@cache
def load(data: str, scaled: str = "standard") -> tuple[FloatArray, FloatArray]:
    """Features with a column of ones, and targets as they are.

    Args:
        data: what scikit-learn calls it, after `load_`; or a `make_`, which generates it.
        scaled: standard: mean 0 and deviation 1; largest: at most 1, spreads as different as
            they are.

    Returns:
        Shapes (n, d + 1) and (n,) or (n, k).
    """
    made = {
        "make_regression": partial(
            datasets.make_regression, 1000, 40, n_targets=1, effective_rank=10, noise=1.0
        ),
        "make_classification": partial(
            datasets.make_classification, 1000, 40, n_informative=10, flip_y=0.05
        ),
        "make_blobs": partial(datasets.make_blobs, 4000, 8, centers=60, cluster_std=5.0),
    }
    if data in made:
        features, targets = made[data](random_state=0)[:2]
    else:
        features, targets = getattr(datasets, f"load_{data}")(return_X_y=True)
    if scaled == "standard":
        features = StandardScaler().fit_transform(features)
    else:  # largest 1: columns keep their different spreads
        features = features / np.abs(features).max(axis=0).clip(1e-9)
    ones = np.ones((len(features), 1))
    return np.hstack([features, ones]), np.asarray(targets)


def one_hot(labels: FloatArray) -> FloatArray:
    """A column for each class; of two classes one column.

    Args:
        labels: shape (n,).

    Returns:
        0 and 1, shape (n, 1) of two classes, else (n, classes).
    """
    return np.asarray(LabelBinarizer().fit_transform(labels), dtype=float)


def classes(labels: FloatArray) -> FloatArray:
    """A column for each class, of two classes as well.

    Args:
        labels: shape (n,).

    Returns:
        0 and 1, shape (n, classes).
    """
    found = one_hot(labels)
    return np.hstack([1.0 - found, found]) if found.shape[1] == 1 else found


def outputs(targets: FloatArray) -> FloatArray:
    """Regression targets of mean 0 and deviation 1.

    Args:
        targets: shape (n,) or (n, k).

    Returns:
        Shape (n, k).
    """
    return np.asarray(StandardScaler().fit_transform(targets.reshape(len(targets), -1)))


@cache
def words(data: str) -> Any:
    """Counts of words; an image of digits is a document of its pixels.

    Args:
        data: digits, else the topics of Python's own help.

    Returns:
        Shape (documents, words), dense or sparse.
    """
    if data == "digits":
        return datasets.load_digits().data[:150]
    count = CountVectorizer(stop_words="english", min_df=2, max_features=1500)
    return count.fit_transform(topics.topics.values())
