"""How much of this process one user's requests may have: a flood slows down its sender alone.

What a client is told of a request that was not done.

Requests that wait for something to happen: they end with the key of whoever asked.

Until when a reply may be held back.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from controlplane.service.rights import REVOKED
from schemas.errors import BadFieldError, DeniedError, OnesError, UnavailableError
from schemas.transport import Incoming
from schemas.wire.client import Failed

UNDER_WAY: Final = 64  # of one user, without those that wait for something to happen
QUEUED: Final = 2000  # of one user, behind these
QUEUED_BYTES: Final = 64 << 20
POLLS: Final = 256  # of one user, which wait for something to happen
REFUSED: Final = 1000  # while others wait, until a connection that goes on so is cut off
BURST_S: Final = 4.0  # of requests that a user may send at once
TOKEN_BYTES: Final = 4096
SENT_TOKEN_BYTES: Final = 16 << 10  # of a request, that cost as much as one more
LOOP_PERCENT: Final = 25  # of the loop's time that one user's reading may take for long
T = TypeVar("T")


class Timer(Protocol):
    """What ends a call that is to come."""

    def cancel(self) -> None:
        """It does not come."""


@dataclass(slots=True)
class _User(Generic[T]):
    tokens: float
    at: float  # when they were counted
    under_way: int = 0
    polls: int = 0
    refused: int = 0  # since nothing waited
    waiting: deque[tuple[T, int]] = field(default_factory=deque)
    bytes_waiting: int = 0

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.under_way or self.polls)


class RequestShares(Generic[T]):
    """Requests of each user wait behind his own, and begin one in each turn of the loop.

    Args:
        start: begins one; `ended` is told when it is over.
        per_s: requests of one user each second.
        token_bytes: of replies that cost as much as one request more.
        clock: seconds that only grow.
        later: calls back after so many seconds.
    """

    def __init__(
        self,
        start: Callable[[T], None],
        per_s: Callable[[], float],
        token_bytes: int = TOKEN_BYTES,
        clock: Callable[[], float] | None = None,
        later: Callable[[float, Callable[[], None]], Timer] | None = None,
    ) -> None:
        self._start = start
        self._per_s = per_s
        self._token_bytes = token_bytes
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._later = later or (lambda s, call: asyncio.get_running_loop().call_later(s, call))
        self._users: dict[str, _User[T]] = {}
        self._timer: Timer | None = None  # of the next turn
        self._due_at = 0.0

    def put(self, user: str, request: T, size: int) -> None:
        """Begin a request when its turn comes.

        Args:
            size: that it keeps in memory meanwhile, bytes.

        Raises:
            UnavailableError: if too many of that user wait already.
        """
        found = self._user(user)
        if len(found.waiting) >= QUEUED or found.bytes_waiting + size > QUEUED_BYTES:
            found.refused += 1
            what = f"{len(found.waiting)} of your requests wait already"
            raise UnavailableError(what, "send the next ones when these are answered")
        if not found.waiting:
            found.refused = 0
        found.waiting.append((request, size))
        found.bytes_waiting += size
        self._soon(0.0)

    def floods(self, user: str) -> bool:
        """Whether a user goes on although much of it was refused."""
        return user in self._users and self._users[user].refused > REFUSED

    def ended(self, user: str, reply_bytes: int = 0, busy_s: float = 0.0) -> None:
        """A request is answered.

        Args:
            busy_s: seconds of reading for which the loop did nothing else: a list of many jobs
                costs more than one of a few.
        """
        found = self._user(user)
        found.under_way -= 1
        found.tokens -= reply_bytes / self._token_bytes
        found.tokens -= busy_s * self._per_s() * 100 / LOOP_PERCENT
        self._soon(0.0)

    @contextlib.contextmanager
    def waits(self, user: str, wait_s: float) -> Iterator[None]:
        """A request under way may wait for something to happen meanwhile.

        Args:
            wait_s: for how long; one that does not wait is under way as before.

        Raises:
            UnavailableError: if too many of that user wait already.
        """
        if not wait_s > 0.0:
            yield
            return
        found = self._user(user)
        if found.polls >= POLLS:
            what = f"{found.polls} of your requests wait for something to happen, as many as may"
            raise UnavailableError(what, "end some of those that wait or follow")
        found.polls, found.under_way = found.polls + 1, found.under_way - 1
        self._soon(0.0)
        try:
            yield
        finally:
            found.polls, found.under_way = found.polls - 1, found.under_way + 1

    def _user(self, name: str) -> _User[T]:
        found = self._users.get(name)
        if found is None:
            burst = BURST_S * self._per_s()
            found = self._users[name] = _User(burst, self._clock())
        return found

    def _soon(self, wait_s: float) -> None:
        due_at = self._clock() + wait_s
        if self._timer is not None:
            if self._due_at <= due_at:
                return
            self._timer.cancel()
        self._due_at, self._timer = due_at, self._later(wait_s, self._turn)

    def _turn(self) -> None:
        """Begin one request of each user who may."""
        self._timer = None
        per_s, now = self._per_s(), self._clock()
        wait_s = float("inf")
        for name, user in list(self._users.items()):
            full = BURST_S * per_s
            user.tokens = min(full, user.tokens + (now - user.at) * per_s)
            user.at = now
            if user.idle and user.tokens >= full:
                del self._users[name]
                continue
            if not user.waiting or user.under_way >= UNDER_WAY:
                continue
            if user.tokens <= 0:
                wait_s = min(wait_s, (1.0 - user.tokens) / per_s)
                continue
            request, size = user.waiting.popleft()
            user.bytes_waiting -= size
            user.tokens -= 1.0 + size / SENT_TOKEN_BYTES
            user.under_way += 1
            wait_s = 0.0 if user.waiting else wait_s
            self._start(request)
        if wait_s < float("inf"):
            self._soon(wait_s)


MAX_SAID: Final = 2000  # characters of each text: some repeat what was asked for


def failed(error: OnesError) -> Failed:
    """The reply for it.

    Args:
        error: why it was not done.
    """
    message, hint, field = (text[:MAX_SAID] for text in (error.message, error.hint, error.field))
    return Failed(code=error.code, message=message, hint=hint, field=field)


class WaitingRequests:
    """Those of one port, each in a task of its own."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[object], Incoming] = {}

    @contextlib.contextmanager
    def held(self, incoming: Incoming, wait_s: float) -> Iterator[None]:
        """The running task answers a request, and may wait with that.

        Args:
            incoming: what was said, and with which key.
            wait_s: for how long; a request that does not wait is never ended half done.

        Raises:
            DeniedError: if the key was taken away meanwhile.
        """
        task = asyncio.current_task()
        if task is None or not wait_s > 0.0:
            yield
            return
        self._tasks[task] = incoming
        try:
            yield
        except asyncio.CancelledError:
            if task in self._tasks:  # it was not `end_revoked`
                raise
            task.uncancel()
            raise DeniedError(*REVOKED) from None
        finally:
            self._tasks.pop(task, None)

    def end_revoked(self) -> None:
        """Those whose keys are not authorised any more are answered now."""
        for task, incoming in list(self._tasks.items()):
            if incoming.revoked:
                del self._tasks[task]
                task.cancel()


MAX_WAIT_S: Final = 30.0


def deadline_of(wait_s: float) -> float:
    """When a request that may wait has to be answered.

    Args:
        wait_s: seconds that it asked for; `MAX_WAIT_S` at most, none if it is negative.

    Returns:
        Seconds of the running loop's clock.

    Raises:
        BadFieldError: if it is no number, which would never be over.
    """
    if math.isnan(wait_s):
        raise BadFieldError("wait_s: nan is no time", "give seconds, 0 or more", "wait_s")
    return asyncio.get_running_loop().time() + min(wait_s, MAX_WAIT_S)
