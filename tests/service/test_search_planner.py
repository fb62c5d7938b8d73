"""The search process as the controller sees it: asked, late, dead, back again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from controlplane.policy.api import ClusterView, Plan, PolicyEvent, SearchStats
from controlplane.service.planner import policy_check, search_planner
from controlplane.service.planner.policy_check import CheckedPolicy, check_policy
from controlplane.service.planner.search_messages import BatchesChosen
from controlplane.service.planner.search_planner import SearchPlanner
from schemas.errors import SettingsError
from schemas.ids import JobId, Seconds
from tests.support import outside_policies
from tests.support.builders import S0, A, B, job_view
from tests.support.documented import ROOT
from tests.support.views import row_of, view_of

LIMIT_S = 120.0


class Board:
    """A cluster to look at, and the plans that were proposed for it."""

    def __init__(
        self,
        slots: int,
        *jobs: JobId,
        history: Sequence[tuple[Seconds, PolicyEvent]] = (),
        policy: str = "ones",
    ) -> None:
        self.slots = row_of(slots)
        self.view = view_of(self.slots, *(job_view(job) for job in jobs))
        self.plans: list[tuple[Plan, SearchStats | None]] = []
        self.batches: list[Plan] = []  # of jobs alone that they name
        self._news = asyncio.Event()
        self.planner = SearchPlanner(
            policy=policy, options={}, seed=0, history=lambda: list(history),
            view_now=self.view_now, propose=self.propose, request_again=self.request_again,
        )  # fmt: skip

    def view_now(self) -> tuple[ClusterView, Seconds]:
        return self.view, Seconds(100.0)

    def request_again(self) -> None:
        self.planner.request_plan()

    def propose(self, plan: Plan, stats: SearchStats | None, /, *, complete: bool = True) -> None:
        if complete:
            self.plans.append((plan, stats))
        else:
            self.batches.append(plan)
        self._news.set()

    def arrive(self, *jobs: JobId) -> None:
        version = self.view.version + 1
        self.view = view_of(self.slots, *(job_view(job) for job in jobs), version=version)

    @property
    def pid(self) -> int:
        process = self.planner._process
        return process.pid

    async def until(self, holds: Callable[[Plan, SearchStats | None], bool]) -> Plan:
        """The first plan from now on, or before, that is as wanted."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                for plan, stats in self.plans:
                    if holds(plan, stats):
                        return plan
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def searching(
    slots: int, *jobs: JobId, history: Sequence[tuple[Seconds, PolicyEvent]] = ()
) -> AsyncIterator[Board]:
    """A board whose search process is there."""
    board = Board(slots, *jobs, history=history)
    task = asyncio.create_task(board.planner.run())
    try:
        await board.until(lambda _, stats: stats is not None)
        yield board
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_free_slots_are_filled_before_the_search_process_is_ready() -> None:
    board = Board(1, A)

    board.planner.request_plan()

    (plan, stats) = board.plans[0]
    assert (plan.reasons[A].code, stats) == ("fill", None)
    assert not board.planner.running


@pytest.mark.slow
async def test_a_killed_search_process_is_replaced_while_free_slots_are_filled() -> None:
    async with searching(2, A) as board:
        board.arrive(A, B)
        board.plans.clear()

        os.kill(board.pid, signal.SIGKILL)

        filled = await board.until(lambda _, stats: stats is None)
        assert filled.reasons[B].code == "fill"
        await board.until(lambda plan, stats: stats is not None and B in plan.local_batch)
        assert board.planner.restarts == 1


@pytest.mark.slow
async def test_events_before_a_reply_cause_another_request() -> None:
    async with searching(2, A) as board:
        os.kill(board.pid, signal.SIGSTOP)
        board.planner.request_plan()
        board.arrive(A, B)
        board.planner.request_plan()
        asked = len(board.planner._unanswered)
        os.kill(board.pid, signal.SIGCONT)

        newest = board.view.version
        late = await board.until(lambda plan, stats: stats is not None and plan.based_on == newest)

        assert (asked, {*late.local_batch}) == (1, {A, B})


@pytest.mark.slow
async def test_a_silent_search_process_leaves_no_slot_idle() -> None:
    async with searching(2, A) as board:
        os.kill(board.pid, signal.SIGSTOP)
        board.plans.clear()
        board.arrive(A, B)

        board.planner.request_plan()

        filled = await board.until(lambda _, stats: stats is None)
        assert {*filled.local_batch} == {A, B}
        assert not board.planner.running
        os.kill(board.pid, signal.SIGCONT)


async def test_a_choice_of_batches_is_not_a_complete_plan() -> None:
    board, plan = Board(2, A, B), Plan(based_on=1, local_batch={A: {S0: 128}})

    board.planner._receive(BatchesChosen(plan=plan))

    assert (board.batches, board.plans) == ([plan], [])


MISBEHAVIOUR = {
    "Raises": "`plan` raised ValueError: boom",
    "Leaves": "`plan` raised SystemExit: 0",
    "Allocates": "`plan` raised MemoryError",
    "Mutates": "`plan` changed its view",
    "NanBatch": "`plan` returned a Plan with a wrong value",
    "UnknownJob": "`plan` is impossible: job z-9 is not in the view",
    "EndsItsProcess": "search process exited, restarting",
    "Hangs": "so it is killed; jobs continue; correct the policy",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISBEHAVIOUR)
async def test_jobs_get_slots_while_a_policy_from_outside_misbehaves(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if name == "Hangs":
        monkeypatch.setattr(search_planner, "REPLY_TIMEOUT_S", 0.1)
        monkeypatch.setattr(search_planner, "HANG_TIMEOUT_S", 0.5)
    policy = f"{outside_policies.__name__}:{name}"
    board = Board(3, A, B, policy=policy)
    with capture_logs() as lines:
        task = asyncio.create_task(board.planner.run())
        try:
            await board.until(lambda *_: board.planner.restarts > 0)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    log = f"{lines}{''.join(capfd.readouterr())}"  # of both processes
    assert policy in log
    assert MISBEHAVIOUR[name] in log
    assert "Traceback" not in log
    assert {(stats, *plan.local_batch) for plan, stats in board.plans} == {(None, A, B)}


@pytest.mark.slow
async def test_what_a_policy_prints_does_not_reach_the_controller() -> None:
    board = Board(2, A, B, policy=f"{outside_policies.__name__}:Prints")
    task = asyncio.create_task(board.planner.run())
    try:
        plan = await board.until(lambda _, stats: stats is not None)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert ({*plan.local_batch}, board.planner.restarts) == ({A, B}, 0)


# --- the check of a policy before it is used


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import os; os._exit(0)", "its module ended the process, exit code 0; correct the module"),
        ("while True: pass", "its module is not imported within 2 s; correct the module"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(mine.py:1\); correct the module"),
        (
            (
                "import numpy; from tests.support.outside_policies import HOST_GIB\n"
                "x = [numpy.empty(1 << 27) for _ in range(HOST_GIB)]"
            ),
            "MemoryError: .*; correct the module",
        ),
        ("", "has no 'Las'"),
    ],
)
def test_a_module_cannot_disturb_whoever_checks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    if text.startswith("while"):
        monkeypatch.setattr(policy_check, "TIMEOUT_S", 2.0)

    with pytest.raises(SettingsError, match=problem):
        check_policy("mine:Las", {}, folder=tmp_path)


@pytest.mark.slow
def test_a_checked_policy_is_known_by_its_needs_and_its_code() -> None:
    source = Path(outside_policies.__file__).read_bytes()
    policy = f"{outside_policies.__name__}:WithOptions"

    found = check_policy(policy, {"share": 1.0}, folder=ROOT)

    code = sha256(source).hexdigest()[:16]
    assert found == CheckedPolicy(apart=True, needs=("losses",), gangs=True, code=code)
    with pytest.raises(SettingsError, match="unknown field `x`; known: share"):
        check_policy(policy, {"x": 1}, folder=ROOT)


def test_policies_of_the_package_are_checked_without_a_process() -> None:
    assert check_policy("fifo", {}) == CheckedPolicy(apart=False, needs=(), gangs=True)
    assert check_policy("slaq", {}) == CheckedPolicy(apart=True, needs=("losses",))
    with pytest.raises(SettingsError, match="needs to know how long jobs will last"):
        check_policy("srtf", {})
