"""Planner that runs a policy in a child process, and the quarantine for jobs that crash it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from controlplane.journal.releases import child_command, child_environment
from controlplane.policy.api import ClusterView, Plan, PlanTaken, PolicyEvent, SearchStats
from controlplane.policy.min_slots import fallback_plan
from controlplane.service import pipes
from controlplane.service.planner import search_messages as messages
from controlplane.service.planner.planner import ProposePlan, ViewNow
from schemas.ids import JobId, Seconds

CRASHES_BEFORE_QUARANTINE: Final = 2  # in a row


class JobQuarantine:
    """Bisection of the view, to find the jobs that crash the search and hide them from the search.

    After repeated crashes the newer half of the visible jobs is quarantined, until the search
    survives. The quarantined groups then return one by one, on probation. A group that crashes the
    search again is halved. A single job that crashes the search stays hidden until the job ends.
    """

    def __init__(self) -> None:
        self.culprits: dict[JobId, None] = {}
        self._groups: list[list[JobId]] = []  # quarantined groups; the last one returns next
        self._on_probation: list[JobId] = []  # jobs that are visible again
        self._visible: Sequence[JobId] = ()  # visible jobs of the last view
        self._crashes = 0  # consecutive crashes without a group on probation

    @property
    def hidden(self) -> set[JobId]:
        """Jobs that the search must not see, which are the quarantined jobs and the culprits."""
        return {*self.culprits, *(job for group in self._groups for job in group)}

    @property
    def undecided(self) -> bool:
        """True while some group is quarantined or on probation."""
        return bool(self._groups or self._on_probation)

    def visible_part(self, view: ClusterView) -> ClusterView:
        """Return the view without the hidden jobs. Forget jobs that are no longer in the view."""
        for job in [job for job in self.culprits if job not in view.jobs]:
            del self.culprits[job]
        self._groups = [kept for group in self._groups if (kept := _present(group, view.jobs))]
        hidden = self.hidden
        if hidden:
            jobs = {name: job for name, job in view.jobs.items() if name not in hidden}
            view = ClusterView(version=view.version, slots=view.slots, jobs=jobs)
        self._visible = tuple(view.jobs)
        return view

    def search_crashed(self) -> None:
        """Quarantine the group on probation again, or the newer half of the jobs if there is none.

        The first crash might be chance, so nothing is quarantined after it.
        """
        if self._on_probation:
            group, self._on_probation = _present(self._on_probation, self._visible), []
            middle = len(group) // 2
            if len(group) == 1:
                self.culprits |= dict.fromkeys(group)
            elif group:
                self._groups += [group[:middle], group[middle:]]
            return
        self._crashes += 1
        if self._crashes >= CRASHES_BEFORE_QUARANTINE and self._visible:
            middle = len(self._visible) // 2
            self._groups.append(list(self._visible[middle:]))  # the newer half
            self._visible = self._visible[:middle]

    def search_survived(self) -> None:
        """Clear the visible jobs and put the next quarantined group on probation."""
        self._crashes, self._on_probation = 0, []
        if self._groups:
            self._on_probation = self._groups.pop()


def _present(group: Iterable[JobId], known: Iterable[JobId]) -> list[JobId]:
    names = set(known)
    return [job for job in group if job in names]


log = structlog.get_logger("search_planner")
SEARCH_MODULE: Final = "controlplane.service.planner.search_process"
REPLY_TIMEOUT_S: Final = 1.0  # after this, the fallback fills free slots
HANG_TIMEOUT_S: Final = 10.0  # after this, the process is killed and restarted
START_TIMEOUT_S: Final = 60.0  # the same, until the process is ready
READ_BYTES: Final = 1 << 18
RESTART_DELAYS_S: Final = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)  # after 1, 2, 3, ... failures in a row
STABLE_AFTER_S: Final = 60.0  # a process that ran longer resets the number of failures
SURVIVAL_S: Final = 3.0  # jobs shown for this long without a crash are cleared
MAX_FAILED_STARTS: Final = 3  # consecutive; after them, start without the history
ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1"}  # matrices are small; idle threads use a core
MAX_BACKLOG_BYTES: Final = 64 << 20  # unread bytes above which the process is considered hung


@dataclass(kw_only=True, eq=False)
class SearchPlanner:
    """Planner that feeds a search process, proposes its plans, and restarts it when it exits.

    While the process is unavailable, the current plan stays and free slots are filled greedily. A
    restarted process first observes the events that `history` returns, oldest first.
    `request_again` has to call `request_plan`, after proposed plans are accepted. If the policy
    `admits` jobs, the fallback starts no job that the policy has not admitted.
    """

    policy: str
    options: dict[str, Any]
    seed: int
    admits: bool = False
    history: Callable[[], list[tuple[Seconds, PolicyEvent]]]
    view_now: ViewNow
    propose: ProposePlan
    request_again: Callable[[], None]
    code: Path | None = None  # zip file of the process's code; None: the installed code

    def __post_init__(self) -> None:
        """Set up the state that no caller passes."""
        self._process: asyncio.subprocess.Process | None = None
        self._ready = False
        self._sent: ClusterView | None = None
        self._unanswered: dict[int, float] = {}  # request number -> time of the request
        self._last_number = 0
        self._view_s = 0.0  # time to make and send the view of the last request
        self._request_again = False  # an event arrived after the unanswered request
        self._fallback_timer: asyncio.TimerHandle | None = None
        self._survival_timer: asyncio.TimerHandle | None = None
        self._quarantine = JobQuarantine()
        self._failed_starts = 0  # consecutive exits before `Ready`
        self.restarts = 0
        self.stats = SearchStats()

    @property
    def running(self) -> bool:
        """True if the process is ready and no reply is overdue."""
        return self._ready and not self._overdue(REPLY_TIMEOUT_S)

    @property
    def busy(self) -> bool:
        """True if the process has not answered a request."""
        return self._ready and bool(self._unanswered)

    def request_plan(self, view_s: float = 0.0) -> None:
        """Request a plan. If the process does not reply, fill free slots with the fallback.

        Only one request is unanswered at a time. Events that happen meanwhile cause one further
        request after the reply.
        """
        if not self._ready:
            self._propose_fallback()
            return
        if self._unanswered:
            self._request_again = True
            if self._overdue(REPLY_TIMEOUT_S):
                self._propose_fallback()
            return
        began = time.perf_counter()
        view, now = self.view_now()
        self._send_view(self._quarantine.visible_part(view))
        self._view_s = view_s + time.perf_counter() - began
        self._last_number += 1
        loop = asyncio.get_running_loop()
        self._unanswered[self._last_number] = loop.time()
        self._send(messages.FindPlan(number=self._last_number, now=now))
        if self._fallback_timer is None:
            self._fallback_timer = loop.call_later(REPLY_TIMEOUT_S, self._fill_if_overdue)

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Send an event to the process. A restarted process gets missed events as history."""
        if not isinstance(event, PlanTaken) and event.job in self._quarantine.hidden:
            return
        self._send(messages.EventObserved(event=event, at=now))  # queued behind the history

    async def run(self) -> None:
        """Run the search process and restart it whenever it exits, until cancelled."""
        failures = 0
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self._run_process()
            except (OSError, ValueError) as error:
                log.warning("search process failed", policy=self.policy, error=str(error))
            finally:
                self._record_crash()
                await self._end_process()
            failures = 1 if loop.time() - began > STABLE_AFTER_S else failures + 1
            self.restarts += 1
            log.warning(
                "search process exited, restarting", policy=self.policy, restarts=self.restarts
            )
            self._propose_fallback()
            await asyncio.sleep(RESTART_DELAYS_S[min(failures, len(RESTART_DELAYS_S)) - 1])

    # --- one process

    async def _run_process(self) -> None:
        process = self._process = await asyncio.create_subprocess_exec(
            *child_command(SEARCH_MODULE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(self.code) | ONE_THREAD,
        )
        frames = pipes.FrameDecoder()
        self._unanswered = {0: asyncio.get_running_loop().time()}  # answered by `Ready`
        history = self.history() if self._failed_starts < MAX_FAILED_STARTS else []
        start = messages.StartSearch(
            policy=self.policy, options=self.options, seed=self.seed, history=history
        )
        self._send(start)
        while data := await self._read(process):
            for body in frames.feed(data):
                self._receive(messages.FROM_SEARCH.decode(body))

    async def _read(self, process: asyncio.subprocess.Process) -> bytes:
        """Read the next bytes. Raise ValueError if a reply becomes overdue meanwhile."""
        stream = process.stdout
        if stream is None:
            return b""
        reading = asyncio.ensure_future(stream.read(READ_BYTES))
        try:
            while not (await asyncio.wait([reading], timeout=REPLY_TIMEOUT_S))[0]:
                limit_s = HANG_TIMEOUT_S if self._ready else START_TIMEOUT_S
                if self._overdue(limit_s):
                    remedy = "jobs continue; correct the policy if this happens again"
                    raise ValueError(f"no reply for {limit_s:.0f} s, so it is killed; {remedy}")
            return reading.result()
        finally:
            reading.cancel()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        self._ready, self._sent, self._request_again = False, None, False
        self._unanswered.clear()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _receive(self, message: messages.FromSearch) -> None:
        match message:
            case messages.Ready():
                self._ready, self._failed_starts = True, 0
                self._unanswered.clear()
                self.request_again()
            case messages.PlanFound(number=number, plan=plan, stats=stats):
                self.stats = stats
                if number in self._unanswered:
                    self.stats = msgspec.structs.replace(stats, view_ms=self._view_s * 1000.0)
                    del self._unanswered[number]
                    if self._fallback_timer is not None:
                        self._fallback_timer.cancel()
                        self._fallback_timer = None
                self.propose(self._with_hidden_jobs(plan), self.stats)
                self._start_survival_timer()
                if self._request_again and not self._unanswered:
                    self._request_again = False
                    self.request_again()
            case messages.BatchesChosen(plan=plan):
                stats = self.stats.in_ms(self.stats.decision_ms / 1000.0)
                self.propose(plan, stats, complete=False)
            case messages.Converged(stats=stats):
                self.stats = stats.in_ms(self.stats.decision_ms / 1000.0)

    # --- jobs that crash the search

    def _record_crash(self) -> None:
        if self._survival_timer is not None:
            self._survival_timer.cancel()
            self._survival_timer = None
        if not self._ready:
            self._failed_starts += 1
        elif self._sent is not None:
            self._quarantine.search_crashed()
            if hidden := sorted(self._quarantine.hidden):
                log.warning("hiding jobs that may crash the search", jobs=hidden)

    def _start_survival_timer(self) -> None:
        """Clear the visible jobs if no crash follows the reply within `SURVIVAL_S`."""
        if self._survival_timer is None:
            loop = asyncio.get_running_loop()
            self._survival_timer = loop.call_later(SURVIVAL_S, self._clear_if_answered)

    def _clear_if_answered(self) -> None:
        self._survival_timer = None
        if self._unanswered:
            self._start_survival_timer()
            return
        undecided = self._quarantine.undecided
        self._quarantine.search_survived()
        if undecided:
            self.request_again()

    def _with_hidden_jobs(self, plan: Plan) -> Plan:
        """Add the hidden jobs to the plan. They keep their slots, or start on free slots."""
        hidden = self._quarantine.hidden
        if not hidden:
            return plan
        view, now = self.view_now()
        taken = {slot for placed in plan.local_batch.values() for slot in placed}
        slots = tuple(
            msgspec.structs.replace(slot, usable=slot.usable and slot.slot not in taken)
            for slot in view.slots
        )
        jobs = {name: job for name, job in view.jobs.items() if name in hidden}
        others = ClusterView(version=view.version, slots=slots, jobs=jobs)
        fill = fallback_plan(others, now, admits=self.admits)
        return msgspec.structs.replace(
            plan,
            local_batch={**plan.local_batch, **fill.local_batch},
            reasons={**plan.reasons, **fill.reasons},
        )

    # --- helpers

    def _send_view(self, view: ClusterView) -> None:
        delta = messages.view_delta(self._sent, view) if self._sent is not None else None
        self._send(delta if delta is not None else messages.FullView(view=view))
        self._sent = view

    def _send(self, message: messages.ToSearch) -> None:
        process = self._process
        if process is None or process.stdin is None or process.stdin.is_closing():
            return
        unread = process.stdin.transport.get_write_buffer_size()  # of earlier messages
        process.stdin.write(pipes.encode_frame(message))
        if unread > MAX_BACKLOG_BYTES:
            log.warning("search process does not read its input, killing it")
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def _overdue(self, limit_s: float) -> bool:
        oldest = min(self._unanswered.values(), default=None)
        return oldest is not None and asyncio.get_running_loop().time() - oldest > limit_s

    def _fill_if_overdue(self) -> None:
        self._fallback_timer = None
        if self._overdue(0.9 * REPLY_TIMEOUT_S):
            self._propose_fallback()
        if self._unanswered:
            loop = asyncio.get_running_loop()
            self._fallback_timer = loop.call_later(REPLY_TIMEOUT_S, self._fill_if_overdue)

    def _propose_fallback(self) -> None:
        view, now = self.view_now()
        self.propose(fallback_plan(view, now, admits=self.admits), None)
