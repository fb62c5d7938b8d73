"""Recorder of loss curves, which runs the algorithms of SLAQ's evaluation on real data.

SLAQ section 3: classification (SVM, MLP, logistic regression, boosted trees, SVM with polynomial
kernels), regression (linear, boosted trees), unsupervised (k-means, LDA). Most data sets come with
scikit-learn, one with Python; `make_*` functions generate the others. Libraries report the loss of
a descent seldom, or only for some iterations. The descents in this module report it for each
iteration.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pydoc_data import topics
from typing import Any, Final, Literal

import numpy as np
import scipy
import sklearn
from scipy.optimize import minimize
from sklearn import datasets
from sklearn.cluster import KMeans
from sklearn.decomposition import LatentDirichletAllocation
from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.kernel_approximation import Nystroem
from sklearn.metrics import log_loss
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import LabelBinarizer, StandardScaler

from controlplane.prediction import FloatArray
from controlplane.sim.cluster import TraceError
from controlplane.sim.models.curves import Convergence, LossCurve, RecordedCurves

ValueAndGradient = Callable[[FloatArray], tuple[float, FloatArray]]


@dataclass(frozen=True, slots=True)
class Objective:
    """Loss as a function of weights that start at zero, with ridge * |weights|^2 / 2 added."""

    value_and_gradient: ValueAndGradient  # function of weights with `shape`
    shape: tuple[int, int]  # shape of the weights: features, outputs
    smoothness: float  # largest curvature; 1 for a hinge loss, although its curvature is 0


def least_squares(features: FloatArray, targets: FloatArray, ridge: float = 0.0) -> Objective:
    """Return half the mean squared error as objective, for arrays of shapes (n, d) and (n, k)."""
    count = len(features)

    def value_and_gradient(weights: FloatArray) -> tuple[float, FloatArray]:
        error = features @ weights - targets
        value = 0.5 * float(np.square(error).sum()) / count
        gradient = features.T @ error / count + ridge * weights
        return value + 0.5 * ridge * float(np.square(weights).sum()), gradient

    shape = (features.shape[1], targets.shape[1])
    return Objective(value_and_gradient, shape, _curvature(features) + ridge)


def softmax(features: FloatArray, labels: FloatArray, ridge: float = 0.0) -> Objective:
    """Return the objective of multinomial logistic regression; labels are one-hot."""
    count = len(features)

    def value_and_gradient(weights: FloatArray) -> tuple[float, FloatArray]:
        scores = features @ weights
        scores -= scores.max(axis=1, keepdims=True)
        log_total = np.log(np.exp(scores).sum(axis=1, keepdims=True))
        value = -float(np.sum(labels * (scores - log_total))) / count
        gradient = features.T @ (np.exp(scores - log_total) - labels) / count + ridge * weights
        return value + 0.5 * ridge * float(np.square(weights).sum()), gradient

    shape = (features.shape[1], labels.shape[1])
    return Objective(value_and_gradient, shape, 0.5 * _curvature(features) + ridge)


def hinge(features: FloatArray, labels: FloatArray, ridge: float = 0.0) -> Objective:
    """Return the objective of linear one-against-rest SVMs: mean hinge loss, with a subgradient."""
    count, signs = len(features), 2.0 * labels - 1.0

    def value_and_gradient(weights: FloatArray) -> tuple[float, FloatArray]:
        short = 1.0 - signs * (features @ weights)
        value = float(np.maximum(short, 0.0).sum()) / count
        gradient = -features.T @ (signs * (short > 0.0)) / count + ridge * weights
        return value + 0.5 * ridge * float(np.square(weights).sum()), gradient

    return Objective(value_and_gradient, (features.shape[1], labels.shape[1]), 1.0)


def descend(
    objective: Objective, iterations: int, step: float, decay: Literal["none", "root"] = "none"
) -> list[float]:
    """Return the losses of full-batch gradient descent from weights of zero.

    The first loss is the loss before the first iteration. Steps are in units of 1 / smoothness.
    With decay "root", a step is divided by the square root of its iteration, as in Spark's MLlib.
    """
    weights = np.zeros(objective.shape)
    losses = []
    for iteration in range(1, iterations + 2):
        value, gradient = objective.value_and_gradient(weights)
        losses.append(value)
        shrink = np.sqrt(iteration) if decay == "root" else 1.0
        weights = weights - step / objective.smoothness / shrink * gradient
    return losses


def minimise(objective: Objective, iterations: int) -> list[float]:
    """Return the losses of L-BFGS from zero weights, before and after each iteration."""

    def flat(weights: FloatArray) -> tuple[float, FloatArray]:
        value, gradient = objective.value_and_gradient(weights.reshape(objective.shape))
        return value, gradient.ravel()

    start = np.zeros(int(np.prod(objective.shape)))
    losses = [flat(start)[0]]
    limits = {"maxiter": iterations, "ftol": 1e-9, "gtol": 1e-6}
    minimize(
        flat, start, jac=True, method="L-BFGS-B", options=limits,
        callback=lambda weights: losses.append(flat(weights)[0]),
    )  # fmt: skip
    return losses


def _curvature(features: FloatArray) -> float:
    """Return the largest eigenvalue of the mean of x x', where x are the rows of `features`."""
    return float(np.linalg.norm(features, 2) ** 2) / len(features)


@cache
def load(data: str, scaled: str = "standard") -> tuple[FloatArray, FloatArray]:
    """Return features with a column of ones, shape (n, d + 1), and targets, shape (n,) or (n, k).

    `data` is the part of a scikit-learn name after `load_`, or a full name that starts with
    `make_`. Standard features have mean 0 and deviation 1. "largest" limits their absolute values
    to 1.
    """
    made: dict[str, dict[str, Any]] = {
        "make_regression": {"n_samples": 1000, "n_features": 40, "n_targets": 1,
                            "effective_rank": 10, "noise": 1.0},
        "make_classification": {"n_samples": 1000, "n_features": 40, "n_informative": 10,
                                "flip_y": 0.05},
        "make_blobs": {"n_samples": 4000, "n_features": 8, "centers": 60, "cluster_std": 5.0},
    }  # fmt: skip
    if data in made:
        features, targets = getattr(datasets, data)(**made[data], random_state=0)[:2]
    else:
        features, targets = getattr(datasets, f"load_{data}")(return_X_y=True)
    if scaled == "standard":
        features = StandardScaler().fit_transform(features)
    else:  # the columns keep their different spreads
        features = features / np.abs(features).max(axis=0).clip(1e-9)
    ones = np.ones((len(features), 1))
    return np.hstack([features, ones]), np.asarray(targets)


def one_hot(labels: FloatArray) -> FloatArray:
    """Return one column of 0 and 1 per class, shape (n, classes), or (n, 1) for two classes."""
    return np.asarray(LabelBinarizer().fit_transform(labels), dtype=float)


def classes(labels: FloatArray) -> FloatArray:
    """Return one column of 0 and 1 per class, shape (n, classes), also for two classes."""
    found = one_hot(labels)
    return np.hstack([1.0 - found, found]) if found.shape[1] == 1 else found


def outputs(targets: FloatArray) -> FloatArray:
    """Return regression targets, scaled to mean 0 and deviation 1, shape (n, k)."""
    return np.asarray(StandardScaler().fit_transform(targets.reshape(len(targets), -1)))


@cache
def words(data: str) -> Any:
    """Return the counts of words in documents. The words of "digits" are its pixels."""
    if data == "digits":
        return datasets.load_digits().data[:150]
    count = CountVectorizer(stop_words="english", min_df=2, max_features=1500)
    return count.fit_transform(topics.topics.values())


DESCENT_ITERATIONS: Final = 200  # iterations of gradient descent; L-BFGS may need fewer
BOOSTING_STAGES: Final = 150  # number of boosted trees
NETWORK_PASSES: Final = 120  # passes of a neural network over its data
MAX_LLOYD_ITERATIONS: Final = 100  # largest number of iterations of k-means
TOPIC_PASSES: Final = 60
NO_LEARNING_RATE: Final = 1e-12  # learning rate without any effect


# --- trainings: data, settings and seed -> losses before the first iteration and after each


def _linear_regression(data: str, scaled: str, step: float, _: int) -> list[float]:
    features, targets = load(data, scaled)
    return descend(least_squares(features, outputs(targets)), DESCENT_ITERATIONS, step)


def _logistic_regression(data: str, scaled: str, step: float, _: int) -> list[float]:
    features, labels = load(data, scaled)
    return descend(softmax(features, classes(labels)), DESCENT_ITERATIONS, step)


def _logistic_lbfgs(data: str, ridge: float, _: int) -> list[float]:
    features, labels = load(data)
    return minimise(softmax(features, classes(labels), ridge), DESCENT_ITERATIONS)


def _linear_svm(data: str, step: float, ridge: float, _: int) -> list[float]:
    features, labels = load(data)
    return descend(hinge(features, one_hot(labels), ridge), DESCENT_ITERATIONS, step, "root")


def _polynomial_svm(data: str, degree: int, step: float, seed: int) -> list[float]:
    features, labels = load(data)
    kernel = Nystroem(
        kernel="polynomial", degree=degree, gamma=1.0 / features.shape[1], coef0=1.0,
        n_components=100, random_state=seed,
    )  # fmt: skip
    mapped = StandardScaler(with_mean=False).fit_transform(kernel.fit_transform(features))
    scaled = np.asarray(mapped) / np.sqrt(mapped.shape[1])
    return descend(hinge(scaled, one_hot(labels), 1e-4), DESCENT_ITERATIONS, step, "root")


def _k_means(data: str, clusters: int, seed: int) -> list[float]:
    """Return mean squared distances to the nearest centre; the first centres are random points."""
    features, _ = load(data)
    centres = features[np.random.default_rng(seed).choice(len(features), clusters, replace=False)]
    losses: list[float] = []
    while len(losses) <= MAX_LLOYD_ITERATIONS:
        distances = np.square(features).sum(axis=1)[:, None] - 2.0 * features @ centres.T
        loss = float((distances + np.square(centres).sum(axis=1)).min(axis=1).mean())
        if losses and loss >= losses[-1]:
            break
        losses.append(loss)
        means = KMeans(clusters, init=centres, n_init=1, max_iter=1, tol=0.0)
        centres = means.fit(features).cluster_centers_
    return losses


def _topics(data: str, count: int, decay: float, seed: int) -> list[float]:
    """Return the log perplexity per word of variational Bayes; each pass uses all documents."""
    counts = words(data)
    model = LatentDirichletAllocation(
        count, learning_decay=decay, total_samples=counts.shape[0], max_iter=0, random_state=seed,
        batch_size=counts.shape[0],
    )  # fmt: skip
    model.fit(counts)  # only initialises the topics
    losses = [float(np.log(model.perplexity(counts)))]
    for _ in range(TOPIC_PASSES):
        model.partial_fit(counts)
        losses.append(float(np.log(model.perplexity(counts))))
    return losses


def _boosted_classification(data: str, rate: float, depth: int, seed: int) -> list[float]:
    features, labels = load(data)
    model = GradientBoostingClassifier(
        learning_rate=rate, n_estimators=BOOSTING_STAGES, max_depth=depth, subsample=0.7,
        max_features="sqrt", random_state=seed,
    ).fit(features, labels)  # fmt: skip
    priors = np.full((len(labels), 1), 1.0) * classes(labels).mean(axis=0)
    stages = [priors, *model.staged_predict_proba(features)]
    return [float(log_loss(labels, each)) for each in stages]


def _boosted_regression(data: str, rate: float, depth: int, seed: int) -> list[float]:
    features, targets = load(data)
    scaled = outputs(targets)[:, 0]
    model = GradientBoostingRegressor(
        learning_rate=rate, n_estimators=BOOSTING_STAGES, max_depth=depth, random_state=seed
    ).fit(features, scaled)
    stages = [np.full(len(scaled), scaled.mean()), *model.staged_predict(features)]
    return [float(np.mean(np.square(scaled - each))) for each in stages]


def _network(data: str, width: int, solver: str, rate: float, seed: int) -> list[float]:
    features, labels = load(data)
    known = np.unique(labels)

    def network(rate: float) -> Any:
        return MLPClassifier((width,), solver=solver, learning_rate_init=rate, random_state=seed)

    untrained = network(NO_LEARNING_RATE).partial_fit(features, labels, classes=known)
    losses = [float(log_loss(labels, untrained.predict_proba(features)))]
    model = network(rate)
    for _ in range(NETWORK_PASSES):
        model.partial_fit(features, labels, classes=known)
        losses.append(float(log_loss(labels, model.predict_proba(features))))
    return losses


# Family -> convergence, function, names of settings, and (data, settings) of each training.
FAMILIES: Final[Mapping[str, tuple[Convergence, Callable[..., list[float]], Any, Any]]] = {
    "linear-regression": ("sublinear", _linear_regression, ("scaled", "step"), (
        ("diabetes", "standard", 1.0), ("diabetes", "standard", 0.2), ("diabetes", "largest", 1.0),
        ("linnerud", "standard", 1.0), ("linnerud", "largest", 1.8),
        ("make_regression", "standard", 1.0),
    )),
    "logistic-regression": ("sublinear", _logistic_regression, ("scaled", "step"), (
        ("breast_cancer", "standard", 1.0), ("breast_cancer", "largest", 2.0),
        ("digits", "standard", 1.0), ("digits", "largest", 4.0), ("wine", "standard", 0.5),
        ("iris", "standard", 1.0), ("make_classification", "standard", 0.5),
    )),
    "logistic-lbfgs": ("linear", _logistic_lbfgs, ("ridge",), (
        ("breast_cancer", 1e-4), ("breast_cancer", 1e-2), ("digits", 1e-4), ("digits", 1e-3),
        ("wine", 1e-4), ("iris", 1e-5),
    )),
    "svm-linear": ("sublinear", _linear_svm, ("step", "ridge"), (
        ("breast_cancer", 0.1, 1e-4), ("digits", 0.1, 1e-4), ("digits", 0.05, 1e-3),
        ("wine", 0.1, 1e-3), ("make_classification", 0.2, 1e-3),
    )),
    "svm-polynomial": ("sublinear", _polynomial_svm, ("degree", "step"), (
        ("breast_cancer", 2, 2.0), ("breast_cancer", 3, 1.0), ("digits", 2, 0.5),
        ("digits", 3, 0.5), ("wine", 2, 1.0),
    )),
    "k-means": ("linear", _k_means, ("clusters",), (
        ("digits", 10), ("digits", 40), ("breast_cancer", 20), ("make_blobs", 60),
        ("make_blobs", 120),
    )),
    "boosted-classification": ("linear", _boosted_classification, ("rate", "depth"), (
        ("breast_cancer", 0.1, 3), ("breast_cancer", 0.05, 2), ("digits", 0.1, 2),
        ("wine", 0.05, 3), ("iris", 0.05, 2),
    )),
    "boosted-regression": ("linear", _boosted_regression, ("rate", "depth"), (
        ("diabetes", 0.1, 3), ("diabetes", 0.2, 2), ("diabetes", 0.05, 4),
        ("make_regression", 0.1, 3), ("make_regression", 0.1, 2),
    )),
    "mlp": ("non-convex", _network, ("width", "solver", "rate"), (
        ("digits", 32, "adam", 1e-3), ("digits", 64, "sgd", 0.01),
        ("breast_cancer", 16, "adam", 1e-3), ("wine", 16, "sgd", 0.02),
        ("iris", 16, "adam", 0.01),
    )),
    "lda": ("non-convex", _topics, ("topics", "decay"), (
        ("digits", 10, 0.7), ("digits", 20, 0.6), ("pydoc_topics", 5, 0.7),
        ("pydoc_topics", 10, 0.6), ("pydoc_topics", 20, 0.6),
    )),
}  # fmt: skip


DIGITS: Final = 7  # significant digits of losses
COMMAND: Final = "ones sim record-curves FILE --seed {seed}"


def record(
    seed: int,
    date: str,
    families: Sequence[str] = (),
    done: Callable[[str], object] = lambda _: None,
) -> RecordedCurves:
    """Run the trainings and return their losses, rounded to `DIGITS` significant digits.

    Losses depend on the versions of the libraries. An unknown family raises `TraceError`.

    Args:
        date: today, ISO 8601.
        families: families to train; empty: all.
        done: called with the name of each finished training.
    """
    if unknown := [name for name in families if name not in FAMILIES]:
        problem = f"family {unknown[0][:60]!r} of trainings is unknown"
        raise TraceError(problem, f"choose from {', '.join(FAMILIES)}", "families")
    curves = []
    for family, data, values in _trainings(families):
        convergence, train, names, _ = FAMILIES[family]
        settings = dict(zip(names, values, strict=True))
        settings_text = "-".join(f"{key}{value}" for key, value in settings.items())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # single iterations never converge
            losses = train(data, *values, seed)
        curve = LossCurve(
            name=f"{family}/{data}/{settings_text}", family=family, convergence=convergence,
            data=data, settings=settings, losses=tuple(float(f"{x:.{DIGITS}g}") for x in losses),
        )  # fmt: skip
        curves.append(curve)
        done(curve.name)
    return RecordedCurves(
        command=COMMAND.format(seed=seed),
        date=date,
        seed=seed,
        versions={
            "python": platform.python_version(),
            "numpy": np.__version__,
            "scipy": scipy.__version__,
            "scikit-learn": sklearn.__version__,
        },
        curves=tuple(curves),
    )


def _trainings(families: Sequence[str]) -> Iterator[tuple[str, str, list[Any]]]:
    for family, (_, _, _, trainings) in FAMILIES.items():
        if not families or family in families:
            for data, *values in trainings:
                yield family, data, values
