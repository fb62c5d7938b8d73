"""Scenarios as values: refusals, and equal results of equal scenarios."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import pytest

from controlplane.core.inputs import JobSubmitted
from controlplane.policy.registry import POLICIES, check_options
from controlplane.sim.cluster import NodeGroup, TraceError, node_specs
from controlplane.sim.results import Trace
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario, model_of, options_of, trace_of
from schemas.errors import SettingsError
from tests.support.simulations import FREE, ToyModel, job, simulated_run

ROOT: Final = Path(__file__).parents[4]
NAN, INF = float("nan"), float("inf")

AGAIN: Final = """
import sys
import msgspec
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario

scenario = Scenario(
    jobs=5, interval_s=20.0, generations=1, crash_share=0.3, cancel_share=0.2, warm_up=0.0,
    node_loss_s=400.0, node_back_s=60.0, interference="pairwise:0.2", record_allocations=True,
    nodes=(NodeGroup(count=2, slots=4, model="v100"), NodeGroup(count=1, slots=4, model="p100")),
)
for policy in sys.argv[1:]:
    result = simulate(policy, scenario, 8)
    timeless = msgspec.structs.replace(result, decisions_ms=(), wall_s=0.0)
    print(msgspec.json.encode([len(result.decisions_ms), timeless]).decode())
"""


# --- the same again


def begin(policies: Sequence[str], hash_seed: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", AGAIN, *policies], cwd=ROOT,
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_two_processes_have_equal_results_under_every_policy() -> None:
    policies = sorted(POLICIES)
    both = [begin(policies, hash_seed) for hash_seed in ("1", "2")]
    (one, said), (other, said_too) = [process.communicate(timeout=200) for process in both]

    ones, others = one.splitlines(), other.splitlines()
    assert (len(ones), len(others)) == (len(policies), len(policies)), said + said_too
    for policy, found, again in zip(policies, ones, others, strict=True):
        assert found == again, policy
        _, result = json.loads(found)
        assert {job["state"] for job in result["jobs"]} <= {"succeeded", "cancelled"}, policy


# --- settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jobs", 0), ("interval_s", 0.0), ("interval_s", NAN), ("interval_s", INF),
        ("warm_up", -0.1), ("warm_up", 1.0), ("warm_up", NAN), ("round_s", -1.0), ("round_s", NAN),
        ("latency_s", -1.0), ("latency_s", INF), ("stall_s", -1.0), ("stall_s", NAN),
        ("first_stall_s", INF), ("prepare_s", -1.0), ("prepare_s", 1000.0), ("noise", -0.1),
        ("noise", NAN), ("noise", 5.0), ("noise_scale_error", 0.5), ("noise_scale_error", INF),
        ("crash_share", 1.5), ("cancel_share", NAN), ("node_loss_s", -1.0), ("node_loss_s", NAN),
        ("node_back_s", INF), ("generations", -1), ("nodes", ()),
        ("nodes", (NodeGroup(count=0, slots=4),)), ("nodes", (NodeGroup(count=1, slots=0),)),
        ("nodes", (NodeGroup(count=1, slots=4, model="abacus"),)), ("interference", "gavel:"),
    ],
)  # fmt: skip
def test_an_invalid_setting_is_named(name: str, value: Any) -> None:
    with pytest.raises(TraceError) as raised:
        Scenario(**{name: value})

    assert raised.value.field == name
    assert raised.value.hint


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(SettingsError, match="luck"):
        simulate("tiresias", Scenario(jobs=1), 1, {"luck": 3})


# --- what policies are told


def told(policy: str, scenario: Scenario, **options: Any) -> dict[str, Any]:
    return options_of(policy, scenario, model_of(scenario), options)


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        ("fifo", set()),
        ("harmony", {"rescale_stall_s"}),
        ("oasis", {"start_stall_s"}),
        ("ones-paper", {"rescale_stall_s", "start_stall_s"}),
        ("goodput", {"rescale_stall_s", "share_family"}),
        ("ones", {"rescale_stall_s", "start_stall_s", "share_family"}),
    ],
)
def test_policies_get_the_costs_of_the_model_for_options_of_that_name(
    policy: str, names: set[str]
) -> None:
    costs = {"rescale_stall_s": 6.0, "start_stall_s": 40.0, "share_family": True}
    scenario = Scenario(stall_s=6.0, first_stall_s=40.0)

    assert told(policy, scenario) == {name: costs[name] for name in names}
    assert told(policy, scenario, start_stall_s=2.0)["start_stall_s"] == 2.0
    check_options(policy, told(policy, Scenario()))


@pytest.mark.parametrize("policy", ["goodput", "ones", "ones-paper"])
def test_no_job_has_relatives_at_level_0(policy: str) -> None:
    """Three trainings alike: what policies know of a family, they know of one job then."""
    rows = [job(f"j{number}", 30.0 * number, workload="bert-mrpc-3.6k") for number in range(3)]
    trace = Trace(name="alike", jobs=tuple(rows))

    def families(knowledge: Literal["L0", "L2"]) -> list[str | None]:
        heard: list[object] = []
        simulate(
            policy, Scenario(knowledge=knowledge, generations=1, warm_up=0.0), 1, trace=trace,
            record=lambda _, event, __: heard.append(event),
        )  # fmt: skip
        return [event.spec.family for event in heard if isinstance(event, JobSubmitted)]

    assert families("L0") == ["j0", "j1", "j2"]
    assert families("L2") == ["bert-mrpc-3.6k"] * 3


# --- traces


def complaint(scenario: Scenario, trace: Trace | None = None) -> TraceError:
    with pytest.raises(TraceError) as raised:
        simulate("fifo", scenario, 1, trace=trace)
    assert raised.value.hint
    return raised.value


def test_a_trace_without_jobs_is_refused() -> None:
    assert "has no jobs" in str(complaint(Scenario(), Trace(name="nobody", jobs=())))


def test_profiles_need_tables_and_a_workload(tmp_path: Path) -> None:
    nowhere = Scenario(physics="profiles", profiles=str(tmp_path / "nowhere"), workload="w.csv")

    assert "nowhere is not a folder" in str(complaint(nowhere))
    with pytest.raises(TraceError, match="the profiles have no generator") as raised:
        trace_of(Scenario(physics="profiles"), 1)
    assert "--workload" in raised.value.hint


# --- clusters


def test_nodes_are_named_in_order_of_their_groups() -> None:
    found = node_specs((NodeGroup(count=2, slots=1), NodeGroup(count=1, slots=2, model="k80")))

    assert [(str(spec.node), [slot.model for slot in spec.slots]) for spec in found] == [
        ("n0000", [""]), ("n0001", [""]), ("n0002", ["k80", "k80"]),
    ]  # fmt: skip


# --- results


def test_a_result_contains_its_setting_and_adds_up() -> None:
    scenario = Scenario(jobs=20, interval_s=20.0, warm_up=0.1, record_allocations=True)
    heard: list[object] = []
    result = simulate("fifo", scenario, 3, record=lambda _, event, __: heard.append(event))

    assert (result.policy, result.seed, result.slots) == ("fifo", 3, 64)
    assert result.setting["jobs"] == 20
    assert [ended.counted for ended in result.jobs] == [False] * 2 + [True] * 18
    assert result.events == len(heard)
    assert result.busy_slot_s == pytest.approx(sum(ended.slot_s for ended in result.jobs))
    assert result.ended_at == max(ended.ended_at or 0.0 for ended in result.jobs)
    for ended in result.jobs:
        held = sum(allocation.until - allocation.since for allocation in ended.allocations)
        assert held == pytest.approx(ended.slot_s)
        assert ended.jct_s == pytest.approx(ended.queued_s + ended.exec_s)


def test_no_schedule_is_better_than_the_bound() -> None:
    scenario = Scenario(jobs=15, interval_s=20.0, warm_up=0.0)
    result = simulate("srtf", scenario, 3)
    mean = sum(ended.jct_s or 0.0 for ended in result.jobs) / len(result.jobs)

    assert result.bound_s is not None
    assert 0.0 < result.bound_s < mean


# --- what an event costs


def load(jobs: int) -> tuple[int, int, int, float]:
    """Most active jobs, holders and entries of the heap at any event, and events for each job.

    Submissions to come lie in the heap from the beginning, and are not counted.
    """
    found = [(0, 0, 0)]
    trace = [job(f"j{number}", 30.0 * number, 1 + number % 2) for number in range(jobs)]
    run = simulated_run("fifo", *trace, model=ToyModel(costs=FREE))
    while run.simulation.kernel._heap and not run.simulation.kernel.stopped:
        run.simulation.kernel.run(run.simulation.kernel._heap[0][0])
        ahead = len(run.simulation.kernel._heap) - (jobs - run.state.jobs_accepted)
        found.append((len(run.state.active), len(run.state.jobs_with_processes), ahead))
    active, holders, heap = (max(each) for each in zip(*found, strict=True))
    return active, holders, heap, run.simulation.events / jobs


def test_the_work_per_event_does_not_grow_with_the_length_of_a_trace() -> None:
    short, long = load(20), load(80)

    assert long[:3] == short[:3]
    assert long[3] == pytest.approx(short[3], rel=0.05)


def test_ones_shares_no_lengths_at_level_0() -> None:
    assert told("ones", Scenario(knowledge="L0"))["share_family"] is False
    assert told("ones", Scenario(knowledge="L2"))["share_family"] is True
