"""The trainings whose losses are recorded: the algorithms of SLAQ's evaluation on real data.

SLAQ section 3: classification (SVM, MLP, logistic regression, boosted trees, SVM with polynomial
kernels), regression (linear, boosted trees), unsupervised (k-means, LDA). All data sets come with
scikit-learn, and one with Python; those of `make_*` are generated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from sklearn.cluster import KMeans
from sklearn.decomposition import LatentDirichletAllocation
from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor
from sklearn.kernel_approximation import Nystroem
from sklearn.metrics import log_loss
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

from controlplane.sim.models.curves.loss_curves import Convergence
from controlplane.sim.models.curves.objectives import (
    descend,
    hinge,
    least_squares,
    minimise,
    softmax,
)
from controlplane.sim.models.curves.training_data import classes, load, one_hot, outputs, words

Run = Callable[[int], list[float]]  # of a seed: losses before the first iteration and after each
Settings = dict[str, str | float]
DESCENT: Final = 200  # iterations
STAGES: Final = 150  # of boosted trees
PASSES: Final = 120  # of a network over its data
LLOYD: Final = 100  # of k-means, at most
TOPIC_PASSES: Final = 60
NEVER: Final = 1e-12  # a learning rate that changes nothing


@dataclass(frozen=True, slots=True)
class Training:
    """One algorithm with its settings on one data set."""

    family: str
    convergence: Convergence
    data: str
    settings: Settings
    run: Run

    @property
    def name(self) -> str:
        """Family, data set and settings."""
        told = "-".join(f"{key}{value}" for key, value in self.settings.items())
        return "/".join(part for part in (self.family, self.data, told) if part)


def all_trainings() -> list[Training]:
    """Every training of every family, in a fixed order."""
    families = (
        _linear_regression, _logistic_regression, _logistic_lbfgs, _linear_svm, _polynomial_svm,
        _k_means, _boosted_classifiers, _boosted_regressions, _networks, _topics,
    )  # fmt: skip
    return [training for family in families for training in family()]


# --- descents


def _linear_regression() -> Iterator[Training]:
    for data, scaled, step in (
        ("diabetes", "standard", 1.0), ("diabetes", "standard", 0.2), ("diabetes", "largest", 1.0),
        ("linnerud", "standard", 1.0), ("linnerud", "largest", 1.8),
        ("make_regression", "standard", 1.0),
    ):  # fmt: skip

        def run(_: int, data: str = data, scaled: str = scaled, step: float = step) -> list[float]:
            features, targets = load(data, scaled)
            return descend(least_squares(features, outputs(targets)), DESCENT, step)

        settings: Settings = {"scaled": scaled, "step": step}
        yield Training("linear-regression", "sublinear", data, settings, run)


def _logistic_regression() -> Iterator[Training]:
    for data, scaled, step in (
        ("breast_cancer", "standard", 1.0), ("breast_cancer", "largest", 2.0),
        ("digits", "standard", 1.0), ("digits", "largest", 4.0), ("wine", "standard", 0.5),
        ("iris", "standard", 1.0), ("make_classification", "standard", 0.5),
    ):  # fmt: skip

        def run(_: int, data: str = data, scaled: str = scaled, step: float = step) -> list[float]:
            features, labels = load(data, scaled)
            return descend(softmax(features, classes(labels)), DESCENT, step)

        settings: Settings = {"scaled": scaled, "step": step}
        yield Training("logistic-regression", "sublinear", data, settings, run)


def _logistic_lbfgs() -> Iterator[Training]:
    for data, ridge in (
        ("breast_cancer", 1e-4), ("breast_cancer", 1e-2), ("digits", 1e-4), ("digits", 1e-3),
        ("wine", 1e-4), ("iris", 1e-5),
    ):  # fmt: skip

        def run(_: int, data: str = data, ridge: float = ridge) -> list[float]:
            features, labels = load(data)
            return minimise(softmax(features, classes(labels), ridge), DESCENT)

        yield Training("logistic-lbfgs", "linear", data, {"ridge": ridge}, run)


def _linear_svm() -> Iterator[Training]:
    for data, step, ridge in (
        ("breast_cancer", 0.1, 1e-4), ("digits", 0.1, 1e-4), ("digits", 0.05, 1e-3),
        ("wine", 0.1, 1e-3), ("make_classification", 0.2, 1e-3),
    ):  # fmt: skip

        def run(_: int, data: str = data, step: float = step, ridge: float = ridge) -> list[float]:
            features, labels = load(data)
            return descend(hinge(features, one_hot(labels), ridge), DESCENT, step, "root")

        settings: Settings = {"step": step, "ridge": ridge}
        yield Training("svm-linear", "sublinear", data, settings, run)


def _polynomial_svm() -> Iterator[Training]:
    for data, degree, step in (
        ("breast_cancer", 2, 2.0), ("breast_cancer", 3, 1.0), ("digits", 2, 0.5),
        ("digits", 3, 0.5), ("wine", 2, 1.0),
    ):  # fmt: skip

        def run(
            seed: int, data: str = data, degree: int = degree, step: float = step
        ) -> list[float]:
            features, labels = load(data)
            kernel = Nystroem(
                kernel="polynomial", degree=degree, gamma=1.0 / features.shape[1], coef0=1.0,
                n_components=100, random_state=seed,
            )  # fmt: skip
            mapped = StandardScaler(with_mean=False).fit_transform(kernel.fit_transform(features))
            scaled = np.asarray(mapped) / np.sqrt(mapped.shape[1])
            return descend(hinge(scaled, one_hot(labels), 1e-4), DESCENT, step, "root")

        settings: Settings = {"degree": degree, "step": step}
        yield Training("svm-polynomial", "sublinear", data, settings, run)


# --- clusters and topics


def _k_means() -> Iterator[Training]:
    for data, clusters in (
        ("digits", 10), ("digits", 40), ("breast_cancer", 20), ("make_blobs", 60),
        ("make_blobs", 120),
    ):  # fmt: skip
        run = partial(_lloyd, data, clusters)
        yield Training("k-means", "linear", data, {"clusters": clusters}, run)


def _lloyd(data: str, clusters: int, seed: int) -> list[float]:
    """Mean squared distance to the nearest centre, from random points as centres."""
    features, _ = load(data)
    centres = features[np.random.default_rng(seed).choice(len(features), clusters, replace=False)]
    losses: list[float] = []
    while len(losses) <= LLOYD:
        distances = np.square(features).sum(axis=1)[:, None] - 2.0 * features @ centres.T
        loss = float((distances + np.square(centres).sum(axis=1)).min(axis=1).mean())
        if losses and loss >= losses[-1]:
            break
        losses.append(loss)
        means = KMeans(clusters, init=centres, n_init=1, max_iter=1, tol=0.0)
        centres = means.fit(features).cluster_centers_
    return losses


def _topics() -> Iterator[Training]:
    for data, count, decay in (
        ("digits", 10, 0.7), ("digits", 20, 0.6), ("pydoc_topics", 5, 0.7),
        ("pydoc_topics", 10, 0.6), ("pydoc_topics", 20, 0.6),
    ):  # fmt: skip
        run = partial(_dirichlet, data, count, decay)
        settings: Settings = {"topics": count, "decay": decay}
        yield Training("lda", "non-convex", data, settings, run)


def _dirichlet(data: str, count: int, decay: float, seed: int) -> list[float]:
    """Logarithm of the perplexity, per word, of online variational Bayes on all documents."""
    counts = words(data)
    model = LatentDirichletAllocation(
        count, learning_decay=decay, total_samples=counts.shape[0], max_iter=0, random_state=seed,
        batch_size=counts.shape[0],
    )  # fmt: skip
    model.fit(counts)  # draws its topics, no more
    losses = [float(np.log(model.perplexity(counts)))]
    for _ in range(TOPIC_PASSES):
        model.partial_fit(counts)
        losses.append(float(np.log(model.perplexity(counts))))
    return losses


# --- trees and networks


def _boosted_classifiers() -> Iterator[Training]:
    for data, rate, depth in (
        ("breast_cancer", 0.1, 3), ("breast_cancer", 0.05, 2), ("digits", 0.1, 2),
        ("wine", 0.05, 3), ("iris", 0.05, 2),
    ):  # fmt: skip

        def run(seed: int, data: str = data, rate: float = rate, depth: int = depth) -> list[float]:
            features, labels = load(data)
            model = GradientBoostingClassifier(
                learning_rate=rate, n_estimators=STAGES, max_depth=depth, subsample=0.7,
                max_features="sqrt", random_state=seed,
            ).fit(features, labels)  # fmt: skip
            priors = np.full((len(labels), 1), 1.0) * classes(labels).mean(axis=0)
            stages = [priors, *model.staged_predict_proba(features)]
            return [float(log_loss(labels, each)) for each in stages]

        settings: Settings = {"rate": rate, "depth": depth}
        yield Training("boosted-classification", "linear", data, settings, run)


def _boosted_regressions() -> Iterator[Training]:
    for data, rate, depth in (
        ("diabetes", 0.1, 3), ("diabetes", 0.2, 2), ("diabetes", 0.05, 4),
        ("make_regression", 0.1, 3), ("make_regression", 0.1, 2),
    ):  # fmt: skip

        def run(seed: int, data: str = data, rate: float = rate, depth: int = depth) -> list[float]:
            features, targets = load(data)
            scaled = outputs(targets)[:, 0]
            model = GradientBoostingRegressor(
                learning_rate=rate, n_estimators=STAGES, max_depth=depth, random_state=seed
            ).fit(features, scaled)
            stages = [np.full(len(scaled), scaled.mean()), *model.staged_predict(features)]
            return [float(np.mean(np.square(scaled - each))) for each in stages]

        settings: Settings = {"rate": rate, "depth": depth}
        yield Training("boosted-regression", "linear", data, settings, run)


def _networks() -> Iterator[Training]:
    for data, width, solver, rate in (
        ("digits", 32, "adam", 1e-3), ("digits", 64, "sgd", 0.01),
        ("breast_cancer", 16, "adam", 1e-3), ("wine", 16, "sgd", 0.02), ("iris", 16, "adam", 0.01),
    ):  # fmt: skip
        run = partial(_network, data, width, solver, rate)
        settings: Settings = {"width": width, "solver": solver, "rate": rate}
        yield Training("mlp", "non-convex", data, settings, run)


def _network(data: str, width: int, solver: str, rate: float, seed: int) -> list[float]:
    """Cross-entropy over all training data after each pass."""
    features, labels = load(data)
    known = np.unique(labels)

    def network(rate: float) -> Any:
        return MLPClassifier((width,), solver=solver, learning_rate_init=rate, random_state=seed)

    untrained = network(NEVER).partial_fit(features, labels, classes=known)
    losses = [float(log_loss(labels, untrained.predict_proba(features)))]
    model = network(rate)
    for _ in range(PASSES):
        model.partial_fit(features, labels, classes=known)
        losses.append(float(log_loss(labels, model.predict_proba(features))))
    return losses
