"""Registers `simgpu` in this process: from then on `torch.device("simgpu", 0)` is its accelerator.

Never in the process of pytest, where other tests would find it: a test runs what needs the device in a
process of its own.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any, Final

import torch

from tests.support.simgpu.build import library

NAME: Final = "simgpu"
LATE: Final = "SIMGPU_LATE_US"  # "COPIES" or "COPIES,KERNELS"; see `set_late`

torch.ops.load_library(str(library()))
OPS: Final[Any] = torch.ops.simgpu


class Gate:
    """What a stream waits at until somebody opens it."""

    def __init__(self) -> None:
        self._number = OPS.new_gate()

    def block(self, stream: torch.Stream) -> None:
        """Let nothing that `stream` is given from now on begin before this opens."""
        OPS.block_stream(stream.device_index, stream.stream_id, self._number)

    def open(self) -> None:
        """Let all go on that wait here."""
        OPS.open_gate(self._number)


def set_late(*, copies_us: int = 0, kernels_us: int = 0) -> None:
    """Let results arrive late; who reads them before finds garbage.

    Args:
        copies_us: of copies with `non_blocking=True`, microseconds.
        kernels_us: of all other operations, microseconds.
    """
    OPS.set_late(copies_us, kernels_us)


@contextlib.contextmanager
def late(*, copies_us: int = 0, kernels_us: int = 0) -> Iterator[None]:
    """`set_late` for a while."""
    set_late(copies_us=copies_us, kernels_us=kernels_us)
    try:
        yield
    finally:
        set_late()


def _index(device: torch.device | str | int | None = None) -> int:
    if isinstance(device, int):
        return device
    named = torch.device(device) if device is not None else None
    if named is None or named.index is None:
        return torch.accelerator.current_device_index()
    return named.index


def _seed_all(seed: int) -> None:
    for index in range(OPS.device_count()):
        OPS.manual_seed(index, seed)


def _module() -> types.ModuleType:
    """What torch asks `torch.simgpu`, and a script as `torch.get_device_module()`."""
    made: Any = types.ModuleType(f"torch.{NAME}")
    made.Stream, made.Event = torch.Stream, torch.Event
    made.is_available = lambda: OPS.device_count() > 0
    made.device_count = OPS.device_count  # torch.accelerator asks this module
    made.current_device = torch.accelerator.current_device_index
    made.set_device = lambda device: torch.accelerator.set_device_index(_index(device))
    made.device = lambda device: torch.accelerator.device_index(_index(device))
    made.current_stream = torch.accelerator.current_stream
    made.set_stream = torch.accelerator.set_stream
    made.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    made.synchronize = lambda device=None: torch.accelerator.synchronize(_index(device))
    made.memory_allocated = lambda device=None: torch.accelerator.memory_allocated(_index(device))
    made.empty_cache = torch.accelerator.empty_cache
    made.manual_seed = lambda seed: OPS.manual_seed(_index(), seed)
    made.manual_seed_all = _seed_all
    made.initial_seed = lambda: OPS.initial_seed(_index())
    made.get_rng_state = lambda device=None: OPS.get_rng_state(_index(device))
    made.set_rng_state = lambda state, device=None: OPS.set_rng_state(_index(device), state)
    made.is_initialized = OPS.in_use
    made._is_in_bad_fork = OPS.forked_after_use
    made._lazy_init = lambda: None
    made.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return made


torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, _module())
torch.utils.generate_methods_for_privateuse1_backend()
OPS.install()

if os.environ.get(LATE):
    _copies, _, _kernels = os.environ[LATE].partition(",")
    set_late(copies_us=int(_copies), kernels_us=int(_kernels or 0))
