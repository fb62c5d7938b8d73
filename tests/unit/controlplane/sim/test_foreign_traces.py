"""Importers of other projects' traces, on files in their layouts.

All files here are invented. `ONES_PROFILES` names a folder with published ones (`traces/` and
`workloads/` of Pollux' artifact).
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.sim.cluster import TraceError
from controlplane.sim.models.table2 import gpu_times
from controlplane.sim.results import TraceJob
from controlplane.sim.traces import foreign_traces
from controlplane.sim.traces.foreign_traces import (
    NO_GPU,
    NO_RUN,
    TOO_LARGE,
    import_trace,
    layout_of,
)
from controlplane.sim.traces.trace_csv import read_trace, write_trace
from controlplane.sim.traces.trace_layouts import Layout
from schemas.ids import Seconds

PUBLISHED = Path(os.environ.get("ONES_PROFILES") or "/nonexistent")
SAME_FOLDER = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

POLLUX = "name,time,application,num_replicas,batch_size\nbert-1,60.5,bert,1,12\n"
TIRESIAS = """job_id,num_gpu,submit_time,iterations,model_name,duration,interval
0,1,0,606,vgg19,164,30
1,8,30,133,vgg11,147,23
"""
GAVEL_10 = "ResNet-18 (batch size 128)\tpython3 main.py --x='a, b\"'\tcifar10\t--num_steps\t1\t{steps}\t{gpus}\t1\t-1.000000\t{at}\n"
GAVEL_9 = "A3C\tcd %s/rl && python3 main.py\t--max-steps\t0\t7176\t1\t1\t-1.000000\t5\n"
GAVEL_7 = "CycleGAN\tcd %s/cyclegan && python3 x.py\t--n_steps\t1\t4426\t17.000000\t1\n"
SHOCKWAVE = (
    "LM (batch size 10)\tpython3 main.py --data %s/wiki\tlm\t--steps\t1\t900\t1\tgns\t1\t-1.000000\t1418\t0\n"
    "Unmeasured\tpython3 main.py\tx\t--steps\t1\t700\t2\tstatic\t1\t-1.000000\t300\t55.5\n"
)
PHILLY = """timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:01:55,66.0,1,66.0,11cb48
2017-10-09 06:01:55,2951.5,4,11806,6214e9
2017-10-09 06:01:56,0,4,0,6214e9
"""
HELIOS = """job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
71,uA,vc1,16,96,2,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:11,2020-06-09 19:41:11,3600,10
72,uB,vc2,0,4,1,COMPLETED,2020-06-09 18:40:00,2020-06-09 18:40:00,2020-06-09 18:50:00,600,0
73,uA,vc1,1,6,1,FAILED,2020-06-10 18:41:01,2020-06-10 18:41:01,2020-06-10 18:43:01,120,0
"""
PAI_TASKS = """j1,ps,2.0,Terminated,90.0,260.0,600.0,29.3,,
j1,worker,3.0,Terminated,100.0,250.0,600.0,29.3,50.0,MISC
j2,tensorflow,1.0,Failed,130.0,160.0,600.0,29.3,200.0,V100
j1,chief,1.0,Terminated,110.0,300.0,600.0,29.3,50.0,MISC
j3,tensorflow,1.0,Running,140.0,,600.0,29.3,100.0,T4
j4,tensorflow,1.0,Terminated,150.0,160.0,600.0,29.3,0.0,
"""
PAI_JOBS = "j1,i1,u1,Terminated,80.0,300.0\nj2,i2,u2,Failed,125.0,160.0\n"
OPENB = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
pod-1,8000,30517,0,0,,BE,Running,900,1900,900
pod-2,6000,12288,1,460,,LS,Running,1000,1300,1100
pod-3,88000,327680,8,1000,V100M16|V100M32,Burstable,Succeeded,1010,1110,1010
pod-4,8000,12288,1,1000,,LS,Pending,1020,1030,
"""
SWF = """; Version: 2.2
; MaxProcs: 64

  1    10  5   100   4 -1 -1  8 200 -1 1  3 1 -1 1 -1 -1 -1
  2    40  0    50  -1 -1 -1  2  60 -1 0 -1 1 -1 1 -1 -1 -1
  3    50  1    20   1 -1 -1  1  60 -1 1  7 1 -1 1 -1 -1 -1
  3    50  1     5   1 -1 -1  1  60 -1 2  7 1 -1 1 -1 -1 -1
  4    60 -1    -1  -1 -1 -1  1  60 -1 5  7 1 -1 1 -1 -1 -1
"""


def attempt(start: str | None, end: str | None, *gpus: int) -> dict[str, Any]:
    machines = [{"ip": f"m{n}", "gpus": ["gpu"] * many} for n, many in enumerate(gpus)]
    return {"start_time": start, "end_time": end, "detail": machines}


def philly_job(name: str, *attempts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    usual = {"status": "Pass", "vc": "v", "user": "ann", "submitted_time": "2017-10-07 01:00:00"}
    return {**usual, "jobid": name, "attempts": [*attempts], **changes}


PHILLY_JSON = json.dumps(
    [
        philly_job(
            "application_1",
            attempt("2017-10-07 01:01:00", "2017-10-07 01:02:00", 8),
            attempt("2017-10-07 01:03:00", "2017-10-07 01:04:00", 8, 8),
            attempt("2017-10-07 01:05:00", None, 8),
        ),
        philly_job("application_2", submitted_time="2017-10-07 01:00:30"),
        philly_job("application_3", attempt("None", "", 1), status="Killed"),
        philly_job(
            "application_4",
            attempt("2017-10-06 23:59:59", "2017-10-07 00:00:09", 1),
            submitted_time="2017-10-06 23:59:58",
            user="bob",
        ),
    ]
)


def imported(
    name: str, at: float, workload: str, slots: int, *, batch: int = 0, user: str = "trace"
) -> TraceJob:
    return TraceJob(
        name=name, at=Seconds(at), workload=workload, slots=slots, batch=batch, user=user
    )


def file_with(folder: Path, content: str | bytes, name: str = "mine.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


CASES: list[tuple[Layout, str, list[TraceJob], dict[str, int]]] = [
    ("pollux", POLLUX, [imported("bert-1", 60.5, "bert", 1, batch=12)], {}),
    # GPUs times duration
    ("tiresias", TIRESIAS,
     [imported("job-0", 0.0, "gpu-time:164", 1), imported("job-1", 30.0, "gpu-time:1176", 8)], {}),
    # steps as on V100s: 1799 at 17.99 per second, and 6995 at 69.95 on four
    ("gavel", GAVEL_10.format(steps=1799, gpus=1, at=0) + GAVEL_10.format(steps=6995, gpus=4, at=2.5),
     [imported("job-0", 0.0, "gpu-time:100", 1), imported("job-1", 2.5, "gpu-time:400", 4)], {}),
    ("gavel", GAVEL_9 + GAVEL_7,
     [imported("job-0", 5.0, "gpu-time:1000", 1), imported("job-1", 17.0, "gpu-time:1000", 1)], {}),
    ("shockwave", SHOCKWAVE,
     [imported("job-0", 0.0, "gpu-time:1418", 1), imported("job-1", 55.5, "gpu-time:600", 2)], {}),
    # counted from the first job
    ("philly", PHILLY,
     [imported("job-1", 0.0, "gpu-time:11806", 4), imported("job-0", 3600.0, "gpu-time:66", 1)],
     {NO_RUN: 1}),
    # 8 GPUs for a minute and 16 for another; the last attempt has no end
    ("philly", PHILLY_JSON,
     [imported("application_4", 0.0, "gpu-time:10", 1, user="bob"),
      imported("application_1", 3602.0, "gpu-time:1440", 16, user="ann")],
     {NO_GPU: 1, NO_RUN: 1}),
    ("helios", HELIOS,
     [imported("job-71", 0.0, "gpu-time:57600", 16, user="uA"),
      imported("job-73", 86400.0, "gpu-time:120", 1, user="uA")],
     {NO_GPU: 1}),
    # 3 workers and a chief with half a GPU each, from 100 to 300
    ("pai2020", PAI_TASKS,
     [imported("j1", 0.0, "gpu-time:400", 2), imported("j2", 30.0, "gpu-time:60", 2)],
     {NO_GPU: 1, NO_RUN: 1}),
    ("openb2023", OPENB,
     [imported("pod-2", 0.0, "gpu-time:200", 1), imported("pod-3", 10.0, "gpu-time:800", 8)],
     {NO_GPU: 1, NO_RUN: 1}),
    ("swf", SWF,
     [imported("job-1", 0.0, "gpu-time:400", 4, user="user-3"),
      imported("job-2", 30.0, "gpu-time:100", 2),
      imported("job-3", 40.0, "gpu-time:20", 1, user="user-7")],
     {NO_RUN: 1}),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "text", "jobs", "left_out"), CASES)
def test_jobs_of_every_layout_are_imported_and_written(
    tmp_path: Path, layout: Layout, text: str, jobs: list[TraceJob], left_out: dict[str, int]
) -> None:
    path = file_with(tmp_path, text)

    found = import_trace(path, layout)
    write_trace(found.trace, tmp_path / "ours.csv")

    assert layout_of(path) == layout
    assert (found.trace.jobs, found.left_out) == (tuple(jobs), left_out)
    assert read_trace(tmp_path / "ours.csv").jobs == tuple(jobs)


def test_every_layout_is_tested() -> None:
    assert {layout for layout, *_ in CASES} == {*get_args(Layout)} - {"sia"}  # same as pollux


def test_traces_of_sia_have_the_columns_of_pollux(tmp_path: Path) -> None:
    path = file_with(tmp_path, POLLUX)

    assert import_trace(path, "sia") == import_trace(path, "pollux")


def test_the_table_of_jobs_adds_users_and_submissions_to_the_tasks(tmp_path: Path) -> None:
    file_with(tmp_path, "job_name,inst_id,user,status,start_time,end_time\n", "header.csv")
    file_with(tmp_path, PAI_TASKS, "pai_task_table.csv")
    path = file_with(tmp_path, PAI_JOBS, "pai_job_table.csv")

    assert layout_of(path) == layout_of(tmp_path / "header.csv") == "pai2020"
    assert import_trace(path, "pai2020").trace.jobs == (
        imported("j1", 0.0, "gpu-time:400", 2, user="u1"),
        imported("j2", 45.0, "gpu-time:60", 2, user="u2"),
    )


def test_a_header_before_a_layout_without_one_is_skipped(tmp_path: Path) -> None:
    names = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"
    headed, plain = file_with(tmp_path, names + PAI_TASKS, "a"), file_with(tmp_path, PAI_TASKS, "b")

    assert layout_of(headed) == "pai2020"
    assert import_trace(headed, "pai2020").trace.jobs == import_trace(plain, "pai2020").trace.jobs


def test_the_source_counts_fractions_that_are_rounded_up(tmp_path: Path) -> None:
    found = import_trace(file_with(tmp_path, OPENB), "openb2023")

    assert (found.rounded, list(found.gpu_s)) == (1, [0.46 * 200.0, 800.0])


def test_jobs_that_are_larger_than_the_cluster_are_left_out_and_counted(tmp_path: Path) -> None:
    path = file_with(tmp_path, TIRESIAS)

    found = import_trace(path, "tiresias", most_slots=4)

    assert [job.name for job in found.trace.jobs] == ["job-0"]
    assert (found.left_out, list(found.gpu_s)) == ({TOO_LARGE: 1}, [164.0, 1176.0])
    with pytest.raises(TraceError, match="that can be imported"):
        import_trace(path, "tiresias", most_slots=0)


def test_a_long_job_keeps_its_gpu_time(tmp_path: Path) -> None:
    path = file_with(tmp_path, "job_id,num_gpu,submit_time,duration\n1,4,0,25000\n2,1,0,1e7\n")

    assert gpu_times(import_trace(path, "tiresias").trace.jobs) == pytest.approx([1e5, 1e7])


def test_a_journal_is_recognised(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite")) as database:
        database.execute("CREATE TABLE meta (key)")

    assert layout_of(tmp_path / "journal.sqlite") == "journal"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "FILE: its layout is not recognised from its first line; give --layout, one of"),
        ("a,b\n1,2\n", "FILE: its layout is not recognised"),
        ("a,b,c,d,e,f,g,h,i,j\n", "FILE: its layout is not recognised"),
        (b"\x00\x01\x02", "FILE:1: has a NUL byte; name a trace"),
        (b"\x7fELF\xff", "FILE:1: byte 5 is not UTF-8"),
    ],
)
def test_a_file_without_a_known_layout_is_refused(
    tmp_path: Path, content: str | bytes, said: str
) -> None:
    path = file_with(tmp_path, content)

    with pytest.raises(TraceError) as caught:
        layout_of(path)

    assert str(caught.value).replace(str(path), "FILE").startswith(said)


@pytest.mark.parametrize(
    ("layout", "content", "said"),
    [
        ("philly", PHILLY.replace("06:01:55", "25:01:55"), ":3: column timestamp: '2017-10-09 25"),
        ("philly", PHILLY.replace("66.0,1", "66.0,-1"), ":2: column num_gpus: '-1' is out of range"),
        ("philly", PHILLY.replace("66.0,1", "1e400,1"), ":2: column duration: '1e400' is out of"),
        ("philly", TIRESIAS, ":1: column timestamp is missing"),
        ("philly", "[1]", ": Expected `object`, got `int` - at `$[0]`; name a file like"),
        ("philly", PHILLY_JSON[:-1], ": Input data was truncated; name a file like"),
        ("philly", "[" * 100_000, ": Expected `object`, got `array` - at `$[0]`"),
        ("philly", PHILLY_JSON.replace("01:02:00", "soon"), ": job 0: column end_time: '2017-10-07 soon' is not a time"),
        ("philly", PHILLY_JSON.replace("ion_2", "ion_1"), ": job 1: column jobid: two jobs are called 'application_1'"),
        ("tiresias", TIRESIAS.replace("164", "long"), ":2: column duration: 'long' is not a number"),
        ("tiresias", TIRESIAS.replace("164", "nan"), ":2: column duration: 'nan' is not a number"),
        ("tiresias", TIRESIAS.replace("164", "1e12").replace("0,1,", "0,2,"), ": job '0' used 2e+12 GPU seconds"),
        ("tiresias", TIRESIAS.replace("\n1,8,30", "\n1,8,-30"), ":3: column submit_time: '-30' is out"),
        ("tiresias", TIRESIAS.replace("\n1,8", "\n0,8"), ":3: column job_id: two jobs are called '0'"),
        ("gavel", "GPT\ta\tb\tc\t1\t5\t1\t1\t-1\t0\n", ":1: column job_type: 'GPT' is unknown"),
        ("gavel", GAVEL_7.replace("4426", "x"), ":1: column total_steps: 'x' is not a number"),
        ("gavel", GAVEL_7.replace("4426", "-3"), ":1: column total_steps: '-3' is out of range"),
        ("gavel", GAVEL_7.replace("17.000000", "nan"), ":1: column arrival_time: 'nan' is not"),
        ("gavel", "a\tb\n", ":1: column working_directory: 2 columns instead of 7 or 9 or 10"),
        ("gavel", "", ": no jobs"),
        ("shockwave", GAVEL_7, ":1: column mode: 7 columns instead of 12"),
        ("helios", HELIOS.replace("\n73", "\n71"), ":4: column job_id: two jobs are called '71'"),
        ("helios", HELIOS.replace("gpu_num", "gpus"), ":1: column gpu_num is missing"),
        ("helios", HELIOS.replace("3600,10", "-1,10"), ":2: column duration: '-1' is out of range"),
        ("pai2020", PAI_TASKS.replace("50.0,MISC", "half,MISC"), ":2: column plan_gpu: 'half' is"),
        ("pai2020", "j5,worker,1,Terminated,9,5,1,1,100,T4\n", ": no jobs that can be imported (1 have no run"),
        ("pai2020", PAI_JOBS, "/../pai_task_table.csv: No such file or directory; name a readable"),
        ("openb2023", OPENB.replace(",460,", ",1460,"), ":3: column gpu_milli: '1460' is out of range"),
        ("swf", SWF.replace(" 100 ", " -100 "), ":4: column run_time: '-100' is out of range"),
        ("swf", SWF.replace("  4    60", "  1    60"), ":8: column job_number: two jobs are called '1'"),
        ("swf", "1 2 3\n", ":1: column run_time: 3 columns instead of 18"),
    ],
)  # fmt: skip
def test_a_malformed_line_is_named(tmp_path: Path, layout: Layout, content: str, said: str) -> None:
    path = file_with(tmp_path, content)

    with pytest.raises(TraceError) as caught:
        import_trace(path, layout)

    assert str(caught.value).startswith(f"{path}{said}".replace("mine.csv/../", ""))


def test_too_many_jobs_and_too_much_text_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_traces, "MAX_JOBS", 1)
    monkeypatch.setattr("controlplane.sim.traces.trace_csv.MAX_JOBS", 1)
    monkeypatch.setattr(foreign_traces, "MAX_READ_JOBS", 3)
    monkeypatch.setattr(foreign_traces, "MAX_JSON_BYTES", 100)

    for layout, text, said in (
        ("tiresias", TIRESIAS, "more than 1 jobs; split the file"),
        ("pai2020", PAI_TASKS, "more than 3 jobs; split the file"),
        ("philly", PHILLY_JSON, "more than 100 bytes; split the list of jobs"),
    ):
        with pytest.raises(TraceError, match=said):
            import_trace(file_with(tmp_path, text), layout)


BEGINS = [text[: text.index("\n") + 1] for _, text, *_ in CASES if "\n" in text]
LINES = st.text(st.sampled_from("0123456789.,-:;[]{}\t ex\n\"'naif\0é"), max_size=80)


@SAME_FOLDER
@given(
    layout=st.sampled_from(get_args(Layout)),
    begin=st.sampled_from(["", *BEGINS, PHILLY_JSON[:-1]]),
    rest=st.binary(max_size=200) | LINES.map(str.encode),
)
def test_any_bytes_raise_trace_errors(
    tmp_path: Path, layout: Layout, begin: str, rest: bytes
) -> None:
    path = file_with(tmp_path, begin.encode() + rest)
    for read in (lambda: import_trace(path, layout), lambda: layout_of(path)):
        with contextlib.suppress(TraceError):
            read()


@SAME_FOLDER
@given(
    jobs=st.lists(
        st.tuples(st.integers(0, 64), st.floats(0.0, 1e6), st.floats(0.0, 1e7)), min_size=1
    ),
    delimiter=st.sampled_from(",;\t"),
    line_end=st.sampled_from(["\n", "\r\n"]),
    mark=st.sampled_from(["", "\ufeff"]),
)
def test_no_form_of_a_table_changes_its_jobs(
    tmp_path: Path, jobs: list[tuple[int, float, float]], delimiter: str, line_end: str, mark: str
) -> None:
    rows = [("job_id", "num_gpu", "submit_time", "duration")]
    rows += [
        (f"{n}", f"{gpus}", f"{at!r}", f"{run_s!r}") for n, (gpus, at, run_s) in enumerate(jobs)
    ]
    text = mark + "".join(delimiter.join(row) + line_end for row in rows)
    ran = [(at, gpus, gpus * run_s) for gpus, at, run_s in jobs if gpus and run_s]
    if not ran:
        return

    found = import_trace(file_with(tmp_path, text), "tiresias")

    assert list(found.gpu_s) == [gpu_s for *_, gpu_s in ran]
    assert [(job.at, job.slots) for job in found.trace.jobs] == sorted(
        ((at, gpus) for at, gpus, _ in ran), key=lambda job: job[0]
    )
    assert sum(found.left_out.values()) == len(jobs) - len(ran)


@pytest.mark.skipif(
    not PUBLISHED.is_dir(), reason="set ONES_PROFILES to the folder of the published traces"
)
@pytest.mark.parametrize(
    ("file", "jobs", "gpu_h", "spread"),
    [("traces/philly.csv", 82_247, 978_078.5, 9.78), ("../tiresias/60_job.csv", 60, 7.4, 1.04)],
)
def test_published_traces_keep_their_gpu_time(
    file: str, jobs: int, gpu_h: float, spread: float
) -> None:
    path = PUBLISHED / file
    if not path.exists():
        pytest.skip(f"{path} is absent")

    found = import_trace(path, layout_of(path))  # type: ignore[arg-type] # no journal

    for gpu_s in (found.gpu_s, gpu_times(found.trace.jobs)):
        assert len(gpu_s) == jobs
        assert sum(gpu_s) / 3600.0 == pytest.approx(gpu_h, rel=0.02)
        assert pstdev(gpu_s) / fmean(gpu_s) == pytest.approx(spread, rel=0.03)


@pytest.mark.skipif(
    not PUBLISHED.is_dir(), reason="set ONES_PROFILES to the folder of the published traces"
)
@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_published_workloads_are_imported(number: int) -> None:
    path = PUBLISHED / "workloads" / f"workload-{number}.csv"

    assert import_trace(path, "pollux").trace == read_trace(path)
    assert layout_of(path) == "pollux"
