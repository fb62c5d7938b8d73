"""Traces of other projects as ours."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.sim.cluster import TraceError
from controlplane.sim.results import TraceJob
from controlplane.sim.traces.trace_csv import Layout, import_trace
from schemas.ids import Seconds

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


def file_with(folder: Path, content: str | bytes) -> Path:
    path = folder / "theirs"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def job(name: str, at: float, workload: str, slots: int) -> TraceJob:
    return TraceJob(name=name, at=Seconds(at), workload=workload, slots=slots)


def test_tiresias_jobs_take_their_gpus_times_duration(tmp_path: Path) -> None:
    assert import_trace(file_with(tmp_path, TIRESIAS), "tiresias").jobs == (
        job("job-0", 0.0, "gpu-time:164", 1),
        job("job-1", 30.0, "gpu-time:1176", 8),
    )


def test_philly_times_count_from_the_first_job(tmp_path: Path) -> None:
    assert import_trace(file_with(tmp_path, PHILLY), "philly").jobs == (
        job("job-1", 0.0, "gpu-time:11806", 4),
        job("job-0", 3600.0, "gpu-time:66", 1),
    )


def test_gavel_steps_take_as_long_as_on_v100s(tmp_path: Path) -> None:
    lines = GAVEL_10.format(steps=1799, gpus=1, at=0) + GAVEL_10.format(steps=6995, gpus=4, at=2.5)

    assert import_trace(file_with(tmp_path, lines), "gavel").jobs == (
        job("job-0", 0.0, "gpu-time:100", 1),  # 1799 steps at 17.99 per second
        job("job-1", 2.5, "gpu-time:400", 4),  # 6995 at 69.95, on four
    )


def test_older_traces_of_gavel_have_fewer_columns(tmp_path: Path) -> None:
    assert import_trace(file_with(tmp_path, GAVEL_9 + GAVEL_7), "gavel").jobs == (
        job("job-0", 5.0, "gpu-time:1000", 1),
        job("job-1", 17.0, "gpu-time:1000", 1),
    )


def test_pollux_is_our_own_layout(tmp_path: Path) -> None:
    text = "name,time,application,num_replicas,batch_size\nbert-1,60,bert,1,12\n"

    assert import_trace(file_with(tmp_path, text), "pollux").jobs == (
        TraceJob(name="bert-1", at=Seconds(60.0), workload="bert", slots=1, batch=12),
    )


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
        (
            "tiresias",
            TIRESIAS.replace("164", "long"),
            ":2: column duration: 'long' is not a number",
        ),
        ("tiresias", TIRESIAS.replace("\n1,8", "\n0,8"), ": column name: two jobs are called"),
        ("gavel", "GPT\ta\tb\tc\t1\t5\t1\t1\t-1\t0\n", ":1: column job_type: 'GPT' is unknown"),
        ("gavel", GAVEL_7.replace("4426", "x"), ":1: column total_steps: 'x' is not a number"),
        ("gavel", GAVEL_7.replace("4426", "-3"), ":1: column total_steps: '-3' is out of range"),
        ("gavel", GAVEL_7.replace("17.000000", "nan"), ":1: column arrival_time: 'nan' is not"),
        ("gavel", "a\tb\n", ":1: column working_directory: 2 columns instead of 7 or 9 or 10"),
        ("gavel", "", ": no jobs"),
    ],
)
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
