"""Which jobs a list is asked for: those in the state, and those that have left it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from heapq import merge
from typing import Final

from controlplane.core.model.job import Job, JobOwner, number_of
from controlplane.core.state import State
from controlplane.journal.ended_jobs import EndedJob, EndedJobs
from controlplane.journal.record import JournalError
from controlplane.service.client_api.pages import Rows
from schemas.errors import BadFieldError
from schemas.ids import JobId, Seconds
from schemas.jobs import ENDED, STATES
from schemas.messages.client import JobSummary, ListJobs

MAX_PATTERN: Final = 200  # characters; one of millions would be looked at for minutes
Found = tuple[int, int, Callable[[], JobSummary]]  # number, and which come first of the same
DAMAGED: Final = "its row in the journal is damaged: `ones admin check`"


def job_rows(
    state: State,
    ended: EndedJobs,
    request: ListJobs,
    summary: Callable[[Job], JobSummary],
    sees: Callable[[JobOwner], bool] = lambda _: True,
) -> Rows:
    """The lines of `ones ps`, oldest first; their positions are the numbers of jobs.

    Args:
        state: the core's, which is only read.
        sees: whether who asks may know of somebody's jobs.

    Raises:
        BadFieldError: if one of its states is none, or its pattern is too long to look at.
    """
    if len(request.name) > MAX_PATTERN:
        what = f"name: a pattern of {len(request.name)} characters, at most {MAX_PATTERN}"
        raise BadFieldError(what, "names of jobs have fewer", "name")
    for wanted in request.states:
        if wanted not in STATES:
            raise BadFieldError(
                f"no job is ever {wanted!r}", f"one of {', '.join(STATES)}", "state"
            )
    every = request.ended or not ENDED.isdisjoint(request.states)
    any_will_do = not (request.states or request.user or request.name)

    def here(after: int) -> Iterator[Found]:
        for job in state.jobs.values() if every else map(state.jobs.__getitem__, state.active):
            if (number := number_of(job.job)) <= after or not sees(job.owner):
                continue
            names = job.job, job.spec.name, job.user
            if any_will_do or _is_asked_for(request, *names, job.phase.value):
                yield number, 0, partial(summary, job)

    def behind(after: int) -> Iterator[tuple[int, JobSummary]]:
        left = _left(ended, request, after, summary, sees) if every else ()
        for number, _, read in merge(here(after), left):
            yield number, read()

    return Rows(behind, state.jobs_accepted)


def _left(
    ended: EndedJobs,
    request: ListJobs,
    after: int,
    summary: Callable[[Job], JobSummary],
    sees: Callable[[JobOwner], bool],
) -> Iterator[Found]:
    for job in ended.behind(after):
        asked_for = _is_asked_for(request, job.job, job.name, job.user, job.state)
        if asked_for and sees(job.owner()):
            yield job.number, 1, partial(_summary_of, job, summary)


def _summary_of(ended: EndedJob, summary: Callable[[Job], JobSummary]) -> JobSummary:
    """Of a damaged row no more than what lists are chosen by."""
    try:
        job = ended.read()
    except JournalError:
        return JobSummary(
            job=ended.job, name=ended.name, user=ended.user, state=ended.state, reason=DAMAGED,
            slots=0, global_batch=0, lr=None, epoch=0, samples_per_s=0.0, progress=None,
            train_loss=None, metrics={}, submitted_at=Seconds(0.0), queued_s=Seconds(0.0),
            running_s=Seconds(0.0), rescales=0, batch_changes=0,
        )  # fmt: skip
    return summary(job)


def _is_asked_for(request: ListJobs, job: JobId, name: str, user: str, state: str) -> bool:
    return (
        (not request.states or state in request.states)
        and request.user in ("", user)
        and (not request.name or fnmatchcase(name, request.name) or fnmatchcase(job, request.name))
    )
