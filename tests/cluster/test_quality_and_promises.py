"""Policy `oasis` on a real cluster, as its users meet it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import TOY, Cluster, running

EPOCH = list(range(400))
SAMPLES = {"samples": 4 * len(EPOCH)}
SLOW = {"PAUSE_S": "0.05", "OMP_NUM_THREADS": "1"}
HOPELESS = {"value": 10.0, "deadline_s": 0.5, "decay": 20.0}
WITH_ROOM = {"value": 10.0, "deadline_s": 300.0, "decay": 0.1}
pytestmark = pytest.mark.slow


def submitted(cluster: Cluster, **fields: Any) -> tuple[str, list[str]]:
    """A job, and what its user is told of it."""
    done = cluster.ones("submit", str(cluster.write(TOY, env=SLOW, record_samples=True, **fields)))
    job = done.out.strip()
    notes = [line.removeprefix(f"{job}: ") for line in done.err.splitlines()]
    return job, notes[1:]  # the first one says what travels


def test_oasis_promises_rejects_and_keeps_its_promise(tmp_path: Path) -> None:
    options = "options = { interval_s = 1.0, start_stall_s = 5.0 }"
    with running(tmp_path, options, policy="oasis", slots=2) as cluster:
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
