from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import AF_INET, AF_INET6, SOCK_STREAM, AddressFamily
from tempfile import mkdtemp

import pytest
import zmq
import zmq.auth
from zmq.utils import z85

from schemas.codec import MAX_BYTES
from schemas.errors import AddressInUseError, SettingsError
from schemas.transport import connection_limits, sockets
from schemas.transport import handshake as handshakes
from schemas.transport.keys import (
    Identity,
    KeyPair,
    load_authorised,
    load_keys,
    load_public,
    write_keys,
)
from schemas.transport.sockets import Incoming, Socket, ThreadDealer
from tests.support.schemas_links import (
    BOUND_S,
    HeldLink,
    connected,
    events_of,
    free_address,
    heard,
    plain_dealer,
    soon,
)

NODE = Identity("node", "agent-1")
ADA = Identity("user", "ada")
FRAME_LIMIT = MAX_BYTES + 64 * 1024


@dataclass
class Setup:
    """A server with the keys of a node and of Ada, and all links."""

    server: HeldLink
    server_key: bytes
    keys: dict[str, KeyPair]
    denied: list[str]
    denial: asyncio.Event
    known: dict[bytes, Identity]
    links: list[HeldLink] = field(default_factory=list)
    address: str = ""

    def link(self, name: str | None) -> HeldLink:
        """Return the link of a process with the keys of `name`; None: no keys."""
        link = HeldLink(self.keys[name] if name else None)
        self.links.append(link)
        return link

    def bind(self, kind: str = "ROUTER") -> Socket:
        self.address = free_address()
        return self.server.bind(kind, self.address)

    def connect(self, name: str, kind: str = "DEALER") -> Socket:
        return self.link(name).connect(kind, self.address, self.server_key)

    async def dealer(self, name: str = "node") -> Socket:
        return await connected(self.connect(name))

    async def on_ipc(self, path: Path) -> tuple[Socket, Socket]:
        """Return a router on a Unix socket, and a dealer that is connected to it."""
        router = self.link(None).bind("ROUTER", f"ipc://{path}")
        return router, await connected(self.link(None).connect("DEALER", f"ipc://{path}"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, KeyPair]:
    folder = tmp_path_factory.mktemp("keys")
    return {name: write_keys(folder, name) for name in ("server", "node", "ada", "stranger")}


@pytest.fixture
async def setup(keys: dict[str, KeyPair]) -> AsyncIterator[Setup]:
    denied: list[str] = []
    denial = asyncio.Event()

    def deny(why: str, address: str) -> None:
        assert address in {"127.0.0.1", "::1", ""}
        denied.append(why)
        denial.set()

    server = HeldLink(keys["server"])
    known = {keys["node"].public: NODE, keys["ada"].public: ADA}
    authority = server.authority(known, deny)
    running = asyncio.create_task(authority.run())
    setup = Setup(server, keys["server"].public, keys, denied, denial, known)
    yield setup
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    for link in (*setup.links, server):
        link.close()


@pytest.fixture
def socket_path() -> Iterator[Path]:
    folder = Path(mkdtemp(prefix="ones-link-"))  # tmp_path may be too long for AF_UNIX
    yield folder / "agent.sock"
    shutil.rmtree(folder)


# --- the handshake alone


async def test_a_handshake_tells_why_a_key_is_not_admitted(
    setup: Setup,
) -> None:
    keys, server = setup.keys, setup.server_key
    router, closed = setup.bind(), free_address()

    async def outcome(name: str, address: str, server_key: bytes, limit_s: float = BOUND_S) -> str:
        return await asyncio.to_thread(
            handshakes.handshake, address, server_key, keys[name], limit_s=limit_s
        )

    assert await outcome("node", setup.address, server) == ""
    assert await outcome("stranger", setup.address, server) == handshakes.REFUSED
    assert await outcome("node", setup.address, keys["ada"].public, 0.5) == handshakes.OTHER
    assert await outcome("node", closed, server, 0.2) == handshakes.CLOSED
    assert not await router._socket.poll(0)  # nothing was sent


# --- identities


async def test_the_identity_of_a_key_arrives_on_a_router_and_replies_reach_its_peer(
    setup: Setup,
) -> None:
    router = setup.bind()
    node, ada = await setup.dealer(), await setup.dealer("ada")

    assert node.send(b"from the node")
    first = await soon(router.receive())
    assert ada.send(b"id", b"from ada")
    second = await soon(router.receive())
    assert router.send(first.route, b"welcome")

    assert (first.identity, first.frames[1:]) == (NODE, (b"from the node",))
    assert (second.identity, second.frames[1:]) == (ADA, (b"id", b"from ada"))
    assert await soon(node.receive()) == Incoming((b"welcome",), None)
    assert not await ada._socket.poll(0)
    assert router.send(b"\0nobd", b"welcome") is False
    assert setup.denied == []


async def test_the_identity_of_a_key_arrives_on_sub_and_xpub(setup: Setup) -> None:
    events = setup.bind("SUB")
    node = setup.connect("node", "PUB")
    incoming = await heard(events, lambda: node.send(b"agent-1", b"event"))
    feed = setup.bind("XPUB")
    ada = setup.connect("ada", "SUB")
    ada.subscribe(b"job")

    assert incoming == Incoming((b"agent-1", b"event"), NODE)
    assert await soon(feed.receive()) == Incoming((b"\x01job",), ADA)
    feed.send(b"job", b"before")  # a subscription gets nothing before its topic is granted
    feed.grant_topic(b"job")
    feed.send(b"job", b"after")
    assert await soon(ada.receive()) == Incoming((b"job", b"after"), None)


async def test_on_ipc_there_are_no_keys_and_messages_arrive_in_order(
    setup: Setup, socket_path: Path
) -> None:
    router, worker = await setup.on_ipc(socket_path)
    sent = [str(number).encode() for number in range(1000)]

    assert all(worker.send(data) for data in sent)

    arrived: list[bytes] = []
    async with asyncio.timeout(BOUND_S):
        async for incoming in router:
            assert incoming.identity is None
            arrived.append(incoming.frames[-1])
            if len(arrived) == len(sent):
                break
    assert arrived == sent


async def test_a_waiting_receiver_gets_a_message_that_arrives_during_a_send(
    setup: Setup, socket_path: Path
) -> None:
    router, dealer = await setup.on_ipc(socket_path)
    assert dealer.send(b"first")
    route = (await soon(router.receive())).route
    waiting = asyncio.create_task(router.receive())
    await asyncio.sleep(0)  # it waits

    assert dealer.send(b"second")
    arrived, _, _ = select.select([router._now.FD], [], [], BOUND_S)  # the loop does not turn
    assert arrived
    for _ in range(100):  # libzmq takes note of it, and tells nobody again
        assert router.send(route, b"meanwhile")

    assert (await soon(waiting)).frames[1:] == (b"second",)


async def test_many_messages_leave_turns_of_the_loop_to_others(
    setup: Setup, socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "TURN_S", 0.0)
    router, worker = await setup.on_ipc(socket_path)
    turns, before = 0, list[int]()

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    assert all(worker.send(b"more") for _ in range(50))
    async with asyncio.timeout(BOUND_S):
        async for _ in router:
            before.append(turns)
            if len(before) == 50:
                break
    beside.cancel()

    assert len(set(before)) == 50


async def test_unread_messages_of_a_cut_connection_are_dropped(setup: Setup) -> None:
    router = setup.bind()
    hostile = await setup.dealer("ada")
    other = await setup.dealer("ada")
    assert all(hostile.send(str(number).encode()) for number in range(300))

    taken, cut = [], False
    async with asyncio.timeout(BOUND_S):
        async for incoming in router:
            taken.append(incoming.frames[-1])
            if not cut:
                cut = router.cut(incoming)
                assert other.send(b"other")
            if taken[-1] == b"other":
                break

    assert (taken, cut) == ([b"0", b"other"], True)


async def test_a_connection_with_a_reused_number_is_not_cut(setup: Setup) -> None:
    router = setup.bind()
    node = await setup.dealer()
    node.send(b"from the node")
    incoming = await soon(router.receive())

    stale = replace(incoming, frames=(b"gone", b""), key=setup.keys["ada"].public)
    cut = router.cut(stale)
    node.send(b"still here")

    assert not cut
    assert (await soon(router.receive())).frames[1:] == (b"still here",)


async def test_remembered_cuts_are_limited(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_REMEMBERED_CUTS", 2)
    router = setup.server.bind("ROUTER", free_address())

    assert router._socket.backlog == 4096, "libzmq's own 100 have the others try again in seconds"
    for number in range(5):
        router.cut(Incoming((bytes([number]), b""), ADA, source=-1))

    assert [route for route, _, _ in router._cut] == [b"\x03", b"\x04"]


# --- revoked keys


async def test_a_removed_or_reassigned_key_loses_its_open_connections(setup: Setup) -> None:
    router, key = setup.bind(), setup.keys["ada"].public
    ada = await setup.dealer("ada")

    async def arrived() -> Incoming:
        ada.send(b"word")
        return await soon(router.receive())

    before = await arrived()
    assert (before.identity, before.revoked) == (ADA, False)
    del setup.known[key]
    removed = await arrived()
    assert (before.revoked, removed.identity, removed.revoked) == (True, None, True)
    assert removed.frames[1:] == (b"word",)
    setup.known[key] = ADA
    back = await arrived()
    assert (back.identity, back.revoked) == (ADA, False)
    setup.known[key] = Identity("viewer", "ada")
    given = await arrived()
    assert (back.revoked, given.identity, given.revoked) == (True, Identity("viewer", "ada"), False)


# --- refused peers


async def test_an_unknown_key_is_denied_and_known_keys_connect(setup: Setup) -> None:
    router = setup.bind()
    stranger_keys = setup.keys["stranger"]
    stranger = plain_dealer(
        setup.link("stranger"), setup.address, curve_serverkey=setup.server_key,
        curve_publickey=stranger_keys.public, curve_secretkey=stranger_keys.secret,
    )  # fmt: skip
    said = stranger.send(b"from a stranger")

    await soon(setup.denial.wait())
    assert setup.connect("stranger").send(b"from a stranger") is False
    node = await setup.dealer()
    node.send(b"from the node")
    incoming = await soon(router.receive())

    assert (incoming.identity, incoming.frames[1:]) == (NODE, (b"from the node",))
    assert not await router._socket.poll(0)
    assert set(setup.denied) == {f"{stranger_keys.public.decode()} is not authorised"}
    assert said.done()  # type: ignore[attr-defined] # queued on the stranger's side
    stranger.close()


async def test_connections_of_one_key_to_a_port_are_limited_and_others_connect(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS_PER_KEY", 3)
    addresses = free_address(), free_address()
    routers = [setup.server.bind("ROUTER", address) for address in addresses]
    first, other = addresses
    link = setup.link("ada")
    many = [link.connect("DEALER", first, setup.server_key) for _ in range(3)]
    for wire in many:
        await connected(wire)

    late = plain_dealer(
        link,
        first,
        immediate=True,
        handshake_ivl=1500,  # milliseconds, after which it tries again
        curve_serverkey=setup.server_key,
        curve_publickey=setup.keys["ada"].public,
        curve_secretkey=setup.keys["ada"].secret,
    )
    await soon(setup.denial.wait())
    await soon(events_of(Socket(late), zmq.EVENT_CONNECT_RETRIED))
    await connected(setup.link("node").connect("DEALER", first, setup.server_key))
    await connected(link.connect("DEALER", other, setup.server_key))
    for wire in many:
        assert wire.send(b"here")
        assert (await soon(routers[0].receive())).identity == ADA

    assert setup.denied == ["user:ada has 1000 connections to one port, the maximum"]
    many[0].close()
    await connected(Socket(late))
    late.close()


async def until_counted(setup: Setup, connections: int) -> None:
    """The server knows of so many."""
    watch = setup.server._flood_guard
    async with asyncio.timeout(BOUND_S):
        while watch.keys._counts.total() != connections:
            watch.process_events()
            await asyncio.sleep(0.005)


async def test_silent_connections_count_until_they_close(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS_PER_KEY", 2)
    setup.bind("XPUB")
    link = setup.link("ada")
    for _ in range(5):
        silent = link.connect("SUB", setup.address, setup.server_key)
        await until_counted(setup, 1)
        silent.close()
        await until_counted(setup, 0)

    for _ in range(2):
        link.connect("SUB", setup.address, setup.server_key)
    await until_counted(setup, 2)
    link.connect("SUB", setup.address, setup.server_key)

    await soon(setup.denial.wait())


async def test_events_of_an_unknown_key_do_not_arrive(setup: Setup) -> None:
    events = setup.bind("SUB")
    stranger = setup.connect("stranger", "PUB")
    node = setup.connect("node", "PUB")

    await soon(setup.denial.wait())

    def both_publish() -> None:
        stranger.send(b"agent-1", b"forged")
        node.send(b"agent-1", b"event")

    arrived = [await heard(events, both_publish) for _ in range(5)]
    assert arrived == [Incoming((b"agent-1", b"event"), NODE)] * 5


async def test_a_peer_without_keys_gets_no_handshake(setup: Setup) -> None:
    router = setup.bind()
    failed = events_of(
        router, zmq.Event.HANDSHAKE_FAILED_PROTOCOL, zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    )
    bare = setup.link(None).connect("DEALER", setup.address)

    await soon(failed)

    assert bare.send(b"hello") is False
    assert not await router._socket.poll(0)


async def test_a_request_that_the_authority_cannot_answer_does_not_stop_it(setup: Setup) -> None:
    asking = setup.server._context.socket(zmq.REQ)
    asking.linger = 0
    asking.connect("inproc://zeromq.zap.01")

    await asking.send_multipart([b"1.0", b"7", b"ones", b"", b"", b"CURVE", b"no key"])
    answer = await soon(asking.recv_multipart())
    asking.close()

    assert answer[:3] == [b"1.0", b"7", b"500"]
    assert setup.denied[0].startswith("unusable request: ")
    router = setup.bind()
    node = await setup.dealer()
    node.send(b"still here")
    assert (await soon(router.receive())).identity == NODE


async def test_peers_that_ask_together_are_answered_together(setup: Setup) -> None:
    asking = [setup.server._context.socket(zmq.REQ) for _ in range(20)]
    shown = [zmq.Socket.shadow(each) for each in asking]
    key = z85.decode(setup.keys["node"].public)
    for number, each in enumerate(shown):
        each.linger = 0
        each.connect("inproc://zeromq.zap.01")
        each.send_multipart([b"1.0", b"%d" % number, b"ones", b"", b"", b"CURVE", key])

    for _ in range(5):  # turns of the loop
        await asyncio.sleep(0)

    codes = [each.recv_multipart(zmq.NOBLOCK)[2] for each in shown if each.poll(0)]
    for each in asking:
        each.close()
    assert codes == [b"200"] * 20


async def test_without_keys_only_loopback_may_be_bound() -> None:
    with closing(HeldLink()) as link:
        for open_address in (
            "tcp://0.0.0.0:0",
            "tcp://*:0",
            "tcp://[::]:0",
            "tcp://192.0.2.1:7700",
        ):
            with pytest.raises(SettingsError) as refused:
                link.bind("ROUTER", open_address)
            why = f"{open_address} without keys is open to every host; configure keys"
            assert str(refused.value) == why
        address = free_address()
        router = link.bind("ROUTER", address)
        dealer = await connected(link.connect("DEALER", address))
        dealer.send(b"hello")

        assert (await soon(router.receive())).identity is None


async def test_an_address_that_is_taken_or_of_another_host_is_named(setup: Setup) -> None:
    setup.bind()
    for address, taken in ((setup.address, True), ("tcp://192.0.2.1:7700", False)):
        with pytest.raises(SettingsError, match=f"^cannot bind {re.escape(address)}: ") as refused:
            setup.server.bind("ROUTER", address)

        assert isinstance(refused.value, AddressInUseError) is taken
        assert ("Address already in use" in str(refused.value)) is taken
        assert refused.value.hint == "choose another address"


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_peers_meet_over_ipv6_with_brackets_or_without(setup: Setup, host: str) -> None:
    address = f"tcp://{host}:{free_address().rpartition(':')[2]}"
    router = setup.server.bind("ROUTER", address)
    dealer = setup.link("ada").connect("DEALER", address, setup.server_key)
    (await connected(dealer)).send(b"hello")

    assert (await soon(router.receive())).identity == ADA


@pytest.mark.parametrize(
    ("families", "ipv6"), [({AF_INET6}, 1), ({AF_INET, AF_INET6}, 0), ({AF_INET}, 0)]
)
async def test_a_name_is_looked_up_in_ipv6_where_its_host_has_nothing_else(
    setup: Setup, families: set[AddressFamily], ipv6: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = [(family, SOCK_STREAM, 6, "", ("", 0)) for family in families]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: addresses)

    dealer = setup.link("ada").connect("DEALER", "tcp://localhost:1", setup.server_key)

    assert dealer._socket.get(zmq.IPV6) == ipv6


# --- bounds


@pytest.mark.parametrize("secured", [True, False], ids=["with keys", "on ipc"])
async def test_a_larger_frame_drops_its_sender_and_the_router_lives_on(
    setup: Setup, socket_path: Path, *, secured: bool
) -> None:
    address = free_address() if secured else f"ipc://{socket_path}"
    key = setup.server_key if secured else None
    router = setup.server.bind("ROUTER", address)
    large = await connected(setup.link("node").connect("DEALER", address, key))
    other = await connected(setup.link("ada").connect("DEALER", address, key))
    dropped = events_of(large, zmq.Event.DISCONNECTED)
    large.send(bytes(MAX_BYTES))
    assert len((await soon(router.receive())).frames[1]) == MAX_BYTES

    large.send(bytes(FRAME_LIMIT + 1))
    await soon(dropped)
    other.send(b"still here")

    assert (await soon(router.receive())).frames[1:] == (b"still here",)
    assert not await router._socket.poll(0)


# --- a dealer for a thread


@pytest.fixture
def thread_dealer(socket_path: Path) -> Iterator[Callable[[], ThreadDealer]]:
    made: list[ThreadDealer] = []

    def make() -> ThreadDealer:
        made.append(ThreadDealer(f"ipc://{socket_path}"))
        return made[-1]

    yield make
    for dealer in made:
        dealer.close()


def polled_until(dealer: ThreadDealer, done: Callable[[list[bytes], bool], bool]) -> None:
    """Poll `dealer` until what it returns is `done`."""
    for _ in range(int(BOUND_S / 0.1)):
        if done(*dealer.poll(0.1)):
            return
    pytest.fail("it never happened")


def test_a_thread_dealer_without_a_router_sends_nothing_and_can_be_woken(
    thread_dealer: Callable[[], ThreadDealer],
) -> None:
    dealer = thread_dealer()
    assert dealer.poll(0.0) == ([], False)
    assert dealer.send(b"hello") is False

    dealer.wake()
    dealer.wake()

    assert dealer.poll(BOUND_S) == ([], False)
    assert dealer.poll(0.0) == ([], False)


async def test_a_thread_dealer_reconnects_and_talks_to_a_new_router(
    socket_path: Path, thread_dealer: Callable[[], ThreadDealer]
) -> None:
    dealer = thread_dealer()
    with closing(HeldLink()) as link:
        link.bind("ROUTER", f"ipc://{socket_path}")
        polled_until(dealer, lambda _, connected: connected)
    polled_until(dealer, lambda *_: not dealer.send(b"into the void"))

    with closing(HeldLink()) as link:
        router = link.bind("ROUTER", f"ipc://{socket_path}")
        polled_until(dealer, lambda _, connected: connected)
        assert dealer.send(b"hello again")
        incoming = await soon(router.receive())
        router.send(incoming.route, b"switch")

        assert incoming.frames[1:] == (b"hello again",)
        polled_until(dealer, lambda messages, _: messages == [b"switch"])


# --- key files


def test_written_keys_are_for_their_owner_only_and_can_be_read_back(tmp_path: Path) -> None:
    pair = write_keys(tmp_path / "keys", "agent-1")

    secret = tmp_path / "keys" / "agent-1.key_secret"
    assert [path.stat().st_mode & 0o777 for path in (secret.parent, secret)] == [0o700, 0o600]
    for mode in (0o600, 0o400, 0o700):
        secret.chmod(mode)
        assert load_keys(secret) == pair
    assert load_public(tmp_path / "keys" / "agent-1.key") == pair.public
    assert load_public(secret) == pair.public


def test_keys_replace_links_and_are_private_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    create = zmq.auth.create_certificates

    def noting(folder: str, name: str) -> tuple[str, str]:
        made.append(Path(folder))
        assert made[-1].stat().st_mode & 0o777 == 0o700
        return create(folder, name)

    monkeypatch.setattr(zmq.auth, "create_certificates", noting)
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o755)
    (keys / "ada.key_secret").symlink_to(tmp_path / "elsewhere")

    write_keys(keys, "ada")

    assert not (tmp_path / "elsewhere").exists()
    assert not (keys / "ada.key_secret").is_symlink()
    assert sorted(path.name for path in keys.iterdir()) == ["ada.key", "ada.key_secret"]
    assert len(made) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610, 0o644, 0o666])
def test_a_key_file_that_other_users_can_access_is_refused(tmp_path: Path, mode: int) -> None:
    write_keys(tmp_path, "agent-1")
    for file, read in (("agent-1.key_secret", load_keys), ("authorised.toml", load_authorised)):
        path = tmp_path / file
        path.touch()
        path.chmod(mode)
        with pytest.raises(SettingsError) as refused:
            read(path)

        what = f"{path} is accessible to other users (mode {mode:o})"
        assert (refused.value.message, refused.value.hint) == (what, f"chmod 600 {path}")


@pytest.mark.parametrize(
    ("read", "content", "why"),
    [
        (load_keys, "public", "no secret key in it; give the .key_secret file"),
        *((read, None, "No such file or directory") for read in (load_keys, load_authorised)),
        (load_public, None, "point at a CURVE certificate"),
        *((read, "not a certificate\n", "point at a CURVE certificate") for read in (load_keys, load_public)),
    ],
)  # fmt: skip
def test_a_file_without_the_key_is_named(
    tmp_path: Path, read: Callable[[Path], object], content: str | None, why: str
) -> None:
    write_keys(tmp_path, "public")
    file = tmp_path / "public.key" if content == "public" else tmp_path / "agent-1"
    if content not in {None, "public"}:
        file.write_text(content or "", encoding="ascii")
        file.chmod(0o600)

    with pytest.raises(SettingsError, match=rf"{re.escape(str(file))}.*{re.escape(why)}"):
        read(file)


def test_the_authorised_list_maps_keys_to_identities(
    tmp_path: Path, keys: dict[str, KeyPair]
) -> None:
    known = {keys["node"].public: NODE, keys["ada"].public: ADA}
    file = tmp_path / "authorised.toml"
    file.touch(mode=0o600)
    assert load_authorised(file) == {}

    for key, who in known.items():
        row = f"public = '{key.decode()}'\nname = '{who.name}'\nrole = '{who.role}'"
        file.write_text(f"{file.read_text()}\n[[key]]\n{row}\n", encoding="ascii")

    assert load_authorised(file) == known


ECHO = """
import sys, zmq
router = zmq.Context().socket(zmq.ROUTER)
router.bind(sys.argv[1])
while True:
    router.send_multipart(router.recv_multipart())
"""


@contextlib.contextmanager
def echoing(address: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", ECHO, address]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
async def test_a_frozen_controller_is_cut_off_before_libzmqs_usual_heartbeats() -> None:
    first, second = free_address(), free_address()
    with echoing(first) as frozen, echoing(second), closing(HeldLink()) as link:
        dealer = link.connect("DEALER", f"{first},{second}", prompt=True)
        answered = set[bytes]()

        async def listen() -> None:
            async for incoming in dealer:
                answered.add(incoming.frames[-1])

        async def answers(count: int) -> None:
            """Send until that many messages in a row were answered."""
            row = list[bytes]()
            for number in itertools.count():
                row.append(b"%d.%d" % (count, number))
                dealer.send(row[-1])
                await asyncio.sleep(0.1)
                row = row if answered.issuperset(row[:-3]) else []
                if len(row) > count:
                    return

        listening = asyncio.create_task(listen())
        await asyncio.wait_for(answers(10), BOUND_S)
        frozen.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(20.0):  # otherwise 30 s
            await answers(20)
        listening.cancel()
