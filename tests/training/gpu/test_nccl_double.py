"""The double of NCCL keeps each sentence of its docstring."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tests.support.simgpu.processes import MODES, here, on_ranks, ranks_of, row
from tests.training.peers import Parent, RendezvousInfo

pytestmark = pytest.mark.slow  # a cluster or devices of its own

SOON_S = 60.0
AWHILE_S = 1.0  # more than an operation's limit and the watchdog's time together
SPARING = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}  # fmt: skip


def made(
    double: Any, meeting: RendezvousInfo, name: str = "one", *, blocking: bool = True,
    eager: bool = False, limit_s: float = 600.0,
) -> Any:  # fmt: skip
    host, _, port = meeting.store.rpartition(":")
    store = PrefixStore(name, TCPStore(host, int(port), is_master=False, wait_for_workers=False))
    options = double.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=limit_s)
    options.config.blocking = int(blocking)
    group = double.ProcessGroupNCCL(store, meeting.rank, meeting.size, options)
    if eager:
        group.eager_connect_single_device(here())
        until(group._is_initialized)
    return group


def until(there: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON_S
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def finished(work: Any) -> None:
    until(work.is_completed)
    work.wait()


# --- what waits for what


def comes_later(double: Any, meeting: RendezvousInfo) -> list[bool]:
    group = made(double, meeting, eager=True)
    kept = row(1.0)
    seen = []
    if meeting.rank == 1:
        Parent.hears("ready")
        assert Parent.says() == "begin"
    work = group.allreduce([kept])
    if meeting.rank == 0:
        own = torch.Stream(device=here())
        with own:
            work.wait()  # blocks this stream, not the thread
        seen = [work.is_completed(), own.query(), torch.accelerator.current_stream().query()]
        Parent.hears("waits")
        own.synchronize()
        seen += [work.is_completed(), own.query(), kept.tolist() == [2.0] * 4]
    finished(work)
    return seen


def test_a_wait_blocks_only_the_current_stream() -> None:
    with ranks_of(comes_later, 2) as ranks:
        assert ranks.said(1) == "ready"
        assert ranks.said(0) == "waits"
        ranks.tell(1, "begin")

        assert ranks.said(0) == [False, False, True, True, True, True]


def reads_at_once(double: Any, meeting: RendezvousInfo) -> bool:
    group = made(double, meeting, eager=True)
    kept, gate = row(1.0), double.Gate()
    own = torch.Stream(device=here())
    gate.block(own)
    with own:
        work = group.allreduce([kept])  # behind what is on this stream
    time.sleep(0.05)
    early = bool(work.is_completed())
    gate.open()
    finished(work)
    assert kept.tolist() == [2.0] * 4
    return early


def test_an_operation_waits_for_earlier_work_on_its_stream() -> None:
    assert on_ranks(reads_at_once, 2) == [False, False]


def crosses(double: Any, meeting: RendezvousInfo) -> list[bool]:
    """Two groups, whose operations the ranks launch in different orders."""
    groups = [made(double, meeting, name, eager=True) for name in ("one", "two")]
    order = groups if meeting.rank == 0 else groups[::-1]
    works = [group.allreduce([row(1.0)]) for group in order]
    deadline = time.monotonic() + (SOON_S if double.os.environ[double.MODE] == "ordinary" else 1.0)
    while not all(work.is_completed() for work in works) and time.monotonic() < deadline:
        time.sleep(0.002)
    return [bool(work.is_completed()) for work in works]


@pytest.mark.parametrize(("mode", "over"), [("ordinary", True), ("worst", False)])
def test_a_full_device_needs_one_order_of_launches(mode: str, over: bool) -> None:  # noqa: FBT001
    assert on_ranks(crosses, 2, NCCL_DOUBLE=mode, **SPARING) == [[over, over]] * 2


def times_out(double: Any, meeting: RendezvousInfo) -> tuple[str, list[bool], str]:
    group = made(double, meeting, eager=True)
    if meeting.rank == 1:
        assert Parent.says() == "end"
        return "", [], ""
    work = group.allreduce([row(1.0)])
    with pytest.raises(dist.DistBackendError, match="timed out") as first:
        work.wait(timedelta(milliseconds=20))
    with pytest.raises(dist.DistBackendError, match="aborted") as second:
        group.allreduce([row(1.0)])
    assert isinstance(first.value, RuntimeError)
    return str(first.value), [work.is_completed()], str(second.value)


def test_a_wait_with_a_limit_aborts_the_communicator() -> None:
    with ranks_of(times_out, 2, **SPARING) as ranks:
        said, complete, _ = ranks.said(0)

        assert "ALLREDUCE timed out in blocking wait" in said
        assert complete == [True]


# --- connections


def connects_lazily(double: Any, meeting: RendezvousInfo, blocking: bool) -> list[object]:  # noqa: FBT001
    group = made(double, meeting, blocking=blocking)
    early = bool(group._is_initialized())
    if meeting.rank == 1:
        Parent.hears(early)
        assert Parent.says() == "connect"
    began = threading.Event()

    def connect() -> None:
        group.eager_connect_single_device(here())
        began.set()

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join(0.3)
    returned = began.is_set()
    if meeting.rank == 0:
        Parent.hears([early, returned, bool(group._is_initialized())])
    until(group._is_initialized)
    return [True]


@pytest.mark.parametrize(("blocking", "returned"), [(True, False), (False, True)])
def test_connecting_blocks_unless_configured_otherwise(blocking: bool, returned: bool) -> None:  # noqa: FBT001
    with ranks_of(connects_lazily, 2, blocking) as ranks:
        assert ranks.said(1) is False
        assert ranks.said(0) == [False, returned, False]
        ranks.tell(1, "connect")

        assert [ranks.said(0), ranks.said(1)] == [[True], [True]]


def is_called_off(double: Any, meeting: RendezvousInfo) -> str:
    group = made(double, meeting, blocking=False)
    if meeting.rank == 1:
        return str(Parent.says())
    group.eager_connect_single_device(here())
    group.abort()
    with pytest.raises(dist.DistBackendError) as refused:
        group.allreduce([row(1.0)])
    return str(refused.value)


def test_a_nonblocking_connection_can_be_aborted() -> None:
    with ranks_of(is_called_off, 2) as ranks:
        assert "NCCL communicator was aborted" in ranks.said(0)


# --- refusals


def is_refused(double: Any, meeting: RendezvousInfo) -> list[str]:
    group = made(double, meeting, eager=True)
    said = []
    for tensor in (
        torch.ones(2), torch.ones(2, 3, device=here()).t(),
        torch.ones(2, dtype=torch.int16, device=here()),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError)) as refused:
            group.allreduce([tensor])
        said.append(str(refused.value))
    with pytest.raises(ValueError, match="with an index"):
        group.eager_connect_single_device(torch.device("simgpu"))
    return said


def test_unsuitable_tensors_are_refused() -> None:
    assert on_ranks(is_refused, 1) == [
        [
            "Tensors must be CUDA and dense",
            "Tensors must be contiguous",
            "Input tensor data type is not supported for NCCL process group: torch.int16",
        ]
    ]


# --- deaths


def loses_a_peer(double: Any, meeting: RendezvousInfo, learns: bool) -> list[object]:  # noqa: FBT001
    group = made(double, meeting, eager=True, blocking=False)
    kept = row(1.0)
    finished(group.allreduce([kept]))
    if meeting.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = group.allreduce([kept])
    Parent.hears("reduces")
    assert Parent.says() == "abort"
    until(lambda: not learns or work.exception())
    seen = [work.is_completed(), work.exception() is not None]
    threading.Thread(target=group.abort).start()
    until(lambda: work.over)
    work.wait()
    torch.accelerator.synchronize()
    return [*seen, work.is_completed(), kept.tolist() == [3.0] * 4, bool(kept.isnan().all())]


@pytest.mark.parametrize("mode", MODES)
def test_an_abort_ends_operations_and_leaves_garbage(mode: str) -> None:
    learns = mode == "ordinary"
    with ranks_of(loses_a_peer, 2, learns, NCCL_DOUBLE=mode, **SPARING) as ranks:
        assert ranks.said(0) == "reduces"
        ranks.processes[1].join(SOON_S)
        ranks.tell(0, "abort")
        complete, failed, after, right, garbage = ranks.said(0)

        assert (complete, failed) == (learns, learns)  # else it hangs
        assert (after, right, garbage) == (True, False, True)


def survives_or_not(double: Any, meeting: RendezvousInfo) -> str:
    group = made(double, meeting, eager=True, limit_s=0.3)
    Parent.hears("ready")
    if meeting.rank == 1:
        Parent.says()
        os.kill(os.getpid(), signal.SIGKILL)
    if meeting.rank == 0:
        Parent.says()
        group.allreduce([row(1.0)])
    return str(Parent.says())  # rank 2 takes no part


def codes_after_a_death(
    mode: str, environment: dict[str, str], *, ended: tuple[int, ...]
) -> list[int | None]:
    with ranks_of(survives_or_not, 3, NCCL_DOUBLE=mode, **environment) as ranks:
        for rank in range(3):
            assert ranks.said(rank) == "ready"
        ranks.tell(1, "die")
        ranks.processes[1].join(SOON_S)
        ranks.tell(0, "reduce")
        for rank in (0, 2):
            ranks.processes[rank].join(AWHILE_S if rank not in ended else SOON_S)
        return [process.exitcode for process in ranks.processes]


@pytest.mark.parametrize("mode", MODES)
def test_one_death_ends_all_ranks_without_the_environment(mode: str) -> None:
    assert codes_after_a_death(mode, {}, ended=(0, 2)) == [-6, -9, -6]
    assert codes_after_a_death(mode, SPARING, ended=()) == [None, -9, None]


def test_a_rank_that_ends_itself_asks_its_peers_to_end() -> None:
    spared = SPARING | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}

    assert codes_after_a_death("worst", spared, ended=(0,)) == [-6, -9, None]
