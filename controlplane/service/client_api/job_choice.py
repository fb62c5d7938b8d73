"""Which jobs a list is asked for: those in the state, and those that have left it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from heapq import merge

from controlplane.core.model.job import Job, number_of
from controlplane.core.state import State
from controlplane.journal.ended_jobs import EndedJobs
from controlplane.service.client_api.pages import Rows
from schemas.errors import BadFieldError
from schemas.ids import JobId
from schemas.jobs import ENDED, STATES
from schemas.messages.client import JobSummary, ListJobs

Found = tuple[int, int, Callable[[], Job]]  # number, and which come first of the same


def job_rows(
    state: State, ended: EndedJobs, request: ListJobs, summary: Callable[[Job], JobSummary]
) -> Rows:
    """The lines of `ones ps`, oldest first; their positions are the numbers of jobs.

    Args:
        state: the core's, which is only read.
        ended: jobs that have left it.
        request: which ones.
        summary: the line of a job.

    Raises:
        BadFieldError: if one of its states is none.
    """
    for wanted in request.states:
        if wanted not in STATES:
            raise BadFieldError(
                f"no job is ever {wanted!r}", f"one of {', '.join(STATES)}", "state"
            )
    every = request.ended or not ENDED.isdisjoint(request.states)
    jobs = state.jobs.values() if every else (state.jobs[name] for name in state.active)
    here = [
        (number_of(job.job), job)
        for job in jobs
        if _is_asked_for(request, job.job, job.spec.name, job.user, job.phase.value)
    ]

    def behind(after: int) -> Iterator[tuple[int, JobSummary]]:
        found = merge(_here(here, after), _left(ended, request, after) if every else ())
        for number, _, read in found:
            yield number, summary(read())

    return Rows(behind, state.jobs_accepted)


def _here(jobs: list[tuple[int, Job]], after: int) -> Iterator[Found]:
    for number, job in jobs:
        if number > after:
            yield number, 0, partial(_itself, job)


def _itself(job: Job) -> Job:
    return job


def _left(ended: EndedJobs, request: ListJobs, after: int) -> Iterator[Found]:
    for job in ended.behind(after):
        if _is_asked_for(request, job.job, job.name, job.user, job.state):
            yield job.number, 1, job.read


def _is_asked_for(request: ListJobs, job: JobId, name: str, user: str, state: str) -> bool:
    return (
        (not request.states or state in request.states)
        and request.user in ("", user)
        and (not request.name or fnmatchcase(name, request.name) or fnmatchcase(job, request.name))
    )
