"""asyncio sockets that carry frames between authenticated peers, and one for a thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from socket import AF_INET6, SOCK_STREAM, gaierror, getaddrinfo
from typing import Final

import zmq
import zmq.asyncio

from schemas.codec import MAX_BYTES
from schemas.errors import SettingsError
from schemas.transport.flood_guard import ConnectionWatch
from schemas.transport.keys import Authority, Identity, KeyPair
from schemas.transport.unix_flood_guard import LocalWatch

HIGH_WATER: Final = 20_000  # messages queued for one peer
TOPIC_ENVELOPE: Final = 1024  # the same beside a topic
UNREAD: Final = 1000  # messages of one peer that a ROUTER holds; what is more stays with its sender
ENVELOPE: Final = 64 * 1024  # bytes of a frame beside the message in it
UNREAD_ON_IPC: Final = 100  # the same of a worker, whose messages are small
TOPICS_UNREAD: Final = 10  # the same, of subscriptions: libzmq takes all that are there at once
BACKLOG: Final = 4096  # peers that connect at once; those beyond it wait for seconds to try again
DRAIN: Final = 256  # messages taken without returning to the loop
TURN_S: Final = 0.001  # the same, and what is done with them: others' work waits as long
NODES_TURN_S: Final = 0.01  # the same of nodes, whose events are committed by the turn
REMEMBERED: Final = 1024  # connections that were cut, whose last messages are still to come


class AddressInUseError(SettingsError):
    """Another socket is bound to the address."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """One message as it came off a socket."""

    frames: tuple[bytes, ...]
    identity: Identity | None  # of the key, if it is authorised; None on ipc and a client's side
    key: bytes = field(default=b"", compare=False)  # that the peer showed as it connected, Z85
    known: Mapping[bytes, Identity] = field(default_factory=dict, compare=False, repr=False)
    source: int = field(default=-1, compare=False)  # descriptor of its connection

    @property
    def route(self) -> bytes:
        """The first frame, which on a ROUTER names the connection."""
        return self.frames[0]

    @property
    def revoked(self) -> bool:
        """Whether its key was taken out, or given to another owner, since it connected.

        What takes a while asks again at its end.
        """
        return bool(self.key) and (
            self.identity is None or self.known.get(self.key) != self.identity
        )


class Socket:
    """One socket with one owning task."""

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        known: Mapping[bytes, Identity] | None = None,
        watch: ConnectionWatch | None = None,
    ) -> None:
        """Wrap `socket`, which nobody else uses from now on.

        Args:
            known: who may say something now, by the CURVE key that its peers had to show; None:
                they had to show none.
            watch: is told what was taken of whom; None: nobody is.
        """
        self._socket = socket
        self._now: zmq.Socket[bytes] = zmq.Socket.shadow(socket)  # the same, without futures
        self._known = known
        self._watch = watch
        self._unsent = 1 if socket.type == zmq.ROUTER else 0  # frames that libzmq adds
        self._cut: dict[tuple[bytes, int, bytes], None] = {}  # the oldest first
        self._looking = False  # at what arrived, in this turn of the loop

    async def __aiter__(self) -> AsyncIterator[Incoming]:
        """Everything that arrives; waits once, then takes what is there.

        It returns to the loop when a turn has taken long, with whatever was done meanwhile, so that
        many messages hold up nobody else. What a connection sent before it was cut is dropped.
        """
        while True:
            incoming = await self._receive(0)
            turn_s = (
                NODES_TURN_S if incoming.identity and incoming.identity.role == "node" else TURN_S
            )
            until = time.perf_counter() + turn_s
            taken = 0
            while True:
                if not (self._cut and _connection(incoming) in self._cut):
                    yield incoming
                taken += 1
                if taken >= DRAIN or time.perf_counter() > until:
                    await asyncio.sleep(0)
                    until, taken = time.perf_counter() + turn_s, 0
                try:
                    incoming = self._receive_now()
                except zmq.Again:
                    break

    async def receive(self) -> Incoming:
        """The next message."""
        return await self._receive(0)

    async def _receive(self, flags: int) -> Incoming:
        return self._taken(await self._socket.recv_multipart(flags, copy=False))

    def _receive_now(self) -> Incoming:
        return self._taken(self._now.recv_multipart(zmq.NOBLOCK, copy=False))

    def _taken(self, frames: Sequence[zmq.Frame]) -> Incoming:
        data = tuple(frame.bytes for frame in frames)
        source = -1
        if self._watch is not None:
            sizes = [len(each) for each in data[self._unsent :]]
            with contextlib.suppress(zmq.ZMQError):  # libzmq itself said it, over no connection
                source = int(frames[-1].get(zmq.SRCFD))
                self._watch.took(source, sizes, secured=self._known is not None)
        if self._known is None:
            return Incoming(data, None, source=source)
        key = b""
        # libzmq itself says "unsubscribed" for a peer that is lost, and for nobody's key.
        with contextlib.suppress(zmq.ZMQError):
            key = str(frames[-1].get("User-Id")).encode()
            if self._watch is not None and source >= 0:
                self._watch.keys.spoke(source, key)
        return Incoming(data, self._known.get(key), key, self._known, source)

    def send(self, *frames: bytes) -> bool:
        """Send now or not at all; False when the peer is lost or its queue is full.

        Args:
            frames: of one message; on a ROUTER the first one is the `route` of its peer.
        """
        try:
            self._now.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        finally:
            self._look_soon()
        return True

    def _look_soon(self) -> None:
        """Sending may take note of what arrived: whoever waits for it would not be woken.

        Once in a turn of the loop is enough, however much is sent in it.
        """
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        if not self._socket.closed:
            self._socket.get(zmq.EVENTS)  # which wakes them

    def said(self, incoming: Incoming) -> int | None:
        """Count a message that libzmq keeps something of until its connection is closed.

        Returns:
            Bytes of all that were counted for its key and whose connections are open; 0 where
            nobody is watched; None if its own connection is open no more.
        """
        if self._watch is None:
            return 0
        return self._watch.keys.says(incoming.source, sum(map(len, incoming.frames)))

    def cut(self, incoming: Incoming) -> bool:
        """End the connection that a message came over; its peer may connect again.

        What it sent before and was not taken yet never comes out of this socket.

        Returns:
            Whether it was there and could be ended.
        """
        if self._watch is None:
            return False
        while len(self._cut) >= REMEMBERED:
            del self._cut[next(iter(self._cut))]
        self._cut[_connection(incoming)] = None
        self._watch.notice()
        if not self._watch.keys.is_of(incoming.source, incoming.key):
            return False  # it is gone, and its number is another's
        return bool(self._watch.cut(incoming.source))

    def listen(self, address: str) -> None:
        """Bind once more, as when somebody deleted the file of an ipc address; peers stay.

        Args:
            address: ipc://PATH; its folder has to be there.

        Raises:
            SettingsError: if it cannot be had.
        """
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            what = f"cannot bind {address}: {error.strerror}"
            raise SettingsError(what, "choose another address") from None

    def admit(self, topic: bytes) -> None:
        """Grant the subscription that was just received (manual XPUB).

        Args:
            topic: the first bytes of the messages that the subscriber may have.
        """
        self._socket.setsockopt(zmq.SUBSCRIBE, topic)

    def revoke(self, topic: bytes) -> None:
        """Take back a subscription (manual XPUB)."""
        with contextlib.suppress(zmq.ZMQError):  # its peer may be lost, or was never granted it
            self._socket.setsockopt(zmq.UNSUBSCRIBE, topic)

    def subscribe(self, topic: bytes) -> None:
        """Ask for a topic (SUB).

        Args:
            topic: the first bytes of the messages that are wanted; empty for all.
        """
        self._socket.setsockopt(zmq.SUBSCRIBE, topic)

    def close(self) -> None:
        """Give up the socket."""
        self._socket.close(linger=0)


class Link:
    """The sockets of one process: a context, its keys, and who may connect."""

    def __init__(self, keys: KeyPair | None = None) -> None:
        """Make a context of its own.

        Args:
            keys: of this process; without them only loopback and ipc can be used.
        """
        self._context = zmq.asyncio.Context()
        self._keys = keys
        self._authority: Authority | None = None
        self._known: Mapping[bytes, Identity] = {}
        self._shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context)
        self._watch = ConnectionWatch()
        self._local: list[LocalWatch] = []
        self._ports = 0  # that were bound

    async def watch_connections(self, refused: Callable[[str], None]) -> None:
        """Cut off who sends more than is taken of it, over bound sockets, for ever.

        Args:
            refused: called with what was cut off.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch.run(refused))
            for local in self._local:
                tasks.create_task(local.run(refused))

    def authority(
        self, known: Mapping[bytes, Identity], denied: Callable[[str, str], None]
    ) -> Authority:
        """The ZAP handler of this process; its `run` must be running before peers connect.

        To be asked for before anything is bound.

        Args:
            known: public key (Z85) to its owner. It may change: a key that is not in it connects
                no more, and what comes over a connection that it has is nobody's.
            denied: called with why somebody was refused, and where he is.
        """
        self._known = known
        self._authority = Authority(self._context, known, denied, self._watch)
        return self._authority

    def bind(
        self, kind: str, address: str, *, queued: int = HIGH_WATER, largest: int = MAX_BYTES
    ) -> Socket:
        """Bind a socket of `kind` (ROUTER, SUB, XPUB) with CURVE, or on ipc without.

        Args:
            address: tcp://HOST:PORT (port 0 or `*` for any), or ipc://PATH.
            queued: messages that may wait for a peer that does not read; more are not sent.
            largest: bytes of a frame; who sends a larger one is dropped.

        Raises:
            AddressInUseError: if the address is taken.
            SettingsError: if it is none of this host, or would be open to others without keys.
        """
        secured = address.startswith("tcp://") and self._keys is not None
        if not secured and not address.startswith("ipc://"):
            _refuse_open(address)
        self._ports += 1
        port = f"ones-{self._ports}"
        socket = self._socket(kind)
        socket.sndhwm = queued
        socket.maxmsgsize = largest + ENVELOPE
        if secured and self._keys:
            socket.curve_server = True
            socket.curve_publickey = self._keys.public
            socket.curve_secretkey = self._keys.secret
            socket.zap_domain = port.encode()
            if self._authority is not None:
                self._authority.admits_to(port)
        socket.backlog = BACKLOG
        socket.ipv6 = has_only_ipv6(_host(address))
        if kind == "ROUTER":
            socket.router_mandatory = True
            socket.rcvhwm = UNREAD_ON_IPC if address.startswith("ipc://") else UNREAD
        if kind == "XPUB":
            socket.rcvhwm = TOPICS_UNREAD
            socket.maxmsgsize = largest + TOPIC_ENVELOPE
            socket.setsockopt(zmq.XPUB_MANUAL, 1)
            socket.setsockopt(zmq.XPUB_VERBOSER, 1)
        if kind == "SUB":
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            what = f"cannot bind {address}: {error.strerror}"
            refusal = AddressInUseError if error.errno == zmq.EADDRINUSE else SettingsError
            raise refusal(what, "choose another address") from None
        if address.startswith("ipc://"):
            path = address.removeprefix("ipc://")
            self._local.append(LocalWatch(zmq.Socket.shadow(socket), self._shadow, path))
            return Socket(socket)
        self._watch.add(zmq.Socket.shadow(socket), self._shadow, port)
        return Socket(socket, self._known if secured else None, self._watch)

    def connect(self, kind: str, address: str, server_key: bytes | None = None) -> Socket:
        """Connect a socket of `kind` (DEALER, PUB, SUB); queues nothing while disconnected.

        Args:
            address: of the other side; it need not be there yet.
            server_key: its public key, Z85; None on ipc.
        """
        socket = self._socket(kind)
        socket.ipv6 = has_only_ipv6(_host(address))
        if kind == "DEALER":
            socket.immediate = True
        if server_key is not None and self._keys is not None:
            socket.curve_serverkey = server_key
            socket.curve_publickey = self._keys.public
            socket.curve_secretkey = self._keys.secret
        socket.connect(address)
        return Socket(socket)

    def _socket(self, kind: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(getattr(zmq, kind))
        _bounds(socket)
        return socket

    def close(self) -> None:
        """Close every socket of the process."""
        self._watch.close()
        for local in self._local:
            local.close()
        if self._authority is not None:
            self._authority.close()
        self._context.destroy(linger=0)


class ThreadDealer:
    """A DEALER on ipc for one background thread, as the training library uses it."""

    def __init__(self, address: str) -> None:
        """Connect; nothing is waited for."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _bounds(self._socket)
        self._socket.immediate = True
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake):
            self._poller.register(source, zmq.POLLIN)
        self._socket.connect(address)

    def wake(self) -> None:
        """End a `poll` early; the only method that other threads may call."""
        os.eventfd_write(self._wake, 1)

    def poll(self, timeout_s: float) -> tuple[list[bytes], bool]:
        """Wait for messages, a wake or the end of `timeout_s`.

        Args:
            timeout_s: seconds, whole milliseconds of them.

        Returns:
            The messages that arrived, and whether a connection was made anew.
        """
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        connected = self._monitor in ready
        if connected:
            self._drain(self._monitor)
        if self._wake in ready:
            os.eventfd_read(self._wake)
        messages = self._drain(self._socket) if self._socket in ready else []
        return messages, connected

    @staticmethod
    def _drain(socket: zmq.Socket[bytes]) -> list[bytes]:
        taken = []
        with contextlib.suppress(zmq.Again):
            while True:
                taken.append(socket.recv_multipart(zmq.NOBLOCK)[-1])
        return taken

    def send(self, data: bytes) -> bool:
        """Send now or not at all; False while nobody is connected."""
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Give up the connection."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=100)
        self._context.term()


def _connection(incoming: Incoming) -> tuple[bytes, int, bytes]:
    """What no two connections share, but those of one key that takes the same name again."""
    return incoming.route, incoming.source, incoming.key


def _bounds(socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> None:
    socket.linger = 0
    socket.maxmsgsize = MAX_BYTES + ENVELOPE
    socket.sndhwm = HIGH_WATER
    socket.rcvhwm = HIGH_WATER
    socket.reconnect_ivl = 50
    socket.reconnect_ivl_max = 1000
    socket.handshake_ivl = 30_000  # a peer may have to wait behind a thousand others
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)


def _host(address: str) -> str:
    """The host of tcp://HOST:PORT; empty for other addresses."""
    if not address.startswith("tcp://"):
        return ""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def has_only_ipv6(host: str) -> bool:
    """Return whether a host has IPv6 addresses only; libzmq tries no more than one address."""
    try:
        found = getaddrinfo(host, None, type=SOCK_STREAM) if host else []
    except (gaierror, UnicodeError):  # the latter of a name that DNS cannot hold
        return False
    return bool(found) and all(family == AF_INET6 for family, *_ in found)


def _refuse_open(address: str) -> None:
    host = _host(address)
    try:
        local = ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local:
        raise SettingsError(f"{address} without keys is open to every host", "configure keys")
