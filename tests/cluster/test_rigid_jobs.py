"""Programs of other kinds on a real cluster, beside elastic jobs: gangs, commands, their ends."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cluster import (
    Cluster,
    assert_nothing_lost,
    kill,
    resize,
    running,
    training_job,
)

pytestmark = pytest.mark.slow  # a cluster of its own

DDP = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
total = torch.stack([p.sum() for p in model.parameters()]).sum()
gathered = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
dist.all_gather(gathered, total.detach())
equal = len(set(map(float, gathered))) == 1
print(f"rank {dist.get_rank()} of {dist.get_world_size()} equal {equal}", flush=True)
dist.destroy_process_group()
os._exit(0)  # torch sometimes aborts in the interpreter's exit: threads of gloo
"""
SAVES = """
import os, pathlib, signal, sys, time
count = pathlib.Path(os.environ["COUNT"])
done = int(count.read_text()) if count.exists() else 0
def save(*_):
    time.sleep(0.3)
    count.write_text(str(done))
    print("saved", done, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("begins at", done, flush=True)
while done < 60 or not count.exists():  # it ends only after it has saved
    time.sleep(0.05)
    done += 1
print("done", done, flush=True)
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("o"), agents=2, slots=2, policy="fifo") as made:
        yield made


@pytest.fixture
def cluster(house: Cluster) -> Iterator[Cluster]:
    yield house
    house.clear()


def test_a_program_prints_here_and_ends_with_its_code(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("b\na\nb\n")

    done = cluster.run(tmp_path, "sh", "-c", "sort words.txt | uniq -c; exit 7")

    assert (done.code, done.out.split()) == (7, ["1", "a", "2", "b"])
    assert "failed: the program ended with exit code 7" in done.err


@pytest.mark.parametrize(
    ("line", "options", "end"),
    [
        (("true",), (), (0, "")),
        (("sh", "-c", "kill -9 $$"), (), (137, "the program was killed by SIGKILL")),
        (("no-such-program",), (), (127, "cannot execute 'no-such-program'")),
        (("sleep", "60"), ("--max-run-s", "1"), (124, "stopped after 1 s, its max_run_s")),
        (("torchrun", "--nnodes", "1:4", "x.py"), (), (125, "--nnodes=1:4 is not a number")),
        (("true",), ("--workdir", "nowhere"), (125, "nowhere is not a folder")),
    ],
)
def test_the_exit_code_says_how_a_program_ended(
    cluster: Cluster,
    tmp_path: Path,
    line: tuple[str, ...],
    options: tuple[str, ...],
    end: tuple[int, str],
) -> None:
    code, said = end
    done = cluster.run(tmp_path, *line, options=options)

    assert (done.code, said in done.err) == (code, True), done.err


def test_an_unmodified_torchrun_script_trains_on_two_nodes(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "ddp.py").write_text(DDP)

    done = cluster.run(tmp_path, "torchrun", "--standalone", "--nproc-per-node=3", "ddp.py", "20")

    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == [
        f"[{rank}] rank {rank} of 3 equal True" for rank in range(3)
    ]
    assert "--standalone: left out, because the cluster decides it" in done.err


def test_an_elastic_job_makes_room_for_a_gang_and_loses_no_step(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "ddp.py").write_text(DDP)
    job = training_job(cluster, slots=1, priority=1)
    resize(cluster, job, 4)
    assert cluster.ones("resume", job, "--auto").code == 0
    cluster.until_epoch(job, 2)

    done = cluster.run(tmp_path, "torchrun", "--nproc-per-node=2", "ddp.py", "50")

    assert done.code == 0, done.err
    decisions = cluster.ones("explain", job, "-o", "json").json["decisions"]
    given = [one["reason"] for one in decisions if "gives slots to ddp-" in one["reason"]]
    assert given, decisions
    cluster.until_epoch(job, cluster.show(job)["epoch"] + 2)
    assert_nothing_lost(cluster, job)


def test_a_paused_program_saves_its_work_and_goes_on_from_there(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    options = ("--detach", "--env", f"COUNT={tmp_path / 'count'}")
    job = cluster.run(tmp_path, "python", "saves.py", options=options).out.strip()
    cluster.until(job, lambda shown: shown["state"] == "running" and cluster.output(job))

    assert cluster.ones("pause", job).code == 0
    shown = cluster.until(job, lambda shown: shown["state"] == "paused" and not shown["workers"])
    assert (shown["failures"], "ended" in shown["reason"]) == (0, True)
    assert cluster.ones("resume", job).code == 0

    assert cluster.wait(job).code == 0
    first, saved, again, done = cluster.output(job)
    assert (first, done.split()[0]) == ("begins at 0", "done")
    assert again.split()[-1] == saved.split()[-1]


def test_a_program_that_saves_its_work_when_its_node_stops_goes_on_later(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    options = ("--detach", "--env", f"COUNT={tmp_path / 'count'}")
    shell = ("--no-python", "sh", "-c", "python saves.py; true")  # dies of TERM at once
    job = cluster.run(tmp_path, "torchrun", *shell, options=options).out.strip()
    cluster.until(job, lambda shown: shown["state"] == "running" and cluster.output(job))

    cluster.down()
    cluster.up()

    assert cluster.wait(job).code == 0
    first, again, done, saved = sorted(cluster.output(job))  # the last line may come late
    assert (first, done.split()[0]) == ("begins at 0", "done")
    assert again.split()[-1] == saved.split()[-1]
    assert cluster.show(job)["failures"] == 0


def test_a_program_that_ignores_term_and_its_children_are_killed_after_the_grace(
    cluster: Cluster, tmp_path: Path
) -> None:
    stubborn = "trap '' TERM; (trap '' TERM; echo child; sleep 600) & echo leader; wait"
    options = ("--detach", "--grace-s", "1")
    job = cluster.run(tmp_path, "sh", "-c", stubborn, options=options).out.strip()
    shown = cluster.until(job, lambda shown: len(cluster.output(job)) == 2 and shown["workers"])
    leader = shown["workers"][0]["pid"]

    assert cluster.ones("cancel", job).code == 0
    cluster.until(job, lambda shown: not shown["workers"])

    assert not _session(leader)


def _session(leader: int) -> list[int]:
    """Return the processes of a session that run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def test_a_program_is_warned_before_its_time_is_over(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        'name = "long"\nkind = "command"\nmax_run_s = 600.0\n'
        'warn = { before_s = 599.5, to = "first" }\n'
        'command = ["sh", "-c", "trap \'echo warned; exit 3\' USR1; while :; do sleep 0.05; done"]\n'
    )

    done = cluster.ones("submit", str(tmp_path / "job.toml"))
    job = done.out.strip()

    assert cluster.wait(job).code == 1
    assert cluster.output(job) == ["warned"]
    assert cluster.show(job)["exit_code"] == 3


def test_an_agent_that_dies_finds_its_programs_and_their_ends(
    cluster: Cluster, tmp_path: Path
) -> None:
    options = ("--detach",)
    lasting = cluster.run(tmp_path, "sh", "-c", "sleep 4; exit 5", options=options).out.strip()
    brief = cluster.run(tmp_path, "sh", "-c", "sleep 1", options=options).out.strip()
    for job in (lasting, brief):
        cluster.until(job, lambda shown: shown["state"] == "running")

    for agent in cluster.up()["agents"]:
        kill(agent)
    cluster.until(brief, lambda shown: not _alive(shown))
    cluster.up()

    assert cluster.ones("wait", brief).code == 0
    assert cluster.ones("wait", lasting).code == 1
    assert cluster.show(lasting)["exit_code"] == 5


def _alive(shown: dict[str, Any]) -> bool:
    pids = [worker["pid"] for worker in shown["workers"] if worker["pid"]]
    return any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_rank_that_is_killed_ends_the_gang(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "ddp.py").write_text(DDP)
    line = ("torchrun", "--nproc-per-node=2", "--max-restarts=1", "ddp.py", "3000")
    job = cluster.run(tmp_path, *line, options=("--detach",)).out.strip()
    shown = cluster.until(job, lambda shown: shown["state"] == "running")

    os.kill(shown["workers"][1]["pid"], signal.SIGKILL)

    shown = cluster.until(job, lambda shown: shown["failures"] == 1)
    assert cluster.wait(job).code == 0, cluster.output(job)
    history = [change["reason"] for change in cluster.show(job)["history"]]
    assert any("rank 1 was killed by SIGKILL; retrying" in reason for reason in history), history
