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
from schemas.transport import (
    FileTarget,
    MemoryTarget,
    StateServer,
    StateUnavailableError,
    fetch_state,
)
from schemas.transport.state_transfer import PIECE, Parts
from schemas.wire.files import AskState, StatePiece, StateRefused

FRAMES = [b"header", b"", os.urandom(3 * PIECE + 17), b"x" * 1000, os.urandom(100_000)]
DIGEST = hashlib.sha256(b"".join(FRAMES)).hexdigest()
ASKED = AskState(job=JobId("sweep-1"), trial=3, version=12, digest=DIGEST, offset=0)
SHORT_S = 1.0  # who hangs is waited for as long
LIMIT_S = 60.0


class Sources:
    """Servers that end with the test."""

    def __init__(self) -> None:
        self._closing: list[Callable[[], None]] = []

    def of(self, find: Callable[[AskState], Parts | None]) -> str:
        server = StateServer("127.0.0.1", find)
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
    *sources: str, asked: AskState = ASKED, piece_s: float = LIMIT_S
) -> tuple[str, list[bytes]]:
    target = MemoryTarget()
    frames: list[bytes] = []

    def check() -> None:
        frames[:] = [bytes(frame) for frame in target.frames(asked.digest)]

    return fetch_state(sources, asked, target, check, piece_s=piece_s), frames


def test_a_state_comes_whole_from_whoever_has_it(sources: Sources) -> None:
    good = sources.good()

    assert fetched(good) == (good, FRAMES)


def test_a_state_comes_whole_into_a_file(sources: Sources, tmp_path: Path) -> None:
    path = tmp_path / "state"
    target = FileTarget(path)

    fetch_state([sources.good()], ASKED, target, lambda: None)
    target.close()

    assert [bytes(frame) for frame in read_frames(path.read_bytes(), DIGEST)] == FRAMES


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        pytest.param("hanging", "no reply within 1 s", marks=pytest.mark.slow),
        ("gone", "no process listens there: Connection refused"),
        ("other", "not available here"),
        ("damaged", "the digest of the state is"),
        ("short", "truncated piece"),
        ("endless", "invalid size of"),
    ],
)
def test_a_source_that_gives_nothing_is_passed_over(sources: Sources, kind: str, why: str) -> None:
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


def test_a_source_that_dies_while_it_gives_is_given_up_at_once(sources: Sources) -> None:
    known = [header_of(FRAMES, DIGEST), *FRAMES]
    given: list[AskState] = []

    def find(asked: AskState) -> Parts:
        given.append(asked)
        if len(given) == 2:
            threading.Thread(target=dying.close).start()
        return known

    dying = StateServer("127.0.0.1", find)
    good = sources.good()
    target = MemoryTarget()

    source = fetch_state(
        [dying.address, good], ASKED, target, lambda: None, piece_s=60.0
    )  # a limit that the test would not live to see

    assert source in {dying.address, good}
    assert [bytes(frame) for frame in target.frames(DIGEST)] == FRAMES


def test_what_nobody_waits_for_any_more_is_given_up(sources: Sources) -> None:
    with pytest.raises(StateUnavailableError, match="not needed any more"):
        fetch_state(
            [sources.hanging(), sources.hanging()], ASKED, MemoryTarget(), lambda: None,
            piece_s=60.0, stopped=lambda: True,
        )  # fmt: skip


def test_a_disk_that_takes_nothing_is_an_error_of_the_disk(sources: Sources) -> None:
    class Full(MemoryTarget):
        def write(self, _: int, __: object) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fetch_state([sources.good(), sources.good()], ASKED, Full(), lambda: None)


def test_a_server_answers_what_is_right_among_what_is_not(sources: Sources) -> None:
    address = sources.good()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://{address}")
        for hostile in (
            [b""],
            [b"\x00" * 100],
            [encode(StateRefused(digest="", reason=""))],
            [encode(msgspec.structs.replace(ASKED, digest="../../etc"))],
            [encode(msgspec.structs.replace(ASKED, offset=1 << 62))],
            [b"", encode(ASKED)],
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


def test_a_peer_that_sends_too_much_at_once_is_dropped_and_others_are_served(
    sources: Sources,
) -> None:
    address = sources.good()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://{address}")
        dealer.send(b"x" * 100_000)

        assert fetched(address) == (address, FRAMES)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_a_state_comes_over_ipv6_with_brackets_or_without() -> None:
    known = [header_of(FRAMES, DIGEST), *FRAMES]
    try:
        server = StateServer("::1", lambda _: known)
    except OSError:
        pytest.skip("no IPv6 loopback here")
    try:
        assert server.address == f"[::1]:{server.port}"
        for address in (server.address, f"::1:{server.port}"):
            assert fetched(address) == (address, FRAMES)
    finally:
        server.close()


def test_a_port_that_is_taken_is_an_error(sources: Sources) -> None:
    taken = int(sources.good().rpartition(":")[2])

    with pytest.raises(OSError, match="in use"):
        StateServer("127.0.0.1", lambda _: None, taken)


def test_what_find_raises_is_a_refusal(sources: Sources) -> None:
    def find(_: AskState) -> Parts:
        raise FileNotFoundError

    with pytest.raises(OnesError, match="not available here"):
        fetched(sources.of(find))


def test_no_memory_is_taken_for_what_is_only_announced() -> None:
    target = MemoryTarget()

    target.begin(1 << 40)
    target.write(PIECE, b"xyz")

    assert len(target._memory) == PIECE + 3
