"""Files of states, on a disk and on their way from another node."""

from __future__ import annotations

import contextlib
import hashlib
import struct
from typing import Any, Final

import zmq

from schemas.codec import FROM_STATES
from schemas.errors import OnesError
from schemas.host.state_files import (
    DamagedStateError,
    StateFile,
    digest_of,
    header_of,
    header_size,
    read_frames,
    split_frames,
)
from schemas.transport.state_transfer import (
    PIECE,
    MemoryTarget,
    _piece_views,
    _Request,
    _store_piece,
)
from schemas.wire.files import AskState
from tests.fuzz.choices import Choices
from tests.fuzz.hostile_messages import Known, hostile_bytes
from tests.fuzz.targets.folders import folder

SIZES: Final = (0, 1, 8, 100, 2**20, 2**32, 2**63, 2**64 - 1)


def _content(choices: Choices) -> bytes:
    """Of a state's file, maybe damaged."""
    frames = [choices.blob() for _ in range(choices.below(5))]
    digest = hashlib.sha256(b"".join(frames)).hexdigest()
    content = bytearray(header_of(frames, digest) + b"".join(frames))
    for _ in range(choices.below(3) if not choices.often() else 0):
        content[choices.below(len(content))] = choices.below(256)
    if not choices.often() and len(content) >= 52:
        content[44:52] = struct.pack(">Q", choices.pick(SIZES))
    return bytes(content[: choices.below(len(content) + 1)] if not choices.often() else content)


def state_files(data: bytes) -> None:
    """A content that is read has its digest; another is damaged, and costs nothing."""
    choices = Choices(data)
    content = choices.rest() if choices.below(8) == 7 else _content(choices)
    with contextlib.suppress(DamagedStateError):
        digest, frames = split_frames(content)
        assert sum(map(len, frames)) <= len(content)
        with contextlib.suppress(DamagedStateError):
            assert read_frames(content) == frames
            assert hashlib.sha256(b"".join(frames)).hexdigest() == digest
    header_size(content)
    with folder() as here:
        path = here / choices.pick(("1-2-3.state", "1-2-3.state.new"))
        path.write_bytes(content)
        digest_of(path)
        StateFile.of(choices.text())


def fetched_states(data: bytes) -> None:
    """A node that is asked for a state says anything; no more memory is taken than it sends."""
    choices = Choices(data)
    content = _content(choices)
    digest = hashlib.sha256(content).hexdigest()
    asked = AskState(job="a-1", trial=1, version=1, digest=digest, offset=0)  # type: ignore[arg-type]
    known: Known = {
        "digest": [digest], "offset": [0, 0, PIECE], "total": [len(content), len(content), 2**40, PIECE + 1],
    }  # fmt: skip
    request, target = _Request(asked, "key", "node:1"), MemoryTarget()
    for _ in range(12):
        if not choices.left or request.over:
            break
        request.more()
        body = hostile_bytes(choices, FROM_STATES.tags, known)
        parts = [bytes(part) for part in _piece_views([content], choices.pick((0, 0, 1)))]
        frames: Any = [zmq.Frame(body), *map(zmq.Frame, parts if choices.often() else [])]
        try:
            _store_piece(frames, request, target)
        except OnesError:
            return
    assert len(target.content) <= max(len(content), PIECE * 16)
