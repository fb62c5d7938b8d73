"""Who is behind a socket: the ZAP handler that maps a CURVE key to an identity."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import zmq
import zmq.asyncio
from zmq.auth.base import Authenticator

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
    ) -> None:
        """Bind the context's ZAP address.

        Args:
            context: whose sockets ask.
            known: public key (Z85) to its owner; may change while this runs.
            denied: called with what was refused, and the address that it came from.
        """
        self._known = known
        self._denied = denied
        self._address = ""  # of who is asked about
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ENDPOINT)
        self._zap = Authenticator(context)  # its User-Id of a frame is the peer's key, Z85
        self._now: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)  # the same, without futures
        self._zap.zap_socket = self._now
        self._zap.configure_curve_callback("ones", self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this Z85 key is authorised (called by pyzmq).

        Args:
            domain: of the socket that asks; there is one.
            key: public, Z85.
        """
        if key in self._known:
            return True
        self._denied(key.decode("ascii", "replace"), self._address)
        return False

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
        except Exception as error:  # noqa: BLE001 - a REP socket must answer before it hears more
            self._denied(f"unusable request: {error!r}", self._address)
            request_id = request[1] if len(request) > 1 else b""
            self._now.send_multipart([b"1.0", request_id, b"500", b"no answer", b"", b""])

    def close(self) -> None:
        """Give up the inproc address."""
        self._socket.close()
