"""Files of traces in our own layout."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.sim.cluster import TraceError
from controlplane.sim.csv_parsing import MAX_LINE_BYTES
from controlplane.sim.results import Trace, TraceJob
from controlplane.sim.traces.trace_csv import read_trace, write_trace
from schemas.ids import Seconds
from schemas.jobs import Utility

HEADER = "name,time,application,num_replicas,batch_size\n"
CRASHING = HEADER.strip() + ",crashes_at\n"
SAME_FOLDER = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def job(name: str, at: float = 0.0, **changes: object) -> TraceJob:
    fields: dict[str, object] = {"workload": "cifar10", "slots": 2, "batch": 64} | changes
    return TraceJob(name=name, at=Seconds(at), **fields)  # type: ignore[arg-type] # few are named


def file_with(folder: Path, content: str | bytes) -> Path:
    path = folder / "mine.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def complaint(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    return str(caught.value).replace(str(path), "FILE")


@pytest.mark.parametrize(
    ("text", "jobs"),
    [
        (HEADER + "cifar10-0,53,cifar10,6,2048\nbert-1,60.5,bert,1,12\n",
         [job("cifar10-0", 53.0, slots=6, batch=2048), job("bert-1", 60.5, workload="bert", slots=1, batch=12)]),
        (HEADER.strip() + ",user,cancelled_after_s,crashes_at,samples\na,0,x,1,0,ann,60,0.5,1000\nb,0,x,1,0,,,,\n",
         [job("a", workload="x", slots=1, batch=0, user="ann", cancelled_after_s=60.0, crashes_at=0.5, samples=1000),
          job("b", workload="x", slots=1, batch=0)]),
        (HEADER.strip() + ",user,project\na,0,cifar10,2,64,ann,vision\nb,0,cifar10,2,64,bob,\n",
         [job("a", user="ann", project="vision"), job("b", user="bob")]),
        (HEADER + "c,9,cifar10,2,64\nb,5,cifar10,2,64\na,5,cifar10,2,64\n",
         [job("b", 5.0), job("a", 5.0), job("c", 9.0)]),
        (b"\xef\xbb\xbfbatch_size, time ,Name,application,num_replicas\r\n\r\n64,1,a,cifar10,2.0\r\n", [job("a", 1.0)]),
        (HEADER.replace(",", ";") + '"a;b";1;cifar10;2;64\n', [job("a;b", 1.0)]),
        (HEADER.replace(",", "\t") + "a, b\t1\tcifar10\t2\t64\n", [job("a, b", 1.0)]),
    ],
    ids=[
        "a workload of the Pollux artifact", "further columns, whose empty cells have defaults",
        "users and projects",
        "sorted by time, and ties as in the file", "columns in any order, and any line ends",
        "semicolons", "tabs",
    ],
)  # fmt: skip
def test_jobs_of_a_file_are_read(tmp_path: Path, text: str | bytes, jobs: list[TraceJob]) -> None:
    assert read_trace(file_with(tmp_path, text)) == Trace(name="mine", jobs=tuple(jobs))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "FILE:1: column name is missing; the first line must name name, time, application,"),
        (HEADER, "FILE: no jobs; write one job on each line below the header"),
        ("name,time\n", "FILE:1: column application is missing; the first line must name"),
        (HEADER.replace("\n", ",gpus\n"), "FILE:1: column 'gpus' is unknown; known columns are"),
        (HEADER.replace("\n", ",name\n"), "FILE:1: column name is duplicated; keep one"),
        (HEADER + "a,x,m,1,1\n", "FILE:2: column time: 'x' is not a number; write digits"),
        (HEADER + "a,nan,m,1,1\n", "FILE:2: column time: 'nan' is not a number"),
        (HEADER + "a,inf,m,1,1\n", "FILE:2: column time: 'inf' is not a number"),
        (HEADER + "a,1e999,m,1,1\n", "FILE:2: column time: '1e999' is out of range; write a"),
        (HEADER + "a,1_0,m,1,1\n", "FILE:2: column time: '1_0' is not a number"),
        (HEADER + "a,\u0661,m,1,1\n", "FILE:2: column time: '\u0661' is not a number"),
        (HEADER + "a,-1,m,1,1\n", "FILE:2: column time: '-1' is out of range; write a number from 0"),
        (HEADER + "a,,m,1,1\n", "FILE:2: column time: is empty; write a number there"),
        (HEADER + "a,1,m,0,1\n", "FILE:2: column num_replicas: '0' is out of range; write a number"),
        (HEADER + "a,1,m,-4,1\n", "FILE:2: column num_replicas: '-4' is out of range"),
        (HEADER + "a,1,m,1.5,1\n", "FILE:2: column num_replicas: '1.5' is not a whole number"),
        (HEADER + "a,1,m,1,-1\n", "FILE:2: column batch_size: '-1' is out of range"),
        (HEADER + "\n,1,m,1,1\n", "FILE:3: column name: is empty; write a value there"),
        (HEADER + "a,1,,1,1\n", "FILE:2: column application: is empty"),
        (HEADER + "a\x07,1,m,1,1\n", "FILE:2: column name: has a character that cannot be printed"),
        (HEADER + "a,1,m,1\n", "FILE:2: column batch_size: 4 columns instead of 5; the columns are"),
        (HEADER + "a,1,m,1,1,1\n", "FILE:2: column batch_size: 6 columns instead of 5"),
        (HEADER + "a,1,m,1,1\na,2,m,1,1\n", "FILE:3: column name: two jobs are called 'a'; give every"),
        (HEADER + '"a,1,m,1,1\n', "FILE:2: unexpected end of data; close every quote on its line"),
        (HEADER.encode() + b"a\0,1,m,1,1\n", "FILE:2: has a NUL byte; name a trace"),
        (HEADER.encode() + b"a\xff,1,m,1,1\n", "FILE:2: byte 2 is not UTF-8; save the file as UTF-8"),
        (HEADER.encode("utf-16"), "FILE:1: byte 1 is not UTF-8"),
        (CRASHING + "a,0,m,1,1,0\n", "FILE:2: column crashes_at: '0' is out of range"),
        (CRASHING + "a,0,m,1,1,1\n", "FILE:2: column crashes_at: '1' is out of range"),
    ],
)  # fmt: skip
def test_invalid_lines_are_refused(tmp_path: Path, content: str | bytes, said: str) -> None:
    assert complaint(file_with(tmp_path, content)).startswith(said)


def test_a_line_without_an_end_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    path = file_with(tmp_path, HEADER.encode() + b"a" * 10_000_000)

    assert complaint(path).startswith(f"FILE:2: longer than {MAX_LINE_BYTES} bytes; write one job")
    assert complaint(Path("/dev/zero")).startswith("FILE:1: longer than")


def test_too_many_lines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.sim.traces.trace_csv.MAX_JOBS", 2)
    path = file_with(tmp_path, HEADER + "a,1,m,1,1\nb,1,m,1,1\nc,1,m,1,1\n")
    assert complaint(path) == "FILE: more than 2 jobs; split the file"

    monkeypatch.setattr("controlplane.sim.csv_parsing.MAX_LINES", 5)
    path = file_with(tmp_path, HEADER + "\n" * 20)
    assert complaint(path) == "FILE: more than 5 lines; split the file"
    assert len(read_trace(file_with(tmp_path, HEADER + "\n" * 3 + "a,1,m,1,1\n")).jobs) == 1


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert complaint(tmp_path) == "FILE: Is a directory; name a readable file"
    assert complaint(tmp_path / "no.csv").startswith("FILE: No such file")
    with pytest.raises(TraceError, match="null byte"):
        read_trace(Path("a\0b"))


@SAME_FOLDER
@given(content=st.binary(max_size=300), headed=st.booleans())
def test_any_bytes_raise_trace_errors_only(tmp_path: Path, content: bytes, headed: bool) -> None:  # noqa: FBT001
    path = file_with(tmp_path, HEADER.encode() * headed + content)
    with contextlib.suppress(TraceError):
        read_trace(path)


NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20)
NUMBERS = st.floats(0.0, 1e9)


@SAME_FOLDER
@given(
    names=st.lists(NAMES, min_size=1, max_size=5, unique=True),
    at=NUMBERS,
    more=st.fixed_dictionaries(
        {
            "cancelled_after_s": st.none() | NUMBERS,
            "samples": st.none() | st.integers(1, 10**12),
            "utility": st.none()
            | st.builds(Utility, value=NUMBERS.filter(lambda value: value <= 1e9))
            | st.builds(Utility, value=st.just(2.5), deadline_s=st.floats(1.0, 1e6), decay=NUMBERS),
        }
    ),
)
def test_written_traces_can_be_read(
    tmp_path: Path, names: list[str], at: float, more: dict[str, Any]
) -> None:
    jobs = tuple(job(name, at, workload=name, **more) for name in names)
    path = tmp_path / "again.csv"

    write_trace(Trace(name="again", jobs=jobs), path)

    assert read_trace(path) == Trace(name="again", jobs=jobs)


def test_unused_columns_are_not_written(tmp_path: Path) -> None:
    write_trace(Trace(name="t", jobs=(job("a, b", 1.0), job("c", 2.25))), tmp_path / "t.csv")

    assert (
        tmp_path / "t.csv"
    ).read_text() == HEADER + '"a, b",1,cifar10,2,64\nc,2.25,cifar10,2,64\n'


@pytest.mark.parametrize(
    "bad",
    [job(" a"), job("a\nb"), job("a", float("nan")), job("a", -1.0), job("a", slots=0), job("")],
)
def test_a_job_that_could_not_be_read_is_not_written(tmp_path: Path, bad: TraceJob) -> None:
    path = file_with(tmp_path, "before")

    with pytest.raises(TraceError, match=r"mine\.csv:2"):
        write_trace(Trace(name="t", jobs=(bad,)), path)

    assert [(at.name, at.read_text()) for at in tmp_path.iterdir()] == [("mine.csv", "before")]


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    trace = Trace(name="t", jobs=(job("a"),))

    with pytest.raises(TraceError, match="No such file or directory; choose another file"):
        write_trace(trace, tmp_path / "no" / "t.csv")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TraceError, match="Is a directory"):
        write_trace(trace, tmp_path / "folder")
    assert [at.name for at in tmp_path.iterdir()] == ["folder"]
