"""Optuna suggests from a study that is made anew of a sweep's trials each time."""

from __future__ import annotations

import math
import sys
from typing import Any

import msgspec
import pytest

from controlplane.client import Choice, Client, Integer, LogInteger, LogUniform
from controlplane.client.sweeps import runs
from controlplane.client.sweeps.runs import SweepRun
from controlplane.client.sweeps.sampler import SamplerName, suggested
from controlplane.sweeps.configurations import drawn
from schemas.errors import SettingsError
from schemas.sweeps import Values
from schemas.wire.client import ChangeSweep, JobDetail, SweepChanged, SweepDetail
from tests.support.builders import A
from tests.support.client_examples import detail, summary, sweep, trial
from tests.support.schemas_examples import EXAMPLES

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

    with pytest.raises(SettingsError, match=r"samplers need Optuna; .* pip install '.\[optuna\]'"):
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
