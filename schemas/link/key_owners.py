"""Who is behind a socket: the ZAP handler that maps a CURVE key to an identity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.auth.base import Authenticator
from zmq.utils import z85

ENDPOINT = "inproc://zeromq.zap.01"


@dataclass(frozen=True, slots=True)
class Identity:
    """The owner of an authorised key; `role` is admin, user, viewer or node."""

    role: str
    name: str

    def __str__(self) -> str:
        """As it travels in the `User-Id` of a frame."""
        return f"{self.role}:{self.name}"

    @classmethod
    def parse(cls, user_id: str) -> Identity:
        """The identity in a frame's `User-Id`.

        Args:
            user_id: ROLE:NAME.
        """
        role, _, name = user_id.partition(":")
        return cls(role=role, name=name)


class _Authority(Authenticator):
    """pyzmq's ZAP protocol, with identities instead of keys as User-Ids."""

    def __init__(self, context: zmq.asyncio.Context, known: Mapping[bytes, Identity]) -> None:
        super().__init__(context)
        self.known = known

    def curve_user_id(self, client_public_key: bytes) -> str:
        return str(self.known[z85.encode(client_public_key)])


class Authority:
    """Answers libzmq's question whether a key may connect, for one context.

    An exception while answering would leave every later handshake hanging, so `run` refuses that
    one request and goes on; it is to be owned by the application's task group.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        known: Mapping[bytes, Identity],
        denied: Callable[[str], None],
    ) -> None:
        """Bind the context's ZAP address.

        Args:
            context: whose sockets ask.
            known: public key (Z85) to its owner; may change while this runs.
            denied: called with what was refused, for the audit log.
        """
        self._known = known
        self._denied = denied
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ENDPOINT)
        self._zap = _Authority(context, known)
        self._zap.zap_socket = self._socket
        self._zap.configure_curve_callback("ones", self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this Z85 key is authorised (called by pyzmq).

        Args:
            domain: of the socket that asks; there is one.
            key: public, Z85.
        """
        if key in self._known:
            return True
        self._denied(key.decode("ascii", "replace"))
        return False

    async def run(self) -> None:
        """Answer for ever."""
        while True:
            request = await self._socket.recv_multipart()
            try:
                await self._zap.handle_zap_message(request)
            except Exception as error:  # noqa: BLE001 - a REP socket must answer before it hears more
                self._denied(f"unusable request: {error!r}")
                request_id = request[1] if len(request) > 1 else b""
                await self._socket.send_multipart(
                    [b"1.0", request_id, b"500", b"no answer", b"", b""]
                )

    def close(self) -> None:
        """Give up the inproc address."""
        self._socket.close()
