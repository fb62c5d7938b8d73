"""Fair queueing of requests per user, for any port. A flood of requests slows only its sender.

`WaitingRequests` ends waiting requests after their keys are revoked. `deadline_of` limits the wait
of a request, and `failure_reply` makes the reply to a refused request.
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
from schemas.transport.sockets import Incoming
from schemas.wire.client import Failed

UNDER_WAY: Final = 64  # started requests of one user, excluding those that wait
QUEUED: Final = 2000  # requests of one user that have not started
QUEUED_BYTES: Final = 64 << 20
POLLS: Final = 256  # waiting requests of one user
REFUSED: Final = 1000  # refusals while a user's queue is full; then the connection is cut
BURST_S: Final = 4.0  # seconds of requests at the full rate that a user may send at once
TOKEN_BYTES: Final = 4096
SENT_TOKEN_BYTES: Final = 16 << 10  # bytes of a request that cost one more token
LOOP_PERCENT: Final = 25  # share of the event loop's time for one user's reading
T = TypeVar("T")


class Timer(Protocol):
    """Handle of a scheduled call."""

    def cancel(self) -> None:
        """Cancel the call."""


@dataclass(slots=True)
class TokenBucket:
    """Tokens that accrue at a rate up to a maximum. Spending can make their number negative."""

    tokens: float
    at: float  # time of the last refill

    def refill(self, now: float, per_s: float, burst_s: float) -> bool:
        """Add the tokens since the last call, and return whether the bucket is full."""
        full = burst_s * per_s
        self.tokens = min(full, self.tokens + (now - self.at) * per_s)
        self.at = now
        return self.tokens >= full


@dataclass(slots=True)
class _User(TokenBucket, Generic[T]):
    under_way: int = 0
    polls: int = 0
    refused: int = 0  # requests refused since the queue was last empty
    waiting: deque[tuple[T, int]] = field(default_factory=deque)
    bytes_waiting: int = 0

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.under_way or self.polls)


class FairQueue(Generic[T]):
    """Queues of requests, one per user. Each turn of the event loop starts a request of every user.

    A token bucket limits each user's rate. Large requests, every `token_bytes` of replies, and
    reads that occupy the event loop cost additional tokens. `start` starts a request, and
    `ended` is called after its reply.
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
        self._timer: Timer | None = None  # next turn
        self._due_at = 0.0

    def put(self, user: str, request: T, size: int) -> None:
        """Queue a request of `size` bytes. It starts when it is the user's turn.

        Raises:
            UnavailableError: if too many requests or bytes of this user are queued.
        """
        found = self._user(user)
        if len(found.waiting) >= QUEUED or found.bytes_waiting + size > QUEUED_BYTES:
            found.refused += 1
            what = f"{len(found.waiting)} of your requests are already queued"
            raise UnavailableError(what, "wait for their replies before sending more")
        if not found.waiting:
            found.refused = 0
        found.waiting.append((request, size))
        found.bytes_waiting += size
        self._schedule_turn(0.0)

    def floods(self, user: str) -> bool:
        """True if a user continues to send although many requests were refused."""
        return user in self._users and self._users[user].refused > REFUSED

    def ended(self, user: str, reply_bytes: int = 0, busy_s: float = 0.0) -> None:
        """Record that a request was answered.

        `busy_s` is how many seconds the request occupied the event loop. These seconds cost tokens,
        so a list of many jobs costs more than a list of few.
        """
        found = self._user(user)
        found.under_way -= 1
        found.tokens -= reply_bytes / self._token_bytes
        found.tokens -= busy_s * self._per_s() * 100 / LOOP_PERCENT
        self._schedule_turn(0.0)

    @contextlib.contextmanager
    def waits(self, user: str, wait_s: float) -> Iterator[None]:
        """Mark a started request as waiting while the context is active, if `wait_s` is above 0.

        Raises:
            UnavailableError: if too many requests of this user are waiting.
        """
        if not wait_s > 0.0:
            yield
            return
        found = self._user(user)
        if found.polls >= POLLS:
            what = f"{found.polls} of your requests are waiting, the limit for one user"
            raise UnavailableError(what, "stop some `wait` or `follow` requests")
        found.polls, found.under_way = found.polls + 1, found.under_way - 1
        self._schedule_turn(0.0)
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

    def close(self) -> None:
        """Start no further request."""
        self._users.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _schedule_turn(self, wait_s: float) -> None:
        due_at = self._clock() + wait_s
        if self._timer is not None:
            if self._due_at <= due_at:
                return
            self._timer.cancel()
        self._due_at, self._timer = due_at, self._later(wait_s, self._start_requests)

    def _start_requests(self) -> None:
        """Start one request of each user who has a queued request and may start one now."""
        self._timer = None
        per_s, now = self._per_s(), self._clock()
        wait_s = float("inf")
        for name, user in list(self._users.items()):
            if user.refill(now, per_s, BURST_S) and user.idle:
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
            self._schedule_turn(wait_s)


MAX_TEXT_CHARACTERS: Final = 2000  # characters of each text, because texts can quote the request


def failure_reply(error: OnesError) -> Failed:
    """Return the reply to a request that failed."""
    message, hint, field = (
        text[:MAX_TEXT_CHARACTERS] for text in (error.message, error.hint, error.field)
    )
    return Failed(code=error.code, message=message, hint=hint, field=field)


class WaitingRequests:
    """Waiting requests of one port, each in its own task."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[object], Incoming] = {}

    @contextlib.contextmanager
    def interruptible(self, incoming: Incoming, wait_s: float) -> Iterator[None]:
        """Register the current task as waiting, so that revoking the sender's key ends the wait.

        A request that does not wait (`wait_s` is 0) is never interrupted halfway.

        Raises:
            DeniedError: if the key was revoked meanwhile.
        """
        task = asyncio.current_task()
        if task is None or not wait_s > 0.0:
            yield
            return
        self._tasks[task] = incoming
        try:
            yield
        except asyncio.CancelledError:
            if task in self._tasks:  # not cancelled by `end_revoked`
                raise
            task.uncancel()
            raise DeniedError(*REVOKED) from None
        finally:
            self._tasks.pop(task, None)

    def end_revoked(self) -> None:
        """End the waits of requests with a revoked key."""
        for task, incoming in list(self._tasks.items()):
            if incoming.revoked:
                del self._tasks[task]
                task.cancel()


MAX_WAIT_S: Final = 30.0


def deadline_of(wait_s: float) -> float:
    """Return the event loop time by which to answer. Limit `wait_s` to between 0 and `MAX_WAIT_S`.

    Raises:
        BadFieldError: if `wait_s` is NaN, because the request would wait forever.
    """
    if math.isnan(wait_s):
        raise BadFieldError("wait_s: nan is not a duration", "give seconds, 0 or more", "wait_s")
    return asyncio.get_running_loop().time() + min(wait_s, MAX_WAIT_S)
