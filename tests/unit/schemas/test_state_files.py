"""A state's file is there whole or not at all, and a damaged one is no state."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.host.state_files import (
    DamagedStateError,
    Frames,
    StateFile,
    digest_of,
    find_state,
    header_of,
    map_state,
    read_frames,
    states_in,
    write_state,
)
from tests.support.sizes import examples

FRAMES = [b"header", b"", bytes(range(256)) * 40]
FILE = StateFile(trial=3, version=12, attempt=7)


def digest(frames: Frames) -> str:
    return hashlib.sha256(b"".join(frames)).hexdigest()


DIGEST = digest(FRAMES)


def test_a_state_comes_back_from_its_file_by_trial_version_and_digest(tmp_path: Path) -> None:
    folder = tmp_path / "states"

    size = write_state(folder, FILE, FRAMES, DIGEST)

    path = find_state(folder, 3, 12, DIGEST)
    assert path == folder / "3-12-7.state"
    assert [bytes(frame) for frame in read_frames(map_state(path), DIGEST)] == FRAMES
    assert size == sum(map(len, FRAMES))
    assert list(states_in(folder)) == [(FILE, path)]
    assert find_state(folder, 3, 12, digest([b"another"])) is None
    assert find_state(folder, 3, 11, DIGEST) is None


@pytest.mark.parametrize(
    "name", ["epoch-000001.v1.pt", "3-12.state", "3-12-x.state", "-3-12-7.state", "../3-12-7.state"]
)
def test_a_name_that_is_no_states_is_none(name: str) -> None:
    assert StateFile.of(name) is None


@pytest.mark.parametrize("left", [None, 0, 10, 43, 50, 500])
def test_an_unfinished_or_truncated_file_is_no_state(tmp_path: Path, left: int | None) -> None:
    write_state(tmp_path, FILE, FRAMES, DIGEST)
    path = tmp_path / FILE.name
    if left is None:
        path = path.rename(tmp_path / "3-12-7.state.new")
    else:
        os.truncate(path, left)

    assert list(states_in(tmp_path)) == [(FILE, path)]
    assert digest_of(path) is None
    assert find_state(tmp_path, 3, 12, DIGEST) is None
    assert list(states_in(tmp_path / "none")) == []
    assert find_state(tmp_path / "none", 3, 12, DIGEST) is None


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_a_state_with_a_changed_bit_is_refused(data: st.DataObject) -> None:
    content = bytearray(header_of(FRAMES, DIGEST) + b"".join(FRAMES))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))

    frames: list[bytes] = []
    try:
        frames = [bytes(frame) for frame in read_frames(content, DIGEST)]
    except DamagedStateError:
        frames = FRAMES if 8 <= at < 40 else []
    # a digest of the header that nobody asks is not looked at
    assert frames == (FRAMES if 8 <= at < 40 else [])


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_state_are_refused(content: bytes) -> None:
    with pytest.raises(DamagedStateError):
        read_frames(content)


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file of this process may be longer than 4 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("full_disk")
def test_a_disk_that_takes_no_more_keeps_nothing_of_it(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large"):
        write_state(tmp_path, FILE, FRAMES, DIGEST)

    assert list(tmp_path.iterdir()) == []
