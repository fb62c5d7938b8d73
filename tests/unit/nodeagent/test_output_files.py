"""Output whose file is deleted or cut under the agent."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import pytest

from nodeagent.folders import WorkerFolder
from nodeagent.logs import GAP_S, SLACK, OutputFile
from nodeagent.process_identity import start_ticks
from schemas.codec import encode
from schemas.wire.feed import LOG, SAMPLES
from schemas.wire.worker import ProcessMark


@pytest.fixture
def folder(tmp_path: Path) -> WorkerFolder:
    """Of a worker that runs no more."""
    made = WorkerFolder(tmp_path / "a-1.v1.r0")
    made.path.mkdir()
    marked(made, 2**22 + 1)
    return made


Files = Callable[..., OutputFile]


@pytest.fixture
def of() -> Iterator[Files]:
    """Opens the files of a test, and closes them behind it."""
    with ExitStack() as stack:

        def opened(folder: WorkerFolder, name: str = LOG) -> OutputFile:
            file = OutputFile(folder, name)
            stack.callback(file.close)
            return file

        yield opened


def marked(folder: WorkerFolder, pid: int) -> None:
    mark = ProcessMark(pid=pid, started_ticks=start_ticks(pid) or 7)
    (folder.path / "process").write_bytes(encode(mark))


def write(folder: WorkerFolder, text: str, name: str = LOG) -> None:
    with folder.stream(name).open("a") as file:
        file.write(text)


def read(file: OutputFile, sent: int) -> str:
    """What is shipped next, all at once."""
    return file.read(sent, file.size(sent) - sent).decode()


def gap(kind: str, sent: int, what: str) -> str:
    return f"[ones: {kind} after byte {sent} may be lost: the file was {what}]\n"


def test_a_worker_that_starts_during_the_check_has_lost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: Files
) -> None:
    folder = WorkerFolder(tmp_path / "a-1.v1.r0")
    folder.path.mkdir()
    file = of(folder)
    look = file._open

    def too_early() -> BinaryIO | None:
        found = look()
        write(folder, "one\n")
        marked(folder, os.getpid())
        return found

    with monkeypatch.context() as patched:
        patched.setattr(file, "_open", too_early)
        assert file.size(0) == 0

    assert read(file, 0) == "one\n"


def test_a_deleted_file_is_read_to_its_end(folder: WorkerFolder, of: Files) -> None:
    write(folder, "one\n")
    file = of(folder)
    assert read(file, 0) == "one\n"
    with folder.stream(LOG).open("a") as worker:
        folder.stream(LOG).unlink()
        worker.write("two\n")

    assert read(file, 4) == "two\n"


@contextmanager
def writing(folder: WorkerFolder) -> Iterator[None]:
    """A worker whose stdout is its log."""
    with folder.stream(LOG).open("a") as output:
        code = "import signal; signal.pause()"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=output)
    marked(folder, child.pid)
    try:
        yield
    finally:
        child.kill()
        child.communicate()


@pytest.mark.slow
def test_the_next_agent_reads_a_deleted_file_through_its_worker(
    folder: WorkerFolder, of: Files
) -> None:
    write(folder, "one\ntwo\n")
    with writing(folder):
        folder.stream(LOG).unlink()

        assert read(of(folder), 4) == "two\n"


def calls_of(action: Callable[[], object]) -> int:
    """Count the calls that an action makes, of Python and of C functions."""
    counted = Counter[str]()
    gc.disable()  # finalizers would be counted, too
    sys.setprofile(lambda _frame, event, _arg: counted.update([event]))
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counted["call"] + counted["c_call"]


@pytest.mark.parametrize("name", [LOG, SAMPLES])
def test_looking_for_a_missing_file_costs_the_same_for_any_number_of_open_descriptors(
    folder: WorkerFolder, of: Files, name: str
) -> None:
    marked(folder, os.getpid())
    file = of(folder, name)
    assert file.bound(0, 1000) == 0
    few = calls_of(lambda: file.bound(0, 1000))
    with ExitStack() as opened:
        for _ in range(300):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))

        assert calls_of(lambda: file.bound(0, 1000)) < few + 100


@pytest.mark.parametrize(("sent", "exists"), [(0, True), (4, True), (4, False)])
def test_a_missing_log_is_a_gap_that_each_agent_finds_once(
    folder: WorkerFolder, of: Files, sent: int, *, exists: bool
) -> None:
    note = gap("output", sent, "deleted")
    if not exists:
        (folder.path / "process").unlink()
        folder.path.rmdir()

    assert [read(of(folder), sent) for _ in range(2)] == [note, note]
    assert read(of(folder), sent + len(note)) == ""


def test_a_worker_without_output_has_lost_nothing(folder: WorkerFolder, of: Files) -> None:
    assert of(folder, SAMPLES).size(0) == 0
    (folder.path / "process").unlink()

    assert of(folder).size(0) == 0
    assert not folder.stream(LOG).exists()


def test_a_truncated_log_continues_after_a_gap(folder: WorkerFolder, of: Files) -> None:
    write(folder, "one\ntwo\n")
    file = of(folder)
    assert read(file, 0) == "one\ntwo\n"
    os.truncate(folder.stream(LOG), 0)
    write(folder, "3\n")

    note = gap("output", 8, "cut")
    assert read(file, 8) == note + "3\n"
    write(folder, "four\n")
    assert read(file, 8 + len(note) + 2) == "four\n"


def test_a_log_that_is_deleted_and_truncated_continues_after_a_gap(
    folder: WorkerFolder, of: Files
) -> None:
    file = of(folder)
    with folder.stream(LOG).open("a") as worker:
        worker.write("one\ntwo\n")
        worker.flush()
        assert read(file, 0) == "one\ntwo\n"
        folder.stream(LOG).unlink()
        worker.truncate(0)

        assert read(file, 8) == gap("output", 8, "cut")


def test_a_log_that_is_truncated_all_the_time_has_one_gap_per_interval(
    folder: WorkerFolder, of: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, "one\n")
    file, mark, marks = of(folder), OutputFile._mark_gap, list[float]()
    assert read(file, 0) == "one\n"
    os.truncate(folder.stream(LOG), 0)

    def mark_and_cut(self: OutputFile, sent: int, what: str) -> None:
        mark(self, sent, what)
        marks.append(now)
        os.truncate(folder.stream(LOG), 0)

    monkeypatch.setattr(OutputFile, "_mark_gap", mark_and_cut)
    for now in (0.0, 0.1, GAP_S - 0.1, GAP_S, GAP_S + 0.1):
        with suppress(BlockingIOError):
            assert file.size(4, now=now) == 4

    assert marks == [0.0, GAP_S]


def beyond(most: int) -> str:
    return f"\n[ones: output beyond {most} bytes of a worker is not kept]\n"


def test_endless_output_fills_no_disk(folder: WorkerFolder, of: Files) -> None:
    with folder.stream(LOG).open("ab", buffering=0) as worker:
        file, sizes = of(folder), set[int]()
        for _ in range(20):
            worker.write(b"x" * (4 << 20))
            sizes.add(file.size(0, 1000))

    end = 1000 + len(beyond(1000))
    assert sizes == {end}
    assert folder.stream(LOG).stat().st_size <= end + SLACK
    assert file.read(0, end).decode() == "x" * 1000 + beyond(1000)


def test_the_next_agent_finds_the_end_of_the_kept_output(folder: WorkerFolder, of: Files) -> None:
    write(folder, "x" * 5000)
    end = of(folder).size(0, 1000)

    assert of(folder).size(0, 1000) == of(folder).size(end, 1000) == end


def test_stored_output_stays_in_place_if_the_limit_is_lowered(
    folder: WorkerFolder, of: Files
) -> None:
    write(folder, "x" * 5000)
    file = of(folder)
    assert file.size(4000, 5000) == 5000

    end = file.size(4000, 1000)

    assert file.read(0, end).decode() == "x" * 4000 + beyond(1000)


def test_a_deleted_file_is_limited_too(folder: WorkerFolder, of: Files) -> None:
    file = of(folder)
    with folder.stream(LOG).open("ab", buffering=0) as worker:
        worker.write(b"x")
        file.size(0, 1000)
        folder.stream(LOG).unlink()
        worker.write(bytes(SLACK + 2000))
        file.size(1, 1000)

        assert os.fstat(worker.fileno()).st_size == 1000 + len(beyond(1000))


def test_sample_records_beyond_their_limit_are_cut_without_a_note(
    folder: WorkerFolder, of: Files
) -> None:
    write(folder, "x" * (SLACK + 5000), SAMPLES)

    assert of(folder, SAMPLES).size(0, 1000) == 1000
    assert folder.stream(SAMPLES).stat().st_size == 1000


def test_lost_sample_records_are_noted_in_the_log_once(folder: WorkerFolder, of: Files) -> None:
    write(folder, "one\n")
    records, output = of(folder, SAMPLES), of(folder)

    assert [records.size(60), records.size(60)] == [60, 60]
    assert read(output, 0) == "one\n" + gap("sample records", 60, "deleted")
