"""States of a sweep's models on their way: from a worker or an agent to whoever trains next."""

from __future__ import annotations

from typing import Annotated

import msgspec

from schemas.ids import JobId
from schemas.messages import Message

Offset = Annotated[int, msgspec.Meta(ge=0)]


class AskState(Message, tag="states.ask.1"):
    """Send the bytes of a state file from `offset` on.

    The digest is the right to read: only the controller tells it, to those who need the state.
    """

    job: JobId
    trial: int
    version: int
    digest: str  # SHA-256 of the state's frames, hexadecimal
    offset: Offset


class StatePiece(Message, tag="states.piece.1"):
    """Answer: what lies there follows in the message's further frames, as raw bytes."""

    digest: str
    offset: Offset
    total: Offset  # bytes of the whole file


class StateRefused(Message, tag="states.refused.1"):
    """Answer: it is not here."""

    digest: str
    why: str


FromStates = StatePiece | StateRefused
