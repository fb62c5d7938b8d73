"""What the quickstart counts, says and draws, and the device that its jobs are paced like."""

from __future__ import annotations

import importlib.util
import io
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console
from torch import nn

from schemas.wire.client import Decision, EpochInfo, JobSummary
from schemas.wire.feed import FeedEvent
from tests.support.schemas_examples import EXAMPLES

FOLDER = Path(__file__).parents[3] / "examples"
EPOCH: Any = EXAMPLES["client.job_detail.3"].epochs[0]
SUMMARY: Any = EXAMPLES["client.job_summary.1"]
ALONE = {"slots": 1}


def module(name: str) -> Iterator[Any]:
    """A script of the examples as a module, where dataclasses look for theirs."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    sys.modules[name] = made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    yield made
    del sys.modules[name]


@pytest.fixture(scope="module")
def quickstart() -> Iterator[Any]:
    yield from module("quickstart")


@pytest.fixture(scope="module")
def paced() -> Iterator[Any]:
    yield from module("paced")


def decided(before: int, after: int, outcome: str = "formed", **numbers: float) -> Decision:
    slots = tuple(f"n1/{index}" for index in range(4))
    return msgspec.convert(
        {
            "time": 10.0, "took_s": 2.0, "from": {"slots": slots[:before]},
            "to": {"slots": slots[:after]}, "reason": "", "outcome": outcome, "numbers": numbers,
        },
        Decision,
    )  # fmt: skip


def walk(quickstart: Any, job: str, *sizes: int) -> list[Any]:
    return [
        quickstart.Change(job, at, before, after)
        for at, (before, after) in enumerate(itertools.pairwise(sizes))
    ]


def happened(seconds: float, event: str, job: str = "a-1", **detail: Any) -> FeedEvent:
    return msgspec.convert(
        {"seq": 1, "time": seconds, "event": event, "job": job, "node": None, "detail": detail},
        FeedEvent,
    )


def summary(job: str = "a-1", state: str = "running", slots: int = 1) -> JobSummary:
    return msgspec.structs.replace(SUMMARY, job=job, state=state, slots=slots, progress=0.5)


# --- what happened


def test_a_change_is_one_of_slots_that_came_to_be(quickstart: Any) -> None:
    decisions = [
        decided(0, 1),  # a start
        decided(1, 2, pause_ms=6.0, pause_steps=0.5),
        decided(2, 4, "abandoned"),
        decided(2, 2),  # another batch
        decided(2, 1),
        decided(1, 0, "suspended"),
    ]

    assert quickstart.changes_of("a-1", decisions) == [
        quickstart.Change("a-1", 12.0, 1, 2, 6.0, 0.5),
        quickstart.Change("a-1", 12.0, 2, 1),
    ]


@pytest.mark.parametrize(("sizes", "counted"), [
    ((1,), (0, 0, 0)),
    ((1, 2, 4), (2, 0, 0)),
    ((1, 2, 1), (1, 1, 0)),
    ((1, 4, 3, 2, 3, 4), (3, 2, 1)),
    ((2, 1, 2, 1, 2), (2, 2, 2)),
])  # fmt: skip
def test_a_regrowth_is_a_growth_of_a_job_that_had_shrunk(
    quickstart: Any, sizes: tuple[int, ...], counted: tuple[int, int, int]
) -> None:
    assert tuple(quickstart.tally(walk(quickstart, "a-1", *sizes)).values()) == counted


def test_a_growth_of_another_job_is_no_regrowth(quickstart: Any) -> None:
    changes = [*walk(quickstart, "a-1", 2, 1), *walk(quickstart, "b-2", 1, 2)]

    assert quickstart.tally(changes) == {"growths": 1, "shrinks": 1, "regrowths": 0}


@pytest.mark.parametrize(("taken", "exact"), [
    ([(1, [2, 0]), (1, [1, 3]), (2, [3, 2, 1, 0])], True),
    ([(1, [2, 0]), (1, [1, 3]), (2, [3, 2, 1, 0]), (3, [1])], True),  # is not over
    ([(1, [2, 0]), (1, [1, 3])], False),
    ([(1, [2, 0]), (1, [1]), (2, [3, 2, 1, 0])], False),
    ([(1, [2, 0]), (1, [1, 3, 2]), (2, [3, 2, 1, 0])], False),
    ([(1, [2, 0]), (1, [1, 2]), (2, [3, 2, 1, 0])], False),
])  # fmt: skip
def test_samples_are_exact_if_each_epoch_has_each_of_them_once(
    quickstart: Any, taken: list[tuple[int, list[int]]], *, exact: bool
) -> None:
    epochs: list[EpochInfo] = [
        msgspec.structs.replace(EPOCH, epoch=number, epoch_samples=4) for number in (1, 2)
    ]
    records = [{"epoch": epoch, "step": 1, "rank": 0, "ids": ids} for epoch, ids in taken]

    assert quickstart.is_exact(epochs, records) is exact
    assert quickstart.is_exact([], records) is False


def test_a_cold_start_is_from_the_first_order_to_the_first_step(quickstart: Any) -> None:
    events = [
        happened(3.0, "job.starting"),
        happened(7.5, "job.running", **ALONE),
        happened(9.0, "job.starting", "b-2"),
        happened(20.0, "job.starting"),
        happened(21.0, "job.running", **ALONE),
    ]

    assert quickstart.cold_starts(events) == {"a-1": 4.5}


def test_the_figures_are_those_that_the_contract_names(quickstart: Any) -> None:
    found = quickstart.Outcome(
        began=100.0,
        jobs=(summary(), summary("b-2")),
        changes=(
            quickstart.Change("a-1", 112.0, 1, 2, 6.0, 0.5),
            quickstart.Change("a-1", 130.0, 2, 1, 2.0, 0.25),
        ),
        cold_s={"a-1": 4.0, "b-2": 8.0},
        epochs=3,
        samples=100,
        exact=True,
    )

    assert found.figures() == {
        "jobs": 2, "first_change_s": 12.0, "last_change_s": 30.0, "growths": 1, "shrinks": 1,
        "regrowths": 0, "pause_ms": [6.0, 2.0], "pause_steps": [0.5, 0.25], "restart_s": 4.0,
        "samples_exact": True,
    }  # fmt: skip
    assert dict(quickstart.summary(found, Path("slots.png"), "look around")) == {
        "changes": "1 growths (0 after a shrink), 1 shrinks: a-1 on 1, 2 at 12 s, 1 at 30 s",
        "pauses": "4 ms in the median, at most 6 ms; 0.38 steps, at most 0.50",
        "restarts": "2 of them would have cost 8.0 s (4.0 s each, cold starts of this run); "
        "the changes cost 0.01 s",
        "samples": "exact: in all 3 epochs each sample was trained on exactly once "
        "(100 samples, by the records of committed steps)",
        "picture": "slots.png",
        "next": "look around",
    }


# --- when jobs come


def test_a_job_comes_when_all_before_it_have_trained_on_all_slots_for_a_while(
    quickstart: Any,
) -> None:
    arrivals = quickstart.Arrivals(slots=4, settled_s=1.5, latest_s=30.0)
    starts = [summary(state="starting", slots=4)]
    some, every = [summary(slots=2)], [summary(slots=4)]
    beside = [summary(slots=4), summary("b-2", "succeeded", slots=0)]

    assert arrivals.is_due([], now=0.0), "the first one comes at once"
    asked = [(starts, 4.0), (every, 5.0), (some, 6.0), (every, 6.5), (every, 7.5)]
    assert [arrivals.is_due(*one) for one in asked] == [False] * 5
    assert arrivals.is_due(beside, 8.0)
    assert not arrivals.is_due(beside, 8.5), "another one needs a while of its own"


def test_a_job_comes_at_the_latest_so_long_after_the_one_before(quickstart: Any) -> None:
    arrivals = quickstart.Arrivals(slots=4, settled_s=1.5, latest_s=30.0)
    arrivals.is_due([], now=0.0)

    assert not arrivals.is_due([summary(slots=1)], now=29.0)
    assert arrivals.is_due([summary(slots=1)], now=30.0)


@pytest.mark.parametrize("name", ["language", "digits", "embedding"])
def test_a_paced_job_trains_its_example_and_records_its_samples(quickstart: Any, name: str) -> None:
    (example,) = [one for one in quickstart.EXAMPLES if one.name == name]

    job = quickstart.spec(example, 8, paced=True)

    assert (Path(job.workdir) / job.script).is_file()
    assert (Path(job.workdir) / job.args[1]).is_file()
    assert (job.args[0], job.slots, job.record_samples) == (
        str(example.samples_per_s),
        (1, 8),
        True,
    )
    unpaced = quickstart.spec(example, 8, paced=False)
    assert (unpaced.script, unpaced.record_samples) == ("train.py", True)


# --- in words and on the screen


def test_events_are_told_in_words(quickstart: Any) -> None:
    why = "grows to 2 slots: no other job needs them more"
    starts = "starts on 1 slot, to warm up"
    story = [
        (happened(1.0, "job.submitted", name="a", user="ann"), "is submitted"),
        (happened(2.0, "job.starting", reason=f"{starts}: n1/0", slots="n1/0"), starts),
        (happened(3.0, "worker.started", slot="n1/0", rank=0, version=1), None),
        (happened(6.5, "job.running", reason="trains on 1 slot, batch 32", slots=1, epoch=0), "trains on 1 slot; a cold start took 4.5 s"),
        (happened(9.0, "job.rescaling", reason=f"{why}: 1 -> 2 slots, batch 32 -> 32"), why),
        (happened(10.0, "job.running", slots=2, batch=32, pause_ms=6.4, pause_steps=0.021), "on 2 slots; stood still 6 ms, 0.02 steps (restart: 4.5 s)"),
        (happened(11.0, "job.running", slots=2, batch=64, pause_ms=0.1), None),
        (happened(12.0, "job.succeeded", reason="all 2 epochs are done"), "succeeded: all 2 epochs are done"),
    ]  # fmt: skip
    events = [event for event, _ in story]

    told = [quickstart.told(one, events[:at]) for at, one in enumerate(events)]

    assert told == [words for _, words in story]


@pytest.mark.parametrize("width", [80, 120])
def test_a_line_stays_on_the_screen_and_its_words_in_their_column(
    quickstart: Any, width: int
) -> None:
    words = "gives 1 slot to embedding-3, goes on with 2 slots and batch 40 " * 2

    lines = quickstart.event_line(24.0, "language-1", words, width).splitlines()

    assert max(map(len, lines)) < width
    assert lines[0].startswith(" 24 s  language-1   gives 1 slot")
    assert {line[:20] for line in lines[1:]} == {" " * 20}


def drawn(quickstart: Any, width: int, encoding: str = "utf-8") -> list[str]:
    """The live part of the screen after 30 of 60 seconds."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=out, width=width, color_system=None)
    events = [
        FeedEvent(seq=1, time=0.0, event="node.joined", job=None, node="n1", detail={"slots": 2}),
        happened(15.0, "worker.started", slot="n1/0", rank=0, version=1),
    ]
    console.print(quickstart.screen([summary()], events, 0.0, 30.0, console))
    out.flush()
    written: bytes = out.buffer.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in written.decode(encoding).splitlines()]


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_has_jobs_and_slots_over_time_and_fits(quickstart: Any, width: int) -> None:
    lines = drawn(quickstart, width)

    assert max(map(len, lines)) < width
    assert lines[1].split()[:4] == ["job", "state", "progress", "slots"]
    assert ("lr" in lines[1]) is (width > 100)
    first, second = (line.split()[1] for line in lines[4:6])
    assert set(first[: len(first) // 2 - 1]) == {"."}, "idle before it began"
    assert set(first[len(first) // 2 + 1 :]) == {"a"}
    assert set(second) == {"."}
    half = (min(width, 110) - 1 - len("n1/0 ")) / 2
    assert abs(len(first) - half) <= 1, "what is to come is blank"


def test_the_screen_is_plain_where_a_terminal_knows_no_other_letters(quickstart: Any) -> None:
    assert all(line.isascii() for line in drawn(quickstart, 80, "latin-1"))


def test_two_quickstarts_draw_into_two_files(quickstart: Any, tmp_path: Path) -> None:
    first, second = quickstart.new_picture(tmp_path), quickstart.new_picture(tmp_path)

    assert first != second
    assert {path.name for path in tmp_path.iterdir()} == {first.name, second.name}


# --- the pace


class Device:
    """A clock that only sleeping moves on, and passes that take as long as is said."""

    def __init__(self, paced: Any, samples_per_s: float) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self.pace = paced.Pace(samples_per_s, lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def takes(self, samples: int, computed_s: float) -> None:
        self.pace.begin(nn.Identity(), (torch.zeros(samples, 3),))
        self.now += computed_s
        self.pace.end()


def test_a_pass_lasts_as_long_as_its_samples_would_on_the_device(paced: Any) -> None:
    device = Device(paced, samples_per_s=64.0)

    device.takes(32, computed_s=0.125)
    device.takes(16, computed_s=0.125)
    device.takes(8, computed_s=0.75)

    assert device.slept == [0.375, 0.125, 0.0]


def test_a_pass_begins_with_the_model_and_not_with_the_modules_inside(paced: Any) -> None:
    device = Device(paced, samples_per_s=64.0)

    device.pace.begin(nn.Identity(), (torch.zeros(32, 3),))
    device.now += 0.25
    device.pace.begin(nn.Identity(), (torch.zeros(512, 3),))
    device.pace.end()

    assert device.slept == [0.25]


def test_an_evaluation_is_not_paced(paced: Any) -> None:
    device = Device(paced, samples_per_s=64.0)

    with torch.no_grad():
        device.pace.begin(nn.Identity(), (torch.zeros(32, 3),))
    device.pace.end()

    assert device.slept == []


def test_torch_is_paced_before_whoever_sums_gradients_behind_the_pass(
    paced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # put back later
    device = Device(paced, samples_per_s=64.0)
    model = nn.Sequential(nn.Linear(3, 1), nn.Identity())

    hook = paced.pace_torch(device.pace)
    try:
        model(torch.zeros(32, 3)).sum().backward()
    finally:
        hook.remove()

    assert device.slept == [0.5]
    assert model[0].weight.grad is not None
