"""Requests that only read. Replies are made from the committed state and the latest telemetry."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from heapq import merge
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from controlplane.core.history import slots_used
from controlplane.core.inputs import PolicyChosen
from controlplane.core.model.job import Job, JobOwner, number_of
from controlplane.core.state import State, Totals
from controlplane.journal.database import JournalError, open_for_reading
from controlplane.journal.ended import EndedJob, EndedJobs, usage_between
from controlplane.journal.records import JobRecords
from controlplane.policy.api import Reason
from controlplane.policy.sharing.start_times import Present, expected_start
from controlplane.service.api import replies, sweep_replies
from controlplane.service.api.fair_queue import deadline_of
from controlplane.service.api.replies import PolicyNotes, account_shares
from controlplane.service.api.views import Rows, View, numbered, page_of, parse_cursor
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.event_feed import EventFeed
from controlplane.service.planner.plan_coordinator import PlanCoordinator
from controlplane.service.rights import JobOwners, projects_of
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.errors import BadFieldError, UnavailableError
from schemas.ids import JobId, Seconds
from schemas.jobs import ENDED, STATES
from schemas.sharing import Sharing
from schemas.transport.keys import Identity
from schemas.wire import client as wire

MAX_PATTERN: Final = 200  # characters; matching millions of characters would take minutes
NEWEST: Final = 10**15  # above any number of a job
FoundRow = tuple[int, int, Callable[[], wire.JobSummary]]  # position, order if equal, row
DAMAGED_REASON: Final = "its row in the journal is damaged: run `ones admin check`"


def job_rows(
    state: State,
    ended: EndedJobs,
    request: wire.ListJobs,
    summary: Callable[[Job], wire.JobSummary],
    sees: Callable[[JobOwner], bool] = lambda _: True,
    *,
    now: Seconds,
) -> Rows:
    """Return the rows of `ones ps`, in the order of the jobs' numbers or in the reverse order.

    Raises:
        BadFieldError: if a requested state is unknown, or the pattern is too long.
    """
    if len(request.name) > MAX_PATTERN:
        what = f"name: pattern of {len(request.name)} characters exceeds {MAX_PATTERN}"
        raise BadFieldError(what, "shorten it", "name")
    for wanted in request.states:
        if wanted not in STATES:
            raise BadFieldError(
                f"unknown state {wanted!r}", f"use one of {', '.join(STATES)}", "state"
            )
    include_ended = request.ended or not ENDED.isdisjoint(request.states)
    unfiltered = not (request.states or request.user or request.name)
    unsubmitted = not (request.labels or request.older_s)
    newest, before = request.newest_first, now - request.older_s

    def was_submitted_so(at: Seconds, labels: Mapping[str, str]) -> bool:
        old = not request.older_s or at <= before
        return old and request.labels.items() <= labels.items()

    def present_rows(after: int) -> Iterator[FoundRow]:
        names = state.jobs if include_ended else state.active
        for name in reversed(names) if newest else names:
            job = state.jobs[name]
            if (at := _position(name, newest=newest)) <= after or not sees(job.owner):
                continue
            if not was_submitted_so(job.submitted_at, job.spec.stated_labels):
                continue
            texts = job.job, job.spec.name, job.user
            if unfiltered or _matches(request, *texts, replies.shown_state(job)):
                yield at, 0, partial(summary, job)

    def departed_rows(after: int) -> Iterator[FoundRow]:
        for job in ended.before(NEWEST - after) if newest else ended.after(after):
            asked_for = _matches(request, job.job, job.name, job.user, job.state)
            if not asked_for or not sees(job.owner()):
                continue
            if unsubmitted or was_submitted_so(*job.submission()):
                yield _position(job.job, newest=newest), 1, partial(_summary_of, job, summary)

    def rows_after(after: int) -> Iterator[tuple[int, wire.JobSummary]]:
        rows = merge(present_rows(after), departed_rows(after) if include_ended else ())
        # A job that is just leaving may be both in the state and in the table.
        once = (next(same) for _, same in groupby(rows, key=itemgetter(0)))
        most = min(request.limit, sys.maxsize) if request.limit > 0 else None
        for at, _, read in islice(once, most):
            yield at, read()

    return Rows(rows_after, NEWEST if newest else state.jobs_accepted)


def _position(job: JobId, *, newest: bool) -> int:
    """Return the position of a job's row, which does not change when jobs are accepted."""
    return NEWEST - number_of(job) if newest else number_of(job)


def _summary_of(ended: EndedJob, summary: Callable[[Job], wire.JobSummary]) -> wire.JobSummary:
    """Return the summary of an ended job. If its row is damaged, fill only the filtered fields."""
    try:
        job = ended.read()
    except JournalError:
        return wire.JobSummary(
            job=ended.job, name=ended.name, user=ended.user, state=ended.state,
            reason=DAMAGED_REASON, slots=0, global_batch=0, lr=None, epoch=0,
            samples_per_s=0.0, progress=None, train_loss=None, metrics={},
            submitted_at=Seconds(0.0), queued_s=Seconds(0.0), running_s=Seconds(0.0),
            rescales=0, batch_changes=0,
        )  # fmt: skip
    return summary(job)


def _matches(request: wire.ListJobs, job: JobId, name: str, user: str, state: str) -> bool:
    return (
        (not request.states or state in request.states)
        and request.user in ("", user)
        and (not request.name or fnmatchcase(name, request.name) or fnmatchcase(job, request.name))
    )


def _stored_usage(
    journal: Path, since: Seconds, until: Seconds, held: Mapping[int, Seconds], after: int
) -> dict[int, wire.JobUsage]:
    """Read the usage of a long time on a connection of its own, outside of the event loop."""
    with contextlib.closing(open_for_reading(journal)) as database:
        return usage_between(database, since, until, held=held, after=after, most=MAX_USAGE_JOBS)


MAX_USAGE_JOBS: Final = 5000  # of which a page is made
MAX_EVENTS: Final = 1000
PREDICTION_S: Final = 0.6  # after which a prediction of a start uses the draws that it has
MAX_HIDDEN_PAGES: Final = 20  # pages of invisible events to skip before an empty reply


MAX_PLANNED: Final = 200  # jobs of the latest plan in a reply


@dataclass(kw_only=True, eq=False)
class ReadRequests:
    """Handlers of requests that change nothing.

    Every reply is made from the committed state, so that a crash cannot make the reply wrong.
    Reading also continues while nothing can become durable.
    """

    commit_loop: CommitLoop
    plans: PlanCoordinator
    feed: EventFeed
    telemetry: TelemetryTable
    notes: PolicyNotes
    owners: JobOwners
    _predicting: set[str] = field(default_factory=set)  # users
    _one_prediction: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def _state(self) -> State:
        return self.commit_loop.committed.state

    @property
    def _totals(self) -> Totals:
        return self.commit_loop.committed.totals

    def sharing(self, _: wire.GetSharing, who: Identity) -> wire.SharingInfo:
        """Return the rules of sharing, and the accounts that the reader may see."""
        state, view = self._state, self.view(who)
        rules = state.sharing or Sharing()
        rows = account_shares(state, rules, self.plans.budgets, self.commit_loop.now())
        seen = tuple(
            row
            for row in rows
            if view.sees(JobOwner(row.user, row.project)) or row.user == who.name
        )
        return wire.SharingInfo(
            sharing=rules,
            slots=len(state.slot_index.slots()),
            accounts=seen,
            paused=state.scheduling_paused,
        )

    def search(self, info: wire.SearchInfo, who: Identity) -> wire.SearchInfo:
        """Return the statistics of the scheduler with the latest plan for jobs that `who` sees."""
        plan, jobs, view = self.plans.latest, self._state.jobs, self.view(who)
        if plan is None:
            return info
        seen = (
            (job, reason)
            for name, reason in plan.reasons.items()
            if (job := jobs.get(name)) is not None and not job.ended and view.sees(job.owner)
        )
        planned = tuple(
            replies.planned_job(job, plan.local_batch.get(job.job, {}), reason)
            for job, reason in islice(seen, MAX_PLANNED)
        )
        return msgspec.structs.replace(info, planned=planned, planned_at=self.plans.latest_at)

    def policy(self, _: wire.GetPolicy, _who: Identity) -> wire.PolicyInfo:
        """Return the policy that plans, and who chose it."""
        state = self._state
        chosen = state.policy or PolicyChosen(name="")
        return wire.PolicyInfo(
            name=chosen.name,
            options=msgspec.json.encode(chosen.options).decode(),
            by=chosen.user,
            since=state.policy_since,
            in_file="" if state.policy_file is None else state.policy_file.name,
        )

    def view(self, who: Identity) -> View:
        """Return the view of the state that `who` may read."""
        return View(who, self.owners.of)

    async def job(self, request: wire.GetJob, who: Identity) -> wire.JobDetail:
        """Return a page of a job once the job has ended, or after `request.wait_s` seconds."""
        job = await self._when_ended(request.job, request.wait_s)
        return self.detail(job, self.view(who), request.cursor)

    async def job_state(self, request: wire.WaitJob, who: Identity) -> wire.JobState:
        """Return the state of a job once the job has ended, or after `request.wait_s` seconds.

        With `request.failures`, also return the state once more tries have failed.
        """
        job = await self._when_ended(request.job, request.wait_s, request.failures)
        return wire.JobState(
            job=job.job,
            state=replies.shown_state(job),
            reason=self.view(who).text(self._summary(job).reason),
            exit_code=job.attempts.exit_code,
            failures=job.attempts.failures,
            failure=self.view(who).text(job.attempts.last_failure),
        )

    def nodes(self, request: wire.ListNodes, who: Identity) -> wire.Nodes:
        """Return a page of all nodes."""
        lists, following = page_of({"nodes": replies.node_rows(self._state)}, request.cursor)
        return wire.Nodes(nodes=tuple(map(self.view(who).node, lists["nodes"])), next=following)

    def sweep(self, request: wire.GetSweep, who: Identity) -> wire.SweepDetail:
        """Return the state of a sweep with a page of its trials."""
        job = self.commit_loop.job(request.job)
        sweep_replies.sweep_of(job)
        past = self._past(job.job)
        summary, now = self._summary(job), self.commit_loop.now()
        return self.view(who).sweep(sweep_replies.sweep_detail(job, past, summary, request, now))

    def ledger(self, request: wire.GetLedger, who: Identity) -> wire.Ledger:
        """Return a page of the units of work that a sweep has recorded."""
        job = self.commit_loop.job(request.job)
        reply = sweep_replies.ledger(job, self._past(request.job), request)
        return self.view(who).ledger(reply, job.owner)

    def _past(self, name: JobId) -> sweep_replies.SweepPast:
        if name in self._state.jobs:
            return self._totals.sweep_of(name)
        return self.commit_loop.reader.sweeps

    async def _when_ended(self, name: JobId, wait_s: float, failures: int | None = None) -> Job:
        job, deadline = self.commit_loop.job(name), deadline_of(wait_s)
        most = math.inf if failures is None else failures
        while not job.ended and job.attempts.failures <= most and (left := deadline - _clock()) > 0:
            await self.feed.wait(left)
            job = self.commit_loop.job(name)
        return job

    async def events(self, request: wire.ReadEvents, who: Identity) -> wire.EventsPage:
        """Return the next visible events, skipping a bounded number of invisible ones."""
        view = self.view(who)
        first, deadline = max(1, request.from_seq), deadline_of(request.wait_s)
        limit = max(1, min(request.limit, MAX_EVENTS))
        for _ in range(MAX_HIDDEN_PAGES):
            while self.feed.last_seq < first and (left := deadline - _clock()) > 0:
                await self.feed.wait(left)
            events = self.commit_loop.reader.feed(first, limit)
            events = tuple(event for event in events if event.seq <= self.feed.last_seq)
            page = page_of({"events": numbered(list(events))}, "")[0]["events"]
            if not page:
                break
            first = page[-1].seq + 1
            if seen := tuple(one for event in page if (one := view.event(event)) is not None):
                return wire.EventsPage(events=seen, next_seq=first)
            await asyncio.sleep(0)
        return wire.EventsPage(events=(), next_seq=first)

    def jobs(self, request: wire.ListJobs, who: Identity) -> wire.Jobs:
        """Return a page of `ones ps`."""
        state, ended, view = self._state, self.commit_loop.reader.ended, self.view(who)
        rows = job_rows(
            state, ended, request, lambda job: view.summary(self._summary(job)), view.sees,
            now=self.commit_loop.now(),
        )  # fmt: skip
        lists, following = page_of({"jobs": rows}, request.cursor)
        return wire.Jobs(jobs=lists["jobs"], left_out=int(bool(following)), next=following)

    async def usage(self, request: wire.GetUsage, who: Identity) -> wire.Usage:
        """Return a page of the slot time that visible jobs used between two times."""
        loop, view = self.commit_loop, self.view(who)
        now = loop.now()
        until = now if request.until is None else min(request.until, now)
        since = max(Seconds(0.0), request.since)
        last = self._state.jobs_accepted
        _, after = parse_cursor({"jobs": last}, request.cursor)
        # The state is read before the table, so that rows which are written meanwhile are known.
        spans = [used for job in self._state.jobs.values() if (used := slots_used(job, until))]
        held = {number_of(used.job): used for used in spans if until > since}
        begins = {number: used.begin for number, used in held.items()}
        found = await asyncio.to_thread(
            _stored_usage, loop.reader.path, since, until, begins, after
        )
        end = max(found) if len(found) == MAX_USAGE_JOBS else last
        for number, used in held.items():
            if after < number <= end:
                slot_s = used.slots * (until - max(used.begin, since))
                before = found[number].slot_s if number in found else 0.0
                found[number] = wire.JobUsage(
                    job=used.job, user=used.user, project=used.project, slot_s=before + slot_s
                )
        rows = [
            (number, found[number])
            for number in sorted(found)
            if view.sees(JobOwner(found[number].user, found[number].project))
        ]
        lists, following = page_of({"jobs": Rows(lambda _: iter(rows), last)}, request.cursor)
        if not following and end < last:
            following = f"jobs.{end}"
        return wire.Usage(since=since, until=until, jobs=lists["jobs"], next=following)

    def _summary(self, job: Job) -> wire.JobSummary:
        return replies.job_summary(
            job,
            self._waiting_reason(job),
            self.telemetry,
            self.commit_loop.now(),
            predicted_loss=self.plans.predicted_loss.get(job.job),
        )

    def _waiting_reason(self, job: Job) -> Reason | None:
        return job.gate_reason or self.plans.reason(job.job)

    def detail(self, job: Job, view: View, cursor: str = "") -> wire.JobDetail:
        """Return one page of everything that the reader may know about a job.

        Raises:
            BadFieldError: if the cursor does not belong to this job.
        """
        records, summary = self.commit_loop.records, self._summary(job)
        detail = replies.job_detail(job, summary, records, self.telemetry, cursor)
        notes = (*self.notes.of(job, detail.summary.train_loss), *_missing_notes(records, job.job))
        return view.detail(msgspec.structs.replace(detail, notes=notes), job.owner)

    def _policy_notes(self) -> tuple[str, ...]:
        """Return a note if an admin chose another policy than the settings file."""
        info = self.policy(wire.GetPolicy(), Identity("", ""))
        when = dt.datetime.fromtimestamp(info.since, dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
        return (f"policy {info.name} plans since {when}, chosen by {info.by}",) if info.by else ()

    async def expected_start(self, request: wire.CheckJob, who: Identity) -> wire.ExpectedStart:
        """Predict the start of a job, from all jobs, in a thread.

        Users have one prediction at a time, and all users together as well, so that predictions
        take no more than one core from the commit loop.

        Raises:
            UnavailableError: if a prediction for this user is under way.
        """
        spec, mine = request.spec, projects_of(who)
        stated = request.project or ("" if spec.project is msgspec.UNSET else spec.project)
        if stated and stated not in mine:
            return wire.ExpectedStart(
                reason=f"project {stated[:64]!r} is not one of {', '.join(mine)}"
            )
        if paused := self._state.scheduling_paused:
            return wire.ExpectedStart(reason=f"scheduling is {paused}")
        if spec.parents:
            return wire.ExpectedStart(reason="it waits for the ends of other jobs (after)")
        if who.name in self._predicting:
            what = "a prediction for you is under way"
            raise UnavailableError(what, "ask again when its reply has come")
        self._predicting.add(who.name)
        try:
            async with self._one_prediction:
                project = stated or next(iter(mine), "")
                present = self.plans.present_with(spec, who.name, project)
                start = await asyncio.to_thread(_predict, present)
        finally:
            self._predicting.discard(who.name)
        view = self.view(who)
        after = None if start.after is None else view.text(start.after)
        return msgspec.structs.replace(start, after=after, reason=view.text(start.reason))

    def explain(self, request: wire.ExplainJob, who: Identity) -> wire.Explanation:
        """Return a page of the decisions about a job."""
        job = self.commit_loop.job(request.job)
        reason = self._waiting_reason(job)
        records, now = self.commit_loop.records, self.commit_loop.now()
        explanation = replies.job_explanation(job, records, reason, now, request.cursor)
        notes = () if request.cursor else (*self._policy_notes(), *_missing_notes(records, job.job))
        return self.view(who).explanation(msgspec.structs.replace(explanation, notes=notes))


def _predict(present: Present) -> wire.ExpectedStart:
    end = time.monotonic() + PREDICTION_S

    def go_on() -> bool:
        time.sleep(0.0)  # lets the commit loop have the interpreter
        return time.monotonic() < end

    rng = Random(present.view.version)  # noqa: S311 - no secret
    return expected_start(present, rng, go_on)


def _missing_notes(records: JobRecords, job: JobId) -> tuple[str, ...]:
    notes = []
    dropped = ", ".join(f"{rows} of {name}" for name, rows in sorted(records.dropped(job).items()))
    if dropped:
        notes.append(f"older records are not kept: {dropped} (keep_records)")
    if damaged := records.damage_of(job):
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        what = f"{damaged[0]}{more} (`ones admin check`)"
        notes.append(f"omitted because damaged in the journal: {what}")
    return tuple(notes)


def _clock() -> float:
    return asyncio.get_running_loop().time()
