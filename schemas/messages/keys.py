"""Admins keep the list of keys over the client port; a secret key never travels."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from schemas.ids import Seconds
from schemas.messages import Message

Role = Literal["admin", "operator", "user", "viewer", "node"]
Public = Annotated[str, msgspec.Meta(min_length=40, max_length=40)]


class AddKey(Message, tag="keys.add.1"):
    """Let the owner of a key connect; the same a second time changes nothing."""

    public: Public  # Z85
    name: str  # whose it is: a person's, or a node's
    role: Role
    projects: tuple[str, ...] = ()
    expires: Seconds | None = None  # since the epoch; None: never


class ListKeys(Message, tag="keys.list.1"):
    """All keys, also those that are not valid any more, a page at a time."""

    cursor: str = ""  # `next` of the page before


class RevokeKey(Message, tag="keys.revoke.1"):
    """Take keys away for ever, and end what is open with them."""

    key: str  # a public key, or a name: all keys of that name


class KeyInfo(Message, tag="keys.key.1"):
    """A key, and who keeps it."""

    public: str
    name: str
    role: str
    projects: tuple[str, ...] = ()
    expires: Seconds | None = None
    state: str = "valid"  # valid, expired or revoked
    kept: str = "online"  # file: in authorised.toml; online: added over this port
    by: str = ""  # who added or revoked it last, if it was over this port
    at: Seconds | None = None  # when


class Keys(Message, tag="keys.keys.1"):
    """Answer to `AddKey`, `RevokeKey` (those that changed, or had) and `ListKeys`: a page."""

    keys: tuple[KeyInfo, ...]
    next: str = ""  # cursor of the next page; empty: this is the last
