"""Parts of the web page: what changes, and texts of hostile users."""

from __future__ import annotations

import json
import math
import time
from typing import Any, Final

import msgspec
import pytest

from controlplane.web.mirror import JobState, State
from controlplane.web.views import (
    NOTHING,
    News,
    Part,
    Parts,
    Rung,
    Views,
    differences,
    environment,
    number,
    plain,
    rungs_of,
)
from schemas.ids import JobId
from schemas.sweeps import Asha, SearchSpec
from schemas.wire.client import (
    Decision,
    Explanation,
    JobDetail,
    JobSummary,
    NodeInfo,
    Size,
    SweepDetail,
    TrialInfo,
)
from tests.support.schemas_examples import EXAMPLES

VIEWS: Final = Views(environment(), "/")
HOSTILE: Final = "<script>alert(1)</script>\x1b[2J\u202egnp.exe\n'\"&"


def example(kind: type[Any], **fields: Any) -> Any:
    (found,) = (one for one in EXAMPLES.values() if type(one) is kind)
    plain = {name: getattr(found, name) for name in found.__struct_fields__}
    return kind(**(plain | fields))


def summary(job: str = "digits-1", **fields: Any) -> JobSummary:
    detail: JobDetail = example(JobDetail)
    plain = {name: getattr(detail.summary, name) for name in detail.summary.__struct_fields__}
    return JobSummary(**(plain | {"job": JobId(job)} | fields))


def test_jobs_are_in_the_table_of_their_state() -> None:
    jobs = (
        summary("a-1", state="running", slots=2, ended_at=None),
        summary("b-2", state="queued", slots=0, ended_at=None),
        summary("c-3", state="failed", slots=0),
    )

    parts = VIEWS.now(State(jobs=jobs))

    assert {name: part.parent for name, part in parts.items() if part.parent != "banner"} == {
        "summary": "summary-of-cluster",
        "running-a-1": "running", "queue-b-2": "queue", "ended-c-3": "ended",
    }  # fmt: skip


def test_a_page_receives_only_parts_that_changed() -> None:
    old = {"a": Part("jobs", "<tr>1"), "b": Part("jobs", "<tr>2"), "c": Part("jobs", "<tr>3")}
    new = {"b": Part("jobs", "<tr>2"), "c": Part("jobs", "<tr>4"), "d": Part("jobs", "<tr>5")}

    assert differences(old, new) == [
        ("a", "jobs", None), ("c", "jobs", "<tr>4"), ("d", "jobs", "<tr>5"),
    ]  # fmt: skip
    assert differences(new, new) == []


async def test_pages_share_messages_and_a_new_page_learns_which_rows_are_gone() -> None:
    news, made = News(), [{"a": Part("jobs", "<tr>1")}, {"a": Part("jobs", "<tr>2")}]

    async def make(state: State) -> Parts:
        return made[min(state.version, 2) - 1]

    states = [State(version=version, history=7) for version in (1, 2, 3)]
    first, second, third = [await news.parts("now", state, make) for state in states]
    *shared, whole = [
        news.message("now", states[1], old, second) for old in (first, first, NOTHING)
    ]

    said = [json.loads(message.removeprefix(b"data: ")) for message in (*shared, whole)]
    assert third is second
    assert abs(said[0]["now"] - time.time()) < 60.0
    assert [one | {"now": 0} for one in said] == [
        {"history": 7, "now": 0, "whole": is_whole, "parts": [["a", "jobs", "<tr>2"]]}
        for is_whole in (False, False, True)
    ]


def test_ages_follow_the_controllers_clock_and_not_this_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = State(clock=1000.0 - time.monotonic())
    monkeypatch.setattr(time, "time", lambda: 0.0)  # a jump of a day and more

    assert 1000.0 <= state.now() < 1060.0


def test_a_rung_shows_who_reached_it_who_stopped_there_and_the_best_so_far() -> None:
    def trial(number: int, state: str, granted: int, *scores: float) -> TrialInfo:
        metrics = tuple({"accuracy": score} for score in scores)
        return TrialInfo(
            number=number, values={}, state=state, granted=granted, epochs=len(scores),
            metrics=metrics,
        )  # fmt: skip

    search = SearchSpec(space={}, searcher=Asha(configurations=4), epochs=9, metric="accuracy")
    spec = msgspec.structs.replace(example(SweepDetail).spec, search=search)
    trials = (
        trial(0, "training", 9, 0.5, 0.6, 0.7), trial(1, "stopped", 1, 0.4),
        trial(2, "stopped", 1, math.nan), trial(3, "stopped", 3, 0.6, 0.8, 0.3),
    )  # fmt: skip

    assert rungs_of(example(SweepDetail, spec=spec, trials=trials)) == [
        Rung(1, 4, 4, "1, 2", 3, 0.6), Rung(3, 2, 2, "3", 3, 0.8), Rung(9, 1, 0, "", 0, 0.7),
    ]  # fmt: skip


@pytest.mark.parametrize("where", ["user", "reason", "state"])
@pytest.mark.parametrize("slots", [0, 2])
def test_texts_of_users_are_shown_and_not_executed(where: str, slots: int) -> None:
    job = summary(slots=slots, ended_at=None, **({"state": "running"} | {where: HOSTILE}))

    html = "".join(part.html for part in VIEWS.now(State(jobs=(job,))).values())

    assert "&lt;script&gt;alert(1)" in html
    assert not any(bad in html for bad in ("<script", "\x1b", "\u202e"))


def test_metrics_decisions_and_nodes_of_users_are_not_executed() -> None:
    detail = example(JobDetail, summary=summary(metrics={HOSTILE: 1.0}, reason=HOSTILE))
    decision = Decision(time=1.0, before=Size(), to=Size(), reason=HOSTILE, by=HOSTILE)
    told = Explanation(job=JobId("digits-1"), state="running", decisions=(decision,))
    node = example(NodeInfo, reason=HOSTILE, labels={HOSTILE: HOSTILE}, model=HOSTILE)

    job = VIEWS.job(State(), JobState(detail=detail, explanation=told))
    html = "".join(
        part.html for part in (*job.values(), *VIEWS.nodes(State(nodes=(node,))).values())
    )

    assert html.count("&lt;script&gt;") == 8
    assert not any(bad in html for bad in ("<script", "\x1b", "\u202e"))


def test_a_long_text_is_cut() -> None:
    assert plain("x" * 10_000_000) == "x" * 400 + "…"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (0.03, "0.03"),
        (50_127.3, "50,127"),
        (1234.0, "1,234"),
        (0.00012345, "0.0001234"),
    ],
)
def test_numbers_have_four_digits(value: float | None, shown: str) -> None:
    assert number(value) == shown
