"""Arrays: indices that become jobs when they may start, and their common end."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.inputs import NodeHeard, StartDue
from controlplane.core.model.job_phases import Phase
from controlplane.policy.api import Reason
from schemas.ids import JobId
from schemas.relations import ArrayElement
from tests.support import builders
from tests.support.builders import (
    N1,
    S0,
    S1,
    A,
    B,
    cancelled,
    exited,
    formed,
    held,
    ready,
    released,
    started,
)
from tests.support.controller import Controller, cluster_of
from tests.support.sizes import examples

COMMAND: Final[dict[str, Any]] = {
    "kind": "command", "command": ("make",), "slots": 1, "script": "", "batch_size": 1,
}  # fmt: skip


def array_of(text: str, slots: int = 2, **spec: Any) -> Controller:
    """Job a-1 is an array on a node with so many slots."""
    controller = cluster_of(n1=slots)
    controller.submit("a", **COMMAND, array=text, **spec)
    return controller


def live(controller: Controller) -> dict[JobId, int]:
    array = controller.job(A).array
    assert array is not None
    return array.live


def run(controller: Controller, job: JobId, code: int = 0) -> None:
    """Start an element on a free slot, and end it."""
    taken = controller.state.slot_index.owners()
    slot = next(slot for slot in (S0, S1) if slot not in taken)
    controller.place({job: {slot: 1}})
    for report in (started(job, pid=100), ready(job), formed(job), exited(job, 1, code=code)):
        controller.tell(N1, report)


# array, slots of the cluster -> elements that are jobs at first
SIZES = [
    ("0-9", 2, 4), ("0-9%3", 2, 3), ("0-9%9", 2, 4), ("0-1", 2, 2), ("7-7", 1, 1),
    ("0-9999", 1, 2), ("999999990-999999999", 1, 2),
]  # fmt: skip


@pytest.mark.parametrize(("text", "slots", "most"), SIZES)
def test_indices_become_jobs_as_far_as_they_may_start(text: str, slots: int, most: int) -> None:
    controller = array_of(text, slots)

    first = int(text.partition("-")[0])
    names = [JobId(f"a_{first + place}-{2 + place}") for place in range(most)]
    assert live(controller) == {name: first + place for place, name in enumerate(names)}
    assert [job.job for job in controller.rigid_views()] == names
    spec = controller.job(names[0]).spec
    assert spec.element == ArrayElement(array=A, index=first)
    assert (spec.indices, spec.name, controller.job(names[0]).family) == (
        None, f"a_{first}", controller.job(A).family,
    )  # fmt: skip


def test_without_slots_an_array_is_one_row_and_costs_as_one_job() -> None:
    controller = Controller()
    controller.start()
    controller.submit("a", **COMMAND, array="0-9999")

    assert [*controller.state.jobs] == [A]
    assert controller.job(A).gate_reason == Reason("array", "array of 10000 elements")
    (array,), single = controller.state.jobs.values(), cluster_of()
    single.submit("a", **COMMAND)
    assert len(msgspec.msgpack.encode(array)) < len(msgspec.msgpack.encode(single.job(A))) + 200

    controller.take(builders.greeting(N1, slots=1))

    assert len(live(controller)) == 2


@pytest.mark.parametrize(
    ("codes", "phase", "reason", "code"),
    [
        ((0, 0, 0), Phase.SUCCEEDED, "all 3 elements succeeded", 0),
        ((0, 4, 0), Phase.FAILED, "1 of 3 elements did not succeed, first a_1-3 failed: ", 4),
        ((5, 0, 6), Phase.FAILED, "2 of 3 elements did not succeed, first a_0-2 failed: ", 5),
    ],
)
def test_an_array_ends_with_its_last_element(
    codes: tuple[int, ...], phase: Phase, reason: str, code: int
) -> None:
    controller = array_of("0-2")
    controller.submit("b", after=("ok:a-1",))
    child = next(iter(controller.state.children[A]))

    for each in codes:
        assert not controller.job(A).ended
        run(controller, next(iter(live(controller))), each)

    job = controller.job(A)
    if code:
        reason += f"the program ended with exit code {code}"
    assert (job.phase, job.reason, job.attempts.exit_code) == (phase, reason, code)
    eligible = phase is Phase.SUCCEEDED
    assert controller.job(child).phase is (Phase.QUEUED if eligible else Phase.CANCELLED)
    assert controller.replayed() == controller.state


def test_a_cancelled_array_cancels_its_elements_and_makes_no_more() -> None:
    controller = array_of("0-9")
    names = [*live(controller)]
    controller.place({names[0]: {S0: 1}})

    controller.take(cancelled(A, "bob"))

    assert [controller.job(name).reason for name in (A, *names)] == ["cancelled by bob"] * 5
    controller.take(NodeHeard(node=N1))
    assert [*controller.state.jobs] == names[:1]  # its process may still exist
    assert controller.replayed() == controller.state


def test_a_held_array_makes_no_elements_and_holds_the_live_ones() -> None:
    controller = array_of("0-9%2")
    first, second = live(controller)
    controller.take(held(A, "olga"))
    assert controller.rigid_views() == []

    controller.take(cancelled(first))
    assert [*live(controller)] == [second]
    controller.take(released(A))

    assert [*live(controller)] == [second, JobId("a_2-4")]
    assert len(controller.rigid_views()) == 2


def test_an_array_waits_for_its_parents_and_its_earliest_start() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a")
    controller.submit("b", **COMMAND, array="0-2", after=("any:a-1",), not_before="+60s")
    assert [*controller.state.jobs] == [A, B]
    assert controller.job(B).gate_reason == Reason("after", "waits for a-1 to end")

    controller.take(cancelled(A))

    reason = controller.job(B).gate_reason
    assert reason is not None
    assert reason.code == "not_before"
    controller.now += 60.0
    controller.take(StartDue(job=B))
    assert [*controller.state.jobs] == [B, "b_0-3", "b_1-4"]


def test_an_element_that_is_submitted_again_does_not_count_twice() -> None:
    controller = array_of("0-1")
    first = next(iter(live(controller)))
    spec = controller.job(first).spec
    run(controller, first, 1)
    again = builders.submission("a")
    controller.take(type(again)(spec=spec, snapshot=again.snapshot, user="ann", key=""))

    run(controller, JobId("a_0-4"))

    assert controller.job(A).array.ended == {"failed": 1}


@settings(max_examples=examples(60), deadline=None)
@given(
    size=st.integers(1, 9),
    cap=st.integers(0, 5),
    acts=st.lists(
        st.tuples(st.sampled_from(("run", "fail", "cancel", "hold", "release")), st.integers(0, 9)),
        max_size=25,
    ),
)
def test_every_index_is_a_job_once_and_never_more_than_allowed_live(
    size: int, cap: int, acts: list[tuple[str, int]]
) -> None:
    controller = array_of(f"0-{size - 1}{f'%{cap}' if cap else ''}")
    most, ended, on_hold = min(cap or 4, 4), dict[int, str](), False
    rest = [("release", 0), *[("run", 0)] * size]
    for act, place in (*acts, *rest):
        names = [*live(controller)]
        if act in {"hold", "release"} and not controller.job(A).ended:
            on_hold = act == "hold"
            controller.take(held(A) if on_hold else released(A))
        elif names and not (on_hold and act != "cancel"):
            name = names[place % len(names)]
            index = live(controller)[name]
            assert index not in ended
            ended[index] = {"run": "succeeded", "fail": "failed", "cancel": "cancelled"}[act]
            if act == "cancel":
                controller.take(cancelled(name))
            else:
                run(controller, name, int(act == "fail"))
        now = live(controller)
        assert len(now) <= most
        assert {*now.values()}.isdisjoint(ended)
        free = min(most, size - len(ended)) - len(now)  # live elements that are missing
        assert free == 0 or (on_hold and free > 0)

    job = controller.job(A)
    assert {*ended} == set(range(size))
    states = [*ended.values()]
    assert job.array is not None
    assert job.array.ended == {state: states.count(state) for state in states}
    assert job.phase is (Phase.SUCCEEDED if {*states} == {"succeeded"} else Phase.FAILED)
    assert controller.replayed() == controller.state
