"""Messages between the controller and its relay process."""

from __future__ import annotations

from typing import Final

import msgspec

from controlplane.service.settings import Store
from schemas.ids import NodeId
from schemas.transport.keys import Identity, KeyPair
from schemas.wire.files import AskFiles, AskPiece
from schemas.wire.streams import OpenStream


class Listener(msgspec.Struct, frozen=True, kw_only=True):
    """A listening socket, which the process inherits."""

    address: str  # tcp://HOST:PORT
    descriptor: int


class StartRelay(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Serve the ports, and follow the journal. The first message; the reply is `RelayReady`."""

    state: str  # absolute path of the controller's state folder
    journal: str  # absolute path
    acknowledged: int  # number of the last acknowledged input
    shippers: Listener
    followers: Listener
    server: KeyPair
    keys: dict[bytes, Identity]  # all valid keys (Z85) and their owners
    store: Store
    silence_s: float  # the process ends after so many seconds without a message


class InputsAcknowledged(msgspec.Struct, frozen=True, kw_only=True, tag="acknowledged"):
    """The state after input `last` may be shown. Sent at least every `PULSE_S` seconds."""

    last: int


class KeysChanged(msgspec.Struct, frozen=True, kw_only=True, tag="keys_changed"):
    """Keys that became valid or have another owner, and keys that are no longer valid."""

    valid: dict[bytes, Identity]
    gone: list[bytes]


class StoreChanged(msgspec.Struct, frozen=True, kw_only=True, tag="store_changed"):
    """The settings file was read again."""

    store: Store


class NodeAway(msgspec.Struct, frozen=True, kw_only=True, tag="node_away"):
    """Reply to `AskNode` if the node is not connected."""

    message: AskFiles | AskPiece | OpenStream


class RelayReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The ports are served."""


class RelayAlive(msgspec.Struct, frozen=True, kw_only=True, tag="alive"):
    """Sent several times per second."""


class AskNode(msgspec.Struct, frozen=True, kw_only=True, tag="ask_node"):
    """Send an agent a request, which it answers on the port for output."""

    node: NodeId
    message: AskFiles | AskPiece | OpenStream


ToRelay = StartRelay | InputsAcknowledged | KeysChanged | StoreChanged | NodeAway
FromRelay = RelayReady | RelayAlive | AskNode
TO_RELAY: Final[msgspec.msgpack.Decoder[ToRelay]] = msgspec.msgpack.Decoder(ToRelay)
FROM_RELAY: Final[msgspec.msgpack.Decoder[FromRelay]] = msgspec.msgpack.Decoder(FromRelay)
PULSE_S: Final = 0.25
