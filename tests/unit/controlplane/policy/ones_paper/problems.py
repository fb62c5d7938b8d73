"""Problems of the paper's search, made by hand: jobs are rows 0, 1, ..., slots are columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from controlplane.policy.api import EpochSeen, JobView, PolicyEvent
from controlplane.policy.ones_paper.job_estimates import PaperEstimates
from controlplane.policy.ones_paper.problem import IDLE, Genes, PaperProblem, ProblemBuilder
from controlplane.policy.options import IMPROVED, OnesPaperOptions
from controlplane.prediction import FloatArray
from schemas.ids import JobId, NodeId, Seconds, slot_id
from tests.support.builders import A, job_view
from tests.support.views import NOW, row_of, view_of

PER_NODE = 4


def genes(*rows: Sequence[int]) -> Genes:
    """Candidates, written as jobs from 1 on, as in the paper's figures; 0 is idle."""
    return np.array(rows, dtype=np.int16).reshape(len(rows), -1) - 1


def shown(found: Genes) -> list[list[int]]:
    """Candidates as `genes` takes them."""
    return [[int(job) + 1 for job in row] for row in found]


def a_problem(
    *,
    present: Sequence[int],
    most: Sequence[int],
    least: Sequence[int] | None = None,
    rates: Sequence[Sequence[float]] | None = None,
    left: Sequence[float] | None = None,
    new: Sequence[int] = (),
    served_s: Sequence[float] | None = None,
    spread: float = 1.0,
    local: int = 8,
    start_s: float = 10.0,
) -> PaperProblem:
    """A problem.

    Args:
        present: the job on each slot, from 1 on; 0 is idle.
        most: slots within R, of each job.
        least: slots, of each job; 1.
        rates: X of each job on 1, 2, ... slots, samples/s; as many as slots.
        left: Y of each job, samples; 1000.
        new: jobs, from 1 on, that never had a slot.
        served_s: T_processed of each job.
        spread: share of X that is left on more nodes than necessary.
        local: batch of one slot.
        start_s: what a start takes.
    """
    jobs, width = len(most), max(max(most, default=0), len(present))
    slots = np.arange(width + 1, dtype=np.float64)
    table: FloatArray = np.tile(slots, (jobs, 1))
    for row, values in enumerate(rates or []):
        table[row] = 0.0
        table[row, 1 : 1 + len(values)] = values[:width]
    now = genes(list(present))[0] if present else np.zeros(0, dtype=np.int16)
    return PaperProblem(
        jobs=tuple(job_view(JobId(f"j-{row + 1}")) for row in range(jobs)),
        slots=tuple(
            slot_id(NodeId(f"n{place // PER_NODE}"), place % PER_NODE)
            for place in range(len(present))
        ),
        nodes=np.arange(len(present)) // PER_NODE,
        present=now,
        size=np.array([(now == row).sum() for row in range(jobs)], dtype=np.int64),
        least=np.array(least or [1] * jobs, dtype=np.int64),
        most=np.array(most, dtype=np.int64),
        batches=np.tile(np.arange(width + 1) * local, (jobs, 1)),
        rates=np.stack([table, spread * table], axis=2),
        done=np.full(jobs, 1000.0),
        exact=np.array(left or [1000.0] * jobs, dtype=np.float64),
        alpha=np.full(jobs, 5.0),
        beta=np.full(jobs, 5.0),
        served_s=np.array(served_s or [100.0] * jobs, dtype=np.float64),
        start_s=np.full(jobs, start_s),
        new=np.array([row + 1 in new for row in range(jobs)], dtype=np.bool_),
        limits=np.array(most, dtype=np.int64) * local,
        gated=(),
        opens_at=(),
        held=False,
    )


@st.composite
def any_problem(draw: st.DrawFn) -> PaperProblem:
    """Up to six jobs on up to twelve slots, of which some run, whatever R says of that."""
    jobs, slots = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    least = [draw(st.integers(1, 3)) for _ in range(jobs)]
    most = [draw(st.sampled_from([0, few, few + 1, few + 5])) for few in least]
    return a_problem(
        present=[draw(st.integers(0, jobs)) for _ in range(slots)],
        most=most,
        least=least,
        rates=[
            [draw(st.floats(0.5, 2.0)) * many**0.8 for many in range(1, 13)] for _ in range(jobs)
        ],
        left=[draw(st.floats(1.0, 1e5)) for _ in range(jobs)],
        new=[row for row in range(1, jobs + 1) if draw(st.booleans())],
        served_s=[draw(st.floats(0.0, 1e3)) for _ in range(jobs)],
        spread=draw(st.sampled_from([1.0, 0.5])),
    )


def idle(found: Genes) -> int:
    """How many slots of all candidates are idle."""
    return int((found == IDLE).sum())


# --- views and what is made of them

SLOTS = row_of(4, 4)
NAMES = [slot.slot for slot in SLOTS]


def warm_job(job: JobId = A, on: int = 0, first: int = 0, **changes: Any) -> JobView:
    """A warm job with a first batch of 64, of which each slot can hold 256."""
    view = job_view(
        job, slots=(1, 8), family="f", batch_size=64, batch_limit=1024, local_limit=256, start_s=5.0
    )
    held = dict.fromkeys(NAMES[first : first + on], 64 // max(on, 1))
    usual: dict[str, Any] = {"epoch": 1, "epoch_samples": 1000, "samples_done": 1000}
    return msgspec.structs.replace(view, running_on=held, **{**usual, **changes})


def seen(slots: int = 1, batch: int = 64, rate: float = 100.0, job: JobId = A) -> EpochSeen:
    return EpochSeen(job=job, family="f", slots=slots, nodes=1, global_batch=batch,
                     samples_per_s=rate, whole=True, epoch=1, train_loss=1.0)  # fmt: skip


def problem_of(
    *jobs: JobView, events: tuple[PolicyEvent, ...] = (), now: float = NOW, **options: Any
) -> PaperProblem:
    """What is made of a view after `events`."""
    chosen = OnesPaperOptions(**{**IMPROVED, "gate": "off", **options})
    estimates = PaperEstimates(chosen)
    builder = ProblemBuilder(estimates, chosen)
    view = view_of(SLOTS, *jobs)
    estimates.update(view.jobs.values(), Seconds(0.0), contended=False)
    for event in events:
        estimates.observe(event, Seconds(now))
    return builder.build(view, Seconds(now))
