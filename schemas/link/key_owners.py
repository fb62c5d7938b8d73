"""Who is behind a socket: the ZAP handler that maps a CURVE key to an identity."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import zmq
import zmq.asyncio
from zmq.auth.base import Authenticator

from schemas.link.connection_watch import ConnectionWatch
from schemas.link.key_connections import MAX_OF_KEY

ENDPOINT = "inproc://zeromq.zap.01"
DRAIN: Final = 256  # handshakes answered without returning to the loop


@dataclass(frozen=True, slots=True)
class Identity:
    """The owner of an authorised key; `role` is admin, operator, user, viewer or node."""

    role: str
    name: str
    projects: tuple[str, ...] = ()  # none: a user's own; all of them for other people's keys
    expires: float | None = None  # seconds since the epoch; None: never

    def __str__(self) -> str:
        """For people."""
        return f"{self.role}:{self.name}"


class _NotNowError(Exception):
    """This key may connect, when others of its connections are closed or some time has passed."""


class Authority:
    """Answers libzmq's question whether a key may connect, for one context.

    An exception while answering would leave every later handshake hanging, so `run` refuses that
    one request and goes on; it is to be owned by the application's task group.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        known: Mapping[bytes, Identity],
        denied: Callable[[str, str], None],
        watch: ConnectionWatch,
    ) -> None:
        """Bind the context's ZAP address.

        Args:
            known: public key (Z85) to its owner; may change while this runs.
            denied: called with why somebody was refused, and the address that it came from.
            watch: knows how many connections each key has.
        """
        self._known = known
        self._denied = denied
        self._watch = watch
        self._address = ""  # of who is asked about
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ENDPOINT)
        self._zap = Authenticator(context)  # its User-Id of a frame is the peer's key, Z85
        self._now: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)  # the same, without futures
        self._zap.zap_socket = self._now
        self.admits_to("ones")

    def admits_to(self, port: str) -> None:
        """Answer for one more port.

        Args:
            port: its name, which is its ZAP domain.
        """
        self._zap.configure_curve_callback(port, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this Z85 key is authorised (called by pyzmq).

        Args:
            domain: of the socket that asks: the name of its port.
            key: public, Z85.
        """
        owner = self._known.get(key)
        if owner is None:
            self._denied(f"{key.decode('ascii', 'replace')} is not authorised", self._address)
            return False
        self._watch.notice_at(domain)
        left_s = self._watch.backoff.left_s(domain, key)
        if left_s and owner.role != "node":  # jobs of others run on a node that would be lost
            if self._watch.backoff.first_refusal(domain, key):
                why = f"{owner} gets no connection for {left_s:.0f} s: others of its were cut off"
                self._denied(why, self._address)
            raise _NotNowError
        if self._watch.keys.admits(domain, self._address, key):
            return True
        if self._watch.keys.first_refusal(domain, key):
            why = f"{owner} has {MAX_OF_KEY} connections to one port, as many as may be"
            self._denied(why, self._address)
        raise _NotNowError

    async def run(self) -> None:
        """Answer for ever: waits once, then answers whoever else asks by then.

        A thousand nodes that come back ask at once. One answer in each turn of a busy loop would
        come after their handshakes' time, and they would ask again.
        """
        while True:
            await self._answer(await self._socket.recv_multipart())
            for _ in range(DRAIN):
                try:
                    more = self._now.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                await self._answer(more)
            else:
                await asyncio.sleep(0)

    async def _answer(self, request: list[bytes]) -> None:
        self._address = request[3].decode("ascii", "replace") if len(request) > 3 else ""  # noqa: PLR2004
        try:
            await self._zap.handle_zap_message(request)
        except (
            _NotNowError
        ):  # as a temporary failure: peers try again when their handshake's time is over
            self._now.send_multipart([b"1.0", request[1], b"300", b"not now", b"", b""])
        except Exception as error:  # noqa: BLE001 - a REP socket must answer before it hears more
            self._denied(f"unusable request: {error!r}", self._address)
            request_id = request[1] if len(request) > 1 else b""
            self._now.send_multipart([b"1.0", request_id, b"500", b"no answer", b"", b""])

    def close(self) -> None:
        """Give up the inproc address."""
        self._socket.close()
