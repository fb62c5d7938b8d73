"""One job that a search dies of takes the search from nobody else."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.api import PlanTaken
from controlplane.service import pipes
from controlplane.service.planner import search_messages, search_planner
from controlplane.service.planner.search_planner import CRASHES_BEFORE_QUARANTINE, JobQuarantine
from schemas.ids import JobId
from tests.service.test_search_planner import searching
from tests.support.builders import A, B, job_view
from tests.support.sizes import examples
from tests.support.views import row_of, view_of

JOBS = [JobId(f"j-{number}") for number in range(40)]


def rounds(quarantine: JobQuarantine, jobs: list[JobId], poison: set[JobId]) -> int:
    """Ask a search that dies of `poison` until nothing is in doubt; return the crashes."""
    crashes = 0
    for _ in range(10 * len(jobs) + 10):
        shown = quarantine.visible_part(view_of(row_of(1), *(job_view(job) for job in jobs)))
        if poison & {*shown.jobs}:
            quarantine.search_crashed()
            crashes += 1
        else:
            quarantine.search_survived()
            if not quarantine.undecided:
                return crashes
    raise AssertionError("it is never over")


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 40), st.sets(st.sampled_from(JOBS), max_size=3))
def test_exactly_the_jobs_that_crash_the_search_are_hidden(many: int, poison: set[JobId]) -> None:
    jobs, quarantine = JOBS[:many], JobQuarantine()

    crashes = rounds(quarantine, jobs, poison)

    assert quarantine.hidden == poison & {*jobs}
    assert crashes <= CRASHES_BEFORE_QUARANTINE + 16 * max(1, len(poison))


def test_a_single_crash_hides_no_job() -> None:
    quarantine = JobQuarantine()
    view = view_of(row_of(1), job_view(A), job_view(B))
    quarantine.visible_part(view)

    quarantine.search_crashed()

    assert quarantine.visible_part(view) == view


def test_all_jobs_return_after_crashes_without_a_culprit() -> None:
    quarantine = JobQuarantine()
    view = view_of(row_of(1), *(job_view(job) for job in JOBS))
    for _ in range(20):
        quarantine.visible_part(view)
        quarantine.search_crashed()
    assert not quarantine.visible_part(view).jobs

    for _ in count():
        quarantine.search_survived()
        if not quarantine.undecided:
            break

    assert quarantine.visible_part(view) == view


def test_an_ended_culprit_is_forgotten() -> None:
    quarantine = JobQuarantine()
    rounds(quarantine, [A, B], {B})
    assert quarantine.hidden == {B}

    quarantine.visible_part(view_of(row_of(1), job_view(A)))

    assert quarantine.hidden == set()


@pytest.mark.slow
async def test_a_process_that_crashes_on_a_job_continues_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search_planner, "SURVIVAL_S", 0.05)
    monkeypatch.setattr(search_planner, "RESTART_DELAYS_S", (0.0,))
    monkeypatch.setattr(
        search_planner, "CRASHES_BEFORE_QUARANTINE", 1
    )  # each life of a process takes its time
    async with searching(3, A) as board:
        board.plans.clear()
        poison = job_view(B, epoch_samples="many")  # it cannot read this

        board.view = view_of(board.slots, job_view(A), poison, version=2)
        board.planner.request_plan()

        plan = await board.until(
            lambda plan, stats: (
                stats is not None
                and plan.based_on == 2
                and board.planner._quarantine.culprits == {B: None}
                and not board.planner._quarantine.undecided
            )
        )
        assert {*plan.local_batch} == {A, B}
        assert plan.reasons[B].code == "fill"


@pytest.mark.slow
async def test_a_process_that_crashes_on_the_history_starts_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search_planner, "RESTART_DELAYS_S", (0.0,))
    monkeypatch.setattr(search_planner, "MAX_FAILED_STARTS", 2)
    real = pipes.encode_frame

    def damaged(message: msgspec.Struct) -> bytes:
        begins = isinstance(message, search_messages.StartSearch)
        if begins and message.history:
            return real(message)[:4] + b"\xc1" * (len(real(message)) - 4)
        return real(message)

    monkeypatch.setattr(pipes, "encode_frame", damaged)
    async with searching(1, A, history=[(1.0, PlanTaken(waiting=()))]) as board:
        assert board.planner.running
        assert board.planner.restarts == search_planner.MAX_FAILED_STARTS
