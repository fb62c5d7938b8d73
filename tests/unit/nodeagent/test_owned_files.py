"""Files of a job are accessed with its rights, and only if they are regular files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from nodeagent import folders
from nodeagent.folders import FRAME, MAX_REPORT_BYTES, READ_BYTES, WorkerFolder
from nodeagent.job_folders import MARK, is_laid_out, read_manifest
from nodeagent.logs import OutputFile
from nodeagent.owned_files import (
    Owner,
    acting_as,
    bytes_below,
    bytes_of,
    make_folder,
    owner_of,
    read_small,
    remove_tree,
)
from nodeagent.process_identity import start_ticks
from schemas.codec import encode
from schemas.host.logging import Audit
from schemas.host.state_files import (
    DamagedStateError,
    StateFile,
    check_file,
    digest_of,
    map_state,
    read_piece,
    write_state,
)
from schemas.ids import WorkerId
from schemas.sweeps import MAX_EPOCH_METRICS
from schemas.wire.agent import bounded_report
from schemas.wire.feed import LOG
from schemas.wire.worker import ExitStatus, ProcessMark
from tests.support.builders import A, assignment, epoch_end, raised, run
from tests.support.file_trees import let_pass

STRANGER, OTHER = Owner(61_001, 61_001), Owner(61_002, 61_002)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


def link(path: Path) -> None:
    path.symlink_to("/etc/shadow")


def folder(path: Path) -> None:
    path.mkdir()


def endless(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


WRONG = [os.mkfifo, link, folder, pytest.param(endless, marks=pytest.mark.slow)]


def worker(tmp_path: Path) -> WorkerFolder:
    found = WorkerFolder(tmp_path / WorkerId(f"{A}.v1.r0"))
    found.write_assignment(assignment(run(A)))
    return found


# --- files that a job replaced


@pytest.mark.parametrize("put", WRONG)
def test_another_kind_of_file_in_place_of_a_jobs_file_is_not_read(
    tmp_path: Path, put: Callable[[Path], object]
) -> None:
    found, workdir = worker(tmp_path), tmp_path / "work"
    workdir.mkdir()
    for path in (*(found.own / name for name in ("exit", "process", "reports")), workdir / MARK):
        put(path)

    assert (found.exit(), found.mark()) == (None, None)
    reports, position = found.reports(0)
    assert (reports, position <= MAX_REPORT_BYTES) == ([], True)
    assert (is_laid_out(workdir, "0" * 64), read_manifest(workdir)) == (False, {})


@pytest.mark.parametrize("put", [os.mkfifo, link, folder])
def test_another_kind_of_file_in_place_of_a_log_or_state_is_refused(
    tmp_path: Path, put: Callable[[Path], object]
) -> None:
    found, state = worker(tmp_path), tmp_path / "1-1-1.state"
    put(found.own / "log")
    put(state)

    assert digest_of(state) is None
    for read in (lambda: OutputFile(found, LOG).size(0), lambda: map_state(state)):
        with pytest.raises(OSError, match=r"regular file|symbolic links|Is a directory"):
            read()


def test_an_oversized_report_is_skipped_without_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_AUDIT", Audit())  # other tests may have flooded the agent's
    found = worker(tmp_path)
    path, data = found.own / "reports", encode(epoch_end(A, 1))
    path.write_bytes(FRAME.pack(2**32 - 1))

    with capture_logs() as said:
        none, position = found.reports(0)
        assert found.reports(position) == ([], position)

    assert (none, position) == ([], FRAME.size + 2**32 - 1)
    assert [(line["what"], line["peer"]) for line in said] == [("report of a worker", found.worker)]
    with path.open("r+b") as file:
        file.seek(position)
        file.write(FRAME.pack(len(data)) + data)
    assert found.reports(position) == ([epoch_end(A, 1)], path.stat().st_size)


def test_metrics_that_a_script_writes_itself_are_bounded(tmp_path: Path) -> None:
    found = worker(tmp_path)
    metrics = {f"m{i:04d}\n": float(i) for i in range(MAX_EPOCH_METRICS + 5)}
    data = encode(epoch_end(A, 1, metrics=metrics))
    (found.own / "reports").write_bytes(FRAME.pack(len(data)) + data)

    (report,), _ = found.reports(0)

    kept = {f"m{i:04d} ": float(i) for i in range(MAX_EPOCH_METRICS)}
    assert report == epoch_end(A, 1, metrics=kept)


def test_a_long_report_is_read_completely(tmp_path: Path) -> None:
    found = worker(tmp_path)
    long = raised(A, index=1, error="x" * (2 * READ_BYTES), where="train.py:1")
    data = encode(long)
    (found.own / "reports").write_bytes(FRAME.pack(len(data)) + data)

    assert found.reports(0) == ([bounded_report(long)], FRAME.size + len(data))


def test_a_state_that_is_truncated_while_it_is_sent_ends_no_process(tmp_path: Path) -> None:
    frames = [b"x" * 5000, b"y" * 9]
    digest = hashlib.sha256(b"".join(frames)).hexdigest()
    write_state(tmp_path, StateFile(1, 1, 1), frames, digest)
    path = tmp_path / "1-1-1.state"
    size = path.stat().st_size
    check_file(path, digest)
    assert read_piece(path, size - 9, 100) == (size, b"y" * 9)

    os.truncate(path, 100)

    assert read_piece(path, 4096, 100) == (100, b"")
    with pytest.raises(DamagedStateError):
        check_file(path, digest)


def deep(path: Path, levels: int) -> None:
    """As deep as paths may be."""
    here = os.open(path, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("a", dir_fd=here)
        inner = os.open("a", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)


@pytest.mark.slow
def test_deeply_nested_folders_are_measured_and_deleted(tmp_path: Path) -> None:
    doomed = tmp_path / "doomed"
    doomed.mkdir()
    (doomed / "file").write_bytes(b"x" * 4096)
    deep(doomed, 3000)

    assert bytes_below(doomed) == (doomed / "file").stat().st_blocks * 512
    remove_tree(doomed)
    assert not doomed.exists()


@pytest.mark.slow
def test_files_of_one_user_are_measured_at_any_depth_and_up_to_a_limit(tmp_path: Path) -> None:
    for name in ("top", "skipped/file", "below/file", "below/other"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(1 << 20))
    (tmp_path / "below" / "link").symlink_to(tmp_path / "skipped")
    me, skipped = os.getuid(), [tmp_path / "skipped"]

    assert 3 << 20 <= bytes_of(me, [tmp_path], 1 << 40, skipped) < 4 << 20
    assert 1 << 20 <= bytes_of(me, [tmp_path], 1 << 19, skipped) < 3 << 20
    assert (bytes_of(STRANGER.uid, [tmp_path], 1 << 40), bytes_of(me, [], 1 << 40)) == (0, 0)


# --- rights


@needs_root
def test_acting_as_a_job_gives_its_rights_only(tmp_path: Path) -> None:
    let_pass(tmp_path)
    for name, owner in (("mine", STRANGER), ("others", OTHER)):
        make_folder(tmp_path / name, owner)
    (tmp_path / "others" / "secret").write_text("s")
    (tmp_path / "mine" / "link").symlink_to(tmp_path / "others" / "secret")

    with acting_as(owner_of(tmp_path / "mine")):
        (tmp_path / "mine" / "made").write_text("m")
        with pytest.raises(PermissionError):
            (tmp_path / "mine" / "link").read_text()
        with pytest.raises(PermissionError):
            Path("/etc/shadow").read_bytes()

    made = (tmp_path / "mine" / "made").stat()
    assert (made.st_uid, made.st_gid) == STRANGER
    assert (tmp_path / "mine" / "link").read_text() == "s"


@needs_root
def test_acting_as_a_job_within_another_returns_to_the_first(tmp_path: Path) -> None:
    make_folder(tmp_path / "mine", STRANGER)
    let_pass(tmp_path)
    tmp_path.chmod(0o777)

    with acting_as(STRANGER):
        with acting_as(OTHER):
            (tmp_path / "inner").touch()
        (tmp_path / "outer").touch()
    (tmp_path / "own").touch()

    owners = [(tmp_path / name).stat().st_uid for name in ("inner", "outer", "own")]
    assert owners == [OTHER.uid, STRANGER.uid, 0]


@needs_root
def test_a_worker_of_another_user_cannot_change_the_agents_records(tmp_path: Path) -> None:
    let_pass(tmp_path)
    given = assignment(run(A))
    found = WorkerFolder(tmp_path / WorkerId(f"{A}.v1.r0"))
    found.write_assignment(given, STRANGER)

    with acting_as(found.owner):
        (found.own / "assignment").write_bytes(b"another")
        with pytest.raises(PermissionError):
            (found.path / "assignment").read_bytes()
        with pytest.raises(PermissionError):
            found.own.rename(found.path / "elsewhere")
        status = ExitStatus(code=3, signal=None, at=0.0, max_rss_bytes=0, cpu_s=0.0)
        (found.own / "exit").write_bytes(encode(status))

    assert (found.assignment(), found.exit()) == (given, status)
    assert found.owner == STRANGER


@needs_root
def test_a_mark_that_names_a_process_of_another_user_is_ignored(tmp_path: Path) -> None:
    let_pass(tmp_path)
    found = WorkerFolder(tmp_path / WorkerId(f"{A}.v1.r0"))
    found.write_assignment(assignment(run(A)), STRANGER)
    mark = ProcessMark(pid=os.getpid(), started_ticks=start_ticks(os.getpid()) or 0)
    (found.own / "process").write_bytes(encode(mark))

    assert found.mark() is None


@pytest.mark.slow
@needs_root
def test_a_folder_of_an_older_release_is_given_to_its_job(tmp_path: Path) -> None:
    root = tmp_path / "job"
    (root / "inner").mkdir(parents=True)
    (root / "inner" / "file").touch()
    outside = tmp_path / "outside"
    outside.touch()
    (root / "link").symlink_to(outside)

    make_folder(root, STRANGER)

    inside = [path.lstat().st_uid for path in (root, *root.rglob("*"))]
    assert inside == [STRANGER.uid] * 4
    assert outside.stat().st_uid == 0


def test_a_regular_file_is_read_within_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 11)

    assert read_small(path, 11) == b"x" * 11
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_small(path, 10)
