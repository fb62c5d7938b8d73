"""How a step was dealt out, and to whom: what it takes to say afterwards which samples it had."""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.ids import WorkerId

REMEMBERED: Final = 4  # steps that a lost member may not have recorded


class DealtStep(msgspec.Struct, frozen=True):
    """A step that is done."""

    epoch: int  # 1-based
    step: int  # 1-based, of all epochs
    cursor_before: int  # samples of the epoch that were done before it
    cursor_after: int  # and with it
    local_batches: tuple[int, ...]  # by rank, samples per step
    workers: tuple[WorkerId, ...]  # by rank, of the group in which it began
