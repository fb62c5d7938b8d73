"""Failing scripts, cancellations, losses of nodes."""

from __future__ import annotations

from inspect import cleandoc
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from controlplane.policy.api import Policy
from controlplane.policy.registry import POLICIES
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.results import TraceJob
from schemas.ids import NodeId
from tests.support import simulations
from tests.support.simulations import N0, N1, S0, S1, T0, A, B, ScriptedPolicy, ToyModel, job

pytestmark = pytest.mark.slow
ONE_SLOT = (NodeGroup(count=1, slots=1),)
TWO_NODES = (NodeGroup(count=2, slots=2),)
SLOW = (  # that search
    "drl", "goodput", "harmony-drl", "ones", "ones-paper", "optimus", "pollux", "slaq",
)  # fmt: skip
FAST = (Phase.generate,)  # a failure is small enough; to make it smaller takes minutes


P = ScriptedPolicy
STORIES = {
    # at 240 of 400 samples; a second later, then 4 s from 200 on
    "a failed script restarts from its last epoch": ("fifo", [job("a", crashes_at=0.6)], {},
        """a: started 0 33, ready 8 37, formed 8 37, epochs 18 28 47 57, raised 32, exited 32 57
        on 0/0 0-32, 0/0 33-57; succeeded at 57, queued 1, ran 56"""),
    "a failed script ends its job without retries": (
        "fifo", [job("a", crashes_at=0.6)], {"model": ToyModel(retries=0)},
        """a: started 0, ready 8, formed 8, epochs 18 28, raised 32, exited 32
        on 0/0 0-32; failed at 32, ran 32"""),
    "the slots of a failed script are free at once": (
        "fifo", [job("a", slots=2, crashes_at=0.6), job("b")], {},
        """a: started 0 0 68 68, ready 8 8 72 72, formed 8 8 72 72, epochs 13 18 77 82, raised 20, exited 20 20 82 82
        on 0/0 0-20, 0/1 0-20, 0/0 68-82, 0/1 68-82; succeeded at 82, queued 48, ran 34
        b: started 20, ready 28, formed 28, epochs 38 48 58 68, exited 68
        on 0/0 20-68; succeeded at 68, queued 20, ran 48"""),
    # 50 samples at 13; its first start had come to no checkpoint
    "a script that fails in its first epoch starts over": (
        "fifo", [job("a", crashes_at=0.125)], {},
        """a: started 0 14, ready 8 18, formed 8 18, epochs 28 38 48 58, raised 13, exited 13 58
        on 0/0 0-13, 0/0 14-58; succeeded at 58, queued 1, ran 57"""),
    "a job cancelled while it waits never starts": (
        "fifo", [job("a"), job("b", 1.0, cancelled_after_s=9.0)], {"nodes": ONE_SLOT},
        """a: started 0, ready 8, formed 8, epochs 18 28 38 48, exited 48
        on 0/0 0-48; succeeded at 48, ran 48
        b: never started
        on nothing; cancelled at 10, queued 9"""),
    "a job that has ended cannot be cancelled": (
        "fifo", [job("a", cancelled_after_s=50.0), job("b")], {"nodes": ONE_SLOT},
        """a: started 0, ready 8, formed 8, epochs 18 28 38 48, exited 48
        on 0/0 0-48; succeeded at 48, ran 48
        b: started 48, ready 56, formed 56, epochs 66 76 86 96, exited 96
        on 0/0 48-96; succeeded at 96, queued 48, ran 48"""),
    "a job cancelled while it starts leaves its slot at once": (
        "fifo", [job("a", cancelled_after_s=5.0), job("b", 1.0)], {"nodes": ONE_SLOT},
        """a: started 0, exited 5
        on 0/0 0-5; cancelled at 5, ran 5
        b: started 5, ready 13, formed 13, epochs 23 33 43 53, exited 53
        on 0/0 5-53; succeeded at 53, queued 4, ran 48"""),
    "a job cancelled while it trains leaves its slot at once": (
        "fifo", [job("a", cancelled_after_s=15.0), job("b", 1.0)], {"nodes": ONE_SLOT},
        """a: started 0, ready 8, formed 8, exited 15
        on 0/0 0-15; cancelled at 15, ran 15
        b: started 15, ready 23, formed 23, epochs 33 43 53 63, exited 63
        on 0/0 15-63; succeeded at 63, queued 14, ran 48"""),
    "a job cancelled while it grows leaves all its slots": (
        P((0, {A: {S0: 64}}), (10, {A: {S0: 32, S1: 32}}), (20, {B: {S0: 32, S1: 32}})),
        [job("a", cancelled_after_s=12.0), job("b", 1.0)], {},
        """a: started 0 10, ready 8, formed 8, exited 12 12
        on 0/0 0-12; cancelled at 12, ran 12
        b: started 20 20, ready 28 28, formed 28 28, epochs 33 38 43 48, exited 48 48
        on 0/0 20-48, 0/1 20-48; succeeded at 48, queued 19, ran 28"""),
    # its newcomer would be ready at 52
    "a job that ends while it grows leaves all its slots": (
        P((0, {A: {S0: 64}}), (46, {A: {S0: 32, S1: 32}}), (60, {B: {S0: 32, S1: 32}})),
        [job("a"), job("b")], {},
        """a: started 0 46, ready 8, formed 8, epochs 18 28 38 48, exited 48 48
        on 0/0 0-48; succeeded at 48, ran 48
        b: started 60 60, ready 68 68, formed 68 68, epochs 73 78 83 88, exited 88 88
        on 0/0 60-88, 0/1 60-88; succeeded at 88, queued 60, ran 28"""),
    # ready at 26 with 180 samples, twice as fast from 26.5 on
    "a newcomer gets the slot of a job that is cancelled before it left": (
        P((0, {A: {S0: 64}, B: {S1: 64}}), (20, {A: {S0: 32, S1: 32}})),
        [job("a"), job("b", cancelled_after_s=15.0)], {},
        """a: started 0 20, ready 8 26, formed 8 26.5 26.5, epochs 18 27.5 32.5 37.5, exited 37.5 37.5
        on 0/0 0-26.5, 0/0 26.5-37.5, 0/1 26.5-37.5; succeeded at 37.5, ran 37.5, rescales 1
        b: started 0, ready 8, formed 8, exited 15
        on 0/1 0-15; cancelled at 15, ran 15"""),
    # 240 samples at 20, half as fast from 50.5 on
    "a group that loses a node recovers and loses no step": (
        P((0, {A: {S0: 32, T0: 32}}), (30, {A: {S0: 64}})), [job("a")],
        {"nodes": TWO_NODES, "losses": [(N1, 20.0, 1000.0)]},
        """a: started 0 0, ready 8 8, formed 8 8 50.5, epochs 13 18 56.5 66.5, broken 20, exited 66.5
        on 0/0 0-50.5, 1/0 0-50.5, 0/0 50.5-66.5; succeeded at 66.5, ran 66.5, rescales 1
        n0001: greeted 0, suspected 26, lost 50"""),
    # 20 samples of the second epoch are lost; 4 s after the node is back it is begun again
    "a job on a lost node goes back to its last epoch": (
        P((0, {A: {S0: 64}})), [job("a")], {"losses": [(N0, 20.0, 100.0)]},
        """a: started 0 120, ready 8 124, formed 8 124, epochs 18 134 144 154, exited 154
        on 0/0 0-50, 0/0 120-154; succeeded at 154, queued 70, ran 84
        n0000: greeted 0 120, suspected 26, lost 50"""),
    "a node is lost before it returns": (
        "fifo", [job("a")], {"nodes": ONE_SLOT, "losses": [(N0, 20.0, 1.0)]},
        """a: started 0 51, ready 8 55, formed 8 55, epochs 18 65 75 85, exited 85
        on 0/0 0-50, 0/0 51-85; succeeded at 85, queued 1, ran 84
        n0000: greeted 0 51, suspected 26, lost 50"""),
    "an order to a lost node is repeated after its return": (
        "fifo", [job("a", 13.0)], {"nodes": ONE_SLOT, "losses": [(N0, 12.0, 50.0)]},
        """a: started 62, ready 70, formed 70, epochs 80 90 100 110, exited 110
        on 0/0 13-42, 0/0 62-110; succeeded at 110, queued 20, ran 77
        n0000: greeted 0 62, suspected 18, lost 42"""),
    # it had never trained: 8 s after the loss at 34
    "a start continues elsewhere after a loss": (
        P((0, {A: {S0: 32, T0: 32}}), (20, {A: {S0: 64}})), [job("a")],
        {"nodes": TWO_NODES, "losses": [(N1, 4.0, 1000.0)]},
        """a: started 0 0 34, ready 8 42, formed 42, epochs 52 62 72 82, exited 34 82
        on 0/0 0-34, 1/0 0-34, 0/0 34-82; succeeded at 82, ran 82
        n0001: greeted 0, suspected 10, lost 34"""),
    "a job continues after the loss of its newcomer": (
        P((0, {A: {S0: 64}}), (20, {A: {S0: 32, T0: 32}}), (40, {A: {S0: 64}})), [job("a")],
        {"nodes": TWO_NODES, "model": ToyModel(epoch_samples=200), "losses": [(N1, 22.0, 1000.0)]},
        """a: started 0 20, ready 8, formed 8, epochs 28 48 68 88, exited 88
        on 0/0 0-88; succeeded at 88, ran 88
        n0001: greeted 0, suspected 28, lost 52"""),
    "a lost node cannot be lost again": (
        "fifo", [job("a")], {"losses": [(N0, 20.0, 100.0), (N0, 95.0, 100.0)]},
        """a: started 0 120, ready 8 124, formed 8 124, epochs 18 134 144 154, exited 154
        on 0/0 0-50, 0/0 120-154; succeeded at 154, queued 70, ran 84
        n0000: greeted 0 120, suspected 26, lost 50"""),
    "a returned node can be lost again": (
        "fifo", [job("a")], {"losses": [(N0, 20.0, 100.0), (N0, 130.0, 100.0)]},
        """a: started 0 120 230, ready 8 124 234, formed 8 124 234, epochs 18 244 254 264, exited 264
        on 0/0 0-50, 0/0 120-160, 0/0 230-264; succeeded at 264, queued 140, ran 124
        n0000: greeted 0 120 230, suspected 26 136, lost 50 160"""),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "jobs", "options", "story"), STORIES.values(), ids=STORIES)
def test_a_fault_has_these_consequences(
    policy: str | Policy, jobs: list[TraceJob], options: dict[str, Any], story: str
) -> None:
    assert simulations.simulated_run(policy, *jobs, **options).run(1e4).story() == cleandoc(story)


# --- whatever happens


Loss = tuple[NodeId, float, float]


def troubles(*, cancels: bool) -> st.SearchStrategy[tuple[list[TraceJob], list[Loss]]]:
    patience = st.none() | st.integers(0, 60) if cancels else st.none()
    crash = st.none() | st.floats(0.05, 0.95)
    each = st.tuples(st.integers(0, 60), st.integers(1, 4), st.integers(20, 300), patience, crash)
    # far enough apart that a node is back before it is lost again
    losses = st.lists(st.tuples(st.sampled_from([N0, N1]), st.integers(0, 80)), max_size=2)
    return st.tuples(
        st.lists(each, min_size=1, max_size=4).map(
            lambda rows: [
                job(
                    f"j{number}", float(at), slots, samples=samples,
                    cancelled_after_s=None if waits is None else float(waits), crashes_at=share,
                )
                for number, (at, slots, samples, waits, share) in enumerate(
                    sorted(rows, key=lambda row: row[0])
                )
            ]
        ),
        losses.map(
            lambda rows: [
                (node, at + 100.0 * number, 50.0) for number, (node, at) in enumerate(rows)
            ]
        ),
    )  # fmt: skip


def ends_well(run: simulations.SimulatedRun, jobs: list[TraceJob]) -> None:
    """Every job ended, and those that succeeded did all of their work."""
    patience = {each.name: each.cancelled_after_s for each in jobs}
    for name, ended in run.jobs.items():
        wanted = {"succeeded"} if patience[name] is None else {"succeeded", "cancelled"}
        assert ended.state in wanted, f"{name} is {ended.state}"
    for name, training in run.trainings.items():
        if run.job(name).phase.value == "succeeded":
            assert training.progress == training.model.epoch_ends_at(training.model.epochs - 1)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("cancels", [False, True])
def test_every_job_ends_under_any_faults(policy: str, cancels: bool) -> None:  # noqa: FBT001 - a parameter
    few = 4 if policy in SLOW else 25

    @settings(max_examples=few, deadline=None, derandomize=True, database=None, phases=FAST)
    @given(trouble=troubles(cancels=cancels), round_s=st.sampled_from([0.0, 30.0]))
    def runs(trouble: tuple[list[TraceJob], list[Loss]], round_s: float) -> None:
        jobs, losses = trouble
        run = simulations.simulated_run(
            policy, *jobs, nodes=TWO_NODES, losses=losses, round_s=round_s
        ).run(1e6)
        ends_well(run, jobs)

    runs()
