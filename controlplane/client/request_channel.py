"""Requests over one socket: matched with their replies, sent again while nobody answers."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Any

from schemas.codec import Codec, encode
from schemas.errors import OnesError, UnreachableError, raised
from schemas.link import Socket
from schemas.messages import Message
from schemas.messages.client import Failed


class RequestChannel:
    """Requests and replies over one DEALER, matched by id, sent again while nobody answers.

    Args:
        socket: connected to the port that answers.
        codec: decodes the replies.
    """

    def __init__(self, socket: Socket, codec: Codec[Any]) -> None:
        self._socket = socket
        self._codec = codec
        self._waiting: dict[bytes, asyncio.Future[Any]] = {}
        self._task = asyncio.create_task(self._receive())

    async def call(self, request: Message, answer_s: float, limit_s: float) -> Any:
        """The reply to `request`, which may be done twice if an answer is lost.

        Args:
            request: to send.
            answer_s: how long an answer may take before the request is sent again, seconds.
            limit_s: how long to try, seconds.

        Raises:
            UnreachableError: if nothing answers within `limit_s`.
            OnesError: what the controller answered, if it refused.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        data = encode(request)
        while True:
            key = uuid.uuid4().bytes
            answer = self._waiting[key] = loop.create_future()
            try:
                while not self._socket.send(key, data):
                    if loop.time() > deadline:
                        raise UnreachableError("no controller answers", "is the cluster up?")
                    await asyncio.sleep(0.02)
                reply = await asyncio.wait_for(answer, answer_s)
            except TimeoutError:
                if loop.time() > deadline:
                    raise UnreachableError("no controller answers", "is the cluster up?") from None
                continue
            finally:
                del self._waiting[key]
            if isinstance(reply, Failed):
                raise raised(reply.code, reply.message, reply.hint, reply.field)
            return reply

    async def _receive(self) -> None:
        async for incoming in self._socket:
            if len(incoming.frames) != 2:  # noqa: PLR2004 - id and message
                continue
            answer = self._waiting.get(incoming.frames[0])
            if answer is not None and not answer.done():
                with contextlib.suppress(OnesError):
                    answer.set_result(self._codec.decode(incoming.frames[1]))

    def close(self) -> None:
        """Stop listening; the socket is its context's to close."""
        self._task.cancel()
