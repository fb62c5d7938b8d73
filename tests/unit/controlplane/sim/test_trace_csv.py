"""Traces in files: our own layout, and those of other projects."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.sim.cluster import TraceError
from controlplane.sim.csv_parsing import MAX_LINE_BYTES
from controlplane.sim.results import Trace, TraceJob
from controlplane.sim.traces.trace_csv import Layout, import_trace, read_trace, write_trace
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
        (HEADER + "c,9,cifar10,2,64\nb,5,cifar10,2,64\na,5,cifar10,2,64\n",
         [job("b", 5.0), job("a", 5.0), job("c", 9.0)]),
        (b"\xef\xbb\xbfbatch_size, time ,Name,application,num_replicas\r\n\r\n64,1,a,cifar10,2.0\r\n", [job("a", 1.0)]),
    ],
    ids=[
        "a workload of the Pollux artifact", "further columns, whose empty cells have defaults",
        "sorted by time, and ties as in the file", "columns in any order, and any line ends",
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
        (HEADER + "a,1,m,1,1\na,2,m,1,1\n", "FILE: column name: two jobs are called 'a'; give every"),
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
    monkeypatch.setattr("controlplane.sim.csv_parsing.MAX_JOBS", 2)
    path = file_with(tmp_path, HEADER + "a,1,m,1,1\nb,1,m,1,1\nc,1,m,1,1\n")
    assert complaint(path) == "FILE:4: more than 2 jobs; split the file"

    monkeypatch.setattr("controlplane.sim.csv_parsing.MAX_LINES", 5)
    path = file_with(tmp_path, HEADER + "\n" * 20)
    assert complaint(path) == "FILE: more than 5 lines; split the file"


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


PHILLY = """timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:01:55,66.0,1,66.0,11cb48
2017-10-09 06:01:55,2951.5,4,11806,6214e9
"""
TIRESIAS = """job_id,num_gpu,submit_time,iterations,model_name,duration,interval
0,1,0,606,vgg19,164,30
1,8,30,133,vgg11,147,23
"""
GAVEL_10 = "ResNet-18 (batch size 128)\tpython3 main.py --x='a, b\"'\tcifar10\t--num_steps\t1\t{steps}\t{gpus}\t1\t-1.000000\t{at}\n"
GAVEL_9 = "A3C\tcd %s/rl && python3 main.py\t--max-steps\t0\t7176\t1\t1\t-1.000000\t5\n"
GAVEL_7 = "CycleGAN\tcd %s/cyclegan && python3 x.py\t--n_steps\t1\t4426\t17.000000\t1\n"


def imported(name: str, at: float, workload: str, slots: int, batch: int = 0) -> TraceJob:
    return TraceJob(name=name, at=Seconds(at), workload=workload, slots=slots, batch=batch)


@pytest.mark.parametrize(
    ("layout", "text", "jobs"),
    [
        # GPUs times duration
        ("tiresias", TIRESIAS, [imported("job-0", 0.0, "gpu-time:164", 1), imported("job-1", 30.0, "gpu-time:1176", 8)]),
        # counted from the first job
        ("philly", PHILLY, [imported("job-1", 0.0, "gpu-time:11806", 4), imported("job-0", 3600.0, "gpu-time:66", 1)]),
        # steps as on V100s: 1799 at 17.99 per second, and 6995 at 69.95 on four
        ("gavel", GAVEL_10.format(steps=1799, gpus=1, at=0) + GAVEL_10.format(steps=6995, gpus=4, at=2.5),
         [imported("job-0", 0.0, "gpu-time:100", 1), imported("job-1", 2.5, "gpu-time:400", 4)]),
        ("gavel", GAVEL_9 + GAVEL_7, [imported("job-0", 5.0, "gpu-time:1000", 1), imported("job-1", 17.0, "gpu-time:1000", 1)]),
        ("pollux", "name,time,application,num_replicas,batch_size\nbert-1,60,bert,1,12\n",
         [imported("bert-1", 60.0, "bert", 1, 12)]),
    ],
    ids=["tiresias", "philly", "gavel", "older files of gavel", "pollux, which is our layout"],
)  # fmt: skip
def test_jobs_of_every_layout_are_imported(
    tmp_path: Path, layout: Layout, text: str, jobs: list[TraceJob]
) -> None:
    assert import_trace(file_with(tmp_path, text), layout).jobs == tuple(jobs)


def test_jobs_that_are_larger_than_the_cluster_are_left_out(tmp_path: Path) -> None:
    path = file_with(tmp_path, TIRESIAS)

    assert [job.name for job in import_trace(path, "tiresias", most_slots=4).jobs] == ["job-0"]
    with pytest.raises(TraceError, match="no jobs"):
        import_trace(path, "tiresias", most_slots=0)


@pytest.mark.parametrize(
    ("layout", "content", "said"),
    [
        ("philly", PHILLY.replace("06:01:55", "25:01:55"), ":3: column timestamp: '2017-10-09 25"),
        ("philly", PHILLY.replace("66.0,1", "66.0,0"), ":2: column num_gpus: '0' is out of range"),
        ("philly", PHILLY.replace("66.0,1", "0,1"), ":2: column duration: a job without duration"),
        ("philly", TIRESIAS, ":1: column timestamp is missing"),
        ("tiresias", TIRESIAS.replace("164", "long"), ":2: column duration: 'long' is not a number"),
        ("tiresias", TIRESIAS.replace("\n1,8", "\n0,8"), ": column name: two jobs are called"),
        ("gavel", "GPT\ta\tb\tc\t1\t5\t1\t1\t-1\t0\n", ":1: column job_type: 'GPT' is unknown"),
        ("gavel", GAVEL_7.replace("4426", "x"), ":1: column total_steps: 'x' is not a number"),
        ("gavel", GAVEL_7.replace("4426", "-3"), ":1: column total_steps: '-3' is out of range"),
        ("gavel", GAVEL_7.replace("17.000000", "nan"), ":1: column arrival_time: 'nan' is not"),
        ("gavel", "a\tb\n", ":1: column working_directory: 2 columns instead of 7 or 9 or 10"),
        ("gavel", "", ": no jobs"),
    ],
)  # fmt: skip
def test_a_malformed_line_is_named(tmp_path: Path, layout: Layout, content: str, said: str) -> None:
    path = file_with(tmp_path, content)

    with pytest.raises(TraceError) as caught:
        import_trace(path, layout)

    assert str(caught.value).startswith(f"{path}{said}")


LINES = st.text(st.sampled_from("0123456789.,-:\t ex\n\"'naif\0é"), max_size=80)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layout=st.sampled_from(get_args(Layout)),
    begin=st.sampled_from(["", PHILLY, TIRESIAS, GAVEL_7, GAVEL_9]),
    rest=st.binary(max_size=200) | LINES.map(str.encode),
)
def test_any_bytes_raise_trace_errors(
    tmp_path: Path, layout: Layout, begin: str, rest: bytes
) -> None:
    path = file_with(tmp_path, begin.encode() + rest)
    with contextlib.suppress(TraceError):
        import_trace(path, layout)
