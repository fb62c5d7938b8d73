"""What was said beforehand is held against what came.

Who counts as held: at a size that is known to be slower than another one that can be had.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.ids import JobId, Seconds, SlotId
from schemas.wire.client import Change, Decision, Explanation, JobDetail, Size
from tests.bench.live_policies import idle_while_waiting
from tests.bench.live_watch import (
    Look,
    Promise,
    SizeWatch,
    Start,
    Violation,
    began,
    promise_figures,
    promises,
    start_figures,
    start_told,
)
from tests.support.schemas_examples import EXAMPLES

A, B = JobId("a"), JobId("b")


def changed(at: float, slots: tuple[int, int], then: float, came: float | None) -> Decision:
    """From so many slots to so many; it made 100 samples a second before."""
    numbers = {"speed_now": 100.0, "speed_then": then}
    return Decision(
        time=Seconds(at),
        before=Size(slots=tuple(SlotId(f"n/{at}") for at in range(slots[0]))),
        to=Size(slots=tuple(SlotId(f"n/{at}") for at in range(slots[1]))),
        reason="",
        numbers=numbers if came is None else {**numbers, "speed_realised": came},
        outcome="formed",
    )


def of(job: JobId, *decisions: Decision) -> Explanation:
    return Explanation(job=job, state="running", decisions=decisions)


def queued(at: float, start_s: float, low: float, high: float) -> Decision:
    numbers = {"start_s": start_s, "start_earliest_s": low, "start_latest_s": high}
    return Decision(
        time=Seconds(at), before=Size(), to=Size(), reason="", numbers=numbers, outcome="waits"
    )


def change(at: float, before: str, after: str) -> Change:
    return Change(time=Seconds(at), from_state=before, to_state=after, reason="", detail={})


def test_a_promise_counts_once_an_epoch_was_held_against_it() -> None:
    late = of(A, changed(9.0, (1, 2), 180.0, 160.0), changed(10.0, (2, 4), 150.0, None))
    early = of(B, changed(3.0, (1, 2), 150.0, 180.0), changed(4.0, (2, 1), 100.0, 100.0))

    assert promises([("wide", late), ("wide", early)]) == [
        Promise("wide", 1.5, 1.8, first=True),
        Promise("wide", 1.0, 1.0, first=False),
        Promise("wide", 1.8, 1.6, first=False),
    ]


def test_too_much_and_too_little_are_as_far_off() -> None:
    figures = promise_figures(
        [Promise("wide", 2.0, 1.0, first=True), Promise("wide", 1.0, 2.0, first=False)]
    )

    assert figures == {
        "promises": 2.0,
        "promise_off_median": pytest.approx(2.0),
        "promise_off_most": pytest.approx(2.0),
        "promise_bias": pytest.approx(1.0),
    }
    assert promise_figures([]) == {"promises": 0.0}


def test_a_forecast_is_what_is_said_of_a_job_that_waits() -> None:
    assert start_told(of(A, queued(100.0, 8.0, 4.0, 20.0))) == Start(100.0, 108.0, 104.0, 120.0)
    assert start_told(of(A, changed(1.0, (0, 1), 100.0, None))) is None
    assert start_told(of(A)) is None


def test_a_job_began_when_it_left_the_queue_for_the_first_time() -> None:
    detail = next(one for one in EXAMPLES.values() if isinstance(one, JobDetail))
    lived = (change(3.0, "queued", "starting"), change(9.0, "starting", "queued"),
             change(12.0, "queued", "starting"))  # fmt: skip

    assert began(replace(detail, history=lived)) == 3.0
    assert began(replace(detail, history=())) is None


def test_starts_are_counted_from_when_their_forecast_was_told() -> None:
    """One starts 2 s late and within its interval, one 6 s late and beyond it; one at once."""
    told = {
        A: Start(100.0, 108.0, 104.0, 120.0),
        B: Start(100.0, 114.0, 110.0, 119.0),
        JobId("c"): Start(100.0, 108.0, 104.0, 120.0),
    }
    came = {A: 110.0, B: 120.0, JobId("c"): 100.0}

    assert start_figures(told, came) == {
        "start_forecasts": 2.0,
        "start_wait_s_mean": 15.0,
        "start_error_median": pytest.approx((0.2 + 0.3) / 2),
        "start_error_s_median": 4.0,
        "start_error_s_most": 6.0,
        "start_coverage": 0.5,
    }
    assert start_figures({}, came) == {"start_forecasts": 0.0}


Stay = tuple[float, float, int, int, float, int]  # from, to, slots, batch, samples/s, idle slots


def lived(*stays: Stay, noise: float = 1e9) -> tuple[SizeWatch, list[tuple[float, Violation]]]:
    """Look twice a second; return violations and when they were found. `noise` 1e9: every sample is worth one."""
    watch, found = SizeWatch(), []
    for begin, end, slots, batch, speed, idle in stays:
        for half in range(int(2 * begin), int(2 * end)):
            at = half / 2
            looks = [Look(at, "a", slots, batch, speed, noise)]
            found += [(at, one) for one in watch.take(looks, idle)]
    return watch, found


@pytest.mark.parametrize(
    ("stays", "held"),
    {
        "a growth that loses may live for ten seconds": (
            [(0, 10, 1, 24, 100.0, 0), (10, 30, 2, 48, 80.0, 0)],
            [(20.5, 10.0, (2, 48), (1, 24), "the same or fewer slots")],
        ),
        "a growth that brings little or nothing is none": (
            [(0, 10, 1, 24, 100.0, 0), (10, 60, 2, 48, 95.0, 0)],
            [],
        ),
        "fewer slots are held only while enough are idle": (
            [(0, 10, 4, 96, 300.0, 0), (10, 40, 2, 48, 160.0, 0), (40, 60, 2, 48, 160.0, 1),
             (60, 75, 2, 48, 160.0, 2)],
            [(70.5, 60.0, (2, 48), (4, 96), "slots were idle")],
        ),
        "a size that was seen for a moment is not known": (
            [(0, 4, 1, 24, 100.0, 0), (4, 60, 2, 48, 50.0, 0)],
            [],
        ),
    }.values(),
    ids=["loses", "little", "idle", "moment"],
)  # fmt: skip
def test_a_job_is_held_at_a_size_that_it_knows_to_be_slow(
    stays: list[Stay], held: list[tuple[float, float, tuple[int, int], tuple[int, int], str]]
) -> None:
    watch, found = lived(*stays)

    assert [(at, one.began, one.shape, one.better, one.reason) for at, one in found] == held
    assert watch.violations == [one for _, one in found]


def test_a_violation_has_both_speeds_and_lasts_until_the_last_look() -> None:
    watch, ((_, held),) = lived((0, 10, 1, 24, 100.0, 0), (10, 30, 2, 48, 80.0, 0))

    assert [held.progress, held.better_progress] == pytest.approx([80.0, 100.0])
    assert [held.ended, watch.most_s] == [29.5, 19.5]


def test_more_samples_a_second_are_no_better_where_they_are_worth_less() -> None:
    """At phi 0 a batch four times as large makes a sample worth a quarter."""
    stays = ((0, 10, 1, 24, 100.0, 0), (10, 30, 1, 12, 60.0, 0))

    assert lived(*stays, noise=0.0)[1] == []


@pytest.mark.parametrize(
    ("taken", "idle_s"),
    [([(0.0, 10.0), (4.0, 6.0)], 2.0), ([], 3.0), ([(0.0, 10.0)] * 2, 0.0)],
)
def test_idle_slots_count_while_somebody_waits(
    taken: list[tuple[float, float]], idle_s: float
) -> None:
    assert idle_while_waiting(taken, [(2.0, 5.0)], slots=2) == idle_s
