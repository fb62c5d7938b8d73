"""What the NVIDIA driver knows of this host's GPUs, asked through NVML."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import structlog

from nodeagent.visible_devices import Device, Gpu
from schemas.errors import SettingsError

log = structlog.get_logger("gpu_driver")
DRIVER: Final = Path("/proc/driver/nvidia/version")  # there while the kernel module is loaded


def list_gpus() -> tuple[Gpu, ...]:
    """All GPUs, in the driver's order: that of the PCI bus.

    A GPU that does not answer keeps its place, has no devices, and is logged.

    Returns:
        Empty without a driver, a GPU or the `gpu` extra.

    Raises:
        SettingsError: if there is a driver that does not answer, or no GPU does: such a host should
            not pass for one without GPUs.
    """
    try:
        import pynvml  # noqa: PLC0415 - an extra that hosts without GPUs do without
    except ImportError:
        if DRIVER.exists():
            remedy = "in a checkout of ONES: pip install '.[gpu]'"
            log.warning("a GPU driver, and no way to ask it", remedy=remedy)
        return ()
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return ()
    except pynvml.NVMLError as error:
        raise _silent(str(error)) from None
    try:
        gpus = tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        raise _silent(str(error)) from None
    finally:
        pynvml.nvmlShutdown()
    if gpus and not any(gpu.uuid for gpu in gpus):
        raise _silent(f"none of its {len(gpus)} GPUs answers")
    return gpus


def _silent(why: str) -> SettingsError:
    why = why.rstrip(".")
    hint = 'see what nvidia-smi says, or offer CPU slots with devices = "cpu"'
    return SettingsError(f"devices: the GPU driver cannot be used: {why}", hint, "devices")


def _gpu(nvml: ModuleType, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        device = _device(nvml, handle)
        if not _is_split(nvml, handle):
            return Gpu(device.uuid, device.model, (device,))
        instances = tuple(_instances(nvml, handle))
    except nvml.NVMLError as error:
        log.warning("a GPU does not answer, and is not offered", gpu=index, error=str(error))
        return Gpu("", "", ())
    if not instances:
        log.warning("MIG is on and has no instance: nothing is offered", gpu=index)
    return Gpu(device.uuid, device.model, instances)


def _device(nvml: ModuleType, handle: Any) -> Device:
    return Device(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        model=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
    )


def _is_split(nvml: ModuleType, handle: Any) -> bool:
    try:
        present, _after_reset = nvml.nvmlDeviceGetMigMode(handle)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return False  # a GPU, or a driver, from before MIG
    return bool(present)


def _instances(nvml: ModuleType, handle: Any) -> Iterator[Device]:
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
        except nvml.NVMLError_NotFound:
            continue  # a place where no instance was made
        yield _device(nvml, instance)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
