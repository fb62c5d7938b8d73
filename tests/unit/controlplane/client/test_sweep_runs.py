"""The handle of a sweep: pages, changes, rows, stored states, manifests, and samples of Optuna."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.client import Choice, Client, Integer, LogInteger, LogUniform
from controlplane.client.files import JobFile
from controlplane.client.sweeps import runs
from controlplane.client.sweeps.runs import SweepRun
from controlplane.client.sweeps.sampler import SamplerName, suggested
from controlplane.sweeps.configurations import drawn
from schemas.errors import BadFieldError, SettingsError
from schemas.ids import JobId, NodeId
from schemas.sweeps import Values
from schemas.wire.client import (
    ChangeSweep,
    GetLedger,
    GetSweep,
    JobDetail,
    Ledger,
    SweepChanged,
    SweepDetail,
)
from schemas.wire.files import FileInfo
from tests.support.builders import A
from tests.support.client_examples import PARTITIONS, detail, ledger, summary, sweep, trial, unit
from tests.support.schemas_examples import EXAMPLES

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


SPACE = {
    "model": Choice("cnn", "mlp"), "kernel": Integer(3, 7, when={"model": ["cnn"]}),
    "width": LogInteger(8, 512), "lr": LogUniform(1e-4, 1e-1),
}  # fmt: skip
SPEC = sweep(space=SPACE, seed=5).sweep_spec()


def accuracy(values: Values) -> float:
    """Best at a rate of 0.01, and better for cnn."""
    return 0.9 - 0.2 * abs(math.log10(float(values["lr"])) + 2) - 0.1 * (values["model"] == "mlp")


def tried(many: int) -> SweepDetail:
    """A sweep that tried so many at random; one failed, one is at its rung, one has just begun."""
    trials = [
        trial(n, accuracy(values), values=values, state="done")
        for n in range(many)
        for values in [drawn(SPACE, 5, n)]
    ]
    failed = trial(many, values=drawn(SPACE, 5, many), state="failed")
    at_rung = trial(many + 1, 0.5, values=drawn(SPACE, 5, many + 1), state="granted")
    begun = trial(many + 2, values=drawn(SPACE, 5, many + 2), state="training")
    return detail(*trials, failed, at_rung, begun, spec=SPEC)


def test_equal_sweeps_give_equal_suggestions() -> None:
    assert suggested(tried(12)) == suggested(tried(12))
    assert suggested(tried(12)) != suggested(tried(13))


def test_suggestions_meet_the_space_and_its_conditions() -> None:
    for many in range(12):
        values = suggested(tried(many))

        assert list(values) == [name for name in SPACE if name != "kernel" or "kernel" in values]
        assert ("kernel" in values) is (values["model"] == "cnn")
        assert 8 <= int(values["width"]) <= 512
        assert 1e-4 <= float(values["lr"]) <= 1e-1


@pytest.mark.parametrize("sampler", ["tpe", pytest.param("gp", marks=pytest.mark.slow)])
def test_suggestions_are_better_than_chance(sampler: SamplerName) -> None:
    whole = tried(30)
    for _ in range(8):  # each is tried, and comes to its end
        values = suggested(whole, sampler)
        one = trial(len(whole.trials), accuracy(values), values=values, state="done")
        whole = detail(*whole.trials, one, spec=SPEC)

    scores = [accuracy(one.values) for one in whole.trials]
    by_chance, by_sampler = scores[:30], scores[-8:]
    assert sum(by_sampler) / 8 > sum(by_chance) / 30 + 0.1


def test_a_metric_with_mode_min_becomes_small() -> None:
    spec = sweep(space=SPACE, seed=5, metric="accuracy", mode="min").sweep_spec()
    trials = tried(30).trials

    worst = [accuracy(suggested(detail(*trials[:n], spec=spec))) for n in range(22, 30)]

    assert sum(worst) / 8 < sum(accuracy(one.values) for one in trials[:30]) / 30


def test_without_optuna_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)

    with pytest.raises(SettingsError, match=r"samplers need Optuna; pip install '.*\[optuna\]'"):
        suggested(tried(2))


class Training(Client):
    """A client whose sweep ends a trial at each second look, the oldest one first."""

    def __init__(self, whole: SweepDetail) -> None:
        self.whole = whole
        self.looks = 0
        self.keys: list[str] = []
        self.most = 0  # that were under way at once

    async def job(self, job: str) -> JobDetail:
        found = EXAMPLES["client.job_detail.3"]
        assert isinstance(found, JobDetail)
        spec = msgspec.structs.replace(found.spec, slots=(1, 2))
        return msgspec.structs.replace(found, spec=spec)

    async def _call(self, request: Any, kind: Any, wait_s: float = 0.0) -> Any:
        trials = list(self.whole.trials)
        under_way = [one.number for one in trials if one.state == "training"]
        if isinstance(request, ChangeSweep):
            self.keys.append(request.key)
            trials.append(trial(len(trials), values=request.values, state="training"))
            self.most = max(self.most, len(under_way) + 1)
        else:
            self.looks += 1
            if self.looks % 2 == 0 and under_way:
                values = trials[under_way[0]].values
                done = trial(under_way[0], accuracy(values), values=values, state="done")
                trials[under_way[0]] = done
        self.whole = detail(*trials, spec=SPEC, summary=self.whole.summary)
        if isinstance(request, ChangeSweep):
            return SweepChanged(job=request.job, trial=len(trials) - 1, state="training")
        return self.whole


async def test_configurations_are_added_with_unique_keys_as_others_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "SAMPLE_INTERVAL_S", 0.0)
    begun = trial(0, values=drawn(SPACE, 5, 0), state="training")
    client = Training(detail(begun, spec=SPEC))
    added: list[int] = []

    many = await SweepRun(client, A).sample(6, on_added=lambda number, _: added.append(number))

    assert (many, added) == (6, [1, 2, 3, 4, 5])
    assert client.keys == ["tpe-1", "tpe-2", "tpe-3", "tpe-4", "tpe-5"]
    assert client.most == 3  # one more than its most slots


async def test_an_ended_sweep_gets_no_configurations() -> None:
    over = detail(trial(0, 0.5, state="done"), summary=summary(A, state="succeeded"), spec=SPEC)
    client = Training(over)

    assert await SweepRun(client, A).sample(6) == 1
    assert client.keys == []
