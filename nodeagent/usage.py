"""Processor, memory and GPU use of the node's workers, for people who look at their jobs."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Final

import psutil

from nodeagent.errors import log_errors
from nodeagent.reconciler import WorkerState
from schemas.ids import WorkerId
from schemas.nodes import SlotSpec
from schemas.wire.agent import WorkerUsed

INTERVAL_S: Final = 5.0


def nvml_of(slots: Iterable[SlotSpec]) -> ModuleType | None:
    """Return the module `pynvml` if a slot has a GPU and the module is installed."""
    with contextlib.suppress(ImportError):
        if any(slot.kind == "gpu" for slot in slots):
            return importlib.import_module("pynvml")  # an extra that only GPU hosts need
    return None


class UsageWatch:
    """Measurement of all running workers every few seconds, in a thread.

    `uuids` has the GPU of each slot that has one. `nvml` is `pynvml`, or None without GPUs.
    """

    def __init__(
        self,
        *,
        workers: Callable[[], Sequence[WorkerState]],
        processes: Callable[[WorkerId], list[int]],
        uuids: Mapping[int, str],
        nvml: ModuleType | None,
        report: Callable[[WorkerUsed], None],
    ) -> None:
        self._workers = workers
        self._processes = processes
        self._uuids = uuids
        self._nvml = nvml
        self._report = report
        self._before: dict[WorkerId, tuple[float, float]] = {}  # time, CPU seconds

    async def run(self) -> None:
        """Measure and report until cancelled."""
        while True:
            with log_errors("usage of the workers"):
                workers = self._workers()
                for used in await asyncio.to_thread(self.measure, workers, time.monotonic()):
                    self._report(used)
            await asyncio.sleep(INTERVAL_S)

    def measure(self, workers: Sequence[WorkerState], now: float) -> list[WorkerUsed]:
        """Return what each worker uses; a worker that is new is measured the next time."""
        before, self._before = self._before, {}
        found: list[WorkerUsed] = []
        for worker in workers:
            cpu_s, memory_bytes = _sums(self._processes(worker.worker))
            self._before[worker.worker] = now, cpu_s
            if (last := before.get(worker.worker)) is None or now <= last[0]:
                continue
            share, gpu_bytes = self._gpu(self._uuids.get(worker.slot, ""))
            used = WorkerUsed(
                job=worker.job,
                version=worker.version,
                rank=worker.rank,
                journal=worker.journal,
                cpu_cores=max(0.0, cpu_s - last[1]) / (now - last[0]),
                memory_bytes=memory_bytes,
                gpu_share=share,
                gpu_memory_bytes=gpu_bytes,
            )
            found.append(used)
        return found

    def _gpu(self, uuid: str) -> tuple[float | None, int | None]:
        """Return the load and the used memory of a GPU; the driver may know only some of it."""
        share, held, nvml = None, None, self._nvml
        if nvml is not None and uuid:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlInit()
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                held = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
                share = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0  # not of MIG
        return share, held


def _sums(pids: Iterable[int]) -> tuple[float, int]:
    """Return the CPU seconds and the resident bytes of processes, without those that have gone.

    Memory that a process shares, such as with the zygote that forked it, counts once.
    """
    cpu_s, own_bytes, shared_bytes = 0.0, 0, 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            times, memory = process.cpu_times(), process.memory_info()
            cpu_s += sum(times[:4])  # user and system, also of children that have ended
            own_bytes += memory.rss - memory.shared
            shared_bytes = max(shared_bytes, memory.shared)
    return cpu_s, own_bytes + shared_bytes
