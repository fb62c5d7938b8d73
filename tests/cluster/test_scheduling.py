"""Real clusters under the search: jobs grow, make room and finish; deaths lose nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.cluster import (
    Cluster,
    await_gone,
    check_all_done,
    explained,
    kill,
    search_process,
    submit_searched,
)

pytestmark = pytest.mark.slow  # a cluster or devices of its own


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    base: Path = tmp_path_factory.mktemp("o")
    made = Cluster(base / "home", base / "jobs", policy="ones")
    agent = made.up()["agents"][0]
    settings = made.home / "agent-1.toml"
    # These jobs sleep: no slot waits for a core of this host.
    settings.write_text(f"cores = {made.slots}\n{settings.read_text()}")
    kill(agent)
    await_gone(agent)
    made.up()
    yield made
    made.down()


@pytest.fixture
def cluster(house: Cluster) -> Iterator[Cluster]:
    """Four slots of one node under `ones`; no job is left behind.

    Each test's jobs are a family of their own: on a busy machine the search rightly learns that
    groups gain nothing, and would not let the next test's jobs grow.
    """
    yield house
    house.clear()


def test_jobs_grow_shrink_for_others_and_finish(cluster: Cluster) -> None:
    first = submit_searched(cluster, 80)  # long enough to be asked for room when it has grown
    grown = cluster.until(first, lambda shown: shown["slots"] >= 3)
    others = [submit_searched(cluster, 8) for _ in range(4)]
    decisions = check_all_done(cluster, others, 8) + check_all_done(cluster, [first], 80)

    assert grown["rescales"] >= 1
    codes = Counter(decision["code"] for decision in decisions)
    # Each begins once, and again each time that it had lost its slots; `fill` where the search
    # took too long to answer.
    changes = [c for job in (first, *others) for c in cluster.show(job)["history"]]
    pauses = sum(change["to_state"] == "paused" for change in changes)
    begun = codes["start"] + codes["resume"] + codes["fill"]
    assert begun == 5 + pauses, [c["reason"] for c in changes]
    assert codes["grow"] >= 2
    assert codes["shrink"] + codes["pause"] >= 1
    searched = [d for d in decisions if "slots_then" in d["numbers"]]
    assert all(d["numbers"]["slots_then"] == len(d["to"]["slots"]) for d in searched)
    # The rest came about without the search: while it was away, or because a worker was lost.
    rest = [d for d in decisions if d not in searched]
    assert {d["code"] for d in rest} <= {"fill", "lost"}, [(d["code"], d["reason"]) for d in rest]


def test_a_killed_search_process_disturbs_no_job(cluster: Cluster) -> None:
    family = "of a search that dies"
    jobs = [submit_searched(cluster, 14, family=family)]
    cluster.until(jobs[0], lambda shown: shown["slots"] >= 2)
    dead = search_process(cluster)

    kill(dead)
    jobs += [submit_searched(cluster, 14, family=family) for _ in range(2)]
    kill(_another(cluster, dead))
    decisions = check_all_done(cluster, jobs, 14)

    assert any(decision["code"] == "grow" for decision in decisions)
    assert "search process exited" in (cluster.home / "logs" / "controller.log").read_text()


@pytest.mark.parametrize("victim", ["controller", "agents"])
def test_a_killed_controller_loses_no_sample_during_rescales(cluster: Cluster, victim: str) -> None:
    family = f"of {victim} that die"
    jobs = [submit_searched(cluster, 18, family=family)]
    cluster.until(jobs[0], lambda shown: shown["slots"] >= 2)
    jobs += [submit_searched(cluster, 18, family=family) for _ in range(2)]
    for _ in range(2):
        cluster.until(jobs[0], lambda shown: shown["state"] in {"rescaling", "succeeded"})
        pids = cluster.up()[victim]
        for pid in [pids] if isinstance(pids, int) else pids:
            kill(pid)
            await_gone(pid)
        cluster.up()

    check_all_done(cluster, jobs, 18)


def test_a_waiting_job_states_its_expected_start(cluster: Cluster) -> None:
    first = submit_searched(cluster, 150, slots=[4, 4], family="whole clusters")
    cluster.until(first, lambda shown: shown["slots"] == 4)
    second = submit_searched(cluster, 150, slots=[4, 4], family="whole clusters")

    told = cluster.until(second, lambda shown: "; expected to start " in shown["reason"])
    waits = explained(cluster, second)[-1]
    for job in (second, first):
        cluster.ones("cancel", job)

    assert told["state"] == "queued"
    assert (waits["outcome"], waits["code"]) == ("waits", "waits")
    low, middle, high = (
        waits["numbers"][name] for name in ("start_earliest_s", "start_s", "start_latest_s")
    )
    assert 0.0 <= low <= middle <= high
    assert high > 0.0


def _another(cluster: Cluster, dead: int) -> int:
    """The search process that came after `dead`."""
    found: list[int] = []

    def came(_: object) -> bool:
        controller = int((cluster.home / "run" / "controller.pid").read_text())
        found[:] = [c.pid for c in psutil.Process(controller).children() if c.pid != dead]
        return bool(found)

    cluster.until(cluster.ones("ps", "--all", "-o", "quiet").out.split()[0], came)
    return found[0]
