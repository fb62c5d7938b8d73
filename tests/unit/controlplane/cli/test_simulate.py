"""`ones sim` as a user calls it: in processes of its own, judged by what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.cli.sim import ended
from controlplane.core.commands import RequestPlan
from controlplane.sim.models.recording import write_recording
from tests.support.builders import N1, A, news
from tests.support.commands import ones
from tests.support.simulations import a_job, recording

KEYS = {
    "policy", "jobs", "avg_jct_s", "geo_jct_s", "p50_jct_s", "p90_jct_s", "p99_jct_s", "avg_exec_s",
    "makespan_s", "avg_queue_s", "utilisation", "rescales_per_job", "decision_ms_mean",
    "decision_ms_p99", "jct_s", "per_application",
}  # fmt: skip
HEAD = "name,time,application,num_replicas,batch_size\n"


def sim(*arguments: str, code: int = 0) -> str:
    """What `ones sim` prints; on stderr if it fails as it should."""
    done = ones("sim", *arguments, COLUMNS="160")
    assert done.code == code, done.err + done.out
    return done.err if code else done.out


def result(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sim(*arguments, "-o", "json"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["fifo", "fair", "srtf", "tiresias", "gittins", "optimus", "slaq"]
)
def test_a_run_gives_every_figure_of_the_contract(policy: str) -> None:
    found = result("run", "--policy", policy, "--gpus", "8", "--jobs", "6", "--seed", "5")

    assert found.keys() >= KEYS
    assert (found["policy"], found["jobs"], len(found["jct_s"])) == (policy, 6, 6)
    assert found["avg_jct_s"] > found["bound_avg_jct_s"] > 0


@pytest.mark.slow
def test_the_same_command_gives_the_same_result() -> None:
    command = ("run", "--policy", "ones", "--gpus", "8", "--jobs", "3", "--seed", "3")
    one, other = result(*command), result(*command)

    clocks = {"decision_ms_mean", "decision_ms_p99", "wall_s"}
    assert {k: v for k, v in one.items() if k not in clocks} == {
        k: v for k, v in other.items() if k not in clocks
    }


def test_a_generated_trace_runs_like_the_jobs_in_its_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    sim("generate", str(file), "--jobs", "6", "--seed", "4")

    size = ("--gpus", "8", "--seed", "4", "--warm-up", "0")
    from_file = result("run", "--policy", "fifo", "--workload", str(file), *size)

    generated = result("run", "--policy", "fifo", "--jobs", "6", *size)
    assert from_file["jct_s"] == generated["jct_s"]


@pytest.mark.slow
def test_a_comparison_is_paired_drawn_and_continued(tmp_path: Path) -> None:
    kept, plots = tmp_path / "results.jsonl", tmp_path / "plots"
    command = (
        "compare", "--policies", "fifo,goodput", "--seeds", "0-1", "--gpus", "4,8", "--jobs", "5",
        "--ours", "goodput", "--results", str(kept), "--workers", "1",
    )  # fmt: skip

    found = result(*command, "--plots", str(plots))
    lines = kept.read_text().splitlines()
    again = result(*command)

    assert found["sizes"].keys() == {"4", "8"}
    assert [each["second"] for each in found["against"]["8"]] == ["fifo"]
    assert len(found["results"]) == 8
    assert again == found, "nothing was simulated again"
    assert kept.read_text().splitlines() == lines
    assert {file.name for file in plots.iterdir()} >= {"boxes-4.png", "cdf-8.png", "scaling.png"}


def test_recorded_losses_are_replayed(tmp_path: Path) -> None:
    file = tmp_path / "curves.json"
    sim("record-curves", str(file), "--families", "linear-regression, k-means", "--seed", "1")
    small = "--policy fair --gpus 8 --gpus-per-node 4 --jobs 3 --work 50 --scaling 0.9"

    found = result("run", "--physics", "curves", "--curves", str(file), *small.split())

    assert found["setting"]["curves"] == str(file)
    assert found["jobs"] == 3
    assert found["per_application"].keys() <= {"linear-regression", "k-means"}


def test_an_imported_trace_can_be_simulated(tmp_path: Path) -> None:
    foreign, ours = tmp_path / "60_job.csv", tmp_path / "jobs.csv"
    foreign.write_text(
        "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n"
        "0,1,0,606,vgg19,164,30\n1,8,30,133,vgg11,147,23\n2,16,40,133,vgg11,600,23\n"
    )
    out = sim("import", str(foreign), str(ours), "--most-gpus", "8")

    assert [line.split() for line in out.splitlines() if line.startswith(("source", "simulated"))] == [
        ["source", "3", "3.0", "1.16"], ["simulated", "2", "0.4", "0.74"],
    ]  # fmt: skip
    assert "1      requested more GPUs than the limit" in out
    assert result("run", "--policy", "fifo", "--workload", str(ours), "--gpus", "8")["jobs"] == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--policy", "nobody"), "unknown policy 'nobody'"),
        (("--gpus", "6"), "6 GPUs cannot be divided among nodes of 4"),
        (("--nodes", "2xquantum"), "GPU type 'quantum' is unknown"),
        (("--jobs", "0"), "jobs: 0 is not a number of at least 1"),
        (("--interval", "nan"), "interval_s: nan is not a number"),
        (("--interference", "some"), "interference 'some' is not one of"),
        (("--interference", "gavel:/nowhere.json"), "No such file"),
        (("--interference", "class:2"), "is not one of"),
        (("--physics", "harmony", "--job-seconds", "0"), "job_s: 0.0 is not a number of at least 0.001"),
        (("--speed-noise", "nan"), "noise: nan is not a number from 0 to 2"),
        (("--noise-scale-error", "0.5"), "noise_scale_error: 0.5 is not a number from 1"),
        (("--prepare", "-1"), "prepare_s: -1.0 is not a number from 0 to 500"),
        (("--physics", "profiles"), "give --profiles DIR"),
        (("--seed", "-1"), "seed -1 is negative"),
        (("--gpus", "8", "--nodes", "2xv100"), "conflict"),
        (("--nodes", "99999999999"), "with at most 1000000 GPUs"),
        (("--plots", "/dev/null/x"), "give a folder"),
        (("--physics", "recorded"), "give --workload FILE"),
        (("--physics", "curves", "--curves", "/nowhere.json"), "No such file"),
        (("--physics", "curves", "--scaling", "1.5"), "scaling: 1.5 is not a number from 1e-09 to 1"),
        (("--physics", "curves", "--work", "0"), "work_core_s: 0.0 is not a number of at least 1e-06"),
        (("--option", "limits"), "option 'limits' has no value"),
        (("--policy", "tiresias", "--option", "limits=[3,2]"), "do not rise"),
        (("--workload", "/nowhere/trace.csv"), "No such file"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused_in_one_line(arguments: tuple[str, ...], told: str) -> None:
    error = sim("run", *arguments, code=2)

    assert told in error
    assert len(error.splitlines()) == 1


def test_a_replay_states_the_share_that_was_never_measured(tmp_path: Path) -> None:
    file = tmp_path / "week.rec"
    wider = msgspec.structs.replace(a_job().spec, slots_wanted=2)
    write_recording(recording(a_job(), a_job(name="b-2", spec=wider)), file)
    what = ("--physics", "recorded", "--workload", str(file), "--nodes", "1")

    found = result("run", "--policy", "fifo", *what)
    printed = sim("run", "--policy", "fifo", *what)
    compared = sim("compare", "--policies", "fifo", "--seeds", "1", "--workers", "1", *what)

    share = f"{found['extrapolated_share']:.0%} of the training time was spent in groups of a kind"
    assert 0.0 < found["extrapolated_share"] < 1.0
    assert share in printed
    assert f"Up to {share}" in compared
    assert "groups like which" not in sim("run", "--policy", "fifo", "--jobs", "3")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "no jobs"),
        ("a,-1,vgg16-cifar10-20k,1,64\n", "trace.csv:2: column time"),
        ("a,nan,vgg16-cifar10-20k,1,64\n", "trace.csv:2: column time"),
        ("a,0,vgg16-cifar10-20k,0,64\n", "trace.csv:2: column num_replicas"),
        ("a,0,vgg16-cifar10-20k,99,64\n", "asks for 99 slots, the cluster has 64"),
        ("a,0,vgg99,1,64\n", "vgg99"),
    ],
)
def test_a_broken_trace_is_named_with_its_place(tmp_path: Path, line: str, told: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(HEAD + line)

    assert told in sim("run", "--policy", "fifo", "--workload", str(file), code=2)


def test_progress_counts_all_ended_jobs() -> None:
    commands = [
        news(f"job.{state}", A) for state in ("succeeded", "failed", "cancelled", "running")
    ]

    assert ended([*commands, news("node.lost", N1), RequestPlan()]) == 3
