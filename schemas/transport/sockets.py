"""asyncio sockets that exchange frames with authenticated peers, and a socket for a thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Final

import zmq
import zmq.asyncio

from schemas.codec import MAX_BYTES
from schemas.errors import AddressInUseError, SettingsError
from schemas.transport.flood_guard import FloodGuard, UnixFloodGuard
from schemas.transport.keys import Authority, Identity, KeyPair
from schemas.transport.listeners import BACKLOG, has_only_ipv6

# The kernel closes a connection when its peer's kernel acknowledges no data, or no probe, for this
# time, or when the peer's buffers stay full. Frequent heartbeats of libzmq would take processor
# time for each idle connection, and need threads that are busy when thousands of nodes return.
LOST_MS: Final = 20_000
# As LOST_MS, for a prompt socket, because after a partition a new connection carries data sooner
# than TCP's next retransmission.
PROMPT_MS: Final = 4000
PROBES: Final = 4  # probes of an idle connection in that time
# Interval of libzmq's heartbeats, and the longest wait for a reply. Connecting sockets send them,
# because the kernels of proxies and of frozen processes acknowledge data, too.
HEARTBEATS_MS: Final = (15_000, 30_000)
# The same for a prompt socket that knows several controllers. A frozen one gets a share of the
# messages until its connection is cut.
PROMPT_HEARTBEATS_MS: Final = (3000, 6000)
SILENT_CLIENT_MS: Final = 60_000  # the bound end cuts a connection without heartbeats for so long
CONNECT_TIMEOUT_MS: Final = 1000
MAX_RECONNECT_MS: Final = 1000
RECONNECT_MS: Final = 50  # first pause before the next attempt to connect; later ones are longer
# As RECONNECT_MS, for connections that can wait: when a controller is back, all nodes first connect
# for their orders.
PATIENT_RECONNECT_MS: Final = 3000
HIGH_WATER: Final = 20_000  # messages in the queue for one peer
TOPIC_ENVELOPE: Final = 1024  # bytes of a frame in addition to the topic
MAX_QUEUED: Final = 1000  # unread messages of one peer in a ROUTER; more stay at the sender
ENVELOPE: Final = 64 * 1024  # bytes of a frame in addition to the message
MAX_QUEUED_ON_IPC: Final = 100  # as MAX_QUEUED, for the small messages of workers
MAX_QUEUED_SUBSCRIPTIONS: Final = 10  # as MAX_QUEUED; libzmq reads all subscriptions at once
DRAIN: Final = 256  # messages that are received without returning to the loop
TURN_S: Final = 0.001  # longest time, with processing, without returning to the loop
NODES_TURN_S: Final = 0.01  # as TURN_S, for nodes, because their events are committed once per turn
MAX_REMEMBERED_CUTS: Final = 1024  # cut connections with last messages that may still arrive


@dataclass(frozen=True, slots=True)
class Incoming:
    """Message that was received from a socket."""

    frames: tuple[bytes, ...]
    identity: Identity | None  # owner of the key; None on ipc and on the client's side
    key: bytes = field(default=b"", compare=False)  # key of the peer when it connected, Z85
    known: Mapping[bytes, Identity] = field(default_factory=dict, compare=False, repr=False)
    source: int = field(default=-1, compare=False)  # descriptor of the connection

    @property
    def route(self) -> bytes:
        """First frame, which identifies the connection on a ROUTER."""
        return self.frames[0]

    @property
    def revoked(self) -> bool:
        """True if the key was revoked, or given to another owner, since the peer connected."""
        return bool(self.key) and (
            self.identity is None or self.known.get(self.key) != self.identity
        )


class Socket:
    """A socket that one task owns.

    `known` has the owners of the CURVE keys that peers must use, or is None if the socket uses no
    keys. `flood_guard` counts the bytes read from each connection, if it is not None.
    """

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        known: Mapping[bytes, Identity] | None = None,
        flood_guard: FloodGuard | None = None,
    ) -> None:
        self._socket = socket
        self._now: zmq.Socket[bytes] = zmq.Socket.shadow(socket)  # without futures
        self._known = known
        self._flood_guard = flood_guard
        self._unsent = 1 if socket.type == zmq.ROUTER else 0  # frames that libzmq adds
        self._cut: dict[tuple[bytes, int, bytes], None] = {}  # oldest first
        self._check_scheduled = False  # True if a check for arrived messages is scheduled

    async def __aiter__(self) -> AsyncIterator[Incoming]:
        """Wait for a message, then yield all messages that have arrived. Repeat this.

        Control returns to the event loop after a turn of limited time, which includes the caller's
        work. Messages that arrived over a connection before it was cut are dropped.
        """
        while True:
            incoming = await self.receive()
            of_node = incoming.identity is not None and incoming.identity.role == "node"
            turn_s = NODES_TURN_S if of_node else TURN_S
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
                    incoming = self._taken(self._now.recv_multipart(zmq.NOBLOCK, copy=False))
                except zmq.Again:
                    break

    async def receive(self) -> Incoming:
        """Wait for the next message and return it."""
        return self._taken(await self._socket.recv_multipart(copy=False))

    def _taken(self, frames: Sequence[zmq.Frame]) -> Incoming:
        data = tuple(frame.bytes for frame in frames)
        source = -1
        if self._flood_guard is not None:
            sizes = [len(each) for each in data[self._unsent :]]
            with contextlib.suppress(zmq.ZMQError):  # libzmq made the message, without a connection
                source = int(frames[-1].get(zmq.SRCFD))
                self._flood_guard.count_read(source, sizes, secured=self._known is not None)
        if self._known is None:
            return Incoming(data, None, source=source)
        key = b""
        # For a lost peer, libzmq itself sends an unsubscription without a key.
        with contextlib.suppress(zmq.ZMQError):
            key = str(frames[-1].get("User-Id")).encode()
            if self._flood_guard is not None and source >= 0:
                self._flood_guard.keys.record_key(source, key)
        return Incoming(data, self._known.get(key), key, self._known, source)

    def send(self, *frames: bytes) -> bool:
        """Send without waiting. Return False if the peer is lost or its queue is full.

        On a ROUTER the first frame is the `route` of the peer.
        """
        try:
            self._now.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        finally:
            self._check_soon()
        return True

    def _check_soon(self) -> None:
        """Check for arrivals once per turn, as sending may have consumed a reader's signal."""
        if not self._check_scheduled:
            self._check_scheduled = True
            asyncio.get_running_loop().call_soon(self._wake_readers)

    def _wake_readers(self) -> None:
        self._check_scheduled = False
        if not self._socket.closed:
            self._socket.get(zmq.EVENTS)  # wakes waiting tasks

    def count_kept_bytes(self, incoming: Incoming) -> int | None:
        """Count a message of which libzmq keeps some data until its connection is closed.

        Return the bytes counted for the peer's key over its open connections. Return 0 if this
        socket counts no bytes, and None if the connection of this message is closed.
        """
        if self._flood_guard is None:
            return 0
        return self._flood_guard.keys.count_kept_bytes(
            incoming.source, sum(map(len, incoming.frames))
        )

    def cut(self, incoming: Incoming) -> bool:
        """Cut a message's connection, and drop its unread messages. Return False if it is gone."""
        if self._flood_guard is None:
            return False
        while len(self._cut) >= MAX_REMEMBERED_CUTS:
            del self._cut[next(iter(self._cut))]
        self._cut[_connection(incoming)] = None
        self._flood_guard.process_events()
        if not self._flood_guard.keys.is_of(incoming.source, incoming.key):
            return False  # it was closed, and its descriptor is reused
        return bool(self._flood_guard.cut(incoming.source))

    def listen(self, address: str) -> None:
        """Bind to an ipc address again, as after its file was deleted. Peers stay connected.

        The folder of the address must exist.
        """
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            what = f"cannot bind {address}: {error.strerror}"
            raise SettingsError(what, "choose another address") from None

    def grant_topic(self, topic: bytes) -> None:
        """Accept the subscription just received, limited to this prefix (manual XPUB)."""
        self._socket.setsockopt(zmq.SUBSCRIBE, topic)

    def revoke_topic(self, topic: bytes) -> None:
        """Withdraw a subscription (manual XPUB)."""
        with contextlib.suppress(zmq.ZMQError):  # lost peer, or unknown subscription
            self._socket.setsockopt(zmq.UNSUBSCRIBE, topic)

    def subscribe(self, topic: bytes) -> None:
        """Subscribe to messages that begin with `topic`. An empty topic selects all (SUB)."""
        self._socket.setsockopt(zmq.SUBSCRIBE, topic)

    def reconnect(self, address: str, server_key: bytes) -> None:
        """Connect anew to a peer that has another public key (Z85)."""
        for one in address.split(","):
            with contextlib.suppress(zmq.ZMQError):  # not connected at the moment
                self._socket.disconnect(one)
        self._socket.curve_serverkey = server_key
        for one in address.split(","):
            self._socket.connect(one)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)


class Link:
    """Sockets of one process. Without keys, only loopback and ipc addresses can be used."""

    def __init__(self, keys: KeyPair | None = None, *, io_threads: int = 1) -> None:
        self._context = zmq.asyncio.Context(io_threads)
        self._keys = keys
        self._authority: Authority | None = None
        self._known: Mapping[bytes, Identity] = {}
        self._shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context)
        self._flood_guard = FloodGuard()
        self._unix_guards: list[UnixFloodGuard] = []
        self._ports = 0  # number of bound sockets

    @property
    def public(self) -> bytes:
        """Own public key, Z85; empty without keys."""
        return self._keys.public if self._keys is not None else b""

    async def guard_connections(self, refused: Callable[[str], None]) -> None:
        """Cut off peers that send more than is read, until cancelled. Call `refused` for each."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._flood_guard.run(refused))
            for local in self._unix_guards:
                tasks.create_task(local.run(refused))

    def authority(
        self, known: Mapping[bytes, Identity], denied: Callable[[str, str], None]
    ) -> Authority:
        """Return the ZAP handler of this process. Its `run` must be running before peers connect.

        Call this before `bind`. `known` has the owner of each public key (Z85), and may change. A
        removed key cannot connect, and messages of its open connections have no identity.
        `denied` is called with the reason of a refusal and the peer's address.
        """
        self._known = known
        self._authority = Authority(self._context, known, denied, self._flood_guard)
        return self._authority

    def bind(
        self,
        kind: str,
        address: str,
        *,
        queued: int = HIGH_WATER,
        largest: int = MAX_BYTES,
        listener: int | None = None,
    ) -> Socket:
        """Bind a socket of `kind` (ROUTER, SUB or XPUB). It uses CURVE on TCP, but not on ipc.

        The address is tcp://HOST:PORT (port 0 or `*` for any), or ipc://PATH. Up to `queued`
        messages wait for a peer that does not read. A peer that sends a frame of more than
        `largest` bytes is disconnected. `listener` is the descriptor of a socket that
        listens at this address already, or None.

        Raises:
            AddressInUseError: if another socket uses the address.
            SettingsError: if this host has no such address, or others could connect without keys.
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
        if listener is not None:
            socket.setsockopt(zmq.USE_FD, os.dup(listener))
        socket.backlog = BACKLOG
        socket.ipv6 = has_only_ipv6(_host(address))
        if kind == "ROUTER":
            socket.router_mandatory = True
            socket.rcvhwm = MAX_QUEUED_ON_IPC if address.startswith("ipc://") else MAX_QUEUED
        if kind == "XPUB":
            socket.rcvhwm = MAX_QUEUED_SUBSCRIPTIONS
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
            self._unix_guards.append(UnixFloodGuard(zmq.Socket.shadow(socket), self._shadow, path))
            return Socket(socket)
        self._flood_guard.add(zmq.Socket.shadow(socket), self._shadow, port)
        return Socket(socket, self._known if secured else None, self._flood_guard)

    def connect(
        self,
        kind: str,
        address: str,
        server_key: bytes | None = None,
        *,
        prompt: bool = False,
        reconnect_ms: int = RECONNECT_MS,
    ) -> Socket:
        """Connect a socket of `kind` (DEALER, PUB, SUB), which queues nothing while disconnected.

        The peer need not listen yet. Several addresses, with commas between them, are those of
        controllers of which one listens. `server_key` is the public key of the peer in Z85, or None
        on ipc.
        A `prompt` socket notices a lost host in seconds, and a frozen controller if there are
        several. It is for peers that always read soon, because full buffers count as a loss.
        After a lost connection, the first pause is `reconnect_ms`. If this is long, all pauses are,
        up to twice as long.
        """
        socket = self._socket(kind)
        socket.reconnect_ivl = reconnect_ms
        # Without a maximum, libzmq varies the pauses randomly.
        socket.reconnect_ivl_max = MAX_RECONNECT_MS if reconnect_ms < MAX_RECONNECT_MS else 0
        addresses = address.split(",")
        socket.ipv6 = any(has_only_ipv6(_host(one)) for one in addresses)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        beats = PROMPT_HEARTBEATS_MS if prompt and len(addresses) > 1 else HEARTBEATS_MS
        socket.heartbeat_ivl, socket.heartbeat_timeout = beats
        socket.heartbeat_ttl = SILENT_CLIENT_MS
        if prompt:
            _detect_loss(socket, PROMPT_MS)
        if kind == "DEALER":
            socket.immediate = True
        if server_key is not None and self._keys is not None:
            socket.curve_serverkey = server_key
            socket.curve_publickey = self._keys.public
            socket.curve_secretkey = self._keys.secret
        for one in addresses:
            socket.connect(one)
        return Socket(socket)

    def _socket(self, kind: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(getattr(zmq, kind))
        _bounds(socket)
        return socket

    def close(self) -> None:
        """Close every socket of the process."""
        self._flood_guard.close()
        for local in self._unix_guards:
            local.close()
        if self._authority is not None:
            self._authority.close()
        self._context.destroy(linger=0)


class ThreadDealer:
    """DEALER on ipc for one background thread, as the training library uses it."""

    def __init__(self, address: str) -> None:
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
        """End a `poll` early. Other threads may call only this method."""
        os.eventfd_write(self._wake, 1)

    def poll(self, timeout_s: float) -> tuple[list[bytes], bool]:
        """Wait for messages, a connection, a wake or the timeout. Return (messages, connected)."""
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
        """Send without waiting. Return False while not connected."""
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Close the connection."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=100)
        self._context.term()


def _connection(incoming: Incoming) -> tuple[bytes, int, bytes]:
    """Return an identifier of a connection. A later connection with this key may reuse it."""
    return incoming.route, incoming.source, incoming.key


def _bounds(socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> None:
    socket.linger = 0
    socket.maxmsgsize = MAX_BYTES + ENVELOPE
    socket.sndhwm = HIGH_WATER
    socket.rcvhwm = HIGH_WATER
    socket.reconnect_ivl = RECONNECT_MS
    socket.reconnect_ivl_max = MAX_RECONNECT_MS
    socket.handshake_ivl = 30_000  # ms, because a thousand other peers may be handled first
    _detect_loss(socket, LOST_MS)


def _detect_loss(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, lost_ms: int) -> None:
    socket.setsockopt(zmq.TCP_MAXRT, lost_ms)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, lost_ms // 1000 // PROBES)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, lost_ms // 1000 // PROBES)


def _host(address: str) -> str:
    """Return the host of tcp://HOST:PORT or tcp://SOURCE;HOST:PORT, or "" for other addresses."""
    if not address.startswith("tcp://"):
        return ""
    peer = address.removeprefix("tcp://").rpartition(";")[2]
    return peer.rpartition(":")[0].strip("[]")


def _refuse_open(address: str) -> None:
    host = _host(address)
    try:
        local = ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local:
        raise SettingsError(f"{address} without keys is open to every host", "configure keys")
