"""What users ask: answered from what is durable, with what workers said last filled in."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from controlplane.core.model.job import Job
from controlplane.core.state import State
from controlplane.core.totals import Totals
from controlplane.journal.job_records import JobRecords
from controlplane.service.client_api import replies, sweep_replies
from controlplane.service.client_api.job_choice import job_rows
from controlplane.service.client_api.pages import numbered, page_of
from controlplane.service.client_api.policy_notes import PolicyNotes
from controlplane.service.client_api.views import View
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.event_feed import EventFeed
from controlplane.service.job_owners import JobOwners
from controlplane.service.long_polls import deadline_of
from controlplane.service.planner.plan_exchange import PlanExchange
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.ids import JobId
from schemas.link import Identity
from schemas.messages import Message
from schemas.messages.client import (
    EventsPage,
    ExplainJob,
    Explanation,
    GetJob,
    GetLedger,
    GetSweep,
    JobDetail,
    Jobs,
    JobSummary,
    ListJobs,
    ListNodes,
    Nodes,
    ReadEvents,
    SweepDetail,
    WaitJob,
)

MAX_EVENTS: Final = 1000
MAX_HIDDEN_PAGES: Final = 20  # of events that may not be seen, until an answer without any


class ReadRequests:
    """Requests that change nothing.

    Nothing is told that a crash could take back: every answer is made of the committed state, which
    goes on while nothing can become durable.

    Args:
        notes: what the policy of this cluster lacks of jobs.
    """

    def __init__(
        self,
        *,
        commit_loop: CommitLoop,
        plans: PlanExchange,
        feed: EventFeed,
        telemetry: TelemetryTable,
        notes: PolicyNotes,
        owners: JobOwners,
    ) -> None:
        self._commit_loop = commit_loop
        self._plans = plans
        self._feed = feed
        self._telemetry = telemetry
        self.notes = notes
        self._owners = owners

    @property
    def _state(self) -> State:
        return self._commit_loop.committed.state

    @property
    def _totals(self) -> Totals:
        return self._commit_loop.committed.totals

    async def answer(self, request: Message, who: Identity) -> Message | None:
        """What is known; None if the request is none of these.

        Raises:
            OnesError: if it cannot be answered.
        """
        view = self.view(who)
        match request:
            case ListJobs():
                return self._jobs(request, view)
            case GetJob(job=name, wait_s=wait_s, cursor=cursor):
                return self.detail(await self._when_ended(name, wait_s), view, cursor)
            case WaitJob(job=name, wait_s=wait_s):
                job = await self._when_ended(name, wait_s)
                return replies.job_state(job, view.text(self._summary(job).reason))
            case ExplainJob():
                return view.explanation(self._explain(request))
            case ListNodes(cursor=cursor):
                lists, following = page_of({"nodes": replies.node_rows(self._state)}, cursor)
                return Nodes(nodes=tuple(map(view.node, lists["nodes"])), next=following)
            case GetSweep():
                return view.sweep(self._sweep(request))
            case GetLedger(job=name):
                return sweep_replies.ledger(self._commit_loop.job(name), self._past(name), request)
            case ReadEvents():
                return await self._events(request, view)
        return None

    def view(self, who: Identity) -> View:
        """What somebody may know."""
        return View(who, self._owners.of)

    def _sweep(self, request: GetSweep) -> SweepDetail:
        job = self._commit_loop.job(request.job)
        sweep_replies.sweep_of(job)
        past = self._past(job.job)
        now, reason = self._commit_loop.now(), self._plans.reason(job.job)
        summary = replies.job_summary(job, reason, self._telemetry, now)
        return sweep_replies.sweep_detail(job, past, summary, request, now)

    def _past(self, name: JobId) -> sweep_replies.Past:
        if name in self._state.jobs:
            return self._totals.sweep_of(name)
        return self._commit_loop.reader.sweeps

    async def _when_ended(self, name: JobId, wait_s: float) -> Job:
        """The job when it has ended, or the wait is over."""
        job, deadline = self._commit_loop.job(name), deadline_of(wait_s)
        while not job.ended and (left := deadline - _clock()) > 0:
            await self._feed.wait(left)
            job = self._commit_loop.job(name)
        return job

    async def _events(self, request: ReadEvents, view: View) -> EventsPage:
        """The next of them that may be seen; looks through many that may not before it answers."""
        first, deadline = max(1, request.from_seq), deadline_of(request.wait_s)
        limit = max(1, min(request.limit, MAX_EVENTS))
        for _ in range(MAX_HIDDEN_PAGES):
            while self._feed.last_seq < first and (left := deadline - _clock()) > 0:
                await self._feed.wait(left)
            events = self._commit_loop.reader.feed(first, limit)
            events = tuple(event for event in events if event.seq <= self._feed.last_seq)
            page = page_of({"events": numbered(list(events))}, "")[0]["events"]
            if not page:
                break
            first = page[-1].seq + 1
            if seen := tuple(one for event in page if (one := view.event(event)) is not None):
                return EventsPage(events=seen, next_seq=first)
            await asyncio.sleep(0)
        return EventsPage(events=(), next_seq=first)

    def _jobs(self, request: ListJobs, view: View) -> Jobs:
        state, ended = self._state, self._commit_loop.reader.ended
        rows = job_rows(
            state, ended, request, lambda job: view.summary(self._summary(job)), view.sees
        )
        lists, following = page_of({"jobs": rows}, request.cursor)
        return Jobs(jobs=lists["jobs"], left_out=int(bool(following)), next=following)

    def _summary(self, job: Job) -> JobSummary:
        return replies.job_summary(
            job,
            self._plans.reason(job.job),
            self._telemetry,
            self._commit_loop.now(),
            predicted_loss=self._plans.predicted_loss.get(job.job),
        )

    def detail(self, job: Job, view: View, cursor: str = "") -> JobDetail:
        """Everything about a job, a page.

        Args:
            view: of who asks, who may know of it.

        Raises:
            BadFieldError: if the cursor is none of this job's.
        """
        reason = self._plans.reason(job.job)
        records, now = self._commit_loop.records, self._commit_loop.now()
        predicted = self._plans.predicted_loss.get(job.job)
        detail = replies.job_detail(
            job,
            records,
            reason,
            self._telemetry,
            now,
            predicted_loss=predicted,
            cursor=cursor,
        )
        notes = (
            *self.notes.of(job, detail.summary.train_loss),
            *_not_told(records, job.job),
        )
        return view.detail(msgspec.structs.replace(detail, notes=notes), job.owner)

    def _explain(self, request: ExplainJob) -> Explanation:
        job = self._commit_loop.job(request.job)
        reason = self._plans.reason(job.job)
        records, now = self._commit_loop.records, self._commit_loop.now()
        told = replies.job_explanation(job, records, reason, now, request.cursor)
        notes = () if request.cursor else _not_told(records, job.job)
        return msgspec.structs.replace(told, notes=notes)


def _not_told(records: JobRecords, job: JobId) -> tuple[str, ...]:
    """Notes about what of a job's past is gone."""
    return (*_dropped(records, job), *_damage(records, job))


def _dropped(records: JobRecords, job: JobId) -> tuple[str, ...]:
    """A note about what is not kept of a job's past, if there is anything."""
    dropped = ", ".join(f"{rows} of {name}" for name, rows in sorted(records.dropped(job).items()))
    return (f"older records are not kept: {dropped} (keep_records)",) if dropped else ()


def _damage(records: JobRecords, job: JobId) -> tuple[str, ...]:
    """A note about what could not be read of a job's past, if there is anything."""
    damaged = records.damage_of(job)
    if not damaged:
        return ()
    more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    return (f"left out, as damaged in the journal: {damaged[0]}{more} (`ones admin check`)",)


def _clock() -> float:
    return asyncio.get_running_loop().time()
