"""Handshake with a socket of the controller: whether it is reachable, and admits a key."""

from __future__ import annotations

import time
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from schemas.transport.keys import KeyPair

LIMIT_S: Final = 3.0
CLOSED: Final = "no connection: nothing listens there, or a firewall drops packets"
REFUSED: Final = "the controller does not know this key, or it has expired"
OTHER: Final = "it does not answer: another program listens, or the controller has another key"


def handshake(
    address: str,
    server_key: bytes,
    keys: KeyPair,
    *,
    kind: str = "DEALER",
    limit_s: float = LIMIT_S,
) -> str:
    """Return why a socket at tcp://HOST:PORT does not admit a key, or "" if it does.

    No message is sent. `kind` is DEALER, or SUB for the feed.
    """
    context = zmq.Context()
    socket = context.socket(getattr(zmq, kind))
    monitor = socket.get_monitor_socket()
    try:
        socket.ipv6 = True
        socket.linger = 0
        socket.curve_serverkey = server_key
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        socket.connect(address)
        why, deadline = CLOSED, time.monotonic() + limit_s
        while (left_s := deadline - time.monotonic()) > 0:
            if not monitor.poll(int(left_s * 1000) + 1):
                break
            match recv_monitor_message(monitor)["event"]:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    return ""
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    return REFUSED
                case zmq.EVENT_CONNECTED:
                    why = OTHER
        return why
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)
        context.term()
