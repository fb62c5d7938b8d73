"""Sweeps with real processes: whatever is killed, finished units stay and results are exact."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import (
    Cluster,
    kill,
    ledger,
    running,
    submit_sweep,
    trained_alone,
    until_sweep,
)

pytestmark = pytest.mark.slow  # a cluster or devices of its own

FOUR = 'type = "random"\nconfigurations = 4\nmax_epochs = 2\n'  # 4 x 2 x 4 units


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("w"), policy="fair") as made:
        yield made


def test_kill_9_of_worker_agent_and_controller_loses_no_finished_unit(house: Cluster) -> None:
    job = submit_sweep(house, FOUR)
    until_sweep(house, job, lambda shown: shown.units_done >= 4)
    kill(house.show(job)["workers"][0]["pid"])
    until_sweep(house, job, lambda shown: shown.units_done >= 8)
    pids = house.up()
    kill(pids["agents"][0])
    house.up()
    until_sweep(house, job, lambda shown: shown.units_done >= 12)
    before = ledger(house, job).units
    kill(pids["controller"])
    house.up()

    assert house.wait(job).code == 0, house.said()

    units = ledger(house, job).units
    assert units[: len(before)] == before
    assert sorted((unit.trial, unit.version) for unit in units) == [
        (trial, version) for trial in range(4) for version in range(1, 9)
    ]
    assert until_sweep(house, job, lambda _: True).units_repeated == 0
    assert trained_alone(house, job, 0) == {"equal": True, "first_difference": None, "units": 8}


def test_a_revoked_slot_is_released_during_a_long_unit(house: Cluster) -> None:
    job = submit_sweep(house, FOUR, pause_s=60.0, more="revoke_s = 0.5")
    until_sweep(house, job, lambda shown: sum(t.state == "training" for t in shown.trials) == 4)

    assert house.ones("resize", job, "--slots", "1").code == 0

    left = house.until(job, lambda shown: len(shown["workers"]) == 1)["workers"]
    shown = until_sweep(house, job, lambda shown: shown.units_done == 0)
    assert [t.slot for t in shown.trials if t.state == "training"] == [left[0]["slot"]]
    house.ones("cancel", job)


def test_a_sweep_finishes_without_a_lost_node(tmp_path: Path) -> None:
    silence = "[silence]\nsuspect_s = 1.0\nlost_s = 3.0"
    with running(tmp_path, silence, slots=2, agents=2, policy="fair") as pair:
        pids = pair.up()
        job = submit_sweep(pair, FOUR, pause_s=0.5)
        until_sweep(pair, job, lambda shown: shown.units_done >= 6 and shown.summary.slots == 4)
        workers = pair.show(job)["workers"]

        kill(pids["agents"][1])
        for worker in workers:
            if worker["node"] == "node-2":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker["pid"], signal.SIGKILL)
        before = ledger(pair, job).units

        assert pair.wait(job).code == 0, pair.said()
        units = ledger(pair, job).units
        assert units[: len(before)] == before
        assert len({(unit.trial, unit.version) for unit in units}) == len(units) == 32
        assert trained_alone(pair, job, 1)["equal"]


def test_asha_selects_the_same_winner_beside_three_jobs(tmp_path: Path) -> None:
    asha = 'type = "asha"\nconfigurations = 24\nmax_epochs = 9\n'
    with running(tmp_path, policy="ones") as shared:
        alone = submit_sweep(shared, asha, pause_s=0.0)
        assert shared.wait(alone).code == 0, shared.said()
        sweep = submit_sweep(shared, asha, pause_s=0.1)
        until_sweep(shared, sweep, lambda shown: shown.units_done >= 8)
        env = {"PAUSE_S": "0.05", "HOLD": "/"}
        jobs = [shared.submit(slots=[1, 2], env=env) for _ in range(3)]

        for job in (*jobs, sweep):
            assert shared.wait(job).code == 0, shared.said()

        versions = shared.show(sweep)["versions"]
        detail = until_sweep(shared, sweep, lambda _: True)
        assert (detail.trials_total, detail.units_repeated) == (24, 0)
        assert len({len(version["slots"]) for version in versions}) > 1, "slots moved"
        expected = until_sweep(shared, alone, lambda _: True)
        assert detail.best == expected.best
        assert [(trial.epochs, trial.best_score) for trial in detail.trials] == [
            (trial.epochs, trial.best_score) for trial in expected.trials
        ]


def test_the_last_configuration_continues_as_a_job_counted_by_its_sweep(house: Cluster) -> None:
    one = 'type = "random"\nconfigurations = 1\nmax_epochs = 3\n'
    sweep = submit_sweep(house, one, more="graduate_batch = 4", pause_s=0.0)
    assert house.wait(sweep).code == 0, house.said()
    (trial,) = until_sweep(house, sweep, lambda shown: shown.trials[0].state == "graduated").trials
    job = trial.graduated_as

    assert house.wait(job).code == 0, house.said()

    (after,) = until_sweep(house, sweep, lambda _: True).trials
    assert len(ledger(house, sweep).units) == 4, "one epoch of it was the sweep's"
    assert (after.epochs, len(after.metrics)) == (3, 3)
    last = house.show(job)["epochs"][-1]
    assert {**last["metrics"], "loss": last["train_loss"]} == after.metrics[-1]
