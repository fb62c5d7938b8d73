"""Candidate schedules: the operations of the search, and scores and selection of candidates.

The four operations of ONES section 3.2.2 work on all candidates at once. None of them loses a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.random import Generator

from controlplane.policy.ones_paper.problem import IDLE, Genes, PaperProblem
from controlplane.policy.options import OnesPaperOptions
from controlplane.prediction import BoolArray, FloatArray, IntArray
from controlplane.prediction.progress_distribution import mean_progress
from schemas.ids import JobId, SlotId

MIN_DISTANCE: Final = 1e-3  # least distance of a drawn progress from 0 and 1
STALL_WEIGHT: Final = 2.5  # cost of a stall, as a multiple of its length; as in `ones`
MIN_LEFT_S, MAX_LEFT_S = 60.0, 900.0  # bounds of the remaining time, to which a stall is compared
SIZE_EXPONENT: Final = 0.55  # score "all": how much short jobs are preferred
SPEEDUP_EXPONENT: Final = 0.8  # score "all": how much a further slot is worth
PATIENCE_S: Final = 300.0  # score "all": added to remaining times; at most 1/4 of their mean


def counts_of(genes: Genes, jobs: int) -> IntArray:
    """Return c_j (eq. 2), the number of slots of each job in each candidate, shape (K, J)."""
    many = len(genes)
    if not genes.size:
        return np.zeros((many, jobs), dtype=np.int64)
    flat = genes.astype(np.int64) + 1 + np.arange(many)[:, None] * (jobs + 1)
    found = np.bincount(flat.ravel(), minlength=many * (jobs + 1))
    return np.asarray(found.reshape(many, jobs + 1)[:, 1:], dtype=np.int64)


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
    """Return the mean progress of every job in the shape of a single draw, (J, 1)."""
    return mean_progress(problem.alpha, problem.beta)[:, None]


def draws(problem: PaperProblem, rng: Generator, many: int) -> FloatArray:
    """Draw rho for every job `many` times (Algorithm 1, line 2); shape (J, many)."""
    shape = (len(problem.jobs), many)
    found = rng.beta(problem.alpha[:, None], problem.beta[:, None], shape)
    return np.clip(found, MIN_DISTANCE, 1.0 - MIN_DISTANCE)


def work_left(problem: PaperProblem, progress: FloatArray) -> FloatArray:
    """Return the remaining samples Y, (J, M): as known, or Y_processed (1 / rho - 1) by eq. 7."""
    forecast = problem.done[:, None] * (1.0 / progress - 1.0)
    exact = problem.exact[:, None]
    return np.where(np.isfinite(exact), exact, forecast)


# --- scores


@dataclass(frozen=True)
class Scorer:
    """The scores of candidates, each a sum over jobs of a part for slots times a part for work.

    `parts` is indexed by job, slots and placement. Placement 0 is on few nodes, and
    placement 1 is on more nodes. Placements 2 and 3 are the same two placements for a job that
    loses some of its present slots.
    """

    parts: FloatArray  # shape (J, C + 1, 4)
    problem: PaperProblem
    options: OnesPaperOptions

    def weights(self, progress: FloatArray) -> FloatArray:
        """Return the part that depends on work, shape (J, M); `progress` is rho, in (0, 1)."""
        left = work_left(self.problem, progress)
        if self.options.score == "running":
            return -left
        lasts = left / one_slot_rates(self.problem)[:, None]
        usual = lasts.sum(axis=0, keepdims=True) / max(1, len(lasts))
        patience = np.minimum(PATIENCE_S, 0.25 * usual)
        return np.asarray(np.power(lasts + patience + 1e-9, -SIZE_EXPONENT))

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
    parts = np.power(parts, SPEEDUP_EXPONENT)
    stopped = np.power(again, SPEEDUP_EXPONENT) - 1.0
    parts[:, 0, :] = np.where(problem.size > 0, stopped, 0.0)[:, None]
    return Scorer(parts, problem, options)


def one_slot_rates(problem: PaperProblem) -> FloatArray:
    """Return each job's X per slot at its minimum number of slots, samples/s, shape (J,)."""
    least = np.minimum(problem.least, problem.rates.shape[1] - 1)
    rate = problem.rates[problem.rows, least, 0] / np.maximum(least, 1)
    return np.where(rate > 0, rate, 1.0)


def _keeps(
    problem: PaperProblem, options: OnesPaperOptions
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the shares of the speed-up that are left after a resize, a move, and a restart."""
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
    pairs = np.unique(key.ravel()) // nodes  # one entry for each candidate, job and node
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
    """Return the rows of the survivors, best first, and all scores by mean progress."""
    options, problem = scorer.options, scorer.problem
    matrix = scorer.matrix(genes)
    mean = (matrix @ scorer.weights(mean_draw(problem)))[:, 0]
    many = min(many, len(genes))
    if options.selection == "sampled":
        return _rounds(scorer, matrix, many, rng), mean
    if options.rho == "mean":
        return _best_first(mean)[:many], mean
    drawn = (matrix @ scorer.weights(draws(problem, rng, 1)))[:, 0]
    return _best_first(drawn)[:many], mean


def _rounds(scorer: Scorer, matrix: FloatArray, many: int, rng: Generator) -> IntArray:
    """Run K rounds of Algorithm 1: draw, select the best candidate, remove it, and draw again."""
    problem = scorer.problem
    if scorer.options.rho == "mean":
        return _best_first((matrix @ scorer.weights(mean_draw(problem)))[:, 0])[:many]
    scores = matrix @ scorer.weights(draws(problem, rng, many))
    taken: dict[int, None] = {}
    for column in range(many):
        order = _best_first(scores[:, column])
        taken[next(int(row) for row in order if int(row) not in taken)] = None
    return np.array(list(taken), dtype=np.int64)


def _best_first(scores: FloatArray) -> IntArray:
    """Return indices by falling score; among equal scores, the earlier candidate comes first."""
    rounded = np.round(scores, 12)
    return np.argsort(-rounded, kind="stable")


# --- operations

INFINITE: Final = np.inf  # gain of a job that cannot grow
MAX_SAMPLES: Final = 1e15  # samples; upper bound in comparisons


def random_schedules(problem: PaperProblem, many: int, rng: Generator) -> Genes:
    """Initialize: put a random job on each slot, shape (K, G). The result may exceed limits."""
    jobs = len(problem.jobs)
    if not jobs:
        return np.full((many, len(problem.slots)), IDLE, dtype=np.int16)
    return rng.integers(0, jobs, (many, len(problem.slots)), dtype=np.int16)


def fill_costs(problem: PaperProblem, many: int, rng: Generator) -> FloatArray:
    """Draw the remaining work Y in `many` candidates, (K, J), as costs that keep them different."""
    return work_left(problem, draws(problem, rng, many)).T


def refreshed(genes: Genes, problem: PaperProblem, left: FloatArray) -> Genes:
    """Refresh (figure 7): (2) scale down, (3) give slots to new jobs, and fill idle slots.

    `carried_over` does part (1). `left` is the remaining work Y, shape (K, J).
    """
    return filled(with_new_jobs(within_limits(genes, problem), problem), problem, left)


def within_limits(genes: Genes, problem: PaperProblem) -> Genes:
    """Scale each job down to floor(R c / B) slots, or to none if that is below its least slots."""
    counts = counts_of(genes, len(problem.jobs))
    allowed = np.minimum(counts, problem.most)
    allowed = np.where(allowed >= problem.least, allowed, 0)
    if (allowed == counts).all():
        return genes
    job = np.maximum(genes, 0).astype(np.int64)
    stays = (genes != IDLE) & (ranks(genes) < np.take_along_axis(allowed, job, axis=1))
    return np.where(stays, genes, IDLE).astype(np.int16)


def with_new_jobs(genes: Genes, problem: PaperProblem) -> Genes:
    """Give each new job its minimum number of slots.

    Idle slots come first, then slots of the jobs with the highest T_processed.
    """
    found = genes
    candidates = np.arange(len(genes))
    new = _fitting_new_jobs(problem, genes.shape[1])
    served = np.append(problem.served_s, INFINITE)  # last entry: IDLE; idle slots go first
    keeps = np.zeros(len(served), dtype=np.int64)  # number of slots that a job keeps
    keeps[new] = problem.least[new]
    for row in new:
        need = int(problem.least[row])
        lacks = (found == row).sum(axis=1) < need
        if not lacks.any():
            continue
        givers = np.where(ranks(found) < keeps[found], -INFINITE, served[found])
        givers = np.where(found == row, INFINITE, givers)  # a new job keeps slots that it has
        first = np.argsort(-givers, axis=1, kind="stable")[:, :need]
        found = found.copy() if found is genes else found
        found[candidates[lacks, None], first[lacks]] = row
    return found if found is genes else within_limits(found, problem)


def _fitting_new_jobs(problem: PaperProblem, room: int) -> list[int]:
    """Return the new jobs that fit into `room` together at minimum size, in order of arrival."""
    found: list[int] = []
    for row in np.flatnonzero(problem.new & (problem.most >= problem.least)).tolist():
        room -= int(problem.least[row])
        if room < 0:
            break
        found.append(row)
    return found


def filled(
    genes: Genes, problem: PaperProblem, left: FloatArray, barred: BoolArray | None = None
) -> Genes:
    """Give idle slots to waiting and running jobs until no job can use one (eq. 4).

    Each step selects the job with the least utilization gain (phi' - phi) Y, where phi = c / X.
    This gain is the change of eq. 8 when the job's batch is raised to R. A running job grows to
    floor(R c / B) slots. A waiting job, for which this is 0 / 0, gets its least slots. `genes` must
    be within limits. `left` is Y, and `barred` jobs get nothing; both have shape (K, J).
    """
    idle = genes == IDLE
    room = idle.sum(axis=1)
    if not room.any() or not len(problem.jobs):
        return genes
    counts, given = counts_of(genes, len(problem.jobs)), np.zeros(len(genes), dtype=np.int64)
    grown = np.full(genes.shape, IDLE, dtype=np.int16)  # job on the n-th idle slot
    phi, finite = _phi(problem), np.nan_to_num(left, posinf=MAX_SAMPLES)
    open_ = np.arange(len(genes))[room > 0]
    while len(open_):
        here, free = counts[open_], (room - given)[open_]
        target = _targets(here, free, problem)
        able = target > here
        if barred is not None:
            able &= ~barred[open_]
        gain = (phi[problem.rows, target] - phi[problem.rows, here]) * finite[open_]
        row = np.where(able, gain, INFINITE).argmin(axis=1)
        some = able.any(axis=1)
        open_, row = open_[some], row[some]
        further = (target - here)[some, row]
        for one, job, more in zip(open_.tolist(), row.tolist(), further.tolist(), strict=True):
            grown[one, given[one] : given[one] + more] = job
        counts[open_, row] += further
        given[open_] += further
        open_ = open_[given[open_] < room[open_]]
    place = np.cumsum(idle, axis=1) - 1
    taken = np.take_along_axis(grown, np.maximum(place, 0), axis=1)
    return np.where(idle, taken, genes).astype(np.int16)


def _phi(problem: PaperProblem) -> FloatArray:
    """Return phi = c / X by job and size, shape (J, C + 1)."""
    rates = problem.rates[:, :, 0]
    slots = np.broadcast_to(np.arange(rates.shape[1]), rates.shape)
    return np.divide(slots, rates, out=np.zeros(rates.shape), where=rates > 0)


def _targets(counts: IntArray, free: IntArray, problem: PaperProblem) -> IntArray:
    """Return the sizes to which jobs would grow with `free` slots, or else their present sizes."""
    wanted = np.where(counts > 0, problem.most, problem.least)
    target = np.minimum(wanted, counts + free[:, None])
    fits = (target >= problem.least) & (target <= problem.most)
    return np.where(fits & (target > counts), target, counts)


def crossed(genes: Genes, many: int, rng: Generator) -> Genes:
    """Uniform crossover (figure 8): return 2 K children of K random pairs, shape (2 K, G)."""
    one = genes[rng.integers(0, len(genes), many)]
    other = genes[rng.integers(0, len(genes), many)]
    return swapped(one, other, rng.random(one.shape) < 0.5)  # noqa: PLR2004 - two children


def swapped(one: Genes, other: Genes, straight: BoolArray) -> Genes:
    """Return the children of pairs of parents, shape (2 K, G).

    The first half takes each slot's job from `one` where `straight` is set, and from `other`
    elsewhere. The second half takes the other parent's job.
    """
    return np.concatenate([np.where(straight, one, other), np.where(straight, other, one)])


def mutated(genes: Genes, problem: PaperProblem, struck: BoolArray, left: FloatArray) -> Genes:
    """Uniform mutation (figure 9): fill the slots of pre-empted (`struck`) jobs with other jobs.

    Slots that the other jobs cannot use return to the pre-empted jobs (eq. 4). `genes` must be
    within limits. `left` is the remaining work Y, shape (K, J).
    """
    if not len(problem.jobs):
        return genes
    job = np.maximum(genes, 0).astype(np.int64)
    gone = (genes != IDLE) & np.take_along_axis(struck, job, axis=1)
    emptied = np.where(gone, IDLE, genes).astype(np.int16)
    return filled(filled(emptied, problem, left, struck), problem, left)


def reordered(genes: Genes, how: Literal["flat", "aligned"]) -> Genes:
    """Reorder (figure 10): put the slots of each job next to each other, and idle slots at the end.

    `flat` is the paper's order, by first occurrence of the jobs. `aligned` orders jobs by arrival,
    so that a slot has the same job in most candidates. The placer then chooses the real slots,
    aligned to nodes and with few moves.
    """
    if how == "aligned":
        last = np.iinfo(np.int16).max
        found = np.sort(np.where(genes == IDLE, last, genes), axis=1)
        return np.where(found == last, IDLE, found).astype(np.int16)
    order = np.argsort(_first_places(genes), axis=1, kind="stable")
    return np.take_along_axis(genes, order, axis=1)


def _first_places(genes: Genes) -> Genes:
    """Return, for each slot, the first slot of its job, shape (K, G); G if the slot is idle."""
    many, width = genes.shape
    top = int(genes.max(initial=0)) + 1
    first = np.full((many, top + 1), width, dtype=np.int16)
    rows = np.arange(many)[:, None]
    places = np.arange(width - 1, -1, -1)
    first[rows, genes[:, ::-1]] = places  # the last write wins, which is the first slot
    first[:, IDLE] = width
    return np.asarray(first[rows, genes])


def carried_over(genes: Genes, before: PaperProblem, after: PaperProblem) -> Genes:
    """Return the candidates of one view in the rows and columns of the next (part (1) of refresh).

    Slots of ended jobs become idle. A slot that was not in play gets its present job.
    """
    rows = {job.job: row for row, job in enumerate(after.jobs)}
    former = [rows.get(job.job, IDLE) for job in before.jobs]
    renamed = np.array([*former, IDLE], dtype=np.int16)  # the last entry is IDLE
    columns: dict[SlotId, int] = {slot: place for place, slot in enumerate(before.slots)}
    source = np.array([columns.get(slot, -1) for slot in after.slots], dtype=np.int64)
    found = np.tile(after.present, (len(genes), 1))
    known = source >= 0
    found[:, known] = renamed[genes[:, source[known]]]
    return found


def different(genes: Genes) -> Genes:
    """Return the distinct candidates in the order of their first occurrence."""
    if not genes.size:
        return genes[:1]
    seen: dict[bytes, int] = {}
    for place, row in enumerate(genes):
        seen.setdefault(row.tobytes(), place)
    return genes[list(seen.values())]


def slots_by_job(problem: PaperProblem, best: Genes) -> dict[JobId, list[SlotId]]:
    """Return the slots of each job in the candidate `best`; jobs without slots are missing."""
    found: dict[JobId, list[SlotId]] = {}
    for place, row in enumerate(best.tolist()):
        if row != IDLE:
            found.setdefault(problem.jobs[row].job, []).append(problem.slots[place])
    return found
