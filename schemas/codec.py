"""Codecs between bytes and typed messages, one codec for each direction of a conversation."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final, Generic, TypeVar, get_args

import msgspec

from schemas.errors import MalformedMessageError, TooLargeError
from schemas.wire import Message, agent, client, feed, files, standby, streams, union_of, worker

MAX_BYTES: Final = 4 * 1024 * 1024  # per message; a peer that sends a larger one is disconnected

MISSING: Final = "Object missing required field "
M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Return a message as a MessagePack map, in which the key `type` has the message's tag."""
    return _encoder.encode(message)


class Codec(Generic[M]):
    """Decoder for the messages of one direction of a conversation. It refuses other messages."""

    def __init__(self, conversation: str, kinds: Any) -> None:
        self.conversation = conversation
        self.kinds: tuple[type[Message], ...] = get_args(kinds) or (kinds,)
        self._union = kinds

    @cached_property
    def _decoder(self) -> msgspec.msgpack.Decoder[M]:
        """Decoder, built on first use: building all takes a tenth of a short command's time."""
        return msgspec.msgpack.Decoder(self._union)

    def decode(self, data: bytes | memoryview) -> M:
        """Return the message in `data`, a frame from a socket or the content of a file.

        Raises:
            TooLargeError: if `data` is longer than `MAX_BYTES`.
            MalformedMessageError: if `data` is not a message of this conversation. Its `field` is
                the path of the invalid field, if any.
        """
        if len(data) > MAX_BYTES:
            what = f"message of {len(data)} bytes exceeds {MAX_BYTES} bytes"
            raise TooLargeError(what, "send large data in pieces")
        try:
            decoded: M = self._decoder.decode(data)
        except msgspec.ValidationError as error:
            raise self._malformed(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._malformed(f"not MessagePack: {error}") from None
        except RecursionError:
            raise self._malformed("arrays or maps nested too deep") from None
        return decoded

    def _malformed(self, what: str) -> MalformedMessageError:
        text, _, path = what[:2000].rpartition(" - at `") if " - at `" in what else (what, "", "")
        text = text[:500]
        field = path.rstrip("`").removeprefix("$").removeprefix(".")
        if text.startswith(MISSING):
            name = text.removeprefix(MISSING).strip("`")
            field = f"{field}.{name}" if field else name
        hint = f"send one of {', '.join(sorted(self.tags))}" if field in {"", "type"} else ""
        where = f" (field {field})" if field else ""
        return MalformedMessageError(f"{self.conversation}: {text}{where}", hint, field)

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the messages that this codec accepts."""
        return tuple(tag_of(kind) for kind in self.kinds)


def tag_of(kind: type[Message]) -> str:
    """Return the tag of a message class, such as `worker.ready.2`."""
    return str(kind.__struct_config__.tag)


FROM_AGENT: Final = Codec[agent.FromAgent | agent.Published](
    "agent to controller", agent.FromAgent | agent.Published
)
TO_AGENT: Final = Codec[agent.ToAgent]("controller to agent", agent.ToAgent)
PUBLISHED: Final = Codec[agent.Published]("events of an agent", agent.Published)
REQUEST: Final = Codec[client.Request | feed.ReadLog](
    "client request", union_of(client.Request) | feed.ReadLog
)
REPLY: Final = Codec[client.Reply | feed.LogPage](
    "reply to a client", union_of(client.Reply) | feed.LogPage
)
FEED: Final = Codec[feed.FeedEvent]("feed", feed.FeedEvent)
FROM_SHIPPER: Final = Codec[feed.FromShipper | files.FromNode | streams.FromNode](
    "bulk from an agent", feed.FromShipper | files.FromNode | streams.FromNode
)
TO_SHIPPER: Final = Codec[feed.ToShipper | streams.ToNode](
    "bulk to an agent", feed.ToShipper | streams.ToNode
)
READ_LOG: Final = Codec[feed.ReadLog | files.FromFollower | streams.FromClient](
    "log reader", feed.ReadLog | files.FromFollower | streams.FromClient
)
LOG_REPLY: Final = Codec[feed.LogPage | files.FilesReply | client.Failed](
    "log page", feed.LogPage | files.FilesReply | client.Failed
)
TO_STREAM_CLIENT: Final = Codec[streams.ToClient | client.Failed](
    "stream to a client", streams.ToClient | client.Failed
)
TO_TERMINAL: Final = Codec[streams.FromClient]("agent to terminal", streams.FromClient)
FROM_TERMINAL: Final = Codec[streams.FromNode]("terminal to agent", streams.FromNode)
FROM_WORKER: Final = Codec[worker.FromWorker]("worker to agent", worker.FromWorker)
TO_WORKER: Final = Codec[worker.ToWorker]("agent to worker", worker.ToWorker)
REPORT: Final = Codec[agent.ScriptReport]("report file", union_of(agent.ScriptReport))
ASSIGNMENT: Final = Codec[worker.Assignment]("assignment file", worker.Assignment)
SHELL_ORDER: Final = Codec[worker.ShellOrder]("order for a shell", worker.ShellOrder)
EXIT_STATUS: Final = Codec[worker.ExitStatus]("exit file", worker.ExitStatus)
PROCESS_MARK: Final = Codec[worker.ProcessMark]("process file", worker.ProcessMark)
FROM_ZYGOTE: Final = Codec[worker.FromZygote]("zygote to agent", worker.FromZygote)
TO_ZYGOTE: Final = Codec[worker.ToZygote]("agent to zygote", worker.ToZygote)
TO_STATES: Final = Codec[files.AskState]("request for a state", files.AskState)
FROM_STATES: Final = Codec[files.FromStates]("piece of a state", files.FromStates)
FROM_STANDBY: Final = Codec[standby.FromStandby](
    "standby to active controller", standby.FromStandby
)
TO_STANDBY: Final = Codec[standby.ToStandby]("active controller to standby", standby.ToStandby)

CODECS: Final = tuple(one for one in globals().values() if isinstance(one, Codec))
