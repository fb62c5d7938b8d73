"""What the processes of a worker use: cores between two looks, memory, and their GPU."""

from __future__ import annotations

import os
from types import ModuleType, SimpleNamespace
from typing import cast

from nodeagent.reconciler import WorkerState
from nodeagent.usage import UsageWatch
from schemas.ids import JobId, Rank, Version, WorkerId
from schemas.wire.agent import WorkerUsed

HERE = WorkerState(
    worker=WorkerId("a-1.v1.r0"), job=JobId("a-1"), version=Version(1), rank=Rank(0), slot=0
)


class LostError(Exception):
    pass


def nvml(load: int | None, used: int) -> ModuleType:
    """A driver with one GPU; without a load it reports memory only, as for a MIG instance."""

    def rates(_: object) -> SimpleNamespace:
        if load is None:
            raise LostError
        return SimpleNamespace(gpu=load)

    return cast(
        "ModuleType",
        SimpleNamespace(
            NVMLError=LostError,
            nvmlInit=lambda: None,
            nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
            nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=used),
            nvmlDeviceGetUtilizationRates=rates,
        ),
    )


def watch(pids: list[int], driver: ModuleType | None = None) -> UsageWatch:
    return UsageWatch(
        workers=lambda: [HERE],
        processes=lambda _: pids,
        uuids={0: "GPU-1"},
        nvml=driver,
        report=lambda _: None,
    )


def measured(made: UsageWatch) -> WorkerUsed:
    """What the second look finds; the first one only remembers the processor's time."""
    assert made.measure([HERE], 10.0) == []
    sum(number for number in range(2_000_000))  # some processor time
    (used,) = made.measure([HERE], 12.0)
    return used


def test_a_worker_uses_cores_and_memory_without_a_gpu() -> None:
    used = measured(watch([os.getpid()]))

    assert 0.0 < used.cpu_cores < 30.0
    assert used.memory_bytes > 1 << 20
    assert (used.job, used.gpu_share, used.gpu_memory_bytes) == (HERE.job, None, None)


def test_processes_that_have_gone_use_nothing() -> None:
    used = measured(watch([2**22 + 1]))

    assert (used.cpu_cores, used.memory_bytes) == (0.0, 0)


def test_a_gpu_tells_its_load_and_memory_and_a_part_of_one_its_memory() -> None:
    whole, part = measured(watch([], nvml(87, 5))), measured(watch([], nvml(None, 5)))

    assert (whole.gpu_share, whole.gpu_memory_bytes) == (0.87, 5)
    assert (part.gpu_share, part.gpu_memory_bytes) == (None, 5)
