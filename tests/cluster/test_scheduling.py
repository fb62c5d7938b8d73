"""Real clusters under the search: jobs grow, make room and finish; deaths lose nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.cluster import (
    Cluster,
    check_all_done,
    kill,
    running,
    submit_searched,
)

pytestmark = pytest.mark.slow  # a cluster or devices of its own


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("o"), policy="ones") as made:
        agent = made.up()["agents"][0]
        settings = made.home / "agent-1.toml"
        # These jobs sleep: no slot waits for a core of this host.
        settings.write_text(f"cores = {made.slots}\n{settings.read_text()}")
        kill(agent)
        made.up()
        yield made


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
