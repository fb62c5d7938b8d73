"""Faults that GPUs had before they could be tried, on the simulated device."""

from __future__ import annotations

import importlib
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.collectives.process_group import ProcessGroup
from elastic.collectives.rendezvous import build_process_group
from elastic.state.transfer import HostStaging
from elastic.training_errors import BrokenGroupError
from tests.support.simgpu.processes import MODES, here, on_device, on_ranks, ranks_of, row
from tests.training.groups import LOOP, PLAIN, WIDE, Slots, crew, script
from tests.training.peers import HERE, Parent, RendezvousInfo
from tests.training.test_group_changes import as_alone

pytestmark = pytest.mark.slow  # a cluster or devices of its own

WATCHDOG_S = 1.5  # more than its time and that from an error to the process's end
OWN_STREAM = LOOP.replace(
    "for epoch in agent.epochs",
    "torch.accelerator.synchronize()\n"
    "torch.accelerator.set_stream(torch.Stream(device=agent.device))\n"
    "for epoch in agent.epochs",
)


ORDINARY, WORST = MODES
# Of whole jobs a quick run has the mode that does what NCCL may do at worst.
BOTH = pytest.mark.parametrize(
    "mode", [pytest.param(ORDINARY, marks=pytest.mark.slow), WORST], indirect=True
)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- a job


@BOTH
@pytest.mark.usefixtures("gpu_slots")
def test_the_agent_and_its_tensors_name_one_device(tmp_path: Path) -> None:
    checked = LOOP.replace(
        "for epoch in", "assert agent.device == next(model.parameters()).device\nfor epoch in", 1
    )
    with crew(tmp_path, script(PLAIN, checked)) as job:
        job.through((6, 6))

        as_alone(job, PLAIN, 12)


@BOTH
@pytest.mark.usefixtures("gpu_slots")
def test_one_death_of_three_leaves_two_training(tmp_path: Path) -> None:
    with crew(tmp_path, script(PLAIN, LOOP), faults="reduce:rank=1:step=9:version=1=kill") as job:
        job.start(4, 4, 4)
        job.until(job.broken, "a member is lost")
        time.sleep(WATCHDOG_S)
        codes = [worker.process.exitcode for worker in job.workers.values()]
        assert codes == [None, -signal.SIGKILL, None]
        job.recover()
        time.sleep(WATCHDOG_S)
        job.trains_on()
        job.finish()

        assert [worker.process.exitcode for worker in job.workers.values()] == [0, -9, 0]
        as_alone(job, PLAIN, 12)


@BOTH
@pytest.mark.usefixtures("gpu_slots")
def test_a_script_on_its_own_stream_sends_its_whole_state(tmp_path: Path) -> None:
    Slots.environment["SIMGPU_LATE_US"] = "2000,100"  # what a step computes is late too
    with crew(tmp_path, script(WIDE, OWN_STREAM)) as job:
        job.through((12,), (6, 6), (4, 4, 4))

        as_alone(job, WIDE, 12)


# --- a group


def meet(meeting: RendezvousInfo, version: int = 1, **words: Any) -> ProcessGroup:
    importlib.import_module("tests.support.simgpu.worker")
    return build_process_group(
        version=version, store=meeting.store, rank=meeting.rank, size=meeting.size, address=HERE,
        device=here(), **words,
    )  # fmt: skip


def reduces_with_a_late_peer(_double: Any, meeting: RendezvousInfo) -> list[float]:
    group = meet(meeting)
    if meeting.rank == 1:
        time.sleep(0.3)  # many times as long as one look at an operation takes
    kept = row(meeting.rank + 1.0)
    group.all_reduce(kept, threading.Event())
    return kept.tolist()  # type: ignore[no-any-return]


def test_a_late_peer_breaks_no_reduction(mode: str) -> None:
    assert on_ranks(reduces_with_a_late_peer, 2, NCCL_DOUBLE=mode) == [[3.0] * 4] * 2


def connects_before_it_trains(double: Any, meeting: RendezvousInfo) -> tuple[bool, int]:
    made: list[Any] = []
    begin = double.Communicator.__init__

    def counted(self: Any, *words: Any) -> None:
        made.append(self)
        begin(self, *words)

    double.Communicator.__init__ = counted
    group = meet(meeting)
    connected = [communicator.connected.is_set() for communicator in made]
    group.all_reduce(row(1.0), threading.Event())
    group.broadcast(row(1.0), 0, threading.Event())
    return connected == [True], len(made)


def test_a_group_is_connected_before_its_first_step() -> None:
    assert on_ranks(connects_before_it_trains, 2) == [(True, 1)] * 2


def is_called_off(_double: Any, meeting: RendezvousInfo) -> str:
    if meeting.rank == 1:
        return str(Parent.says())  # never comes
    shown: list[ProcessGroup] = []
    there = threading.Event()

    def show(group: ProcessGroup) -> None:
        shown.append(group)
        there.set()

    said: list[str] = []

    def build() -> None:
        with pytest.raises(BrokenGroupError) as broken:
            meet(meeting, publish=show)
        said.append(str(broken.value))

    builds = threading.Thread(target=build)
    builds.start()
    there.wait()
    time.sleep(0.1)  # in the midst of connecting
    shown[0].abort()
    builds.join(10.0)
    return said[0] if said else "still connects"


def test_a_cancelled_build_ends(mode: str) -> None:
    with ranks_of(is_called_off, 2, NCCL_DOUBLE=mode) as ranks:
        assert ranks.said(0) == "the group was aborted"


def sends_state_beside_a_reduction(_double: Any, meeting: RendezvousInfo) -> bool:
    """The ranks start the two in different orders."""
    group = meet(meeting)
    state = torch.full((8,), 5.0 if meeting.rank == 0 else 0.0)
    summed = row(1.0)

    def travels() -> None:
        work = group.send(state, 1) if meeting.rank == 0 else group.receive(state, 0)
        work.wait()

    beside = threading.Thread(target=travels, daemon=True)
    if meeting.rank == 0:
        beside.start()
        time.sleep(0.1)
        group.all_reduce(summed, threading.Event())
    else:
        group.all_reduce(summed, threading.Event())
        beside.start()
    beside.join(10.0)
    return not beside.is_alive() and (state.tolist(), summed.tolist()) == ([5.0] * 8, [2.0] * 4)


def test_state_travels_beside_a_reduction_in_any_order(mode: str) -> None:
    assert on_ranks(sends_state_beside_a_reduction, 2, NCCL_DOUBLE=mode) == [True, True]


@on_device
def test_state_is_copied_beside_training(simgpu: Any) -> None:
    staging, state, gate = HostStaging(here()), row(3.0), simgpu.Gate()
    marks = staging.mark()
    gate.block(torch.accelerator.current_stream())  # as a reduction does that waits for a peer
    found: list[torch.Tensor] = []
    copies = threading.Thread(target=lambda: found.extend(staging.to_host([state], marks)))
    copies.start()
    copies.join(5.0)
    copied = not copies.is_alive()
    gate.open()
    copies.join()

    assert (copied, [copy.tolist() for copy in found]) == (True, [[3.0] * 4])


@on_device
def test_a_state_copy_follows_the_computation(simgpu: Any) -> None:
    state, own = row(1.0), torch.Stream(device=here())
    staging = HostStaging(here())
    simgpu.set_late(kernels_us=50_000)
    with own:  # which a script may choose
        state.add_(2.0)
        marks = staging.mark()
    copies = staging.to_host([state], marks)

    assert [copy.tolist() for copy in copies] == [[3.0] * 4]


def has_no_gpu(_double: Any, meeting: RendezvousInfo, opened: bool) -> str:  # noqa: FBT001
    group_error = ""
    if opened:  # NCCL's own word is a ValueError
        torch.accelerator.set_device_index = lambda _: None
    try:
        meet(meeting)
    except BrokenGroupError as error:
        group_error = str(error)
    return group_error


@pytest.mark.parametrize("opened", [False, True], ids=["no driver", "a driver"])
def test_a_missing_gpu_breaks_the_group(opened: bool) -> None:  # noqa: FBT001
    said = on_ranks(has_no_gpu, 2, opened, SIMGPU_DEVICES="0")

    assert [bool(error) for error in said] == [True, True]
