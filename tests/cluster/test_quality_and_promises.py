"""Policies `slaq` and `oasis` on real clusters, as their users meet them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import TOY, Cluster

EPOCH = list(range(400))
SAMPLES = {"samples": 4 * len(EPOCH)}
SLOW = {"PAUSE_S": "0.05", "OMP_NUM_THREADS": "1"}
HOPELESS = {"value": 10.0, "deadline_s": 0.5, "decay": 20.0}
WITH_ROOM = {"value": 10.0, "deadline_s": 300.0, "decay": 0.1}
pytestmark = pytest.mark.slow


@contextmanager
def cluster_under(policy: str, base: Path, options: str) -> Iterator[Cluster]:
    """A cluster with two slots and options of its policy."""
    made = Cluster(base / "home", base / "jobs", slots=2, policy=policy)
    made.up()
    try:
        made.down()
        with (made.home / "controller.toml").open("a") as settings:
            settings.write(f"options = {options}\n")
        made.up()
        yield made
    finally:
        made.down()


def submitted(cluster: Cluster, **fields: Any) -> tuple[str, list[str]]:
    """A job, and what its user is told of it."""
    done = cluster.ones("submit", str(cluster.write(TOY, env=SLOW, record_samples=True, **fields)))
    job = done.out.strip()
    notes = [line.removeprefix(f"{job}: ") for line in done.err.splitlines()]
    return job, notes[1:]  # the first one says what travels


def test_oasis_promises_rejects_and_keeps_its_promise(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    options = "{ interval_s = 1.0, start_s = 5.0 }"
    with cluster_under("oasis", tmp_path_factory.mktemp("o"), options) as cluster:
        patient, told = submitted(cluster, stop=SAMPLES)
        cluster.until_epoch(patient, 1)  # now it is known how fast its like are
        hopeless, nothing = submitted(cluster, stop=SAMPLES, utility=HOPELESS)
        promised, _ = submitted(cluster, stop=SAMPLES, utility=WITH_ROOM)
        codes = [cluster.wait(job).code for job in (patient, hopeless, promised)]
        refused, kept = cluster.show(hopeless), cluster.show(promised)
        shown = cluster.ones("show", promised).out
        samples = [cluster.samples(job) for job in (patient, promised)]

    assert [note.split(":")[0] for note in told] == ["no utility stated"]
    assert nothing == []
    assert codes == [0, 1, 0]
    assert refused["state"] == "rejected"
    assert "a window that would be accepted" in refused["reason"]
    assert kept["ended_at"] <= kept["promised_end"]
    assert ": kept, " in shown
    assert samples == [dict.fromkeys((1, 2, 3, 4), EPOCH)] * 2


def test_slaq_reports_its_predictions(tmp_path_factory: pytest.TempPathFactory) -> None:
    options = "{ interval_s = 1.0 }"
    with cluster_under("slaq", tmp_path_factory.mktemp("q"), options) as cluster:
        job, notes = submitted(cluster, slots=[1, 2])
        expected = cluster.until(  # losses of steps alone let it expect something, too
            job, lambda shown: shown["predicted_loss"] is not None and bool(shown["epochs"])
        )
        screen = cluster.ones("top", "--once").out
        code = cluster.wait(job).code
        samples = cluster.samples(job)

    assert [note.split(":")[0] for note in notes] == ["slaq shares slots by training losses"]
    told = [
        epoch["train_loss"] for epoch in expected["epochs"]
    ]  # by now maybe less than was expected
    assert expected["predicted_loss"] < max(told)
    assert "predicted" in screen.split()
    assert code == 0
    assert samples == dict.fromkeys((1, 2, 3, 4), EPOCH)
