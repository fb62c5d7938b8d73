"""The only ZeroMQ I/O of the project: sockets with CURVE, identities, bounds and drains."""

from schemas.link.identity import Authority, Identity
from schemas.link.keys import KeyPair, load_authorised, load_keys, load_public, write_keys
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
