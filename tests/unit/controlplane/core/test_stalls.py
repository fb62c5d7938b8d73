"""Ranks that make no step: joins are cancelled, and changes go on without them at their deadline."""

from __future__ import annotations

from signal import SIGKILL
from typing import Any, Final

import msgspec
import pytest

from controlplane.core.inputs import Input, JoinStalled, OverrideDue, RescaleExpired, Straggler
from controlplane.core.state import RETRY_LONGEST_S
from schemas.ids import Rank, Version
from schemas.jobs import PROGRESS_DEADLINE_S
from schemas.wire.agent import RECOVER
from tests.support.builders import (
    N1,
    N2,
    S0,
    S1,
    T0,
    A,
    exited,
    formed,
    named,
    paused,
    quiesced,
    ready,
    resized,
    run,
    started,
    stop,
    store,
    suspended,
)
from tests.support.controller import Controller, cluster_of, training
from tests.unit.controlplane.core.steps import (
    NEW,
    OLD,
    STORE_OPENS,
    Happens,
    Story,
    both,
    growing,
    order,
    played,
    quiescing,
    replays,
    stories,
    switching,
    to,
    told,
)

AT: Final = "train.py:17 in evaluate"
HUNG: Final = f"rank 1 made no step for 1800 s, at {AT}"
KILLED: Final = "a worker was killed by SIGKILL"
AGAIN: Final = "restarts from the beginning"
GOES_ON: Final = {"phase": "running", "slots": [S0]}
OTHER: Final = (1, 1)  # rank 1 of version 1
SWITCHED: Final = formed(A, index=4, group=2)


def silent(version: int, rank: int, idle_s: float = 32.0) -> Straggler:
    return Straggler(worker=named(A, version, rank), rank=Rank(rank), idle_s=idle_s, answers=False)


def busy(version: int, rank: int, idle_s: float = 1800.0) -> Straggler:
    worker = named(A, version, rank)
    return Straggler(worker=worker, rank=Rank(rank), idle_s=idle_s, answers=True, at=AT)


def hangs(*stragglers: Straggler, version: int = 2) -> JoinStalled:
    return JoinStalled(job=A, version=Version(version), stragglers=stragglers)


def expires(*stragglers: Straggler, after_s: float = PROGRESS_DEADLINE_S) -> Happens:
    """Let the deadline of job a's change pass, with what telemetry told of its ranks."""

    def pass_(controller: Controller) -> object:
        due = RescaleExpired(job=A, version=controller.job(A).version, stragglers=())
        assert due not in controller.due(after_s - 1)
        controller.now += after_s
        assert due in controller.due()
        return controller.take(msgspec.structs.replace(due, stragglers=stragglers))

    return pass_


def two_newcomers() -> Controller:
    """Job a grows from one slot to three, and all were told to switch."""
    controller = training(cluster_of(n1=2, n2=2), S0)
    controller.take(resized(A, on=(S0, S1, T0)))
    newcomers = [(2, 1), (2, 2)]
    return told(controller, STORE_OPENS, *(step for who in newcomers for step in _ready(*who)))


def _ready(version: int, rank: int) -> list[Any]:
    return [started(A, version, rank=rank), ready(A, version, rank=rank)]


def three() -> Controller:
    return training(cluster_of(n1=2, n2=1), S0, S1, T0, epochs=2)


JOINS: Final[dict[str, Story]] = {
    "a newcomer that does not answer is ended and the others go on without it": [
        switching, SWITCHED, 32.0, hangs(silent(*NEW)),
        {
            "reasons": ["rank 1 did not answer for 32 s; 1 worker continues"],
            "workers": {OLD: "member", NEW: "leaving"}, "change": "quiescing",
            "orders": [*to(order(run, 3, S0, [OLD], kind=RECOVER), N1), *to(stop(A, 3, stage=1), N2)],
        },
        quiesced(A, index=5, group=3), {"change": "rejoining"},
        formed(A, index=6, group=3), {**GOES_ON, "attempts.failures": 0},
        exited(A, 2, rank=1, signal=SIGKILL), {**GOES_ON, "workers": {OLD: "member"}},
        replays, {replays: True},
    ],
    "a newcomer that hangs in its script is ended with its line": [
        switching, SWITCHED, hangs(busy(2, 1, 41.0)),
        {"reasons": [f"rank 1 made no step for 41 s, at {AT}; 1 worker continues"]},
    ],
    "the same join is tried again after the longest pause": [
        switching, SWITCHED, hangs(silent(*NEW)), quiesced(A, index=5, group=3), formed(A, index=6, group=3),
        exited(A, 2, rank=1, signal=SIGKILL), {"waits": "waiting for its next retry"},
        RETRY_LONGEST_S - 1.0, {"due": []}, 1.0, {"due": [OverrideDue(job=A)]},
        OverrideDue(job=A), {"change": "preparing"},
    ],
    "a newcomer that waits like the others is kept until it has no state to offer": [
        two_newcomers, SWITCHED, hangs(silent(2, 2)),
        {"workers": {OLD: "member", (2, 1): "ready", (2, 2): "leaving"}, "change": "quiescing"},
        quiesced(A, index=5, group=3), {"change": "quiescing"},
        quiesced(A, 2, rank=1, index=2, group=3, has_full_state=False),
        {"workers": {OLD: "member", (2, 1): "leaving", (2, 2): "leaving"}, "change": "rejoining"},
    ],
    "an incumbent that hangs ends no newcomer": [
        switching, SWITCHED, hangs(silent(*OLD)), {"commands": [], "change": "switching"},
    ],
    "a join that was not told to switch has no stalled newcomers": [
        growing, hangs(silent(*NEW)), {"commands": [], "change": "preparing"},
    ],
    "a pause has no newcomers": [
        both, paused(A), hangs(silent(*OTHER)), {"commands": [], "change": "switching"},
    ],
    "an earlier change is over": [
        switching, hangs(silent(*NEW), version=1), {"commands": [], "change": "switching"},
    ],
}  # fmt: skip

EXPIRED: Final[dict[str, Story]] = {
    "a pause that a rank holds up goes on without the rank": [
        both, paused(A), expires(busy(*OTHER)),
        {
            "reasons": [f"{HUNG}; 1 worker continues"],
            "workers": {OLD: "member", OTHER: "leaving"},
        },
        quiesced(A, index=3, group=3), formed(A, index=4, group=3), {"phase": "rescaling"},  # the pause again
        suspended(A, index=5, group=4), {"phase": "paused"},
    ],
    "a shrink goes on without the ranks that do not answer": [
        three, resized(A, 2), store(A, index=5, group=2, port=29500), expires(silent(1, 1, 1799.0)),
        {
            "reasons": ["rank 1 did not answer for 1799 s; 2 workers continue"],
            "workers": {OLD: "member", OTHER: "leaving", (1, 2): "member"},
        },
    ],
    "if all hang the job restarts from its checkpoint": [
        lambda: training(cluster_of(n1=1), S0, epochs=2), paused(A), expires(busy(1, 0)),
        {"reasons": [f"rank 0 made no step for 1800 s, at {AT}; resumes after epoch 2"], "phase": "paused"},
    ],
    "if all hang a job that must not run twice fails by name": [
        lambda: training(cluster_of(n1=1), S0, on_loss="fail"), paused(A), expires(busy(1, 0)),
        {"reasons": [f"rank 0 made no step for 1800 s, at {AT}; on_loss = fail"], "phase": "failed"},
    ],
    "without telemetry all are asked to come to rest": [
        both, paused(A), expires(),
        {"reasons": ["the group did not switch within 1800 s; 2 workers continue"], "change": "quiescing"},
    ],
    "a join that an incumbent holds up before the boundary is given up": [
        switching, expires(busy(*OLD)), {"phase": "running", "workers": {OLD: "member", NEW: "leaving"}},
    ],
    "a join that an incumbent holds up after the boundary goes on without it": [
        lambda: training(cluster_of(n1=2, n2=1), S0, S1), resized(A, 3), STORE_OPENS, *_ready(2, 2),
        formed(A, index=4, group=2), expires(busy(*OTHER)),
        {"workers": {OLD: "member", OTHER: "leaving", (2, 2): "ready"}, "change": "quiescing"},
    ],
    "survivors that came to rest go on without the one that did not": [
        quiescing, quiesced(A, index=3, group=2), expires(busy(*OTHER)),
        {"workers": {OLD: "member", OTHER: "leaving", (1, 2): "exited"}, "change": "rejoining"},
        formed(A, index=4, group=2),
        {
            "reasons": [
                f"trains on 1 slot, batch 64: {KILLED}; {HUNG}",
            ],
            **GOES_ON,
        },
    ],
    "a survivor of which nothing is known is named by its rank": [
        quiescing, quiesced(A, index=3, group=2), expires(), formed(A, index=4, group=2),
        {"reasons": [f"trains on 1 slot, batch 64: {KILLED}; rank 1 did not stop training"]},
    ],
    "survivors without the whole state cannot go on alone": [
        quiescing, quiesced(A, index=3, group=2, has_full_state=False), expires(),
        {
            "reasons": [f"{KILLED}; rank 1 did not stop training, and no survivor had the full state; {AGAIN}"],
            "phase": "paused",
        },
    ],
    "if no survivor comes to rest the job restarts by name": [
        quiescing, expires(busy(*OTHER)),
        {
            "reasons": [
                f"{KILLED}; {HUNG}, and the survivors did not form a group within 1800 s; {AGAIN}",
            ],
        },
    ],
    "a deadline from the journal of an older release ends no rank": [
        quiescing, quiesced(A, index=3, group=2), RescaleExpired(job=A, version=Version(2)), {"phase": "paused"},
    ],
    "the job file sets the deadline": [
        lambda: training(cluster_of(n1=1, n2=1), S0, T0, progress_deadline_s=60), paused(A),
        expires(busy(*OTHER, 60.0), after_s=60.0), {"change": "quiescing"},
        expires(after_s=60.0), {"phase": "paused"},
    ],
    "more ranks than a reason names are counted": [
        lambda: training(cluster_of(n1=5), *(f"n1/{slot}" for slot in range(5)), slots=(1, 5)), paused(A),
        expires(*(silent(1, rank) for rank in range(1, 5))),
        {
            "reasons": [
                "; ".join([*(f"rank {rank} did not answer for 32 s" for rank in (1, 2, 3)), "and 1 more; 1 worker continues"]),
            ],
        },
    ],
}  # fmt: skip


@stories({**JOINS, **EXPIRED})
def test_ranks_that_hang_are_left_behind(story: Story) -> None:
    for found, expected in played(*story):
        assert found == expected


@pytest.mark.parametrize(
    "event",
    [
        hangs(silent(*NEW)),
        RescaleExpired(job=A, version=Version(1)),
    ],
)
def test_reports_about_an_unknown_or_waiting_job_are_ignored(event: Input) -> None:
    waiting = cluster_of(n1=1)
    assert waiting.take(event) == []
    waiting.submit("a", slots=2)
    assert waiting.take(event) == []
