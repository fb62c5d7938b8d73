"""Rigid jobs in the core: their start, their ends, and how they give up their slots."""

from __future__ import annotations

from signal import SIGKILL, SIGSEGV, SIGTERM
from typing import Any

import pytest

from controlplane.core.commands import SendDelta
from controlplane.core.inputs import DrainExpired, DrainRequested, RunExpired, SharingChanged
from controlplane.core.model.job_phases import Phase
from controlplane.policy.sharing.rigid_view import RigidView
from schemas.ids import Seconds
from schemas.jobs import EndWarning
from schemas.sharing import Sharing
from schemas.wire.agent import PREPARE, SUSPEND, SWITCH, WARNED
from tests.support import builders
from tests.support.builders import (
    N1,
    N2,
    S0,
    S1,
    T0,
    A,
    exited,
    formed,
    paused,
    raised,
    ready,
    resumed,
    started,
)
from tests.support.controller import Controller, cluster_of

GANG: dict[str, Any] = {
    "kind": "torchrun", "command": ("python", "train.py"), "slots": 2, "script": "", "batch_size": 2,
}  # fmt: skip
COMMAND: dict[str, Any] = {
    "kind": "command", "command": ("make",), "slots": 2, "script": "", "batch_size": 2,
}  # fmt: skip
ONE: dict[str, Any] = {**COMMAND, "slots": 1, "batch_size": 1}


def ordered(spec: dict[str, Any], **changes: Any) -> Controller:
    """Job a was ordered to start, with one worker on each of two nodes, or on one of them."""
    controller = cluster_of(n1=2, n2=2)
    controller.submit("a", **{**spec, **changes})
    slots = (S0, T0) if spec["slots"] == 2 else (S0,)
    controller.place({A: dict.fromkeys(slots, 1)})
    return controller


def running(spec: dict[str, Any], **changes: Any) -> Controller:
    controller = ordered(spec, **changes)
    members = [(0, N1), (1, N2)][: spec["slots"]]
    for rank, node in members:
        controller.tell(node, started(A, rank=rank, pid=100 + rank))
        controller.tell(node, ready(A, rank=rank, port=20_000 + rank))
    for rank, node in members:
        controller.tell(node, formed(A, rank=rank))
    return controller


def leave(controller: Controller, rank: int = 0, version: int = 1, **how: Any) -> list[Any]:
    return controller.tell((N1, N2)[rank], exited(A, version, rank=rank, **how))


def test_a_gang_starts_together_with_the_address_of_its_first_rank() -> None:
    controller = ordered(GANG)
    for rank, node in ((0, N1), (1, N2)):
        controller.tell(node, started(A, rank=rank, pid=100 + rank))
    controller.tell(N1, ready(A, rank=0, port=20_007))

    commands = controller.tell(N2, ready(A, rank=1))

    orders = [one.delta for one in commands if isinstance(one, SendDelta)]
    assert [(one.stage, one.store) for one in orders] == [(SWITCH, "127.0.0.1:20007")] * 2
    assert controller.job(A).phase is Phase.STARTING


def test_a_running_gang_trained_nothing_and_says_where_it_runs() -> None:
    controller = running(GANG)

    job = controller.job(A)
    assert (job.phase, job.reason) == (Phase.RUNNING, "runs on 2 slots")
    assert (job.progress.epoch, job.progress.epoch_samples) == (0, 0)


# Who exits how -> phase, reason and exit code of the job.
ENDS = [
    (ONE, [(0, {"code": 0})], Phase.SUCCEEDED, "exit code 0", 0),
    (ONE, [(0, {"code": 3})], Phase.FAILED, "the program ended with exit code 3", 3),
    (ONE, [(0, {"signal": SIGKILL})], Phase.FAILED, "the program was killed by SIGKILL", 137),
    (ONE, [(0, {"signal": SIGSEGV})], Phase.FAILED, "the program crashed with SIGSEGV", 139),
    (ONE, [(0, {})], Phase.FAILED, "a worker vanished without an exit status; on_loss = fail", None),
    (ONE | {"on_loss": "restart"}, [(0, {})], Phase.PAUSED,
     "a worker vanished without an exit status; restarts from the beginning", None),
    (ONE | {"on_loss": "restart"}, [(0, {"signal": SIGTERM})], Phase.PAUSED,
     "a worker was killed by SIGTERM; restarts from the beginning", None),
    (ONE | {"retries": 1}, [(0, {"code": 3})], Phase.PAUSED,
     "try 1 of 2 failed: the program ended with exit code 3; retrying in 1 s", 3),
    (COMMAND, [(0, {"code": 0})], Phase.SUCCEEDED, "exit code 0", 0),
    (COMMAND, [(1, {"signal": SIGKILL})], Phase.FAILED, "rank 1 was killed by SIGKILL", 137),
    (GANG, [(0, {"code": 0})], Phase.RUNNING, "runs on 2 slots", None),
    (GANG, [(1, {"code": 0}), (0, {"code": 0})], Phase.SUCCEEDED, "exit code 0", 0),
    (GANG, [(1, {"code": 0}), (0, {"code": 5})], Phase.FAILED, "rank 0 ended with exit code 5", 5),
    (GANG, [(1, {"code": 1})], Phase.FAILED, "rank 1 ended with exit code 1", 1),
    (GANG, [(1, {})], Phase.PAUSED,
     "a worker vanished without an exit status; restarts from the beginning", None),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "exits", "phase", "reason", "code"), ENDS)
def test_the_end_of_a_program_is_the_end_of_its_job(
    spec: dict[str, Any], exits: list[tuple[int, Any]], phase: Phase, reason: str, code: int | None
) -> None:
    controller = running(spec)

    for rank, how in exits:
        leave(controller, rank, **{"code": None, **how})

    job = controller.job(A)
    assert (job.phase, job.reason, job.attempts.exit_code) == (phase, reason, code)


def test_a_program_that_cannot_be_executed_is_named() -> None:
    controller = running(ONE)
    controller.tell(
        N1, raised(A, index=3, where="", error="cannot execute 'mkae': there is no such program")
    )

    leave(controller, code=127)

    job = controller.job(A)
    assert job.reason == "cannot execute 'mkae': there is no such program (exit code 127)"
    assert (job.phase, job.attempts.exit_code) == (Phase.FAILED, 127)


def test_a_launcher_that_ends_early_ends_the_start() -> None:
    controller = ordered(GANG)
    for rank, node in ((0, N1), (1, N2)):
        controller.tell(node, started(A, rank=rank, pid=100 + rank))
    controller.tell(N1, ready(A, rank=0, port=20_000))

    leave(controller, 1, code=None)

    assert controller.job(A).phase is Phase.PAUSED


def test_a_paused_job_gets_term_and_waits_for_its_last_process() -> None:
    controller = running(GANG)

    commands = controller.take(paused(A))

    orders = [one.delta for one in commands if isinstance(one, SendDelta)]
    assert {(one.kind, one.stage, len(one.former)) for one in orders} == {(SUSPEND, SWITCH, 2)}
    leave(controller, 0, code=0, asked=True)
    assert controller.job(A).phase is Phase.RESCALING
    controller.now += 4.0
    leave(controller, 1, code=1, asked=True)
    job = controller.job(A)
    assert (job.phase, job.attempts.failures, job.attempts.losses) == (Phase.PAUSED, 0, 0)
    assert job.reason == "paused by ann, ended 4.0 s after the order"
    assert S0 not in controller.state.slot_index.owners()


def test_a_program_that_ends_before_term_has_its_own_result() -> None:
    controller = running(ONE)
    controller.take(paused(A))

    leave(controller, code=0, asked=False)

    assert (controller.job(A).phase, controller.job(A).reason) == (Phase.SUCCEEDED, "exit code 0")


def test_a_paused_job_begins_again_with_new_processes() -> None:
    controller = running(ONE)
    controller.take(paused(A))
    leave(controller, code=0, asked=True)
    controller.take(resumed(A, auto=True))

    controller.place({A: {S1: 1}})

    assert controller.job(A).phase is Phase.STARTING
    assert [member.worker for member in controller.job(A).members()] == ["a-1.v3.r0"]


def test_processes_that_never_end_do_not_keep_a_job_from_pausing() -> None:
    controller = running(ONE, grace_s=5.0)
    controller.take(paused(A))

    (expired,) = controller.due(65.0)
    controller.now += 65.0
    controller.take(expired)

    assert controller.job(A).phase is Phase.PAUSED
    assert S0 in controller.state.slot_index.owners()  # until the node says that they are gone


def test_a_plan_neither_moves_nor_forgets_a_running_job() -> None:
    controller = running(ONE)

    controller.place({A: {S1: 1}})
    assert [member.slot for member in controller.job(A).members()] == [S0]
    controller.place({})
    assert controller.job(A).phase is Phase.RUNNING


def test_policies_do_not_see_rigid_jobs() -> None:
    controller = running(GANG)

    assert controller.view().jobs == {}
    assert controller.rigid_views() == [
        RigidView(
            job=A, account="ann/ann", submitted_at=Seconds(1000.0), slots=2, waits=False,
            family=controller.job(A).family, holds=(S0, T0), began_at=Seconds(1000.0), preemptible=True,
        )
    ]  # fmt: skip


def test_the_view_of_a_rigid_job_follows_its_changes() -> None:
    controller = cluster_of(n1=2, n2=2)
    controller.submit("a", **GANG)

    assert [view.waits for view in controller.rigid_views()] == [True]
    controller.place({A: {S0: 1, T0: 1}})
    assert [(view.waits, view.holds) for view in controller.rigid_views()] == [(False, (S0, T0))]
    controller.take(builders.cancelled(A))
    assert controller.rigid_views() == []


def test_a_time_limit_tells_when_slots_are_free() -> None:
    controller = running(ONE, max_run_s=100.0, grace_s=5.0)

    (view,) = controller.rigid_views()
    assert (view.one_node, view.ends_at, view.run_limit_s) == (True, 1105.0, 105.0)
    (expired,) = controller.due(100.0)
    controller.now += 100.0
    controller.take(expired)
    job = controller.job(A)
    assert (job.phase, job.attempts.exit_code) == (Phase.FAILED, 124)


def test_a_program_is_warned_once_before_its_time_is_over_and_again_after_a_restart() -> None:
    controller = running(ONE, max_run_s=100.0, on_loss="restart", warn=EndWarning(before_s=20.0))
    assert controller.due(79.0) == []
    assert controller.due(80.0) == [RunExpired(job=A)]
    controller.now += 80.0

    commands = controller.take(RunExpired(job=A))

    assert [one.delta.stage for one in commands if isinstance(one, SendDelta)] == [WARNED]
    assert controller.due(0.0) == []
    assert controller.due(20.0) == [RunExpired(job=A)]
    assert controller.replayed() == controller.state

    leave(controller, signal=SIGTERM, asked=True)
    assert controller.job(A).attempts.warned != controller.job(A).version


def test_a_running_job_is_stopped_at_its_deadline() -> None:
    controller = running(ONE, deadline="+60s")

    assert controller.due(59.0) == []
    (passed,) = controller.due(60.0)
    controller.now += 60.0
    controller.take(passed)

    job = controller.job(A)
    assert (job.phase, job.attempts.exit_code, job.reason) == (
        Phase.FAILED, 124, "its deadline has passed",
    )  # fmt: skip


def test_a_job_that_cannot_end_before_its_deadline_does_not_wait_for_it() -> None:
    controller = cluster_of(n1=2)
    controller.submit("a", **ONE, max_run_s=100.0, deadline="+1h")

    assert controller.due(3499.0) == []
    controller.now += 3500.0
    controller.take(RunExpired(job=A))

    job = controller.job(A)
    assert (job.phase, job.reason) == (
        Phase.CANCELLED, "it cannot end before its deadline any more",
    )  # fmt: skip


def test_the_lengths_of_ended_programs_are_kept_for_predictions() -> None:
    controller = running(ONE, max_run_s=95.0, grace_s=5.0)
    controller.take(SharingChanged(sharing=Sharing()))
    family = controller.job(A).family

    controller.now += 50.0
    leave(controller, code=0)

    (run,) = controller.state.past_runs[family]
    assert (run.slot_s, run.share) == (run.run_s, run.run_s / 100.0)
    assert 49.0 <= run.run_s <= 51.0
    assert controller.state.past_runs["rigid"] == (run,)


def test_a_drain_lets_programs_end_and_sends_term_so_that_the_grace_ends_with_it() -> None:
    controller = running(ONE, grace_s=30.0)

    controller.take(DrainRequested(node=N1, user="op", reason="", within_s=100.0))
    assert (controller.job(A).phase, controller.due(69.0)) == (Phase.RUNNING, [])
    controller.now += 70.0
    (due,) = controller.due()
    controller.take(due)
    assert controller.job(A).phase is Phase.RESCALING
    controller.now += 30.0
    controller.take(DrainExpired(node=N1))
    assert controller.job(A).phase is Phase.PAUSED


def test_a_lost_node_ends_the_gang_and_it_begins_again() -> None:
    controller = running(GANG)

    controller.lose(N2)

    job = controller.job(A)
    assert (job.phase, job.attempts.losses) == (Phase.PAUSED, 1)
    assert job.reason.endswith("restarts from the beginning")


def test_a_long_run_ends_a_row_of_losses() -> None:
    controller = running(GANG)
    controller.job(A).attempts.losses = 5
    controller.now += 601.0

    controller.lose(N2)

    assert controller.job(A).attempts.losses == 1


def test_what_happens_to_rigid_jobs_is_replayed() -> None:
    controller = running(GANG)
    controller.take(paused(A))
    leave(controller, 0, code=0, asked=True)
    leave(controller, 1, code=0, asked=True)

    assert controller.replayed() == controller.state


def test_a_start_waits_with_its_first_stage() -> None:
    controller = cluster_of(n1=2, n2=2)
    controller.submit("a", **GANG)

    commands = controller.place({A: {S0: 1, T0: 1}})

    stages = [one.delta.stage for one in commands if isinstance(one, SendDelta)]
    assert stages == [PREPARE, PREPARE]
