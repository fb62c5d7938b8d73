"""The first use of a GPU waits until the slot is granted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch

CUDA: Final[Any] = torch.cuda  # some of it has no types
TOO_LATE: Final = "[ones] the GPU was used before ScalingAgent.from_env(), beside another worker\n"


def hold_device(await_slot: Callable[[], None]) -> None:
    """From now on, whoever uses CUDA first in this process waits for `await_slot` before it.

    torch opens the device in the first call that needs it, and then makes up for the calls that
    waited for that: `await_slot` is one of them. No memory of the device is taken before. Where
    the device is open already, the log says so.

    Args:
        await_slot: returns when the device is free; called once, in the thread that came first.
    """
    if CUDA.is_initialized():
        sys.stderr.write(TOO_LATE)
        return
    CUDA._lazy_call(await_slot)  # noqa: SLF001 - no public name
