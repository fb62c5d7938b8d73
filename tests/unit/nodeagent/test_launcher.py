"""What a launcher gives to the program of a rigid job, and how an agent stops the program."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from msgspec.structs import replace

from nodeagent.devices import device_environment
from nodeagent.launcher import PORTS, environment, free_port
from nodeagent.reconciler import Desired, Ended, GraceOver, Kill, PublishEvent, Terminate
from schemas.ids import Version
from schemas.nodes import SlotSpec
from schemas.wire.agent import START, SUSPEND, SWITCH, WorkerExited
from schemas.wire.worker import Assignment, GroupOrder
from tests.support.builders import S0, S1, T0, A, assignment, job_spec, run
from tests.support.reconciler_events import FIRST, agent, alive

RIGID: dict[str, Any] = {"script": "", "batch_size": 0, "command": ("python", "train.py")}
GANG = job_spec(kind="torchrun", slots=3, **RIGID)
ONE = job_spec(kind="command", slots=1, **RIGID)


def told(rank: int) -> tuple[Assignment, GroupOrder]:
    """The assignment of a rank of a gang on two nodes, and its order to start."""
    delta = replace(run(A, on={S0: 1, S1: 1, T0: 1}), spec=GANG)
    own = replace(assignment(delta, rank), env={"OMP_NUM_THREADS": "2", "MINE": "yes"})
    order = GroupOrder(
        version=Version(1), stage=SWITCH, kind=START, group=own.group, store="10.0.0.7:20003"
    )
    return own, order


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}),
        (1, {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}),
        (2, {"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}),
    ],
)
def test_a_rank_has_the_variables_that_torchrun_sets(rank: int, expected: dict[str, str]) -> None:
    environ = environment(*told(rank), 20_003)

    same = {
        "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "20003", "WORLD_SIZE": "3",
        "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": A, "OMP_NUM_THREADS": "2", "MINE": "yes",
        "ONES_JOB": A, "ONES_SLOTS": "3", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    assert {**expected, **same}.items() <= environ.items()


def test_a_gang_of_one_meets_on_its_own_host() -> None:
    assigned, order = told(0)

    environ = environment(assigned, replace(order, store=""), 20_111)

    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("127.0.0.1", "20111")


def test_a_command_has_no_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assigned = assignment(replace(run(A), spec=ONE))
    _, order = told(0)

    environ = environment(assigned, order, 0)

    assert {"RANK", "WORLD_SIZE", "MASTER_ADDR"}.isdisjoint(environ)
    assert (environ["ONES_RANK"], environ["ONES_SLOT_INDICES"]) == ("0", "0")


def test_two_slots_of_a_node_never_have_the_same_port() -> None:
    ports = [free_port(slot) for slot in range(8)]

    assert len(set(ports)) == 8
    assert all(port in PORTS for port in ports)


def test_a_port_in_use_is_passed_over() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        taken = free_port(3)
        with socket.socket() as holder:
            holder.bind(("", taken))
            holder.listen()
            assert free_port(3) not in {taken, other.getsockname()[1]}


def test_a_program_sees_the_devices_of_all_its_slots() -> None:
    slots = [SlotSpec(index=index, kind="gpu", uuid=f"GPU-{index}") for index in (1, 3)]

    assert device_environment(*slots)["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-3"


def suspended() -> Desired:
    delta = replace(run(A), spec=ONE)
    former = delta.group.members if delta.group is not None else ()
    group = replace(delta.group, version=Version(2), members=()) if delta.group else None
    return Desired(
        replace(
            delta, version=Version(2), stage=SWITCH, kind=SUSPEND, group=group, former=former
        )
    )  # fmt: skip


def test_the_program_of_a_suspended_job_gets_term_and_after_its_grace_kill() -> None:
    node = agent(*alive(), Desired(replace(run(A), spec=ONE)))

    assert Terminate(FIRST) in node.handle(suspended())
    assert node.handle(suspended()) == []
    assert node.handle(GraceOver(FIRST)) == [Kill(FIRST)]


def test_an_agent_says_whether_a_program_was_asked_to_end() -> None:
    node = agent(*alive(), suspended())

    actions = node.handle(Ended(FIRST, 0, None, unseen=False, asked=True))

    exit_event = WorkerExited(
        job=A, version=Version(1), rank=node.workers[FIRST].rank, code=0, signal=None, asked=True
    )
    assert PublishEvent(exit_event) in actions


def test_programs_see_no_variable_of_the_agent_that_is_not_passed_on() -> None:
    assert "ONES_HOME" not in os.environ or "ONES_HOME" in environment(*told(0), 1)
