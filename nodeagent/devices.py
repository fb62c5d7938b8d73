"""GPU inventory through NVML; declared CPU slots where there is no GPU."""

from __future__ import annotations

import os
import socket
from importlib.metadata import version

import psutil
import structlog

from nodeagent.agent_settings import AgentSettings
from schemas.errors import SettingsError
from schemas.ids import NodeId
from schemas.nodes import NodeSpec, SlotSpec

log = structlog.get_logger("devices")


def inventory(settings: AgentSettings) -> NodeSpec:
    """What this host offers.

    Args:
        settings: whether GPUs are looked for, and how many CPU slots there are otherwise.

    Returns:
        The node's slots, cores and memory (bytes).

    Raises:
        SettingsError: if `devices` is neither "auto" nor "cpu", or no slot is offered.
    """
    if settings.devices not in {"auto", "cpu"}:
        raise SettingsError(f"devices: {settings.devices!r}", 'choose "auto" or "cpu"', "devices")
    slots = gpu_slots() if settings.devices == "auto" else ()
    slots = slots or cpu_slots(settings.slots)
    if not slots:
        raise SettingsError("slots: the node offers none", "set slots to 1 or more", "slots")
    return NodeSpec(
        node=NodeId(settings.node),
        host=socket.gethostname(),
        address=settings.address,
        slots=slots,
        cores=os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        release=version("ones"),
    )


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


def gpu_slots() -> tuple[SlotSpec, ...]:
    """A slot for each GPU that NVML knows; none without the driver or the `gpu` extra."""
    try:
        import pynvml  # noqa: PLC0415 - an extra that most hosts of the test-suite lack
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            found.append(
                SlotSpec(
                    index=index,
                    kind="gpu",
                    model=_text(pynvml.nvmlDeviceGetName(device)),
                    memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(device).total),
                    uuid=_text(pynvml.nvmlDeviceGetUUID(device)),
                )
            )
        return tuple(found)
    except pynvml.NVMLError as error:
        log.warning("no GPU inventory", error=str(error))
        return ()
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
