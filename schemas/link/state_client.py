"""Brings a state of a model here, from whoever has it; blocks, so it is for a thread."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import zmq

from schemas.codec import FROM_STATES, encode
from schemas.errors import OnesError
from schemas.link.sockets import has_only_ipv6
from schemas.link.state_targets import Target
from schemas.messages.states import AskState, StatePiece

PIECE: Final = 1 << 20  # bytes
WINDOW: Final = 8  # pieces that are asked for and have not come
PIECE_S: Final = 10.0  # without a piece, the source is given up
LOOK_S: Final = 0.25
CONNECT_S: Final = 3.0
MAX_STATE: Final = 1 << 40  # bytes


class StateUnavailableError(OnesError):
    """Nobody gave the state; says why for each that was asked."""

    code = "state_unavailable"


def fetch_state(
    sources: Sequence[str],
    asked: AskState,
    target: Target,
    check: Callable[[], None],
    *,
    piece_s: float = PIECE_S,
    stopped: Callable[[], bool] = lambda: False,
) -> str:
    """Bring a state's file here from the first source that gives it whole.

    Args:
        sources: HOST:PORT of each, the best first.
        asked: the state; its offset counts for nothing.
        target: takes the bytes.
        check: looks at what came; raises `OnesError` if it is not the state.
        piece_s: how long a piece may take, seconds.
        stopped: whether nobody wants it any more; looked at every quarter of a second.

    Returns:
        Who gave it.

    Raises:
        StateUnavailableError: if nobody gave it.
        OSError: if `target` does not take it.
    """
    why = []
    for source in sources:
        try:
            _fetch_from(source, asked, target, piece_s, stopped)
            check()
        except OnesError as error:
            why.append(f"{source}: {error.message}")
        else:
            return source
        if stopped():
            break
    shown = "; ".join(why) or "no node is known to have it"
    what = f"state {asked.version} of trial {asked.trial} cannot be had: {shown}"
    raise StateUnavailableError(what, "it is trained again")


@dataclass(frozen=True, slots=True)
class _Patience:
    """How long a source is waited for."""

    piece_s: float
    stopped: Callable[[], bool]
    probe: Callable[[], None]

    def lost(self, deadline: float) -> None:
        """Nothing has come for a moment.

        Raises:
            StateUnavailableError: if it is not waited for any longer.
        """
        if self.stopped():
            raise StateUnavailableError("nobody wants it any more")
        if time.monotonic() > deadline:
            raise StateUnavailableError(f"no answer within {self.piece_s:g} s")
        self.probe()


def _fetch_from(
    source: str, asked: AskState, target: Target, piece_s: float, stopped: Callable[[], bool]
) -> None:
    patience = _Patience(piece_s, stopped, partial(_require_listener, source))
    patience.probe()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.maxmsgsize = PIECE + 64 * 1024
    host, _, port = source.rpartition(":")
    host = host.strip("[]")
    dealer.ipv6 = has_only_ipv6(host)
    try:
        dealer.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{source}")
        _receive(dealer, _Request(asked), target, patience)
    except zmq.ZMQError as error:
        raise StateUnavailableError(f"cannot connect: {error.strerror}") from None
    finally:
        dealer.close()
        context.term()


def _receive(
    dealer: zmq.Socket[bytes], request: _Request, target: Target, patience: _Patience
) -> None:
    deadline = time.monotonic() + patience.piece_s
    while not request.over:
        for message in request.more():
            dealer.send(message)
        if not dealer.poll(int(1000 * min(LOOK_S, patience.piece_s))):
            patience.lost(deadline)
            continue
        with contextlib.suppress(zmq.Again):
            while True:
                if _take(dealer.recv_multipart(zmq.NOBLOCK, copy=False), request, target):
                    deadline = time.monotonic() + patience.piece_s


def _require_listener(source: str) -> None:
    """ZeroMQ tries for ever, in silence; a process that is dead should cost no time."""
    host, _, port = source.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise StateUnavailableError(f"nobody listens there: {why}") from None


class _Request:
    """Which pieces are missing."""

    def __init__(self, asked: AskState) -> None:
        self._asked = asked
        self.digest = asked.digest
        self.total: int | None = None
        self._next = 0
        self.awaited: set[int] = set()

    def more(self) -> list[bytes]:
        """Requests that may be sent now: the first alone, because it says how many follow."""
        found = []
        while len(self.awaited) < WINDOW and self._next < (1 if self.total is None else self.total):
            self.awaited.add(self._next)
            found.append(encode(self._of(self._next)))
            self._next += PIECE
        return found

    def _of(self, offset: int) -> AskState:
        a = self._asked
        return AskState(job=a.job, trial=a.trial, version=a.version, digest=a.digest, offset=offset)

    @property
    def over(self) -> bool:
        """Whether everything came."""
        return self.total is not None and not self.awaited and self._next >= self.total


def _take(frames: list[zmq.Frame], request: _Request, target: Target) -> bool:
    """Whether it is a piece that was waited for."""
    answer = FROM_STATES.decode(frames[0].buffer)
    if answer.digest != request.digest:
        return False
    if not isinstance(answer, StatePiece):
        raise StateUnavailableError(answer.why[:200])
    if answer.offset not in request.awaited:
        return False
    if request.total is None:
        if not 0 < answer.total <= MAX_STATE:
            raise StateUnavailableError(f"a state of {answer.total} bytes")
        request.total = answer.total
        target.begin(answer.total)
    parts = [frame.buffer for frame in frames[1:]]
    if sum(map(len, parts)) != min(PIECE, request.total - answer.offset):
        raise StateUnavailableError("a piece that is cut")
    offset = answer.offset
    for part in parts:
        target.write(offset, part)
        offset += len(part)
    request.awaited.discard(answer.offset)
    return True
