"""The slots of this host: GPUs that its agent may use; declared CPU slots where there are none."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil
import structlog

from nodeagent.agent_settings import LEAST_FENCE_S, AgentSettings
from nodeagent.gpu_driver import list_gpus
from nodeagent.visible_devices import Device, Gpu, select_visible
from schemas import __version__
from schemas.errors import SettingsError
from schemas.ids import NodeId
from schemas.nodes import NodeSpec, SlotSpec

log = structlog.get_logger("devices")
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER: Final = "CUDA_DEVICE_ORDER"
BUS_ORDER: Final = "PCI_BUS_ID"
FENCE_SPARE_S: Final = 2.0  # until the passing of a time is noticed, and a killed process is gone
CGROUPS: Final = Path("/sys/fs/cgroup")
OWN_CGROUP: Final = Path("/proc/self/cgroup")


def inventory(settings: AgentSettings, environ: Mapping[str, str] = os.environ) -> NodeSpec:
    """What this host offers.

    Args:
        settings: whether GPUs are looked for, and how many CPU slots there are otherwise.
        environ: the agent's environment; CUDA_VISIBLE_DEVICES restricts the GPUs.

    Returns:
        The node's slots, cores and memory (bytes).

    Raises:
        SettingsError: if `devices` is neither "auto" nor "cpu", no slot is offered, the driver does
            not answer, CUDA_VISIBLE_DEVICES cannot be followed, or `fence_s` is too short.
    """
    if settings.devices not in {"auto", "cpu"}:
        raise SettingsError(f"devices: {settings.devices!r}", 'choose "auto" or "cpu"', "devices")
    slots = gpu_slots(list_gpus(), environ) if settings.devices == "auto" else ()
    slots = slots or cpu_slots(settings.slots)
    if settings.cores < 0:
        raise SettingsError(f"cores: {settings.cores} is below 0", "leave it out", "cores")
    if not slots:
        raise SettingsError("slots: the node offers none", "set slots to 1 or more", "slots")
    return NodeSpec(
        node=NodeId(settings.node),
        host=socket.gethostname(),
        address=settings.address,
        slots=slots,
        cores=settings.cores or usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        release=__version__,
        fenced_s=fenced_s(settings),
    )


def fenced_s(settings: AgentSettings) -> float:
    """After how many seconds without an answer of the controller no worker is left; 0: they stay.

    Args:
        settings: when workers are told to end, and how long they may take.

    Raises:
        SettingsError: if `fence_s` is too short to hear an answer.
    """
    if settings.fence_s == 0.0:
        return 0.0
    if settings.fence_s < LEAST_FENCE_S:
        hint = f"give {LEAST_FENCE_S:g} or more, or 0: workers train on"
        raise SettingsError(f"fence_s: {settings.fence_s:g} s are too short", hint, "fence_s")
    return settings.fence_s + settings.kill_grace_s + FENCE_SPARE_S


def usable_cores(groups: Path = CGROUPS) -> int:
    """Cores that processes of this agent may use at a time, at least 1.

    Those of its affinity, and no more than the CPU quota of its control group and of those above
    it: in a container the host's cores say nothing.

    Args:
        groups: where control groups (version 2) are mounted.
    """
    cores = float(len(os.sched_getaffinity(0)))
    try:
        own = OWN_CGROUP.read_text(encoding="utf-8").strip().rpartition("::")[2].lstrip("/")
    except OSError:
        own = ""
    place = groups / own
    while place.is_relative_to(groups):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (place / "cpu.max").read_text(encoding="ascii").split()
            if quota != "max":
                cores = min(cores, int(quota) / int(period))
        place = place.parent
    return max(1, math.floor(cores))


def cpu_slots(count: int) -> tuple[SlotSpec, ...]:
    """`count` declared slots without a device.

    Args:
        count: how many; 0 or less gives none.

    Returns:
        Slots with the host's memory in equal shares, bytes, index from 0.
    """
    share = psutil.virtual_memory().total // max(1, count)
    return tuple(
        SlotSpec(index=i, kind="cpu", model="CPU", memory_bytes=share) for i in range(count)
    )


def gpu_slots(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[SlotSpec, ...]:
    """A slot for each GPU or MIG instance that the agent may use.

    A slot's index counts all devices of the host in the driver's order, visible or not, so that it
    names the same device after a restart under another CUDA_VISIBLE_DEVICES, and is the GPU's
    number in `nvidia-smi` where nothing is split.

    Returns:
        In the order of their indices; empty if CUDA_VISIBLE_DEVICES hides everything.

    Raises:
        SettingsError: if CUDA_VISIBLE_DEVICES names none of them, one twice, or counts GPUs of
            several models in an order of CUDA's own.
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


def device_environment(slot: SlotSpec) -> dict[str, str]:
    """The variables that make a slot's device the only one that its worker sees.

    Returns:
        They win over a job's own; a worker of a CPU slot sees no GPU.
    """
    return {VISIBLE: slot.uuid if slot.kind == "gpu" else "", ORDER: BUS_ORDER}


def _visible(value: str, gpus: Sequence[Gpu], order: str | None) -> tuple[Device, ...]:
    selection = select_visible(value, gpus)
    if not gpus:
        return ()
    if selection.repeated is not None:
        what = f"{selection.repeated} stands in it twice, and CUDA then shows no GPU"
        raise _refuse(value, what, "name each GPU once")
    models = {gpu.model for gpu in gpus if gpu.model}
    if selection.by_index and len(models) > 1 and order != BUS_ORDER:
        what = "CUDA counts GPUs of several models by speed, the driver by bus"
        raise _refuse(value, what, f"set {ORDER}={BUS_ORDER} beside it, or name UUIDs")
    hides = not value.strip() or (selection.ended_by or "").startswith("-")
    if not selection.devices and not hides:
        raise _refuse(value, "it names no GPU that can be used", "nvidia-smi -L lists their UUIDs")
    if selection.ended_by is not None and not hides:
        log.warning("CUDA_VISIBLE_DEVICES ends at what names no GPU", entry=selection.ended_by)
    return selection.devices


def _refuse(value: str, what: str, remedy: str) -> SettingsError:
    return SettingsError(f"{VISIBLE}={value[:200]}: {what}", remedy, VISIBLE)
