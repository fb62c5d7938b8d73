"""Score of a candidate: eq. 8 and Algorithm 1, or a value of all jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.random import Generator

from controlplane.policy.ones_paper.problem import IDLE, Genes, PaperProblem
from controlplane.policy.options import OnesPaperOptions
from controlplane.prediction import BoolArray, FloatArray, IntArray
from controlplane.prediction.progress_distribution import mean_progress

MIN_DISTANCE: Final = 1e-3  # least distance of a drawn progress from 0 and 1
STALL_WEIGHT: Final = 2.5  # cost of a stall in multiples of its length; as in `ones`
MIN_LEFT_S, MAX_LEFT_S = 60.0, 900.0  # bounds of the remaining time that a stall is compared with


def counts_of(genes: Genes, jobs: int) -> IntArray:
    """Return c_j, the slots of each job in each candidate (eq. 2), shape (K, J)."""
    many = len(genes)
    if not genes.size:
        return np.zeros((many, jobs), dtype=np.int64)
    flat = genes.astype(np.int64) + 1 + np.arange(many)[:, None] * (jobs + 1)
    found = np.bincount(flat.ravel(), minlength=many * (jobs + 1))
    return np.asarray(found.reshape(many, jobs + 1)[:, 1:], dtype=np.int64)


def local_batches(genes: Genes, problem: PaperProblem) -> IntArray:
    """Return b_j^i of eq. 1: the batch of each slot, shape (K, G); 0 where it is idle.

    A job's batch follows from its number of slots; the slots' shares differ by at most one sample.
    """
    counts = counts_of(genes, len(problem.jobs))
    rank = ranks(genes)
    rows = np.arange(len(genes))[:, None]
    job = np.maximum(genes, 0).astype(np.int64)
    if not len(problem.jobs):
        return np.zeros(genes.shape, dtype=np.int64)
    many = np.maximum(counts[rows, job], 1)
    batch = problem.batches[job, np.minimum(many, problem.batches.shape[1] - 1)]
    share = batch // many + (rank < batch % many)
    return np.where(genes == IDLE, 0, share)


def ranks(genes: Genes) -> IntArray:
    """Return the index of each slot among the slots of its job, from 0; shape (K, G)."""
    order = np.argsort(genes, axis=1, kind="stable")
    row = np.take_along_axis(genes, order, axis=1)
    place = np.broadcast_to(np.arange(genes.shape[1]), genes.shape)
    begins = np.ones(genes.shape, dtype=np.bool_)
    begins[:, 1:] = row[:, 1:] != row[:, :-1]
    first = np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    found = np.empty(genes.shape, dtype=np.int64)
    np.put_along_axis(found, order, place - first, axis=1)
    return found


# --- remaining work


def mean_draw(problem: PaperProblem) -> FloatArray:
    """Return the mean progress of every job in the shape of one draw, (J, 1)."""
    return mean_progress(problem.alpha, problem.beta)[:, None]


def draws(problem: PaperProblem, rng: Generator, many: int) -> FloatArray:
    """Draw rho of every job (Algorithm 1, line 2); shape (J, many)."""
    shape = (len(problem.jobs), many)
    found = rng.beta(problem.alpha[:, None], problem.beta[:, None], shape)
    return np.clip(found, MIN_DISTANCE, 1.0 - MIN_DISTANCE)


def work_left(problem: PaperProblem, progress: FloatArray) -> FloatArray:
    """Return Y of eq. 7, samples, shape (J, M): Y_processed (1 / rho - 1), or the known value.

    Args:
        progress: rho, shape (J, M), in (0, 1).
    """
    forecast = problem.done[:, None] * (1.0 / progress - 1.0)
    exact = problem.exact[:, None]
    return np.where(np.isfinite(exact), exact, forecast)


# --- scores


@dataclass(frozen=True)
class Scorer:
    """Scores as a sum over jobs of a part that depends on slots times a part that depends on work.

    `parts` is indexed by job, slots and placement: 0 on few nodes, 1 on more; 2 and 3 are the same
    for a job that keeps its size on other slots.
    """

    parts: FloatArray  # shape (J, C + 1, 4)
    problem: PaperProblem
    options: OnesPaperOptions

    def weights(self, progress: FloatArray) -> FloatArray:
        """Return the part that depends on progress, shape (J, M); `progress` is rho in (0, 1)."""
        left = work_left(self.problem, progress)
        if self.options.score == "running":
            return -left
        lasts = left / one_slot_rates(self.problem)[:, None]
        usual = lasts.sum(axis=0, keepdims=True) / max(1, len(lasts))
        patience = np.minimum(self.options.patience_s, 0.25 * usual)
        return np.asarray(np.power(lasts + patience + 1e-9, -self.options.size_exponent))

    def matrix(self, genes: Genes) -> FloatArray:
        """Return the part that depends on slots, shape (K, J)."""
        problem = self.problem
        counts = counts_of(genes, len(problem.jobs))
        how: IntArray = np.zeros_like(counts)
        if self.options.reorder == "flat":
            how = _spread(genes, counts, problem) + 2 * _moved(genes, problem)
        return np.asarray(self.parts[problem.rows, counts, how])


def scorer_for(problem: PaperProblem, options: OnesPaperOptions) -> Scorer:
    """Return the scorer of the candidates of one view."""
    slots = np.arange(problem.rates.shape[1])[None, :, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        if options.score == "running":  # eq. 8: c / X
            parts = np.where(problem.rates > 0, slots / problem.rates, 0.0)
            return Scorer(np.concatenate([parts, parts], axis=2), problem, options)
    speedup = problem.rates / one_slot_rates(problem)[:, None, None]
    keeps, moved, again = _keeps(problem, options)
    parts = np.concatenate([speedup * keeps[:, :, None], speedup * moved[:, :, None]], axis=2)
    parts = np.power(parts, options.speedup_exponent)
    stopped = np.power(again, options.speedup_exponent) - 1.0
    parts[:, 0, :] = np.where(problem.size > 0, stopped, 0.0)[:, None]
    return Scorer(parts, problem, options)


def one_slot_rates(problem: PaperProblem) -> FloatArray:
    """Return X on one slot, samples/s, shape (J,); from a job's least slots if it needs several."""
    least = np.minimum(problem.least, problem.rates.shape[1] - 1)
    rate = problem.rates[problem.rows, least, 0] / np.maximum(least, 1)
    return np.where(rate > 0, rate, 1.0)


def _keeps(
    problem: PaperProblem, options: OnesPaperOptions
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the share of the speed-up left after a resize, after a move, and after a restart."""
    sizes = problem.rates.shape[1]
    jobs = len(problem.jobs)
    if not options.charge:
        return np.ones((jobs, sizes)), np.ones((jobs, sizes)), np.ones(jobs)
    left = work_left(problem, mean_draw(problem))
    rate = problem.rates[:, :, 0]
    lasts = np.divide(left, rate, out=np.full(rate.shape, MAX_LEFT_S), where=rate > 0)
    lasts = np.clip(lasts, MIN_LEFT_S, MAX_LEFT_S)
    runs = problem.size > 0
    stall = np.where(runs, options.rescale_stall_s, problem.start_s)
    changed = np.maximum(0.0, 1.0 - STALL_WEIGHT * stall[:, None] / lasts - options.change_margin)
    changed[problem.new] = 1.0  # every job needs a first start
    keeps, here = changed.copy(), np.minimum(problem.size, sizes - 1)
    stays = runs & (problem.size < sizes)
    keeps[problem.rows[stays], here[stays]] = 1.0
    start = STALL_WEIGHT * problem.start_s / lasts[problem.rows, here]
    again = np.maximum(0.0, 1.0 - start - options.change_margin)
    return keeps, changed, again


def _spread(genes: Genes, counts: IntArray, problem: PaperProblem) -> IntArray:
    """Return 1 for each job on more nodes than it needs, otherwise 0; shape (K, J)."""
    jobs = len(problem.jobs)
    if not genes.size or not jobs:
        return np.zeros_like(counts)
    nodes = int(problem.nodes.max()) + 1
    key = (np.arange(len(genes))[:, None] * (jobs + 1) + genes + 1) * nodes + problem.nodes
    pairs = np.unique(key.ravel()) // nodes  # one for each candidate, job and node
    spans = np.bincount(pairs, minlength=len(genes) * (jobs + 1))
    spans = spans.reshape(len(genes), jobs + 1)[:, 1:]
    widest = int(np.bincount(problem.nodes).max())
    return (spans > -(-counts // widest)).astype(np.int64)


def _moved(genes: Genes, problem: PaperProblem) -> IntArray:
    """Return 1 for each running job that loses any of its slots, otherwise 0; shape (K, J)."""
    stays: Genes = np.where(genes == problem.present, genes, IDLE).astype(np.int16)
    kept = counts_of(stays, len(problem.jobs))
    return ((problem.size > 0) & (kept < problem.size)).astype(np.int64)


# --- selection


def selected(
    scorer: Scorer, genes: Genes, many: int, rng: Generator
) -> tuple[IntArray, FloatArray]:
    """Return the rows of the survivors, best first, and all candidates' scores by mean progress."""
    options, problem = scorer.options, scorer.problem
    matrix = scorer.matrix(genes)
    mean = (matrix @ scorer.weights(mean_draw(problem)))[:, 0]
    many = min(many, len(genes))
    if options.selection == "sampled":
        return _rounds(scorer, matrix, many, rng), mean
    if options.rho == "mean":
        scores = mean
    elif options.rho == "generation":
        scores = (matrix @ scorer.weights(draws(problem, rng, 1)))[:, 0]
    else:
        each = scorer.weights(draws(problem, rng, len(genes)))
        scores = np.einsum("kj,jk->k", matrix, each)
    return _best_first(scores)[:many], mean


def _rounds(scorer: Scorer, matrix: FloatArray, many: int, rng: Generator) -> IntArray:
    """Run Algorithm 1 K times: draw, take the winner out, and draw again."""
    problem, rho = scorer.problem, scorer.options.rho
    if rho == "candidate":  # draw for each candidate in each round
        left = np.ones(len(matrix), dtype=np.bool_)
        chosen: list[int] = []
        for _ in range(many):
            each = scorer.weights(draws(problem, rng, len(matrix)))
            scores = np.where(left, np.einsum("kj,jk->k", matrix, each), -np.inf)
            chosen.append(int(scores.argmax()))
            left[chosen[-1]] = False
        return np.array(chosen, dtype=np.int64)
    drawn = mean_draw(problem) if rho == "mean" else draws(problem, rng, many)
    scores = matrix @ scorer.weights(drawn)
    if rho == "mean":
        return _best_first(scores[:, 0])[:many]
    taken: dict[int, None] = {}
    for column in range(many):
        order = _best_first(scores[:, column])
        taken[next(int(row) for row in order if int(row) not in taken)] = None
    return np.array(list(taken), dtype=np.int64)


def _best_first(scores: FloatArray) -> IntArray:
    """Return the order by falling score; the earlier candidate first if scores are equal."""
    rounded = np.round(scores, 12)
    return np.argsort(-rounded, kind="stable")


def all_within(genes: Genes, problem: PaperProblem) -> BoolArray:
    """Return which candidates give each job no slots or an allowed size; shape (K,)."""
    counts = counts_of(genes, len(problem.jobs))
    fits = (counts >= problem.least) & (counts <= problem.most)
    return np.asarray(((counts == 0) | fits).all(axis=1))
