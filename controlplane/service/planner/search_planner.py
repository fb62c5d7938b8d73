"""A policy that searches, in a process of its own: the controller's side of it.

Which jobs a search dies of: they are left out of what it sees, and the others have it back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
import structlog

from controlplane.policy.api import ClusterView, Plan, PlanTaken, PolicyEvent, SearchStats
from controlplane.policy.min_slots import fallback_plan
from controlplane.service.planner.planner import Propose, ViewNow
from controlplane.service.planner.search_messages import (
    FROM_SEARCH,
    Answer,
    Ask,
    Batches,
    Begin,
    Converged,
    Frames,
    FromSearch,
    Observed,
    Ready,
    ToSearch,
    WholeView,
    frame,
    view_delta,
)
from schemas.ids import JobId, Seconds

CHANCES: Final = 2  # deaths in a row, before jobs are suspected


class SuspectJobs:
    """Halves the jobs that a search sees until it lives, then lets them back group by group.

    A group on trial that it dies of again is halved; one job alone stays aside until it ends.
    """

    def __init__(self) -> None:
        self.guilty: dict[JobId, None] = {}
        self._groups: list[list[JobId]] = []  # set aside, to be tried; the last one next
        self._trial: list[JobId] = []  # seen again, on trial
        self._seen: Sequence[JobId] = ()  # in the last view
        self._deaths = 0  # in a row, with nobody on trial

    @property
    def aside(self) -> set[JobId]:
        """Jobs that the search is not told of."""
        return {*self.guilty, *(job for group in self._groups for job in group)}

    @property
    def in_doubt(self) -> bool:
        """Whether something is still to be found out."""
        return bool(self._groups or self._trial)

    def shown(self, view: ClusterView) -> ClusterView:
        """The view without the jobs that are set aside.

        Args:
            view: of all of them; those that are not in it any more are forgotten.
        """
        for job in [job for job in self.guilty if job not in view.jobs]:
            del self.guilty[job]
        self._groups = [kept for group in self._groups if (kept := _among(group, view.jobs))]
        aside = self.aside
        if aside:
            jobs = {name: job for name, job in view.jobs.items() if name not in aside}
            view = ClusterView(version=view.version, slots=view.slots, jobs=jobs)
        self._seen = tuple(view.jobs)
        return view

    def died(self) -> None:
        """The search died of what it had seen, or with it."""
        if self._trial:
            self._put_back(_among(self._trial, self._seen))
            self._trial = []
            return
        self._deaths += 1
        if self._deaths >= CHANCES and self._seen:
            middle = len(self._seen) // 2
            self._groups.append(list(self._seen[middle:]))  # the newer half
            self._seen = self._seen[:middle]

    def lived(self) -> None:
        """The search lives with what it sees: the next group is let back, on trial."""
        self._deaths, self._trial = 0, []
        if self._groups:
            self._trial = self._groups.pop()

    def _put_back(self, group: list[JobId]) -> None:
        middle = len(group) // 2
        if len(group) == 1:
            self.guilty |= dict.fromkeys(group)
        elif group:
            self._groups += [group[:middle], group[middle:]]


def _among(group: Iterable[JobId], known: Iterable[JobId]) -> list[JobId]:
    names = set(known)
    return [job for job in group if job in names]


log = structlog.get_logger("search_planner")
ANSWER_S: Final = 1.0  # then free slots are filled without it
HUNG_S: Final = 10.0  # then it is ended and started again
START_S: Final = 60.0  # the same, while it starts and reads what was learnt before
READ_BYTES: Final = 1 << 18
RESTART_S: Final = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)  # before the next try, by failures in a row
STEADY_S: Final = 60.0  # a life this long is no failure
TRUST_S: Final = 3.0  # jobs that it has seen for so long are none that it dies of
BLANK_AFTER: Final = 3  # deaths in a row while it reads what was learnt before: it begins without
ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1"}  # small matrices; waiting threads burn a core
MAX_BACKLOG: Final = 64 << 20  # bytes that it has not read: it hangs


class SearchPlanner:
    """Feeds the search process, takes its plans, and starts it again when it dies.

    While it is away the plan in force holds, and free slots are filled greedily.

    Args:
        admits: whether it may reject jobs; then nobody starts whom it has not admitted.
        history: what it learns from again when it begins anew, oldest first.
        view_now: what it may see at the moment, and the time.
        propose: takes its plans, choices of batches alone, and plans that fill free slots.
    """

    def __init__(
        self,
        *,
        policy: str,
        options: dict[str, Any],
        seed: int,
        admits: bool = False,
        history: Callable[[], list[tuple[Seconds, PolicyEvent]]],
        view_now: ViewNow,
        propose: Propose,
    ) -> None:
        self._policy, self._options, self._seed = policy, options, seed
        self._admits = admits
        self._history = history
        self._view_now = view_now
        self._propose = propose
        self._process: asyncio.subprocess.Process | None = None
        self._ready = False
        self._sent: ClusterView | None = None
        self._asked: dict[int, float] = {}  # questions without an answer, and when
        self._number = 0
        self._ask_again = False  # something happened since the question
        self._fallback_timer: asyncio.TimerHandle | None = None
        self._trust_timer: asyncio.TimerHandle | None = None
        self._suspects = SuspectJobs()
        self._stillborn = 0  # deaths in a row before it was ready
        self.restarts = 0
        self.stats = SearchStats()

    @property
    def running(self) -> bool:
        """Whether the process answers."""
        return self._ready and not self._overdue(ANSWER_S)

    def ask(self) -> None:
        """Put the question; fill free slots if nobody answers.

        One question at a time: what happens until its answer is here makes one more.
        """
        if not self._ready:
            self._propose_fallback()
            return
        if self._asked:
            self._ask_again = True
            if self._overdue(ANSWER_S):
                self._propose_fallback()
            return
        view, now = self._view_now()
        self._send_view(self._suspects.shown(view))
        self._number += 1
        loop = asyncio.get_running_loop()
        self._asked[self._number] = loop.time()
        self._send(Ask(number=self._number, now=now))
        if self._fallback_timer is None:
            self._fallback_timer = loop.call_later(ANSWER_S, self._fill_if_overdue)

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Hand it on; what is lost while the process is away is in the history that it gets."""
        if not isinstance(event, PlanTaken) and event.job in self._suspects.aside:
            return
        self._send(Observed(event=event, at=now))  # behind the history, if that is still being read

    async def run(self) -> None:
        """Keep a process running, for ever."""
        failures = 0
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self._run_process()
            except (OSError, ValueError) as error:
                log.warning("search process failed", error=repr(error))
            finally:
                self._note_death()
                await self._end_process()
            failures = 1 if loop.time() - began > STEADY_S else failures + 1
            self.restarts += 1
            log.warning("search process ended; it is started again", restarts=self.restarts)
            self._propose_fallback()
            await asyncio.sleep(RESTART_S[min(failures, len(RESTART_S)) - 1])

    # --- one process

    async def _run_process(self) -> None:
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "controlplane.service.planner.search_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **ONE_THREAD},
        )
        frames = Frames()
        self._asked = {0: asyncio.get_running_loop().time()}  # whether it is ready
        history = self._history() if self._stillborn < BLANK_AFTER else []
        begin = Begin(policy=self._policy, options=self._options, seed=self._seed, history=history)
        self._send(begin)
        while data := await self._read(process):
            for body in frames.feed(data):
                self._receive(FROM_SEARCH.decode(body))

    async def _read(self, process: asyncio.subprocess.Process) -> bytes:
        """The next bytes; looks up from time to time to see whether answers are overdue."""
        stream = process.stdout
        if stream is None:
            return b""
        reading = asyncio.ensure_future(stream.read(READ_BYTES))
        try:
            while not (await asyncio.wait([reading], timeout=ANSWER_S))[0]:
                limit_s = HUNG_S if self._ready else START_S
                if self._overdue(limit_s):
                    raise ValueError(f"no answer for {limit_s:.0f} s")
            return reading.result()
        finally:
            reading.cancel()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        self._ready, self._sent, self._ask_again = False, None, False
        self._asked.clear()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _receive(self, message: FromSearch) -> None:
        match message:
            case Ready():
                self._ready, self._stillborn = True, 0
                self._asked.clear()
                self.ask()
            case Answer(number=number, plan=plan, stats=stats):
                self.stats = stats
                if number in self._asked:
                    del self._asked[number]
                    if self._fallback_timer is not None:
                        self._fallback_timer.cancel()
                        self._fallback_timer = None
                self._propose(self._with_others(plan), stats)
                self._await_trust()
                if self._ask_again and not self._asked:
                    self._ask_again = False
                    self.ask()
            case Batches(plan=plan):
                self._propose(plan, self.stats, whole=False)
            case Converged(stats=stats):
                self.stats = stats.in_ms(self.stats.decision_ms / 1000.0)

    # --- what it dies of

    def _note_death(self) -> None:
        if self._trust_timer is not None:
            self._trust_timer.cancel()
            self._trust_timer = None
        if not self._ready:
            self._stillborn += 1
        elif self._sent is not None:
            self._suspects.died()
            if aside := sorted(self._suspects.aside):
                log.warning("the search is not told of jobs that it may have died of", jobs=aside)

    def _await_trust(self) -> None:
        """What it answers of and lives with for a while is nothing that it dies of."""
        if self._trust_timer is None:
            loop = asyncio.get_running_loop()
            self._trust_timer = loop.call_later(TRUST_S, self._trust)

    def _trust(self) -> None:
        self._trust_timer = None
        if self._asked:
            self._trust_timer = asyncio.get_running_loop().call_later(TRUST_S, self._trust)
            return
        doubted = self._suspects.in_doubt
        self._suspects.lived()
        if doubted:
            self.ask()

    def _with_others(self, plan: Plan) -> Plan:
        """The plan, with jobs that the search is not told of: they go on, or fill free slots."""
        aside = self._suspects.aside
        if not aside:
            return plan
        view, now = self._view_now()
        taken = {slot for placed in plan.local_batch.values() for slot in placed}
        slots = tuple(
            msgspec.structs.replace(slot, usable=slot.usable and slot.slot not in taken)
            for slot in view.slots
        )
        jobs = {name: job for name, job in view.jobs.items() if name in aside}
        others = ClusterView(version=view.version, slots=slots, jobs=jobs)
        fill = fallback_plan(others, now, admits=self._admits)
        return msgspec.structs.replace(
            plan,
            local_batch={**plan.local_batch, **fill.local_batch},
            reasons={**plan.reasons, **fill.reasons},
        )

    # --- helpers

    def _send_view(self, view: ClusterView) -> None:
        delta = view_delta(self._sent, view) if self._sent is not None else None
        self._send(delta if delta is not None else WholeView(view=view))
        self._sent = view

    def _send(self, message: ToSearch) -> None:
        process = self._process
        if process is None or process.stdin is None or process.stdin.is_closing():
            return
        unread = process.stdin.transport.get_write_buffer_size()  # of what was sent before
        process.stdin.write(frame(message))
        if unread > MAX_BACKLOG:
            log.warning("search process does not read; it is ended")
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def _overdue(self, limit_s: float) -> bool:
        oldest = min(self._asked.values(), default=None)
        return oldest is not None and asyncio.get_running_loop().time() - oldest > limit_s

    def _fill_if_overdue(self) -> None:
        self._fallback_timer = None
        if self._overdue(0.9 * ANSWER_S):
            self._propose_fallback()
        if self._asked:
            loop = asyncio.get_running_loop()
            self._fallback_timer = loop.call_later(ANSWER_S, self._fill_if_overdue)

    def _propose_fallback(self) -> None:
        view, now = self._view_now()
        self._propose(fallback_plan(view, now, admits=self._admits), None)
