"""Submit, run, follow: real processes, real sockets, real training."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.client import BlockingClient, Client, JobSpec, StopRule
from controlplane.client.formats import moment
from controlplane.client.job_file import load_job
from tests.support.cluster import TOY, Cluster

EPOCH = list(range(400))
TOY_OUTPUT = [f"epoch {(step - 1) // 20} step {step}" for step in range(1, 81)] + ["done"]


@pytest.mark.slow
def test_seven_jobs_share_four_slots_without_lost_or_repeated_samples(cluster: Cluster) -> None:
    jobs = [cluster.submit(record_samples=True) for _ in range(7)]

    assert [cluster.wait(job).code for job in jobs] == [0] * 7
    for job in jobs:
        assert cluster.output(job) == TOY_OUTPUT
        assert cluster.samples(job) == dict.fromkeys((1, 2, 3, 4), EPOCH)
    shown = cluster.show(jobs[-1])
    assert shown["state"] == "succeeded"
    assert shown["reason"] == "all 4 epochs are done"
    assert [epoch["step"] for epoch in shown["epochs"]] == [20, 40, 60, 80]
    assert shown["progress"] == 1.0


@pytest.mark.slow
async def test_jobs_of_one_folder_may_start_at_the_same_moment(cluster: Cluster) -> None:
    spec = load_job(cluster.write(TOY))
    async with Client(cluster.home) as client:
        jobs = await asyncio.gather(*(client.submit(spec) for _ in range(8)))
        ended = [await client.wait(job, timeout=60) for job in jobs]

    assert [detail.summary.state for detail in ended] == ["succeeded"] * 8


@pytest.mark.slow
def test_a_job_shows_its_speed_before_its_first_epoch_ends(cluster: Cluster) -> None:
    job = cluster.submit(env={"PAUSE_S": "2", "OMP_NUM_THREADS": "1"})

    shown = cluster.until(job, lambda shown: shown["samples_per_s"] > 0)
    assert cluster.ones("cancel", job).code == 0

    assert shown["epochs"] == []


@pytest.mark.slow
def test_logs_can_be_followed_while_the_job_runs(cluster: Cluster) -> None:
    job = cluster.submit(env={"PAUSE_S": "0.01", "OMP_NUM_THREADS": "1"})

    followed = cluster.ones("logs", job, "-f")

    lines = [line for line in followed.out.splitlines() if not line.startswith("[ones]")]
    assert (followed.code, lines) == (0, TOY_OUTPUT)
    assert cluster.show(job)["state"] == "succeeded"


@pytest.mark.slow
def test_logs_print_the_selected_lines_with_their_ranks(cluster: Cluster) -> None:
    script = TOY.replace('print("done")', 'print("done")\nagent.rank or print("no end", end="")')
    job = cluster.submit(script, slots=[2, 2], batch_size=100)
    assert cluster.wait(job).code == 0

    def said(*options: str) -> list[str]:
        done = cluster.ones("logs", job, *options)
        assert done.code == 0
        return done.out.splitlines()

    assert sorted(said("--grep", "^epoch 3 step 16|done")) == [
        "[0] done", "[0] epoch 3 step 16", "[1] done", "[1] epoch 3 step 16",
    ]  # fmt: skip
    assert said("--rank", "0", "--tail", "2") == ["done", "no end"]
    assert said("--rank", "0", "--tail", "1", "-f", "--prefix") == ["[0] no end"]
    (line,) = map(json.loads, said("--rank", "1", "--grep", "done", "-o", "jsonl"))
    assert line == {"time": line["time"], "node": "node-1", "rank": 1, "text": "done"}
    (timed,) = said("--rank", "1", "--grep", "done", "--timestamps")
    assert timed == f"{moment(line['time'])} done"
    assert said("--since", "1h") == said()
    assert said("--since", "0s") == []


@pytest.mark.slow
@pytest.mark.parametrize(("option", "said"), [
    (("--since", "soon"), "--since 'soon' is not a duration; write 90s, 5m, 2h or 1d"),
    (("--tail", "-1"), "--tail -1 is below 0; give a number of lines"),
    (("--grep", "a["), "'a[' is not a regular expression: unterminated character set"),
])  # fmt: skip
def test_an_invalid_log_option_is_explained(
    cluster: Cluster, option: tuple[str, str], said: str
) -> None:
    done = cluster.ones("logs", "nobody-1", *option)

    assert (done.code, done.out, said in done.err) == (2, "", True)


def test_several_jobs_are_waited_for_and_cancelled_at_once(cluster: Cluster) -> None:
    long, short, wrong = (
        cluster.submit(f"import sys, time; time.sleep({time_s}); sys.exit({code})")
        for time_s, code in ((300, 0), (0, 0), (0, 3))
    )

    ended = cluster.ones("wait", short, "nobody-1", short, "-o", "json")
    cluster.wait(wrong)
    late = cluster.ones("wait", wrong, long, "--timeout", "0.5")
    listed = cluster.ones("ps", "--name", "toy", "--state", "running,starting", "-o", "quiet")
    cancelled = cluster.ones("cancel", long, short)

    assert ended.code == 3
    assert [(end["job"], end["state"]) for end in ended.json] == [
        (short, "succeeded"),
        ("nobody-1", None),
    ]
    assert ended.err == "ones: no job 'nobody-1'; `ones ps --all` lists every job\n"
    assert (late.code, late.out.split(":")[0]) == (6, f"{wrong} failed")
    assert late.err.endswith(
        f"{long} had not ended after 0.5 s; wait longer, or inspect the job with `ones show`\n"
    )
    assert listed.out.split() == [long]
    assert (cancelled.code, cancelled.out.splitlines()) == (
        0,
        [f"{long} cancelled", f"{short} succeeded, had ended before"],
    )


def test_the_job_file_overrides_the_script_with_a_note_in_the_log(cluster: Cluster) -> None:
    job = cluster.submit(batch_size=50, lr=0.01, stop={"epochs": 2})
    cluster.wait(job)

    notes = [line for line in cluster.ones("logs", job).out.splitlines() if "overrides" in line]
    assert notes == [
        "[ones] batch_size 50 of the job file overrides the script's 20",
        "[ones] lr 0.01 of the job file overrides the script's 0.05",
        "[ones] stop epochs 2 of the job file overrides the script's 4",
    ]
    epochs = cluster.show(job)["epochs"]
    assert [(e["step"], e["global_batch"], e["lr"]) for e in epochs] == [
        (8, 50, 0.01),
        (16, 50, 0.01),
    ]


def test_a_metric_ends_a_job(cluster: Cluster) -> None:
    stop = {"metric": "mse", "at_least": 0.0, "consecutive": 2}

    job = cluster.submit(stop=stop)
    cluster.wait(job)

    shown = cluster.show(job)
    assert (shown["state"], shown["epoch"], shown["progress"]) == ("succeeded", 2, None)
    assert "for 2 epochs in a row" in shown["reason"]


def test_a_number_of_samples_ends_a_job_within_an_epoch(cluster: Cluster) -> None:
    job = cluster.submit(stop={"samples": 500}, record_samples=True)
    cluster.wait(job)

    shown = cluster.show(job)
    assert (shown["state"], shown["samples_done"]) == ("succeeded", 500)
    taken = cluster.samples(job)
    assert taken[1] == EPOCH
    assert len(set(taken[2])) == 100


def test_later_edits_do_not_reach_a_job_that_was_submitted(cluster: Cluster) -> None:
    blocker = [cluster.submit("import time; time.sleep(60)") for _ in range(4)]
    path = cluster.write(TOY)
    job = cluster.ones("submit", str(path)).out.strip()

    (path.parent / "train.py").write_text("raise SystemExit(7)")
    for other in blocker:
        cluster.ones("cancel", other)

    assert cluster.wait(job).code == 0


def test_a_module_named_elastic_does_not_hide_the_library(cluster: Cluster) -> None:
    path = cluster.write("import mine\n" + TOY, files={"elastic.py": "", "mine.py": "VALUE = 1"})

    done = cluster.ones("submit", str(path), "--wait")

    assert done.code == 0, cluster.ones("logs", done.out.strip()).out


def test_submitting_twice_with_the_same_key_makes_a_single_job(cluster: Cluster) -> None:
    path = str(cluster.write(TOY))

    first, second = (cluster.ones("submit", path, "--key", "mine").out for _ in range(2))

    assert first == second
    assert cluster.wait(first.strip()).code == 0


def test_the_python_client_submits_waits_and_tails(cluster: Cluster) -> None:
    folder = cluster.write(TOY).parent
    spec = JobSpec(
        name="mine", script="train.py", workdir=str(folder), batch_size=20, stop=StopRule(epochs=1),
        env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    with BlockingClient(cluster.home) as client:
        job = client.submit(spec)
        detail = client.wait(job, timeout=60)
        lines = [line for line in client.tail(job) if not line.startswith("[ones]")]
        types = [event.event for event in client.events() if event.job == job]

    assert detail.summary.state == "succeeded"
    assert lines == [*TOY_OUTPUT[:20], "done"]
    assert types == [
        "job.submitted", "job.starting", "worker.started", "worker.ready", "job.running",
        "job.epoch", "worker.exited", "job.succeeded",
    ]  # fmt: skip


def test_a_client_needs_only_pyzmq_and_msgpack(cluster: Cluster) -> None:
    script = Path(__file__).parents[2] / "examples" / "plain_msgpack_client.py"
    code = (
        "import sys, runpy; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: print('ours:', sorted({'schemas', 'controlplane', 'msgspec'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(script), str(cluster.write(TOY))], capture_output=True,
        text=True, timeout=60, env={**os.environ, "ONES_HOME": str(cluster.home)}, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith(("epoch", "done"))] == TOY_OUTPUT
    assert lines[-2].endswith("succeeded: all 4 epochs are done")
    assert lines[-1] == "ours: []"
