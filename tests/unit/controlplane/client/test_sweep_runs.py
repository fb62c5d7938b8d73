"""The handle of a sweep: pages, changes, rows, stored states and manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.client.client import Client
from controlplane.client.files import JobFile
from controlplane.client.sweeps import runs
from schemas.errors import BadFieldError, SettingsError
from schemas.ids import JobId, NodeId
from schemas.wire.client import ChangeSweep, GetLedger, GetSweep, Ledger, SweepChanged, SweepDetail
from schemas.wire.files import FileInfo
from tests.support.client_examples import PARTITIONS, detail, ledger, sweep, trial, unit

PAGE = 2


class Controller(Client):
    """A client whose controller has one sweep, and pages of two."""

    def __init__(self, whole: SweepDetail, units: Ledger) -> None:
        self.whole = whole
        self.units = units
        self.asked: list[Any] = []

    async def _call(self, request: Any, kind: Any, wait_s: float = 0.0) -> Any:
        self.asked.append(request)
        match request:
            case GetSweep(from_trial=begin):
                page = self.whole.trials[begin : begin + PAGE]
                return msgspec.structs.replace(self.whole, trials=page)
            case GetLedger(from_unit=begin):
                units = self.units.units[begin : begin + PAGE]
                return msgspec.structs.replace(self.units, units=units)
            case ChangeSweep():
                return SweepChanged(job=request.job, trial=request.trial or 7, state="stopped")
        raise AssertionError(request)


async def test_pages_are_joined() -> None:
    whole = detail(*(trial(number, 0.5) for number in range(5)))
    units = ledger([unit(0, version) for version in range(1, 4)])
    controller = Controller(whole, units)

    assert await controller.sweep("a-1") == whole
    assert await controller.ledger("a-1") == units
    assert [type(one) for one in controller.asked] == [GetSweep] * 3 + [GetLedger] * 2
    empty = Controller(detail(trial(0, 0.5), trials_total=9), ledger([]))  # ends the list
    assert len((await empty.sweep("a-1")).trials) == 1


async def test_each_change_has_a_key_of_its_own_unless_its_caller_gives_one() -> None:
    controller = Controller(detail(), ledger([]))

    await controller.change_sweep("a-1", "stop", 3)
    await controller.change_sweep("a-1", "stop", 3)
    await controller.change_sweep("a-1", "add", values={"lr": 0.1}, parent=2, key="mine")

    first, second, third = controller.asked
    assert first.key != second.key
    assert third == ChangeSweep(
        job=third.job, change="add", values={"lr": 0.1}, parent=2, key="mine"
    )


def test_the_best_is_the_controllers_after_the_earliest_of_its_best_epochs() -> None:
    others = trial(0, 0.7, 0.9), trial(2), trial(3, float("nan")), trial(4, 1.0, state="deleted")
    whole = detail(others[0], trial(1, 0.6, 0.9, 0.9), *others[1:], best=1)

    best = runs.best_of(whole)

    assert best is not None
    assert (best.trial.number, best.score, best.epoch) == (1, 0.9, 2)
    assert [one.number for one in runs.ranked(whole)] == [0, 1, 2, 3, 4]
    assert runs.best_of(detail(trial(0))) is None


def test_for_a_metric_that_should_be_small_the_smallest_is_best() -> None:
    spec = sweep(metric="loss", mode="min").sweep_spec()
    losses = [trial(0, 0.7, best_score=0.3), trial(1, 0.9, best_score=0.1)]
    whole = detail(*losses, spec=spec, best=1)

    assert [one.number for one in runs.ranked(whole)] == [1, 0]
    assert runs.best_of(whole) == (whole.trials[1], pytest.approx(0.1), 1)


def test_epochs_of_a_very_long_trial_keep_their_numbers_and_its_best_may_be_an_older_one() -> None:
    late = trial(0, 0.7, 0.8, first_epoch=4001, best_score=0.95, best_epoch=17, epochs=4002)

    assert [row["epoch"] for row in runs.epoch_rows(detail(late))] == [4001, 4002]
    assert runs.best_of(detail(late)) == (late, 0.95, 17)


def test_rows_are_flat_and_a_copy_counts_its_parents_epochs() -> None:
    whole = detail(trial(0, 0.7, 0.8), trial(1, 0.9, parent=0, start_epochs=2))

    assert runs.epoch_rows(whole, (1,)) == [
        {"trial": 1, "parent": 0, "config.lr": 0.02, "config.width": 16, "epoch": 3,
         "ended": 100.0, "loss": pytest.approx(0.1), "accuracy": 0.9},
    ]  # fmt: skip
    assert [row["epoch"] for row in runs.epoch_rows(whole)] == [1, 2, 3]
    assert runs.trial_row(whole.trials[1]) == {
        "trial": 1, "parent": 0, "config.lr": 0.02, "config.width": 16, "state": "waiting",
        "reason": "", "epochs": 3, "granted": 1, "partition": None, "slot": None, "best": 0.9,
        "best_epoch": 3, "loss": pytest.approx(0.1), "accuracy": 0.9,
    }  # fmt: skip


def stored(*names: str) -> list[JobFile]:
    info = FileInfo(area="work", path="x", size=1, stamp="")
    return [JobFile(name, NodeId("n1"), info) for name in names]


def test_the_state_of_a_trial_is_that_of_its_best_epoch_else_its_newest() -> None:
    whole = detail(trial(0, 0.7, 0.9, 0.8))
    best, newest = f"states/n1/0-{2 * PARTITIONS}-9.state", f"states/n2/0-{3 * PARTITIONS}-0.state"

    assert runs.chosen_state(whole, stored("work/n1/x", best, newest), 0).file.name == best
    assert runs.chosen_state(whole, stored(newest, "states/n1/0-1-1.state"), 0).file.name == newest
    reason = "continues as job a-t0-5 from epoch 1"
    job = {"state": "graduated", "reason": reason, "graduated_as": JobId("a-t0-5")}
    graduated = detail(trial(0, 0.7, 0.9, **job))
    assert runs.chosen_state(graduated, stored(best), 0).file.name == best
    said = f"trial 0 {reason}; `ones export a-t0-5"
    with pytest.raises(BadFieldError, match=said):
        runs.chosen_state(graduated, stored("states/n1/0-4-1.state"), 0)
    with pytest.raises(BadFieldError, match="no node has a state of trial 0; an ended sweep"):
        runs.chosen_state(whole, stored("states/n1/1-8-9.state"), 0)
    with pytest.raises(BadFieldError, match="a-1 has no trial 3; 0 to 0: see"):
        runs.chosen_state(whole, [], 3)


def manifest() -> runs.Manifest:
    whole = detail(trial(0, 0.7, 0.8), trial(1, 0.9), trial(2, 0.9, parent=0, start_epochs=1))
    units = [*(unit(0, version) for version in range(1, 9)), unit(1, 2), unit(1, 1)]
    units += [unit(2, version) for version in range(5, 9)]
    return runs.manifest_of(sweep().job_spec(), whole, ledger(units))


def test_the_visits_of_a_copy_in_a_stored_manifest_start_with_its_parents(tmp_path: Path) -> None:
    runs.write_manifest(manifest(), tmp_path / "m.json")
    found = runs.read_manifest(tmp_path / "m.json")

    assert found == manifest()
    assert [one.version for one in found.visits(1)] == [1, 2]
    assert [(one.trial, one.version) for one in found.visits(2)] == [
        (0, 1), (0, 2), (0, 3), (0, 4), (2, 5), (2, 6), (2, 7), (2, 8)
    ]  # fmt: skip
    with pytest.raises(BadFieldError, match="no trial 9; 0 to 2"):
        found.visits(9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("{", "is not a manifest: Input data was truncated"),
        ("{}", "is not a manifest: Object missing required field `format`"),
        ("format 2", "is a manifest of format 2, this is 1"),
    ],
)
def test_a_file_that_is_not_a_manifest_is_refused(
    tmp_path: Path, text: str | None, said: str
) -> None:
    file = tmp_path / "m.json"
    if text == "format 2":
        runs.write_manifest(msgspec.structs.replace(manifest(), format=2), file)
    elif text is not None:
        file.write_text(text)

    with pytest.raises(SettingsError, match=said):
        runs.read_manifest(file)
