"""Slots of this host, which are the GPUs that the agent may use, or declared CPU slots.

GPUs are listed through NVML and filtered by CUDA_VISIBLE_DEVICES as CUDA reads it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import psutil
import structlog

from nodeagent.environments import uv
from nodeagent.settings import MIN_FENCE_S, AgentSettings
from schemas import __version__
from schemas.errors import BadFieldError, SettingsError, install_hint
from schemas.ids import NodeId
from schemas.nodes import NodeSpec, SlotSpec
from schemas.relations import check_labels

driver_log = structlog.get_logger("gpu_driver")
log = structlog.get_logger("devices")
LEADING_NUMBER: Final = re.compile(r"[+-]?[0-9]+")
DRIVER: Final = Path("/proc/driver/nvidia/version")  # exists while the kernel module is loaded
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER: Final = "CUDA_DEVICE_ORDER"
BUS_ORDER: Final = "PCI_BUS_ID"
PLACE_PART: Final = 16  # one part of so many is for jobs without slots
FENCE_SPARE_S: Final = 2.0  # until the timeout is noticed and the killed processes have exited
CGROUPS: Final = Path("/sys/fs/cgroup")
OWN_CGROUP: Final = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Device:
    """Device of one worker, which is a GPU, or one MIG instance of a GPU."""

    uuid: str  # "GPU-..." or "MIG-...", given by the driver
    model: str  # name given by the driver
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this host. Its index is its position in the list of GPUs."""

    uuid: str  # empty if the GPU does not respond
    model: str
    devices: tuple[Device, ...]  # the GPU, or its MIG instances; empty if it does not respond


@dataclass(frozen=True, slots=True)
class Selection:
    """The visible devices, and the entry of CUDA_VISIBLE_DEVICES that ended the list, if any."""

    devices: tuple[Device, ...]
    by_index: bool  # True: entries are indices, so the order of GPUs matters
    ended_by: str | None = None  # first entry that names no device; later entries are ignored
    repeated: str | None = None  # entry that names a device again, so that none is visible


def select_visible(value: str, gpus: Sequence[Gpu]) -> Selection:
    """Return the devices that a value of CUDA_VISIBLE_DEVICES names, in its order, as CUDA does.

    The list ends at the first entry that names no device (`-1` is customary), or that differs in
    kind from the first entry. If a device is named twice, no device is visible. An abbreviated
    UUID is valid if it fits one device only. Characters after the digits of an index are ignored.
    One difference from CUDA: a GPU that is split by MIG means all of its instances, because the
    agent runs a worker on each instance. CUDA would use only the first instance.
    """
    entries = [entry.strip() for entry in value.split(",")] if value.strip() else []
    kind = _kind(entries[0]) if entries else ""
    found: list[Device] = []
    seen: set[tuple[str, ...]] = set()
    for entry in entries:
        named = _find_entry(entry, kind, gpus)
        if named is None:
            return Selection(tuple(found), kind == "", ended_by=entry)
        which, devices = named
        if which in seen:
            return Selection((), kind == "", repeated=entry)
        seen.add(which)
        found += devices
    return Selection(tuple(found), kind == "" and bool(entries))


def _kind(entry: str) -> str:
    return next((kind for kind in ("GPU-", "MIG-") if entry.startswith(kind)), "")


def _find_entry(
    entry: str, kind: str, gpus: Sequence[Gpu]
) -> tuple[tuple[str, ...], tuple[Device, ...]] | None:
    if _kind(entry) != kind:
        return None
    if kind == "MIG-":
        fitting = [d for gpu in gpus for d in gpu.devices if d.uuid.startswith(entry)]
        return ((fitting[0].uuid,), (fitting[0],)) if len(fitting) == 1 else None
    if kind == "GPU-":
        indices = [i for i, gpu in enumerate(gpus) if gpu.uuid.startswith(entry)]
        index = indices[0] if len(indices) == 1 else -1
    else:
        digits = LEADING_NUMBER.match(entry)
        index = int(digits.group()) if digits else -1
    if not 0 <= index < len(gpus):
        return None
    return (str(index),), gpus[index].devices


def list_gpus() -> tuple[Gpu, ...]:
    """Return all GPUs in the driver's order, which is the order of the PCI bus.

    A GPU that does not respond keeps its position, has no devices, and is logged. The result is
    empty without a driver, a GPU or the `gpu` extra.

    Raises:
        SettingsError: if the driver or all GPUs do not respond. Without this error, the host would
            look like a host without GPUs.
    """
    try:
        import pynvml  # noqa: PLC0415 - an extra that only GPU hosts need
    except ImportError:
        if DRIVER.exists():
            remedy = install_hint("gpu")
            driver_log.warning("GPU driver found, but pynvml is not installed", remedy=remedy)
        return ()
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return ()
    except pynvml.NVMLError as error:
        raise _driver_error(str(error)) from None
    try:
        gpus = tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        raise _driver_error(str(error)) from None
    finally:
        pynvml.nvmlShutdown()
    if gpus and not any(gpu.uuid for gpu in gpus):
        raise _driver_error(f"none of its {len(gpus)} GPUs responds")
    return gpus


def driver_version() -> str:
    """Return the version of the GPU driver; pynvml has to be installed."""
    import pynvml  # noqa: PLC0415 - an extra that only GPU hosts need

    try:
        pynvml.nvmlInit()
        return _text(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return str(error)


class DriverError(SettingsError):
    """Raised when the GPU driver does not respond; after a boot it may need time."""

    needs_person = False


def _driver_error(why: str) -> DriverError:
    why = why.rstrip(".")
    hint = 'check nvidia-smi, or offer CPU slots with devices = "cpu"'
    return DriverError(f"devices: the GPU driver cannot be used: {why}", hint, "devices")


def _gpu(nvml: ModuleType, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        device = _device(nvml, handle)
        if not _is_split(nvml, handle):
            return Gpu(device.uuid, device.model, (device,))
        instances = tuple(_instances(nvml, handle))
    except nvml.NVMLError as error:
        driver_log.warning("GPU does not respond, not offered", gpu=index, error=str(error))
        return Gpu("", "", ())
    if not instances:
        driver_log.warning("MIG is enabled without instances, GPU not offered", gpu=index)
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
        return False  # the GPU or the driver is older than MIG
    return bool(present)


def _instances(nvml: ModuleType, handle: Any) -> Iterator[Device]:
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
        except nvml.NVMLError_NotFound:
            continue  # this position has no instance
        yield _device(nvml, instance)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


HARDWARE_XIDS: Final = frozenset({48, 62, 64, 74, 79, 95, 109, 119, 120, 140})
XID_LINE: Final = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<gpu>[0-9a-fA-F:.]+)\): (?P<xid>\d+)")
UNCORRECTED, SINCE_LOAD = 1, 0  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC
XID_EVENTS: Final = 8  # nvmlEventTypeXidCriticalError
GPU_REMEDY: Final = "drain the node, and reset the GPU or the host"


def logged_xids(lines: Iterable[str]) -> dict[str, int]:
    """Return the last hardware error of each GPU (PCI address) in lines of the kernel's log."""
    found = (XID_LINE.search(line) for line in lines)
    pairs = {
        one["gpu"]: int(one["xid"]) for one in found if one and int(one["xid"]) in HARDWARE_XIDS
    }
    return dict(sorted(pairs.items()))


class GpuCheck:
    """Health of the GPUs of a node's slots, by the driver's counters and errors.

    Xid errors that a program can cause are ignored (NVIDIA, "XID Errors", r580). Other errors
    count from the first check on.

    Args:
        uuids: GPUs or MIG instances.
        nvml: module `pynvml`; None if it is not installed.
    """

    setting: Final = "devices"
    timeout_problem: Final = f"devices: the GPU driver hangs; {GPU_REMEDY}"

    def __init__(self, uuids: Sequence[str], nvml: ModuleType | None) -> None:
        self._uuids = uuids
        self._nvml = nvml
        self._events: Any = None  # of all GPUs; None: not registered
        self._has_events = True  # False: the driver reports none
        self._names: dict[str, str] = {}  # UUID by PCI bus id
        self._xids: dict[str, int] = {}  # last hardware error by UUID

    def problem(self, *, full: bool) -> str:
        """Return what is wrong with a GPU, and the remedy, or "" if nothing is."""
        nvml = self._nvml
        if nvml is None:
            return ""
        try:
            nvml.nvmlInit()
            if self._has_events:
                self._collect_xids(nvml)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            self._has_events = False  # such as a virtual machine, or an old driver
        except nvml.NVMLError as error:
            return f"devices: the GPU driver does not respond: {error}; {GPU_REMEDY}"
        if "" in self._xids:
            return f"devices: Xid error {self._xids['']} of a GPU that is lost; {GPU_REMEDY}"
        for uuid in self._uuids:
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                why = self._fault(nvml, uuid, handle)
            except nvml.NVMLError as error:
                why = str(error)
            if why:
                return f"devices: GPU {uuid}: {why}; {GPU_REMEDY}"
        return ""

    def _fault(self, nvml: ModuleType, uuid: str, handle: Any) -> str:
        if uuid in self._xids:
            return f"Xid error {self._xids[uuid]}"
        with contextlib.suppress(nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            nvml.nvmlDeviceGetMemoryInfo(handle)  # fails if the GPU is lost
        with contextlib.suppress(nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            errors = nvml.nvmlDeviceGetTotalEccErrors(handle, UNCORRECTED, SINCE_LOAD)
            if errors:
                return f"{errors} uncorrected memory errors"
        with contextlib.suppress(nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            if nvml.nvmlDeviceGetRemappedRows(handle)[3]:
                return "a faulty row of its memory cannot be replaced"
        return ""

    def _collect_xids(self, nvml: ModuleType) -> None:
        if self._events is None:
            self._events = nvml.nvmlEventSetCreate()
            for uuid in self._uuids:
                with contextlib.suppress(nvml.NVMLError):  # such as a MIG instance
                    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                    self._names[_bus(nvml, handle)] = uuid
                    nvml.nvmlDeviceRegisterEvents(handle, XID_EVENTS, self._events)
        with contextlib.suppress(nvml.NVMLError_Timeout):
            while True:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                if event.eventData in HARDWARE_XIDS:
                    self._xids[self._name(nvml, event.device)] = event.eventData

    def _name(self, nvml: ModuleType, handle: Any) -> str:
        """Return the UUID of a GPU that had an error, or "" if the GPU is lost."""
        with contextlib.suppress(nvml.NVMLError):
            return self._names.get(_bus(nvml, handle), "")
        return ""


def _bus(nvml: ModuleType, handle: Any) -> str:
    return _text(nvml.nvmlDeviceGetPciInfo(handle).busId)


def gpu_check(slots: Sequence[SlotSpec]) -> GpuCheck | None:
    """Return the check of the GPUs of these slots, or None if no slot has one."""
    uuids = [slot.uuid for slot in slots if slot.kind == "gpu" and slot.uuid]
    if not uuids:
        return None
    try:
        import pynvml  # noqa: PLC0415 - an extra that only GPU hosts need
    except ImportError:
        return None
    return GpuCheck(uuids, pynvml)


def inventory(settings: AgentSettings, environ: Mapping[str, str] = os.environ) -> NodeSpec:
    """Return the slots, cores and memory (bytes) of this host.

    Raises:
        SettingsError: if `devices` is neither "auto" nor "cpu", no slot is offered, the driver does
            not respond, CUDA_VISIBLE_DEVICES is invalid, `fence_s` is too short, or the engine of
            containers is not installed.
    """
    if settings.devices not in {"auto", "cpu"}:
        raise SettingsError(f"devices: {settings.devices!r}", 'choose "auto" or "cpu"', "devices")
    slots = gpu_slots(list_gpus(), environ) if settings.devices == "auto" else ()
    slots = slots or cpu_slots(settings.slots)
    if (engine := settings.containers.engine) and shutil.which(engine) is None:
        what = f"containers.engine: there is no program {engine} on this host"
        raise SettingsError(what, "install it and catatonit, or leave it out", "containers.engine")
    if settings.cores < 0:
        raise SettingsError(f"cores: {settings.cores} is below 0", "leave it out", "cores")
    if not slots:
        raise SettingsError("slots: the node offers none", "set slots to 1 or more", "slots")
    try:
        check_labels(settings.labels)
    except BadFieldError as error:
        raise SettingsError(error.message, error.hint, error.field) from None
    cores, memory = settings.cores or usable_cores(), usable_memory()
    aside = settings.places
    return NodeSpec(
        node=NodeId(settings.node),
        host=socket.gethostname(),
        address=settings.address,
        slots=slots,
        cores=cores,
        memory_bytes=memory,
        release=__version__,
        fenced_s=fenced_s(settings),
        containers=settings.containers.engine,
        environments=uv() is not None,
        labels=settings.labels,
        place_cores=max(1.0, cores / PLACE_PART) if aside.cpus is None else aside.cpus,
        place_memory_bytes=(
            memory // PLACE_PART if aside.memory_bytes is None else aside.memory_bytes
        ),
    )


def fenced_s(settings: AgentSettings) -> float:
    """Return after how many seconds without a reply all workers are stopped, or 0 for never.

    Raises:
        SettingsError: if `fence_s` is too short to receive a reply.
    """
    if settings.fence_s == 0.0:
        return 0.0
    if settings.fence_s < MIN_FENCE_S:
        hint = f"give {MIN_FENCE_S:g} or more, or 0: workers continue"
        raise SettingsError(f"fence_s: {settings.fence_s:g} s is too short", hint, "fence_s")
    return settings.fence_s + settings.kill_grace_s + FENCE_SPARE_S


def usable_cores(groups: Path = CGROUPS) -> int:
    """Return the cores that this agent's processes may use concurrently, at least 1.

    The number is the CPU affinity, limited by the CPU quotas of the control group and its parents.
    The host's number of cores would be meaningless in a container.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for limit in _limits("cpu.max", groups):
        with contextlib.suppress(ValueError):
            quota, period = limit.split()
            cores = min(cores, int(quota) / int(period))
    return max(1, math.floor(cores))


def usable_memory(groups: Path = CGROUPS) -> int:
    """Return the memory of this host in bytes, limited by the control group and its parents."""
    limits = [int(limit) for limit in _limits("memory.max", groups) if limit.isdecimal()]
    return min([psutil.virtual_memory().total, *limits])


def _limits(file: str, groups: Path) -> Iterator[str]:
    """Yield the contents of a file of this process's control group and its parents."""
    try:
        own = OWN_CGROUP.read_text(encoding="utf-8").strip().rpartition("::")[2].lstrip("/")
    except OSError:
        own = ""
    place = groups / own
    while place.is_relative_to(groups):
        with contextlib.suppress(OSError, ValueError):
            yield (place / file).read_text(encoding="ascii").strip()
        place = place.parent


def cpu_slots(count: int) -> tuple[SlotSpec, ...]:
    """Return `count` slots without a device, with equal shares of the host's memory."""
    share = psutil.virtual_memory().total // max(1, count)
    return tuple(
        SlotSpec(index=i, kind="cpu", model="CPU", memory_bytes=share) for i in range(count)
    )


def gpu_slots(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[SlotSpec, ...]:
    """Return a slot for each GPU or MIG instance that the agent may use, ordered by index.

    A slot's index counts all devices of the host in the driver's order, visible or not. So an
    index names the same device after a restart with another CUDA_VISIBLE_DEVICES. If no GPU is
    split, the index is the GPU's number in `nvidia-smi`.

    Raises:
        SettingsError: if CUDA_VISIBLE_DEVICES names no GPU or the same GPU twice, or if it has
            indices in CUDA's own order while the GPUs are of several models.
    """
    value = environ.get(VISIBLE)
    visible = None if value is None else _visible(value, gpus, environ.get(ORDER))
    devices = [device for gpu in gpus for device in gpu.devices or (None,)]
    return tuple(
        SlotSpec(
            index=index,
            kind="gpu",
            model=device.model,
            memory_bytes=device.memory_bytes,
            uuid=device.uuid,
        )
        for index, device in enumerate(devices)
        if device is not None and (visible is None or device in visible)
    )


def device_environment(*slots: SlotSpec) -> dict[str, str]:
    """Return the variables that hide all GPUs from a process except the devices of its slots."""
    visible = ",".join(slot.uuid for slot in slots if slot.kind == "gpu")
    return {VISIBLE: visible, ORDER: BUS_ORDER}


def _visible(value: str, gpus: Sequence[Gpu], order: str | None) -> tuple[Device, ...]:
    selection = select_visible(value, gpus)
    if not gpus:
        return ()
    if selection.repeated is not None:
        what = f"{selection.repeated} is listed twice, and CUDA then shows no GPU"
        raise _refuse(value, what, "name each GPU once")
    models = {gpu.model for gpu in gpus if gpu.model}
    if selection.by_index and len(models) > 1 and order != BUS_ORDER:
        what = "CUDA counts GPUs of several models by speed, the driver by bus"
        raise _refuse(value, what, f"set {ORDER}={BUS_ORDER} beside it, or name UUIDs")
    hides = not value.strip() or (selection.ended_by or "").startswith("-")
    if not selection.devices and not hides:
        raise _refuse(value, "it names no usable GPU", "nvidia-smi -L lists their UUIDs")
    if selection.ended_by is not None and not hides:
        log.warning("entry of CUDA_VISIBLE_DEVICES names no GPU", entry=selection.ended_by)
    return selection.devices


def _refuse(value: str, what: str, remedy: str) -> SettingsError:
    return SettingsError(f"{VISIBLE}={value[:200]}: {what}", remedy, VISIBLE)
