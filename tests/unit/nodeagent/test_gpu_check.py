"""Health of GPUs by the driver's counters and errors."""

# ruff: noqa: N802, N818 - names of pynvml

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from nodeagent.devices import GPU_REMEDY, GpuCheck

A, B = "GPU-a", "GPU-b"


class NvmlError(Exception):
    pass


class Timeout(NvmlError):
    pass


class Unsupported(NvmlError):
    pass


class Driver:
    """The part of `pynvml` that a check uses. A handle is the GPU's UUID."""

    NVMLError, NVMLError_Timeout = NvmlError, Timeout
    NVMLError_NotSupported = NVMLError_FunctionNotFound = Unsupported

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self.ecc: dict[str, int] = {}
        self.rows_failed: set[str] = set()
        self.xids: list[tuple[str, int]] = []
        self.old = False  # no counters and no events
        self.down = False

    def nvmlInit(self) -> None:
        if self.down:
            raise NvmlError("Driver Not Loaded")

    def nvmlEventSetCreate(self) -> str:
        if self.old:
            raise Unsupported
        return "events"

    def nvmlDeviceRegisterEvents(self, *_: object) -> None:
        pass

    def nvmlEventSetWait_v2(self, *_: object) -> Any:
        if not self.xids:
            raise Timeout
        device, number = self.xids.pop(0)
        return SimpleNamespace(device=device, eventData=number)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:
        if handle in self.lost:
            raise NvmlError("GPU is lost")
        return SimpleNamespace(busId=f"bus of {handle}".encode())

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> None:
        if handle in self.lost:
            raise NvmlError("GPU is lost")

    def nvmlDeviceGetTotalEccErrors(self, handle: str, *_: int) -> int:
        if self.old:
            raise Unsupported
        return self.ecc.get(handle, 0)

    def nvmlDeviceGetRemappedRows(self, handle: str) -> tuple[int, int, int, int]:
        if self.old:
            raise Unsupported
        return 1, 0, 0, int(handle in self.rows_failed)


def lose(driver: Driver) -> None:
    driver.lost.add(B)


def corrupt(driver: Driver) -> None:
    driver.ecc[B] = 3


def wear_out(driver: Driver) -> None:
    driver.rows_failed.add(B)


def fall_off(driver: Driver) -> None:
    driver.xids.append((B, 79))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lose, "GPU is lost"),
        (corrupt, "3 uncorrected memory errors"),
        (wear_out, "a faulty row of its memory cannot be replaced"),
        (fall_off, "Xid error 79"),
    ],
)
def test_a_fault_of_a_gpu_is_named(fault: Any, said: str) -> None:
    driver = Driver()
    check = GpuCheck([A, B], cast("Any", driver))
    assert check.problem(full=False) == ""

    fault(driver)

    for _ in range(2):
        assert check.problem(full=True) == f"devices: GPU {B}: {said}; {GPU_REMEDY}"


def test_an_error_of_a_gpu_that_cannot_be_named_is_reported() -> None:
    driver = Driver()
    check = GpuCheck([A], cast("Any", driver))
    assert check.problem(full=False) == ""
    driver.lost.add(B)
    driver.xids = [(B, 79)]

    for _ in range(2):
        said = f"devices: Xid error 79 of a GPU that is lost; {GPU_REMEDY}"
        assert check.problem(full=False) == said


def test_an_error_that_a_script_can_cause_is_no_fault_of_the_gpu() -> None:
    driver = Driver()
    check = GpuCheck([A, B], cast("Any", driver))
    driver.xids = [(A, 13), (B, 31), (A, 43)]

    assert check.problem(full=False) == ""


def test_a_gpu_without_counters_is_healthy_and_a_driver_that_fails_is_not() -> None:
    driver = Driver()
    driver.old = True
    check = GpuCheck([A], cast("Any", driver))
    assert check.problem(full=False) == ""

    driver.down = True

    assert check.problem(full=False).startswith("devices: the GPU driver does not respond: Driver")
    assert GpuCheck([A], None).problem(full=False) == ""
