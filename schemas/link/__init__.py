"""The only ZeroMQ I/O of the project: sockets with CURVE, identities, bounds and drains."""

from schemas.link.key_files import (
    KeyPair,
    check_name,
    check_public,
    identity_of,
    load_authorised,
    load_keys,
    load_public,
    refuse_wide,
    write_keys,
)
from schemas.link.key_owners import Authority, Identity
from schemas.link.known_keys import KnownKeys
from schemas.link.sockets import (
    HIGH_WATER,
    AddressInUseError,
    Incoming,
    Link,
    Socket,
    ThreadDealer,
)
from schemas.link.state_client import PIECE, StateUnavailableError, fetch_state
from schemas.link.state_server import StateServer, Stored
from schemas.link.state_targets import FileTarget, MemoryTarget

__all__ = [
    "HIGH_WATER",
    "PIECE",
    "AddressInUseError",
    "Authority",
    "FileTarget",
    "Identity",
    "Incoming",
    "KeyPair",
    "KnownKeys",
    "Link",
    "MemoryTarget",
    "Socket",
    "StateServer",
    "StateUnavailableError",
    "Stored",
    "ThreadDealer",
    "check_name",
    "check_public",
    "fetch_state",
    "identity_of",
    "load_authorised",
    "load_keys",
    "load_public",
    "refuse_wide",
    "write_keys",
]
