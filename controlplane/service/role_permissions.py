"""Which roles of keys may do what; the roles themselves are in `authorised.toml`."""

from __future__ import annotations

from typing import Final

READERS: Final = frozenset({"admin", "operator", "user", "viewer"})  # states, events, output
OPERATORS: Final = frozenset({"admin", "operator"})  # drain nodes
WRITERS: Final = frozenset(
    {"admin", "operator", "user"}
)  # submit, and change jobs: of others only an admin
NODE: Final = "node"  # an agent: says what happens on the node that its key names
