"""How a group of workers becomes another one while it trains."""

from __future__ import annotations

import math
from signal import SIGKILL
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from controlplane.core.commands import RequestPlan
from controlplane.core.desired_state import desired
from controlplane.core.handlers import overrides
from controlplane.core.handlers.recovery import MAX_RECOVERIES
from controlplane.core.inputs import OverrideDue, RescaleExpired
from controlplane.core.model.job import Job, ManualOverride
from controlplane.core.model.report_bounds import MAX_MEASURE
from controlplane.core.state import PREPARE_LIMIT_S, State
from schemas.ids import NodeId, SlotId, Version
from schemas.jobs import PROGRESS_DEADLINE_S
from schemas.wire.agent import JOIN, PREPARE, RECOVER, START, SUSPEND
from tests.support.builders import (
    BATCH,
    N1,
    N2,
    S0,
    S1,
    T0,
    T1,
    A,
    B,
    C,
    broken,
    cancelled,
    cleared,
    deltas,
    epoch_end,
    exited,
    finished,
    formed,
    greeting,
    join_failed,
    members,
    news,
    paused,
    quiesced,
    raised,
    ready,
    refused,
    resized,
    resume_at,
    resumed,
    run,
    seen,
    settle,
    started,
    stop,
    suspended,
    switch,
)
from tests.support.controller import ELASTIC, Controller, cluster_of, training
from tests.unit.controlplane.core.steps import (
    HALVES,
    NEW,
    NEWCOMER,
    OLD,
    ON_N1,
    STORE,
    STORE_OPENS,
    Happens,
    Story,
    alone,
    both,
    do,
    growing,
    lose,
    order,
    place,
    played,
    quiescing,
    stories,
    submit,
    switching,
    to,
    told,
)

N3 = NodeId("n3")
U0 = SlotId("n3/0")
PAIR = [(1, 0), (1, 1)]  # both members began with the first version
FIRST_TWO = members(A, HALVES, PAIR)
THIRD = members(A, {S0: 22, S1: 21, T0: 21}, [*PAIR, (1, 2)])[2:]
JOINED = formed(A, index=4, group=2), formed(A, 2, rank=1)  # what members of version 2 say
NEW_GONE = exited(A, 2, rank=1, signal=SIGKILL)
OTHER_GONE = exited(A, rank=1, signal=SIGKILL)
BOTH_EXIT = exited(A, code=0), exited(A, rank=1, code=0)
BOTH_QUIESCED = [quiesced(A, rank=rank, index=3, group=2) for rank in (0, 1)]
TRAINS = "trains on 1 slot, batch 64"
MENDED = "a worker switched to the abandoned version 2; 1 worker continues"
ASKED = "ann asked for n1/0, n2/0"
KEPT = order(settle, 2, S0, [OLD], of=1)  # version 2 is given up
PREPARED = order(run, 2, HALVES, [OLD, NEW], kind=JOIN)
SWITCHES = order(switch, 2, HALVES, [OLD, NEW], kind=JOIN, store=STORE)
SHRINKS = order(switch, 2, S0, [OLD], kind=JOIN, former=FIRST_TWO[1:])
RESTS = order(run, 2, ON_N1, PAIR, kind=RECOVER)
REJOINS = order(switch, 2, ON_N1, PAIR, kind=RECOVER, store=STORE)
GOES_ON = {"phase": "running", "slots": [S0]}


def fresh(**spec: Any) -> Happens:
    return submit(**{**ELASTIC, **spec})


def one_node() -> Controller:
    return cluster_of(n1=1)


def one_node_trains() -> Controller:
    return training(cluster_of(n1=1), S0)


def three() -> Controller:
    """Job a trains on two slots of the first node and the only one of the second."""
    return training(cluster_of(n1=2, n2=1), S0, S1, T0)


def beside_b(*theirs: SlotId) -> Controller:
    """Job a trains on the first node, job b on slots of the second, which is full."""
    controller = training(cluster_of(n1=1, n2=len(theirs)), S0)
    return training(controller, *theirs, name="b")


OTHER_SIZE: Final = (
    "the training set of rank 1 on n2/0 has 82 samples, that of rank 0 has 1000: all workers need "
    "the same data"
)
OTHER_ORDER: Final = (
    "the training set of rank 1 on n2/0 has another order than that of rank 0: sort what the file "
    "system lists, and seed what is shuffled"
)


def full() -> Controller:
    return beside_b(T0)


def handing_over() -> Controller:
    """On a full cluster job b gives up its slot, which job a is to have."""
    return told(full(), paused(B), resized(A, 2))


def forming() -> Controller:
    """Both members of the first group are ready, and it has not formed."""
    controller = told(cluster_of(n1=1, n2=1), fresh(), place({A: HALVES}))
    return told(controller, *(ready(A, rank=rank, port=29500) for rank in (0, 1)))


def expires(after_s: float) -> Happens:
    """Let the deadline of job a's change pass."""

    def pass_(controller: Controller) -> object:
        due = RescaleExpired(job=A, version=controller.job(A).version, stragglers=())
        assert controller.due(after_s - 1) == []
        controller.now += after_s
        assert due in controller.due()
        return controller.take(due)

    return pass_


def greets(node: NodeId, *there: tuple[int, int, SlotId], **fields: Any) -> Any:
    """The greeting of a node of two slots with the workers that are there."""
    workers = [seen(A, version, rank=rank, slot=int(slot[-1])) for version, rank, slot in there]
    return greeting(node, *workers, slots=2, **fields)


# --- what becomes of a group

GROWS: Final[dict[str, Story]] = {
    "growing prepares the newcomers and rank 0 and nobody else": [
        lambda: training(cluster_of(n1=1, n2=1, n3=1), S0, T0), resized(A, 3),
        {
            "commands": [
                news("job.override", A, user="ann", override="resize", slots=3, batch=None),
                news("job.rescaling", A, reason="ann asked for 3 slots: 2 -> 3 slots, batch 64 -> 64"),
                *to(order(run, 2, {S0: 22, T0: 21, U0: 21}, [*PAIR, (2, 2)], kind=JOIN), N3, N1),
                RequestPlan(),
            ],
            "slots": [S0, T0],  # the old group trains
        },
    ],
    "all are told to switch when the newcomer is ready and the store is open": [
        growing, started(A, 2, rank=1), ready(A, 2, rank=1), {"orders": []},  # nobody knows the store
        STORE_OPENS, {"orders": to(SWITCHES, N2, N1), "change": "switching"},
    ],
    "nobody switches while one newcomer of two is not ready": [
        alone, resized(A, on=(S0, S1, T0)), STORE_OPENS, started(A, 2, rank=1), started(A, 2, rank=2),
        ready(A, 2, rank=1), {"orders": [], "change": "preparing"},
        ready(A, 2, rank=2), {"nodes": [N1, N2], "change": "switching"},
    ],
    "a newcomer with another number of samples is dismissed": [
        lambda: told(cluster_of(n1=1, n2=1), fresh(), place({A: {S0: 64}})),
        started(A), ready(A, data_digest="1000-cafe"), formed(A),
        resized(A, on=(S0, T0)), STORE_OPENS, started(A, 2, rank=1),
        ready(A, 2, rank=1, data_digest="82-cafe"),
        {"reasons": [f"trains on 1 slot, batch 64: {OTHER_SIZE}"], "phase": "running"},
    ],
    "a newcomer whose samples have another order is dismissed": [
        lambda: told(cluster_of(n1=1, n2=1), fresh(), place({A: {S0: 64}})),
        started(A), ready(A, data_digest="1000-cafe"), formed(A),
        resized(A, on=(S0, T0)), STORE_OPENS, started(A, 2, rank=1),
        ready(A, 2, rank=1, data_digest="1000-beef"),
        {"reasons": [f"trains on 1 slot, batch 64: {OTHER_ORDER}"], "phase": "running"},
    ],
    "workers that start together with other data fail the job": [
        lambda: told(cluster_of(n1=1, n2=1), fresh(), place({A: HALVES})),
        ready(A, rank=1, data_digest="1000-beef"), ready(A, data_digest="1000-cafe"),
        {"reasons": [OTHER_ORDER], "phase": "failed"},
    ],
    "a worker of an earlier release, whose order is not known, trains with others": [
        growing, STORE_OPENS, started(A, 2, rank=1), ready(A, 2, rank=1, data_digest="1000-beef"),
        {"change": "switching"},
    ],
    "the store may be open before the newcomer is ready": [
        growing, STORE_OPENS, {"orders": []}, ready(A, 2, rank=1), {"nodes": [N2, N1]},
    ],
    "a group is settled when each of its members takes its steps in it": [
        switching, 2.0, JOINED[0], {"commands": [], "phase": "rescaling"}, JOINED[1],
        {
            "commands": [
                news("job.running", A, reason=f"trains on 2 slots, batch 64: {ASKED}", slots=2, batch=64, took_s=2.0),
                *to(order(settle, 2, HALVES, [OLD, NEW]), N1, N2),
                RequestPlan(),
            ],
            "accounting.rescales": 1, "accounting.batch_changes": 0, "outcome": "formed",
        },
    ],
    "a newcomer is chosen on the node where the job is": [alone, resized(A, 2), {"owners": {S0: A, S1: A}}],
    "a job that waits is started at the size that was asked for": [
        lambda: cluster_of(n1=2), fresh(), resized(A, 2), {"orders": to(order(run, 1, ON_N1, PAIR), N1)},
    ],
    "a job that waits starts on what is free within its bounds and grows to the order": [
        one_node, fresh(), resized(A, 2), {"reasons": ["ann asked for 2 slots; 1 for now, no more are free: n1/0"]},
        started(A), ready(A), formed(A), {"waits": "waiting for 1 more slot, as ann ordered"},
        greeting(N2), {"reasons": ["ann asked for 2 slots: 1 -> 2 slots, batch 64 -> 64"]},
    ],
    "growth in part goes on while slots become free and is followed by the rest": [
        lambda: training(cluster_of(n1=1), S0, slots=(1, 8)), resized(A, 6),
        greeting(N2), {"reasons": ["ann asked for 6 slots; 2 for now, no more are free: 1 -> 2 slots, batch 64 -> 64"]},
        greeting(N3), {"reasons": [], "usable": {S0: False, T0: False, U0: False}},  # no policy takes what becomes free
        STORE_OPENS, ready(A, 2, rank=1), *JOINED,
        {
            "reasons": [
                "trains on 2 slots, batch 64: ann asked for 6 slots; 2 for now, no more are free",
                "ann asked for 6 slots; 3 for now, no more are free: 2 -> 3 slots, batch 64 -> 64",
            ],
        },
    ],
    "an order for a batch smaller than its slots is given once": [
        alone, resized(A, 4, batch=2), {"reasons": ["ann asked for 4 slots, batch 2: 1 -> 4 slots, batch 64 -> 4"]},
        started(A, 2, rank=1), {"reasons": [], "version": 2},
    ],
    "a job that waits is not started below its least": [
        one_node, fresh(slots=(2, 4)), resized(A, 3),
        {"orders": [], "waits": "waiting for slots: ann ordered 3 slots, at least 2 are needed"},
        greeting(N2), {"nodes": [N1, N2]},  # a slot came
    ],
    "a job goes on at what is free after a pause whatever size was asked for": [
        both, resized(A, 4), paused(A), suspended(A, index=3, group=2), *BOTH_EXIT, resumed(A),
        {"phase": "starting", "slots": [S0, T0]},
    ],
    "an order that does not fit waits and says for what": [
        one_node_trains, resized(A, 2), {"orders": [], "waits": "waiting for 1 more slot, as ann ordered"},
        greeting(N2), {"nodes": [N2, N1], "waits": ""},  # a slot came
    ],
}  # fmt: skip

SHRINKS_OR_MOVES: Final[dict[str, Story]] = {
    "shrinking to one switches at once and tells the leaver": [both, resized(A, 1), {"orders": to(SHRINKS, N1, N2)}],
    "a group that shrank is settled without the leaver which exits by itself": [
        both, resized(A, 1), formed(A, index=3, group=2),
        {
            "orders": [*to(order(settle, 2, S0, [OLD]), N1), *to(stop(A, 2), N2)],
            "workers": {(1, 0): "member", (1, 1): "retiring"},
            "usable": {S0: False, S1: True, T0: False, T1: True},  # its process still lives
        },
        exited(A, rank=1, code=0), {"usable": {S0: False, S1: True, T0: True, T1: True}, "phase": "running"},
    ],
    "a leaver may be gone before the others say that they switched": [
        both, resized(A, 1), exited(A, rank=1, code=0), {"orders": []}, formed(A, index=3, group=2), GOES_ON,
    ],
    "a smaller group of several meets at a new store": [
        three, resized(A, 2), {"orders": to(order(run, 2, ON_N1, PAIR, kind=JOIN, former=THIRD), N1)},
        STORE_OPENS, {"orders": to(order(switch, 2, ON_N1, PAIR, kind=JOIN, former=THIRD, store=STORE), N1, N2)},
    ],
    "a new batch is a new version of the same workers": [
        both, resized(A, batch=101), {"orders": to(order(switch, 2, {S0: 51, T0: 50}, PAIR, kind=JOIN), N1, N2)},
        formed(A, index=3, group=2), formed(A, rank=1, index=3, group=2),
        {"accounting.rescales": 0, "accounting.batch_changes": 1, "placed": {S0: 51, T0: 50}, "batches": [51, 50]},
    ],
    "asking for what is there changes nothing": [both, resized(A, 2, batch=BATCH), {"orders": [], "phase": "running"}],
    "moving to other slots grows first and shrinks then": [
        alone, resized(A, on=(T0,)), STORE_OPENS, ready(A, 2, rank=1), *JOINED,
        {
            "orders": [
                *to(order(settle, 2, HALVES, [OLD, NEW]), N1, N2),
                *to(order(switch, 3, T0, [NEW], kind=JOIN, former=members(A, HALVES, [OLD, NEW])[:1]), N2, N1),
            ],
        },
        formed(A, 2, rank=1, index=3, group=3), {"phase": "running", "slots": [T0]},
    ],
}  # fmt: skip

PAUSES: Final[dict[str, Story]] = {
    "a pause is a group of nobody": [
        both, paused(A),
        {
            "commands": [
                news("job.override", A, user="ann", override="pause", slots=None, batch=None),
                news("job.rescaling", A, reason="paused by ann: 2 -> 0 slots, batch 64 -> 0"),
                *to(order(switch, 2, {}, [], kind=SUSPEND, former=FIRST_TWO), N1, N2),
                RequestPlan(),
            ],
        },
    ],
    "a job is paused when its checkpoint is durable and resumes from it": [
        both, epoch_end(A, 1), paused(A), suspended(A, index=4, group=2, epoch=1, step=20),
        {
            "commands": [
                news("job.paused", A, reason="paused by ann, at step 20", epoch=1), *to(stop(A, 2), N1, N2), RequestPlan(),
            ],
            "workers": {(1, 0): "retiring", (1, 1): "retiring"},
        },
        *BOTH_EXIT, resumed(A), place({A: S0}), {"orders": to(order(run, 3, S0, [(3, 0)], resume=resume_at(1, 2)), N1)},
    ],
    "a size of zero is a pause and a resume brings the size of before": [
        lambda: training(cluster_of(n1=2), S0), resized(A, 1), resized(A, 0), suspended(A, index=3, group=2),
        exited(A, code=0), {"phase": "paused"}, resumed(A), {"phase": "starting", "slots": [S0]},
    ],
    "a job that is just starting is paused at once": [
        one_node, fresh(), place({A: S0}), paused(A), {"orders": to(stop(A, 2), N1), "phase": "paused"},
    ],
    "a paused job stays paused whatever the policy plans": [
        one_node, fresh(), paused(A), place({A: S0}), {"commands": [], "phase": "queued"},
    ],
}  # fmt: skip

NEWCOMERS_FAIL: Final[dict[str, Story]] = {
    "a lost newcomer leaves the old group training": [
        growing, started(A, 2, rank=1), NEW_GONE,
        {
            "reasons": [f"{TRAINS}: a newcomer was lost: a worker was killed by SIGKILL"],
            "orders": [*to(stop(A, 2), N2), *to(KEPT, N1)], **GOES_ON, "outcome": "abandoned",
        },
    ],
    "a newcomer that is lost before the boundary leaves the old group training": [
        switching, NEW_GONE, {"orders": [*to(stop(A, 2), N2), *to(KEPT, N1)], "phase": "running"},
    ],
    **{
        f"a newcomer that ends with code {code} is no failure of the job": [
            growing, started(A, 2, rank=1), exited(A, 2, rank=1, code=code),
            {"reasons": [f"{TRAINS}: a newcomer was lost: {why}"]},
            {"phase": "running", "attempts.failures": 0, "attempts.losses": 0},
        ]
        for code, why in ((0, "it exited"), (3, "the script exited with code 3"))
    },
    # The job's last epoch ends in the group that it has just joined; its node says so first.
    "a newcomer whose script is through first is not lost": [
        switching, JOINED[0], finished(A, index=5, reason="10 of 10 epochs"),
        exited(A, 2, rank=1, code=0), {"reasons": []},
        exited(A, code=0), {"reasons": ["10 of 10 epochs"], "phase": "succeeded", "attempts.recoveries": 0},
    ],
    "a newcomer that cannot be started leaves the old group training": [
        growing, refused(A, 2, rank=1, error="no zygote"),
        {"reasons": [f"{TRAINS}: a newcomer could not start: no zygote"], "phase": "running"},
    ],
    "a newcomer that comes too late is stopped": [
        growing, started(A, 2, rank=1), expires(PREPARE_LIMIT_S),
        {"reasons": [f"{TRAINS}: not ready after 600 s: n2/0"], "workers": {OLD: "member", NEW: "leaving"}},
        ready(A, 2, rank=1), {"commands": []},  # too late
    ],
    "a boundary that never comes ends the change": [
        switching, expires(PROGRESS_DEADLINE_S),
        {"reasons": [f"{TRAINS}: the group did not switch within 1800 s"], "phase": "running"},
    ],
    "a group that cannot be built leaves the old group training": [
        switching, join_failed(A, index=4, group=2, error="timed out"),
        {
            "reasons": [f"{TRAINS}: the new group could not be built: timed out"],
            "workers": {OLD: "member", NEW: "leaving"},
        },
    ],
    "an order that failed is tried again after a pause that doubles": [
        growing,
        *(
            step
            for version, pause_s in ((2, 1.0), (3, 2.0), (4, 4.0))
            for step in (
                refused(A, version, rank=1, error="no zygote"), {"waits": "waiting for its next retry", "due": []},
                pause_s - 0.001, {"due": []}, 0.001, {"due": [OverrideDue(job=A)]},
                OverrideDue(job=A), {"change": "preparing"},
            )
        ),
    ],
    "a member that switched although the change was abandoned is mended": [
        switching, NEW_GONE, JOINED[0],
        {"reasons": [MENDED], "orders": to(order(run, 3, S0, [OLD], kind=RECOVER), N1)},
    ],
    "a member that switched before the change was abandoned is mended at once": [
        switching, JOINED[0], NEW_GONE,
        {
            "reasons": [f"{TRAINS}: a newcomer was lost: a worker was killed by SIGKILL", MENDED],
            "orders": [*to(stop(A, 2), N2), *to(KEPT, N1), *to(order(run, 3, S0, [OLD], kind=RECOVER), N1)],
        },
        broken(A, index=5, group=2, error="reset"), {"orders": []},
    ],
    "when the last incumbent ends well the job has ended whatever its newcomers do": [
        growing, started(A, 2, rank=1), finished(A, index=3, reason="10 of 10 epochs"), exited(A, code=0),
        {"reasons": ["10 of 10 epochs"], "phase": "succeeded"},
    ],
}  # fmt: skip

SECOND_ORDERS: Final[dict[str, Story]] = {
    "a newer order takes the place of one that is prepared": [
        growing, resized(A, on=(S0, S1)),
        {
            "reasons": [f"{TRAINS}: replaced by a newer order", "ann asked for n1/0, n1/1: 1 -> 2 slots, batch 64 -> 64"],
            "version": 3,  # versions are never used again
            "workers": {OLD: "member", NEW: "leaving", (3, 1): "ordered"},
        },
    ],
    "a newer order waits for a switch that is under way": [
        switching, resized(A, 1), {"orders": []}, *JOINED,
        {"reasons": [f"trains on 2 slots, batch 64: {ASKED}", "ann asked for 1 slot: 2 -> 1 slots, batch 64 -> 64"]},
    ],
    "the same order again leaves the newcomer alone": [growing, resized(A, on=(S0, T0)), {"orders": [], "version": 2}],
    "a pause takes the place of a growth that is prepared": [
        growing, paused(A),
        {"reasons": [f"{TRAINS}: replaced by a newer order", "paused by ann: 1 -> 0 slots, batch 64 -> 0"]},
    ],
    "a job that is cancelled while it grows is stopped everywhere": [
        growing, cancelled(A), {"orders": to(stop(A, 3, forget=True), N1, N2), "change": None},
    ],
}  # fmt: skip

HANDED_OVER: Final[dict[str, Story]] = {
    "a job waits until somebody leaves": [full, resized(A, 2), {"orders": [], "claims": {}}],
    "a newcomer is prepared beside a worker that leaves": [
        full, paused(B), resized(A, 2), {"orders": to(PREPARED, N2, N1), "claims": {T0: A}, "owners": {S0: A, T0: B}},
    ],
    "a newcomer owns its slot when the owner was seen gone": [
        handing_over, started(A, 2, rank=1), suspended(B, index=3, group=2), exited(B, code=0),
        {"owners": {S0: A, T0: A}, "claims": {}}, ready(A, 2, rank=1), STORE_OPENS, {"change": "switching"},
    ],
    "a slot that is kept after all is no longer waited for": [
        lambda: beside_b(T0, T1), resized(B, 1), resized(A, 2), {"claims": {T1: A}},
        join_failed(B, index=3, group=2, error="no"),
        {
            "reasons": [
                "trains on 2 slots, batch 64: the new group could not be built: no",
                f"{TRAINS}: the reserved slots are not given up",
            ],
            "owners": {S0: A, T0: B, T1: B}, "phase": "running",
        },
    ],
    "a slot is promised to one only": [
        lambda: training(training(training(cluster_of(n1=1, n2=1, n3=1), S0), T0, name="b"), U0, name="c"),
        paused(B), resized(A, 2), resized(C, 2),
        {"claims": {T0: A}, (C, "override_wait_reason"): "waiting for 1 more slot, as ann ordered"},
    ],
}  # fmt: skip

MEMBERS_LOST: Final[dict[str, Story]] = {
    "a lost member brings the others to rest": [
        lambda: training(cluster_of(n1=2, n2=2), S0, S1, T0), exited(A, rank=2, signal=SIGKILL),
        {
            "commands": [
                news("worker.exited", A, rank=2, slot=T0, version=1, code=None, signal=9),
                news("job.rescaling", A, reason="a worker was killed by SIGKILL; 2 workers continue"),
                *to(RESTS, N1), RequestPlan(),
            ],
            "change": "quiescing",
        },
    ],
    "survivors at one step go on as they are": [
        quiescing, quiesced(A, index=3, group=2, step=20, port=29500),
        quiesced(A, rank=1, index=3, group=2, step=20, port=29501), {"orders": to(REJOINS, N1)},
    ],
    "survivors that disagree take the furthest step": [
        quiescing, quiesced(A, index=3, group=2, step=20, port=29500),
        quiesced(A, rank=1, index=3, group=2, step=21, port=29501),
        {"orders": to(order(switch, 2, ON_N1, PAIR, kind=RECOVER, store=STORE, source=1), N1)},
    ],
    "a mended group trains on without a checkpoint": [
        quiescing, *BOTH_QUIESCED, *(formed(A, rank=rank, index=4, group=2, step=20) for rank in (0, 1)),
        {
            "orders": [*to(order(settle, 2, ON_N1, PAIR), N1), *to(stop(A, 2), N2)],
            "phase": "running", "attempts.losses": 0, "kinds": [START, RECOVER],
        },
    ],
    "the word of a broken group is enough to mend it": [
        both, broken(A, index=3, group=1, error="reset by peer"),
        {"orders": to(order(run, 2, HALVES, PAIR, kind=RECOVER), N1, N2)},
        broken(A, rank=1, index=3, group=1, error="reset"), {"commands": []},
    ],
    "a newcomer without the whole state is dismissed": [
        lambda: training(cluster_of(n1=2, n2=2), S0, S1), resized(A, on=(S0, S1, T0)), STORE_OPENS,
        started(A, 2, rank=2), ready(A, 2, rank=2), OTHER_GONE,
        quiesced(A, 2, rank=2, index=2, group=3, has_full_state=False), quiesced(A, index=4, group=3),
        {
            "orders": [*to(order(switch, 3, S0, [OLD], kind=RECOVER), N1), *to(stop(A, 3, stage=PREPARE + 1), N2)],
            "workers": {(1, 0): "member", (1, 1): "exited", (2, 2): "leaving"},
        },
    ],
    "a newcomer that passed the boundary may be the only one that is left": [
        switching, JOINED[1], exited(A, signal=SIGKILL), {"change": "quiescing"},
        quiesced(A, 2, rank=1, index=3, group=3), {"orders": to(order(switch, 3, T0, [NEW], kind=RECOVER), N2)},
    ],
    "a survivor that is lost at rest is not waited for": [
        quiescing, BOTH_QUIESCED[0], OTHER_GONE, {"change": "rejoining"}, formed(A, index=4, group=2), GOES_ON,
    ],
    **{
        f"a survivor that {how} while it rejoins is another mend": [
            quiescing, *BOTH_QUIESCED, exited(A, rank=1, **end),
            {"orders": to(order(run, 3, S0, [OLD], kind=RECOVER), N1), "change": "quiescing"},
        ]
        for how, end in (("is killed", {"signal": SIGKILL}), ("ends", {"code": 0}))
    },
    "when the last survivor is lost the job starts again from its checkpoint": [
        lambda: training(cluster_of(n1=2, n2=2), S0, T0, epochs=2), OTHER_GONE, exited(A, signal=SIGKILL),
        {"reasons": ["a worker was killed by SIGKILL; resumes after epoch 2"], "phase": "paused"},
        place({A: T0}), {"orders": to(order(run, 4, T0, [(4, 0)], resume=resume_at(2, 1)), N2)},
    ],
    "survivors that do not come to rest in time are given up": [
        quiescing, expires(PROGRESS_DEADLINE_S),
        {
            "reasons": [
                "a worker was killed by SIGKILL, and the survivors did not form a group within 1800 s; restarts from the beginning"
            ],
        },
    ],
    "nobody who has the whole state is nobody to go on with": [
        quiescing, *(quiesced(A, rank=rank, index=3, group=2, has_full_state=False) for rank in (0, 1)), {"phase": "paused"},
    ],
    "a group that breaks again and again starts from its checkpoint": [
        both, broken(A, index=3, group=1, error="reset"),
        *(
            step
            for version in range(2, MAX_RECOVERIES + 2)
            for step in (
                {"phase": "rescaling"},
                *(quiesced(A, rank=rank, index=2 * version, group=version) for rank in (0, 1)),
                join_failed(A, index=2 * version + 1, group=version, error="no"),
            )
        ),
        {"phase": "paused"},
    ],
    "a survivor that exits while the job is mended does not make it a success": [
        both, OTHER_GONE, {"change": "quiescing"}, exited(A, code=0), {"phase": "paused"},
    ],
    "growths that failed do not cost a job its mend": [
        lambda: training(cluster_of(n1=2, n2=1), S0, T0),
        *(
            step
            for version in range(2, 9)
            for step in (resized(A, 3), exited(A, version, rank=2, signal=SIGKILL), {"phase": "running"})
        ),
        OTHER_GONE, {"change": "quiescing"},
    ],
}  # fmt: skip

SCRIPTS_END: Final[dict[str, Story]] = {
    "a script that fails on one slot fails the job": [
        both, exited(A, rank=1, code=3), {"phase": "failed", "orders": to(stop(A, 2, forget=True), N1, N2)},
    ],
    "a script that raised fails the job also where its peers tell of the broken group first": [
        both, raised(A, index=3, error="OSError: disk full", where="train.py:7"),
        broken(A, rank=1, index=3, group=1, error="reset by peer"),
        raised(A, rank=1, index=4, error="UsageError: apart", where=""), exited(A, code=1),
        {"reasons": ["OSError: disk full (train.py:7) (exit code 1)"], "phase": "failed"},
    ],
    "a script that raises while others recover from a loss is left behind": [
        three, exited(A, rank=2, signal=SIGKILL), exited(A, rank=1, code=1), {"change": "quiescing"},
    ],
    **{
        f"a script that raises before its group has formed fails the job: {then.__struct_config__.tag}": [
            forming, raised(A, index=3, error="OSError: disk full", where=""), then,
            {"reasons": ["OSError: disk full"], "phase": "failed"},  # its process may go on in a thread
        ]
        for then in (say(A, rank=1, index=3, group=1, error="reset by peer") for say in (broken, join_failed))
    },
    "a job has succeeded when its last worker ends": [
        both, finished(A, index=3, reason="10 of 10 epochs"), exited(A, code=0), {"phase": "running"},
        exited(A, rank=1, code=0), {"phase": "succeeded"},
    ],
    "a script that ends on one slot while another waits for it failed": [
        lambda: told(cluster_of(n1=1, n2=1), fresh(), place({A: HALVES})), started(A), ready(A, rank=1), exited(A, code=0),
        {"reasons": ["the script exited on one slot while another slot waited for it"]},
    ],
    "a job of which one node tells the end waits for the other to tell": [
        forming, formed(A, rank=1), exited(A, rank=1, code=0), {"phase": "starting"},
        formed(A), epoch_end(A, 1), finished(A, index=4, reason="1 of 1 epochs"), exited(A, code=0),
        {"phase": "succeeded", "progress.epoch": 1},
    ],
    **{
        f"a first group that cannot form is started again: {why.__struct_config__.tag}": [
            forming, why, {"reasons": ["the group could not form: no store; restarts from the beginning"]},
        ]
        for why in (say(A, rank=1, index=2, group=1, error="no store") for say in (join_failed, broken))
    },
}  # fmt: skip

NODES: Final[dict[str, Story]] = {
    "a lost node leaves the survivors on another training": [
        both, lose(N2),
        {
            "orders": [*to(order(run, 2, S0, [OLD], kind=RECOVER), N1), *to(stop(A, 2, stage=PREPARE), N2)],
            "workers": {(1, 0): "member", (1, 1): "leaving"},
        },
    ],
    "a node that returns is told to stop what others went on without": [
        both, lose(N2), greets(N2, (1, 1, S0)), {"orders": to(stop(A, 2, stage=PREPARE), N2)},
        BOTH_QUIESCED[0], formed(A, index=4, group=2), greets(N2, (1, 1, S0)), {"orders": to(stop(A, 2), N2)},
    ],
    "a node that came back empty is not told to start a lost member again": [
        both, greets(N2, boot="boot-2"),
        {
            "orders": [*to(order(run, 2, S0, [OLD], kind=RECOVER), N1), *to(stop(A, 2, stage=PREPARE), N2)],
            "change": "quiescing",
        },
    ],
    "a lost node with newcomers only leaves the old group training": [growing, lose(N2), GOES_ON],
    "a lost node with all that trained pauses the job": [
        growing, lose(N1), {"phase": "paused", "workers": {OLD: "leaving", NEW: "leaving"}},
    ],
    # The agents of a new controller greet it with these workers.
    "a new controller goes on preparing": [
        growing, started(A, 2, rank=1), do("start"),
        greets(N1, (1, 0, S0)), {"orders": to(order(run, 2, HALVES, [OLD, NEW], kind=JOIN, term=2), N1)},
        greets(N2, (2, 1, T0)), {"orders": to(order(run, 2, HALVES, [OLD, NEW], kind=JOIN, term=2), N2)},
        STORE_OPENS, ready(A, 2, rank=1), {"change": "switching"},
    ],
    "a new controller goes on switching": [
        switching, do("start"), greets(N1, (1, 0, S0)),
        {"orders": to(order(switch, 2, HALVES, [OLD, NEW], kind=JOIN, store=STORE, term=2), N1)},
        greets(N2, (2, 1, T0)), {"orders": to(order(switch, 2, HALVES, [OLD, NEW], kind=JOIN, store=STORE, term=2), N2)},
        *JOINED, {"phase": "running", "slots": [S0, T0]},
    ],
    "a new controller goes on bringing to rest": [
        quiescing, quiesced(A, index=3, group=2, port=29500), do("start"), greets(N1, (1, 0, S0), (1, 1, S1)),
        {"orders": to(order(run, 2, ON_N1, PAIR, kind=RECOVER, term=2), N1)}, greets(N2), {"orders": []},
        BOTH_QUIESCED[1], {"change": "rejoining"},
    ],
    "a new controller goes on rejoining": [
        quiescing, *(quiesced(A, rank=rank, index=3, group=2, port=29500) for rank in (0, 1)), do("start"),
        greets(N1, (1, 0, S0), (1, 1, S1)),
        {"orders": to(order(switch, 2, ON_N1, PAIR, kind=RECOVER, store=STORE, term=2), N1)}, greets(N2), {"orders": []},
    ],
    "a new controller that finds a newcomer gone gives the change up": [
        growing, started(A, 2, rank=1), do("start"), greets(N1, (1, 0, S0)), greets(N2), GOES_ON,
    ],
    "a new controller gives every change its time again": [growing, 10_000.0, do("start"), {"due": []}],
    "a node that nobody told of the change runs what it ran": [
        both, resized(A, on=(S0, T0, S1)), greets(N2, (1, 1, S0)), {"orders": to(order(settle, 1, HALVES, PAIR), N2)},
    ],
    "a worker that lives is not cleared by what its node said when it was a member": [
        both, cancelled(A), (N2, cleared(A, 2)),
        {"workers": {(1, 0): "leaving", (1, 1): "leaving"}, "owners": {S0: A, T0: A}},
    ],
}  # fmt: skip

BY_HAND: Final[dict[str, Story]] = {
    "the policy sees and moves no job under a hand": [
        one_node_trains, greeting(N2), resized(A, 1), {"seen": []}, place({A: T0}), {"commands": []},
    ],
    "slots that a hand waits for are kept from the policy": [
        lambda: cluster_of(n1=1, n2=1), fresh(slots=(3, 4)), resized(A, 3),
        {"waits": "waiting for slots: ann ordered 3 slots", "usable": {S0: False, T0: False}},
    ],
    "auto gives a job back to the policy": [
        one_node_trains, resized(A, 1), resumed(A, auto=True),
        {"commands": [news("job.override", A, user="ann", override="off"), RequestPlan()], "seen": [A]},
    ],
    "a hand on a job that ended changes nothing": [
        alone, cancelled(A),
        *(step for ask in (resized(A, 2), paused(A), resumed(A)) for step in (ask, {"commands": []})),
    ],
    "an order for the batch leaves the job where it was ordered to be": [
        both, resized(A, on=(S1, T0)), resized(A, batch=32), {"override.on": (S1, T0), "override.batch": 32},
    ],
    "an order does not take the outcome of the group before it": [
        growing, paused(A),
        {"outcomes": [(1, "formed"), (0, "ordered"), (2, "abandoned"), (0, "ordered"), (3, "")]},
    ],
    "a job that waits says who paused and resumed it": [
        cluster_of, fresh(), {"reason": "submitted"},
        *(
            step
            for ask, why in ((paused(A), "paused"), (resumed(A), "resumed"), (paused(A), "paused"), (resized(A, 1), "resumed"))
            for step in (ask, {"reason": f"{why} by ann"})
        ),
    ],
}  # fmt: skip


@stories(
    GROWS | SHRINKS_OR_MOVES | PAUSES | NEWCOMERS_FAIL | SECOND_ORDERS | HANDED_OVER | MEMBERS_LOST
    | SCRIPTS_END | NODES | BY_HAND
)  # fmt: skip
def test_a_change_of_a_group_goes_as_told(story: Story) -> None:
    for found, expected in played(*story):
        assert found == expected


@pytest.mark.parametrize(
    ("pause_ms", "step_ms", "said"),
    [
        (12.5, 50.0, {"pause_ms": 12.5, "pause_steps": 0.25}),
        (12.5, 0.0, {"pause_ms": 12.5}),
        (12.5, math.nan, {"pause_ms": 12.5}),
        (0.0, 50.0, {}),
        (-1.0, 50.0, {}),
        (math.nan, 50.0, {}),
        (math.inf, 0.0, {"pause_ms": MAX_MEASURE}),
    ],
)
def test_a_change_says_how_long_training_stood_still_for_it(
    pause_ms: float, step_ms: float, said: dict[str, float]
) -> None:
    controller = switching()
    controller.tell(N1, formed(A, index=4, group=2, pause_ms=pause_ms, step_ms=step_ms))

    (announced, *_) = controller.tell(N2, formed(A, 2, rank=1))

    why = f"trains on 2 slots, batch 64: {ASKED}"
    assert announced == news("job.running", A, reason=why, slots=2, batch=64, took_s=0.0, **said)
    last = controller.history_of(A).versions[-1]
    assert (last.kind, last.took_s) == (JOIN, 0.0)
    assert controller.history_of(A).decisions[-1].numbers == said


def test_a_change_says_how_long_its_phases_took() -> None:
    controller = told(
        growing(), 3.0, STORE_OPENS, *NEWCOMER, 0.5,
        formed(A, index=4, group=2, connect_ms=125.0), 1.0, formed(A, 2, rank=1, connect_ms=62.5),
    )  # fmt: skip

    assert controller.history_of(A).decisions[-1].numbers == {
        "prepare_s": 3.0, "connect_s": 0.125, "switch_s": 0.5, "transfer_s": 1.0,
    }  # fmt: skip


def test_orders_are_among_the_decisions_with_who_gave_them() -> None:
    controller = told(
        one_node(), fresh(slots=(2, 4)), resized(A, 4, batch=128, user="bob"), paused(A),
        resumed(A), resized(A, on=(S0, S1)), resumed(A, auto=True),
    )  # fmt: skip

    decisions = controller.history_of(A).decisions

    assert {(one.code, one.by, one.outcome) for one in decisions} == {
        ("order", "operator", "ordered")
    }
    assert [one.reason for one in decisions] == [
        "bob asked for 4 slots, batch 128",
        "ann asked for a pause",
        "ann ended the pause",
        f"ann asked for {S0}, {S1}",
        "ann returned the job to the policy",
    ]


def test_a_node_that_came_back_empty_is_not_told_to_start_again_what_had_ended_there() -> None:
    controller = told(both(), exited(A, rank=1, code=0))

    commands = controller.take(greets(N2, boot="boot-2"))

    assert deltas(commands) == []
    assert desired(controller.state, controller.job(A), N2) == stop(A, 1)


def test_the_history_of_a_change_gives_the_same_state_again() -> None:
    controller = told(switching(), *JOINED, NEW_GONE, quiesced(A, index=5, group=3))

    assert controller.job(A).version == Version(3)
    assert controller.replayed() == controller.state


def test_slots_to_add_leave_out_slots_that_the_job_has() -> None:
    free = SimpleNamespace(free=[S0, S1], releasing={S0: B})
    anywhere = SimpleNamespace(slots=None)
    state = SimpleNamespace(available_to=lambda _job: free, fit=lambda _job: anywhere)
    job = cast("Job", SimpleNamespace(job=A, spec=None))
    wanted = ManualOverride(user="ann", slots=3)

    assert overrides._slots_to_add(cast("State", state), job, wanted, [S0], 3) == ([S1], [])
