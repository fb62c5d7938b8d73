"""Policy `ones-paper`: the search of the ONES paper."""

from __future__ import annotations

from numpy.random import Generator, default_rng

from controlplane.policy.api import Budget, ClusterView, JobView, Plan
from controlplane.policy.ones_paper.candidate_scores import mean_draw, work_left
from controlplane.policy.ones_paper.evolution import EvolutionarySearch, slots_by_job
from controlplane.policy.ones_paper.job_estimates import PaperEstimates
from controlplane.policy.ones_paper.problem import PaperProblem, ProblemBuilder
from controlplane.policy.options import OnesPaperOptions
from controlplane.policy.placement.free_slots import Placer
from controlplane.policy.placement.slot_partition import (
    Partition,
    compose_plan,
    partition_of,
    slots_in_words,
    split,
)
from controlplane.policy.search.search_loop import SearchPolicy
from schemas.ids import JobId, Seconds, SlotId


class OnesPaper(SearchPolicy[PaperProblem]):
    """Policy that evolves schedules, i.e. the job on each slot, and plans the best one.

    Each ambiguity of the paper is an option, and one of its values is the literal reading.
    """

    def __init__(self, options: OnesPaperOptions | None = None) -> None:
        self.options = options or OnesPaperOptions()
        self._estimates = PaperEstimates(self.options)
        self._builder = ProblemBuilder(self._estimates, self.options)
        self._search = EvolutionarySearch(self.options)
        self._placer = Placer()
        super().__init__(self._estimates, self._search)

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """Fit the progress model to finished jobs, then evolve as the base class does."""
        self._estimates.learn(rng)
        return super().improve(view, budget, rng, now)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return S* where the gates are open, with a reason for every job that changes or waits."""
        problem = self._current_problem(view, now)
        partition = partition_of(view, now)
        rows = {job.job: row for row, job in enumerate(problem.jobs)}
        best = self._search.best
        if best is None or problem.held:
            placed = {job.job: dict(job.running_on) for job in partition.running}
        else:
            slots = self._slots(partition, problem, slots_by_job(problem, best))
            placed = {
                name: _local_batches(view.jobs[name], problem, rows.get(name), chosen)
                for name, chosen in slots.items()
            }
        left = work_left(problem, mean_draw(problem))[:, 0]

        def why(job: JobView, many: int) -> tuple[str, dict[str, float]]:
            row = rows[job.job]
            return _reason(job, problem, row, float(left[row]), many)

        opens_at = min((at for at in problem.opens_at if at > now), default=None)
        return compose_plan(partition, placed, why, wake_at=opens_at)

    def _build_problem(self, view: ClusterView, now: Seconds) -> PaperProblem:
        problem = self._builder.build(view, now)
        self._search.update(problem, default_rng((self.options.seed, view.version)))
        return problem

    def _next_change(
        self, problem: PaperProblem, view: ClusterView, now: Seconds
    ) -> Seconds | None:
        wake_at = partition_of(view, now).wake_at
        times = [at for at in (*problem.opens_at, wake_at) if at is not None and at > now]
        return min(times, default=None)

    def _slots(
        self, partition: Partition, problem: PaperProblem, chosen: dict[JobId, list[SlotId]]
    ) -> dict[JobId, list[SlotId]]:
        """Return the slots that each job gets in the best candidate; gated jobs keep theirs."""
        kept = {
            job.job: list(job.running_on) for job in partition.running if job.job in problem.gated
        }
        if self.options.reorder == "flat":
            return kept | {
                name: slots
                for name, slots in chosen.items()
                if _reachable(partition.view.jobs[name], slots)
            }
        sizes = {name: len(slots) for name, slots in (kept | chosen).items()}
        largest_first = dict(sorted(sizes.items(), key=lambda entry: -entry[1]))
        return self._placer.place(partition, largest_first)


def _reachable(job: JobView, slots: list[SlotId]) -> bool:
    """True unless the job would move and has fewer samples than old and new slots together.

    While a group moves, it trains on both.
    """
    both = job.running_on.keys() | set(slots)
    moves = len(both) > len(job.running_on) and len(both) > len(slots)
    return not moves or len(both) <= job.batch_limit


def _local_batches(
    job: JobView, problem: PaperProblem, row: int | None, slots: list[SlotId]
) -> dict[SlotId, int]:
    """Return local batches; the present ones if the job is gated or keeps slots and batch."""
    if row is None:
        return dict(job.running_on)
    batch = int(problem.batches[row, len(slots)])
    if set(slots) == job.running_on.keys() and batch == sum(job.running_on.values()):
        return dict(job.running_on)
    return split(batch, slots)


def _reason(
    job: JobView, problem: PaperProblem, row: int, left: float, many: int
) -> tuple[str, dict[str, float]]:
    """Return the text and the numbers of the reason for a job's size."""
    share = problem.alpha[row] / (problem.alpha[row] + problem.beta[row])
    numbers = {
        "batch_now": float(sum(job.running_on.values())),
        "batch_then": float(problem.batches[row, many]) if many else 0.0,
        "batch_limit": float(problem.limits[row]),
        "progress": float(share),
        "samples_left": left,
    }
    if not many:
        if problem.held:
            return "the schedule changes when all running jobs have finished an epoch", numbers
        if problem.most[row] < problem.least[row]:
            text = f"its batch limit of {problem.limits[row]} allows no slot"
            return text, numbers
        return "the best schedule that was found gives all slots to other jobs", numbers
    rate = float(problem.rates[row, many, 0])
    if rate > 0:
        numbers["utilization_s"] = left / rate * many  # T c of eq. 8
    text = f"batch {int(problem.batches[row, many])} of at most {problem.limits[row]}"
    return f"{text}, {100 * share:.0f}% done on {slots_in_words(many)}", numbers
