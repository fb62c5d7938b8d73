"""The only ZeroMQ I/O of the project: sockets with CURVE, identities, bounds and drains."""

from schemas.link.key_files import KeyPair, load_authorised, load_keys, load_public, write_keys
from schemas.link.key_owners import Authority, Identity
from schemas.link.sockets import Incoming, Link, Socket, ThreadDealer

__all__ = [
    "Authority",
    "Identity",
    "Incoming",
    "KeyPair",
    "Link",
    "Socket",
    "ThreadDealer",
    "load_authorised",
    "load_keys",
    "load_public",
    "write_keys",
]
