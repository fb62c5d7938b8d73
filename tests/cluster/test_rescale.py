"""Real clusters, real workers: jobs change size while they train, and lose nothing."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster import (
    RESIZED,
    Cluster,
    assert_nothing_lost,
    further,
    kill,
    kinds,
    resize,
    running,
    training_job,
)

pytestmark = pytest.mark.slow  # a cluster or devices of its own


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("r")) as made:
        yield made


@pytest.fixture
def cluster(house: Cluster) -> Iterator[Cluster]:
    """Four slots of one node; no job is left behind."""
    yield house
    house.clear()


def test_a_job_takes_every_size_and_loses_no_sample(cluster: Cluster) -> None:
    job = training_job(cluster)
    for slots in (2, 4, 3, 1, 0, 2):
        shown = resize(cluster, job, slots)
    further(cluster, job)

    assert shown["rescales"] == 6
    assert shown["batch_changes"] == 0
    assert [len(version["slots"]) for version in shown["versions"]] == [1, 2, 4, 3, 1, 0, 2]
    assert_nothing_lost(cluster, job)


def test_random_resizes_in_quick_succession_lose_no_sample(cluster: Cluster) -> None:
    job = training_job(cluster)
    choose = random.Random(7)  # noqa: S311 - sizes
    for _ in range(8):
        slots, batch = choose.randint(0, 4), choose.choice((12, 24, 48, 96))
        order = ("--slots", str(slots), *(("--batch", str(batch)) if slots else ()))
        assert cluster.ones("resize", job, *order).code == 0
    resize(cluster, job, 3, "--batch", "30")
    further(cluster, job)
    shown = cluster.until(job, lambda s: len(s["workers"]) == 3)  # those that left are gone

    assert (shown["slots"], shown["global_batch"]) == (3, 30)
    assert [worker["local_batch"] for worker in shown["workers"]] == [10, 10, 10]
    assert_nothing_lost(cluster, job)


def test_a_resumed_job_continues_from_the_step_of_its_pause(cluster: Cluster) -> None:
    job = training_job(cluster, 2)
    further(cluster, job)
    assert cluster.ones("pause", job).code == 0
    paused = cluster.until(job, lambda s: s["state"] == "paused")
    assert cluster.ones("resume", job).code == 0
    cluster.until(job, lambda s: s["state"] == "running")
    shown = further(cluster, job)

    assert paused["workers"] == [] or {w["phase"] for w in paused["workers"]} <= {"retiring"}
    assert shown["versions"][-1]["resumed_step"] == paused["samples_done"] // 12
    assert_nothing_lost(cluster, job)


def test_two_jobs_trade_slots_on_a_full_cluster(cluster: Cluster) -> None:
    first, second = training_job(cluster, 3), training_job(cluster, 1)
    for turn in range(2):
        large, small = (first, second) if turn % 2 else (second, first)
        # In the second turn the one that grows is ordered first: it has to wait, not to die.
        orders = [(small, 1), (large, 3)]
        for job, slots in reversed(orders) if turn else orders:
            assert cluster.ones("resize", job, "--slots", str(slots)).code == 0
        for job, slots in orders:
            cluster.until(job, lambda s, n=slots: s["slots"] == n and s["state"] == "running")  # type: ignore[misc]
    (wide, of_wide), (narrow, of_narrow) = sorted(
        ((job, slots_of(cluster.show(job))) for job in (first, second)), key=lambda it: -len(it[1])
    )
    # Each to where the other is: neither can begin, unless one steps aside.
    given = max(of_wide)
    there = {wide: of_wide - {given} | of_narrow, narrow: {given}}
    for job, on in there.items():
        options = [part for slot in sorted(on) for part in ("--on", slot)]
        assert cluster.ones("resize", job, *options).code == 0
    for job, on in there.items():
        cluster.until(job, lambda s, on=on: slots_of(s) == on and s["state"] == "running")  # type: ignore[misc]

    owners: dict[str, str] = {}
    for event in cluster.events():
        if event["type"] == "worker.ready" and event["job"] in {first, second}:
            assert event["slot"] not in owners, event
            owners[event["slot"]] = event["job"]
        elif event["type"] == "worker.exited" and owners.get(event["slot"]) == event["job"]:
            del owners[event["slot"]]
    for job in (first, second):
        assert_nothing_lost(cluster, job)


def test_a_newcomer_with_another_order_of_the_data_is_dismissed(cluster: Cluster) -> None:
    listed = "data = TensorDataset(inputs"
    other = "inputs = inputs.flip(0) if os.path.exists(os.environ['FLIP']) else inputs\n"
    script = RESIZED.replace(listed, other + listed)
    flip = cluster.home / "flip"
    job = training_job(cluster, script=script, env={"OMP_NUM_THREADS": "1", "FLIP": str(flip)})
    flip.touch()

    assert cluster.ones("resize", job, "--slots", "2").code == 0
    shown = cluster.until(job, lambda s: "another order" in s["reason"])

    assert shown["slots"] == 1
    assert "sort what the file system lists" in shown["reason"]
    flip.unlink()
    resize(cluster, job, 2)
    assert_nothing_lost(cluster, job)


def slots_of(shown: dict[str, Any]) -> set[str]:
    return {worker["slot"] for worker in shown["workers"]}


FAULTS = {  # before the change, in it and after it; `training/test_group_changes.py` has the others
    "a newcomer is lost while it is prepared": "ready:rank=2:version=2=kill",
    "the state arrives damaged": "handover.send:rank=1:version=2=corrupt",
    "one is a step behind when a member is lost": (
        "reduced:rank=1:step=40:version=2=kill; reduced:rank=0:step=40:version=2=fail"
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_resize_survives_a_fault_without_losing_samples(cluster: Cluster, fault: str) -> None:
    job = training_job(cluster, 2, faults=fault)
    assert cluster.ones("resize", job, "--slots", "3").code == 0
    whole = cluster.until(job, lambda s: s["slots"] == 3 and s["state"] == "running")
    shown = further(cluster, job)

    assert [kind for kind, _ in kinds(shown)].count("start") == 1  # never back to a checkpoint
    damaged = fault.endswith("corrupt")  # which is noticed two steps later
    assert_nothing_lost(cluster, job, equal_after=whole["epoch"] + 1 if damaged else 0)


def test_a_job_whose_members_are_all_lost_goes_back_to_its_last_epoch(cluster: Cluster) -> None:
    job = training_job(cluster, 2)
    shown = further(cluster, job)
    for worker in shown["workers"]:
        kill(worker["pid"])
    cluster.until(job, lambda s: s["state"] == "running" and len(s["versions"]) > 1)
    further(cluster, job)

    assert_nothing_lost(cluster, job)


@pytest.mark.parametrize("part", ["agent", "controller"])
def test_a_resize_survives_the_death_of_a_daemon(cluster: Cluster, part: str) -> None:
    job = training_job(
        cluster, 2, faults="ready:rank=2:version=2=stall 0.5; built:rank=1:version=2=stall 0.5"
    )
    assert cluster.ones("resize", job, "--slots", "3").code == 0
    pids = cluster.up()
    kill(pids["agents"][0] if part == "agent" else pids["controller"])
    cluster.up()
    shown = cluster.until(job, lambda s: s["slots"] == 3 and s["state"] == "running")
    further(cluster, job)

    assert kinds(shown) == [("start", "formed"), ("join", "formed")]
    assert_nothing_lost(cluster, job)


def test_the_output_of_every_former_worker_is_kept(cluster: Cluster) -> None:
    job = training_job(cluster)
    for slots in (3, 1, 2):
        resize(cluster, job, slots)
        further(cluster, job, 1)
    shown = cluster.show(job)
    cluster.ones("cancel", job)

    by_epoch: dict[int, set[int]] = defaultdict(set)
    for line in cluster.output(job):
        if line.startswith("epoch"):
            _, epoch, _, rank, _ = line.split()
            by_epoch[int(epoch)].add(int(rank))
    for finished in range(shown["epoch"]):
        assert by_epoch[finished] == set(range(len(by_epoch[finished])))
    assert max(len(ranks) for ranks in by_epoch.values()) == 3


REFUSED = (
    (("--slots", "5"), "slots: 5 is outside the job's slots [1, 4]"),
    (("--batch", "97"), "batch: 97 is outside"),
    (("--slots", "4", "--batch", "3"), "batch: 3 is outside 4 to 96"),
    (("--on", "nowhere/0"), "there is no slot 'nowhere/0'"),
    ((), "the request changes nothing"),
)


def test_an_impossible_resize_is_refused(cluster: Cluster) -> None:
    job = training_job(cluster)
    refused = [cluster.ones("resize", job, *order) for order, _ in REFUSED]
    shown = cluster.show(job)

    for done, (_, said) in zip(refused, REFUSED, strict=True):
        assert (done.code, said in done.err) == (2, True), done.err
        assert done.err.count("\n") == 1
    assert (shown["state"], shown["rescales"], shown["batch_changes"]) == ("running", 0, 0)
