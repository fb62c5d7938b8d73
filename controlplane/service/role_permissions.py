"""Which roles of keys may do what; the roles themselves are in `authorised.toml`."""

from __future__ import annotations

from typing import Final

from schemas.errors import DeniedError
from schemas.link import Incoming

READERS: Final = frozenset({"admin", "operator", "user", "viewer"})  # states, events, output
OPERATORS: Final = frozenset({"admin", "operator"})  # drain nodes
WRITERS: Final = frozenset(
    {"admin", "operator", "user"}
)  # submit, and change jobs: of others only an admin
NODE: Final = "node"  # an agent: says what happens on the node that its key names
REVOKED: Final = ("this key is not authorised any more", "ask an admin for another one")


def refuse_revoked(incoming: Incoming) -> None:
    """Whoever connected while his key was authorised may do nothing when it is not any more.

    Args:
        incoming: what he said.

    Raises:
        DeniedError: if it is not.
    """
    if incoming.revoked:
        raise DeniedError(*REVOKED)
