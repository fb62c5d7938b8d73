"""Nodes from a real Slurm: four machines with two slots each, all on this host."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import (
    RESIZED,
    RESIZED_SAMPLES,
    Cluster,
    assert_nothing_lost,
    further,
    looked,
    training_job,
)
from tests.support.commands import Finished, ones
from tests.support.slurm import SlurmCluster, slurm

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(900)]

EPOCHS = 60


class Provided(Cluster):
    """A cluster whose nodes come from Slurm."""

    slurm: SlurmCluster

    def cluster(self, command: str, *options: str) -> Finished:
        """Run `ones cluster ...`."""
        line = ("cluster", command, *options, "--dir", str(self.home), "-o", "json")
        done = ones(*line, limit_s=240, SLURM_CONF=self.slurm.environ["SLURM_CONF"])
        assert done.code == 0, done.err + self.said()
        return done

    def nodes(self) -> dict[str, str]:
        """Return the state of each node."""
        return {row["node"]: row["state"] for row in self.ones("node", "list", "-o", "json").json}

    def decisions(self) -> list[tuple[str, str]]:
        """Return the actions of the autoscaler, with their reasons."""
        return [(one["action"], one["why"]) for one in self.cluster("status").json["decisions"]]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Provided]:
    with slurm(tmp_path / "slurm") as engine:
        made = Provided(tmp_path / "home", tmp_path / "jobs")
        made.slurm = engine
        made.cluster("up", "--slurm", "-N", "2", "--max-nodes", "4", "--time", "1",
                     "--notice", "25s", "--wait", "2s", "--idle", "5s")  # fmt: skip
        try:
            yield made
        finally:
            made.cluster("down")


def test_jobs_outlive_requeue_drain_and_time_limit_and_the_allocation_follows_the_queue(
    cluster: Provided,
) -> None:
    engine = cluster.slurm
    jobs = [
        cluster.submit(
            RESIZED, name=f"job{number}", batch_size=12, max_batch_size=96, max_local_batch=12,
            slots=[1, 3], record_samples=True, stop={"epochs": EPOCHS},
            env={"OMP_NUM_THREADS": "1"},
        )
        for number in range(12)
    ]  # fmt: skip
    looked(lambda: [*cluster.nodes().values()].count("up"), lambda up: up == 4)

    job, _ = next(iter(engine.jobs().items()))
    engine.call("scontrol", "requeue", job)
    looked(engine.jobs, lambda running: job not in running)
    job, host = next(iter(engine.jobs().items()))
    engine.call("scontrol", "update", f"NodeName={host}", "State=drain", "Reason=new disk")
    looked(lambda: engine.call("sinfo", "-h", "-N", "-n", host, "-o", "%T").strip(),
           lambda state: state == "drained")  # fmt: skip
    engine.call("scontrol", "update", f"NodeName={host}", "State=resume")
    for name in jobs:
        assert (
            ones("wait", name, "--timeout", "600", limit_s=620, ONES_HOME=str(cluster.home)).code
            == 0
        )

    for name in jobs:
        whole = {epoch: list(range(RESIZED_SAMPLES)) for epoch in range(1, EPOCHS + 1)}
        assert cluster.samples(name) == whole
    said = json.dumps(cluster.decisions())
    for reason in ("of at least 2 nodes", "jobs wait for", "end-of-time-limit"):
        assert reason in said


def test_machines_are_requested_for_a_waiting_job_and_returned_when_idle(
    cluster: Provided, tmp_path: Path
) -> None:
    cluster.cluster("up", "--slurm", "-N", "1", "--time", "60")
    looked(lambda: len(cluster.slurm.jobs()), lambda held: held == 1)

    (tmp_path / "gang.py").write_text("print('done')")
    done = cluster.run(tmp_path, "torchrun", "gang.py", options=("--slots", "5"))
    assert (done.code, done.out.count("done")) == (0, 5)
    looked(lambda: len(cluster.slurm.jobs()), lambda held: held == 1)

    whys = [f"{action}: {why}" for action, why in cluster.decisions()]
    assert any(why.startswith("request: 1 job waits for 5 slots since") for why in whys)
    assert sum(": idle for" in why for why in whys if why.startswith("drain: ")) >= 2


def test_an_allocation_that_ends_during_a_rescale_costs_the_others_nothing(
    cluster: Provided,
) -> None:
    cluster.cluster("up", "--slurm", "-N", "2", "--time", "60")
    job = training_job(cluster, slots=1)
    looked(lambda: [*cluster.nodes().values()].count("up"), lambda up: up == 2)
    (home,) = {one["node"] for one in cluster.show(job)["workers"]}
    newcomers = next(one for one, host in cluster.slurm.jobs().items() if not home.endswith(host))

    assert cluster.ones("resize", job, "--slots", "4").code == 0
    cluster.until(job, lambda shown: shown["state"] == "rescaling")
    cluster.slurm.call("scancel", newcomers)
    further(cluster, job, 5)

    assert_nothing_lost(cluster, job)


def test_a_script_runs_straight_under_srun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RESIZED.replace("agent.epochs(1000)", "agent.epochs(3)"))
    with slurm(tmp_path / "slurm") as engine:
        out = engine.call(
            "srun", "-N2", "-n2", f"--chdir={tmp_path}", "--export=ALL,OMP_NUM_THREADS=1",
            sys.executable, str(script),
        )  # fmt: skip

    ranks: dict[str, dict[str, str]] = {}
    for line in out.splitlines():
        if line.startswith("epoch"):
            _, epoch, _, rank, digest = line.split()
            ranks.setdefault(epoch, {})[rank] = digest
    assert [sorted(found) for found in ranks.values()] == [["0", "1"]] * 3
    assert all(len(set(found.values())) == 1 for found in ranks.values())
