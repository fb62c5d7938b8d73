"""States on their way between nodes: whole, from somebody, or an error that says who gave nothing."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from schemas.codec import FROM_STATES, encode
from schemas.errors import OnesError
from schemas.host.state_files import header_of, read_frames
from schemas.ids import JobId
from schemas.transport.state_transfer import (
    PIECE,
    FileTarget,
    MemoryTarget,
    Parts,
    StateServer,
    StateUnavailableError,
    fetch_state,
    mac_of,
)
from schemas.wire.files import AskState, StatePiece, StateRefused

FRAMES = [b"header", b"", os.urandom(3 * PIECE + 17), b"x" * 1000, os.urandom(100_000)]
DIGEST = hashlib.sha256(b"".join(FRAMES)).hexdigest()
ASKED = AskState(job=JobId("sweep-1"), trial=3, version=12, digest=DIGEST, offset=0)
SHORT_S = 1.0  # who hangs is waited for as long
LIMIT_S = 60.0
KEY = "a key of the sweep"


def key_of(job: JobId) -> str:
    """Keys of the jobs whose states a server has."""
    return KEY if job == ASKED.job else ""


def signed(asked: AskState, address: str, key: str = KEY) -> AskState:
    return msgspec.structs.replace(asked, mac=mac_of(asked, key, address))


class Sources:
    """Servers that end with the test."""

    def __init__(self) -> None:
        self._closing: list[Callable[[], None]] = []

    def of(self, find: Callable[[AskState], Parts | None]) -> str:
        server = StateServer("127.0.0.1", key_of, find)
        self._closing.append(server.close)
        return server.address

    def good(self) -> str:
        """Has the state."""
        known = [header_of(FRAMES, DIGEST), *FRAMES]
        return self.of(lambda asked: known if asked.digest == DIGEST else None)

    def lying(self, **changes: int) -> str:
        """Answers everything with a piece that is not what was asked for."""
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        ended = threading.Event()

        def lie() -> None:
            while not ended.is_set():
                if router.poll(20):
                    route, _ = router.recv_multipart()
                    piece = StatePiece(digest=DIGEST, offset=0, total=100)
                    answer = encode(msgspec.structs.replace(piece, **changes))
                    router.send_multipart([route, answer, b"short"])
            router.close(linger=0)
            context.term()

        thread = threading.Thread(target=lie)
        thread.start()
        self._closing += [ended.set, thread.join]
        return f"127.0.0.1:{port}"

    def hanging(self) -> str:
        """Takes the connection and says nothing."""
        listener = socket.create_server(("127.0.0.1", 0))
        self._closing.append(listener.close)
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def gone(self) -> str:
        """Nobody listens there."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            return f"127.0.0.1:{listener.getsockname()[1]}"

    def close(self) -> None:
        for close in self._closing:
            close()


@pytest.fixture
def sources() -> Iterator[Sources]:
    found = Sources()
    yield found
    found.close()


def fetched(
    *sources: str, asked: AskState = ASKED, key: str = KEY, piece_s: float = LIMIT_S
) -> tuple[str, list[bytes]]:
    target = MemoryTarget()
    frames: list[bytes] = []

    def check() -> None:
        frames[:] = [bytes(frame) for frame in target.frames(asked.digest)]

    return fetch_state(sources, asked, key, target, check, piece_s=piece_s), frames


def test_a_state_is_fetched_into_memory_and_into_a_file(sources: Sources, tmp_path: Path) -> None:
    good, path = sources.good(), tmp_path / "state"
    target = FileTarget(path)

    fetch_state([good], ASKED, KEY, target, lambda: None)
    target.close()

    assert fetched(good) == (good, FRAMES)
    assert [bytes(frame) for frame in read_frames(path.read_bytes(), DIGEST)] == FRAMES


@pytest.mark.parametrize(("kind", "why"), [
    pytest.param("hanging", "no reply within 1 s", marks=pytest.mark.slow),
    ("gone", "no process listens there: Connection refused"),
    ("other", "not available here"),
    ("damaged", "the digest of the state is"),
    ("short", "truncated piece"),
    ("endless", "invalid size of"),
])  # fmt: skip
def test_a_source_without_the_state_is_skipped(sources: Sources, kind: str, why: str) -> None:
    changed = [header_of(FRAMES, DIGEST), *FRAMES[:-1], os.urandom(100_000)]
    bad = {
        "hanging": sources.hanging,
        "gone": sources.gone,
        "other": lambda: sources.of(lambda _: None),
        "damaged": lambda: sources.of(lambda _: changed),
        "short": sources.lying,
        "endless": lambda: sources.lying(total=1 << 60),
    }[kind]()
    good = sources.good()

    with pytest.raises(StateUnavailableError, match=why) as raised:
        fetched(bad, piece_s=SHORT_S if kind == "hanging" else LIMIT_S)
    assert bad in raised.value.message
    assert fetched(bad, good, piece_s=SHORT_S if kind == "hanging" else LIMIT_S) == (good, FRAMES)


def test_a_source_that_dies_is_abandoned_at_once(sources: Sources) -> None:
    known = [header_of(FRAMES, DIGEST), *FRAMES]
    given: list[AskState] = []

    def find(asked: AskState) -> Parts:
        given.append(asked)
        if len(given) == 2:
            threading.Thread(target=dying.close).start()
        return known

    dying = StateServer("127.0.0.1", key_of, find)
    good = sources.good()
    target = MemoryTarget()

    source = fetch_state(
        [dying.address, good], ASKED, KEY, target, lambda: None, piece_s=60.0
    )  # a limit that the test would not live to see

    assert source in {dying.address, good}
    assert [bytes(frame) for frame in target.frames(DIGEST)] == FRAMES


def test_a_fetch_ends_when_it_is_stopped_or_the_disk_is_full(sources: Sources) -> None:
    class Full(MemoryTarget):
        def write(self, _: int, __: object) -> None:
            raise OSError(28, "No space left on device")

    silent, good = [sources.hanging(), sources.hanging()], [sources.good(), sources.good()]
    with pytest.raises(StateUnavailableError, match="not needed any more"):
        fetch_state(
            silent, ASKED, KEY, MemoryTarget(), lambda: None, piece_s=60.0, stopped=lambda: True
        )
    with pytest.raises(OSError, match="No space left"):
        fetch_state(good, ASKED, KEY, Full(), lambda: None)


def test_a_server_answers_valid_requests_among_hostile_ones(sources: Sources) -> None:
    address = sources.good()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://{address}")
        for hostile in (
            [b""],
            [b"\x00" * 100],
            [encode(StateRefused(digest="", reason=""))],
            [encode(signed(msgspec.structs.replace(ASKED, digest="../../etc"), address))],
            [encode(signed(msgspec.structs.replace(ASKED, offset=1 << 62), address))],
            [b"", encode(signed(ASKED, address))],
        ):
            dealer.send_multipart(hostile)
        answers = [dealer.recv_multipart() for _ in range(3)]

    said = [FROM_STATES.decode(answer[0]) for answer in answers]
    total = len(header_of(FRAMES, DIGEST)) + sum(map(len, FRAMES))
    assert said == [
        StateRefused(digest="../../etc", reason="not available here"),
        StateRefused(digest=DIGEST, reason="not available here"),
        StatePiece(digest=DIGEST, offset=0, total=total),
    ]
    assert sum(map(len, answers[2][1:])) == PIECE


def test_only_the_sweeps_key_opens_its_states(sources: Sources) -> None:
    good, other = sources.good(), sources.good()
    replace = msgspec.structs.replace
    forged = [
        ASKED,
        replace(ASKED, mac="ü" * 64),
        signed(ASKED, good, key="another key"),
        signed(ASKED, other),
        replace(signed(ASKED, good), offset=PIECE),
        signed(replace(ASKED, job=JobId("other-1")), good, key=""),
    ]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://{good}")
        for one in forged:
            dealer.send(encode(one))
        answers = [FROM_STATES.decode(dealer.recv()) for _ in forged]

    assert answers == [StateRefused(digest=DIGEST, reason="not available here")] * len(forged)
    with pytest.raises(StateUnavailableError, match="not available here"):
        fetched(good, key="another key")
    assert fetched(good) == (good, FRAMES)


def test_a_peer_with_the_first_protocol_of_zeromq_ends_no_server(sources: Sources) -> None:
    address = sources.good()
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as wire:
        wire.sendall(b"\x01\x00" + b"\x02\x00x")  # ZMTP 1.0: an empty name, and a message
        wire.shutdown(socket.SHUT_WR)
        while wire.recv(1000):
            pass

    assert fetched(address) == (address, FRAMES)


def test_a_peer_with_an_oversized_request_is_dropped(sources: Sources) -> None:
    address = sources.good()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://{address}")
        dealer.send(b"x" * 100_000)

        assert fetched(address) == (address, FRAMES)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_a_state_is_fetched_over_ipv6_with_brackets_or_without() -> None:
    known = [header_of(FRAMES, DIGEST), *FRAMES]
    try:
        server = StateServer("::1", key_of, lambda _: known)
    except OSError:
        pytest.skip("no IPv6 loopback here")
    try:
        assert server.address == f"[::1]:{server.port}"
        for address in (server.address, f"::1:{server.port}"):
            assert fetched(address) == (address, FRAMES)
    finally:
        server.close()


def test_a_taken_port_is_an_error_and_an_error_of_find_a_refusal(sources: Sources) -> None:
    taken = int(sources.good().rpartition(":")[2])
    with pytest.raises(OSError, match="in use"):
        StateServer("127.0.0.1", key_of, lambda _: None, taken)

    def find(_: AskState) -> Parts:
        raise FileNotFoundError

    with pytest.raises(OnesError, match="not available here"):
        fetched(sources.of(find))


def test_no_memory_is_allocated_for_an_announced_size() -> None:
    target = MemoryTarget()

    target.begin(1 << 40)
    target.write(PIECE, b"xyz")

    assert len(target._memory) == PIECE + 3
