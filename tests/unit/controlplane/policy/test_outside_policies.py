"""Policies from outside the package: how they are found, and what happens if they misbehave."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from controlplane.policy import registry
from controlplane.policy.api import ClusterView, Plan, Policy
from controlplane.policy.guard import GuardedPolicy, PolicyError
from controlplane.policy.registry import check_options, entry, make
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.results import SimulationResult, Trace
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario
from schemas.errors import SettingsError
from schemas.ids import Seconds
from tests.support import outside_policies
from tests.support.builders import S0, S1, A, B, job_view
from tests.support.simulations import ToyModel, job
from tests.support.views import row_of, view_of

HERE: Final = outside_policies.__name__
SMALL: Final = Scenario(nodes=(NodeGroup(count=1, slots=2),), warm_up=0.0)
TWO_JOBS: Final = Trace(name="two", jobs=(job("a", at=5.0), job("b", at=5.0)))
NOW: Final = Seconds(100.0)


def simulated(policy: str | type[Policy] | Policy, **options: Any) -> SimulationResult:
    """Two jobs on two slots, which arrive at 5 s."""
    return simulate(policy, SMALL, 0, options, trace=TWO_JOBS, model=ToyModel(most=1))


# --- how they are found


@pytest.mark.parametrize(
    ("policy", "label"),
    [
        (f"{HERE}:Steady", f"{HERE}:Steady"),
        (outside_policies.Steady, "Steady"),
        (outside_policies.Steady(), "Steady"),
        (outside_policies.Prints, "Prints"),
    ],
)
def test_results_have_the_name_of_the_policy(
    policy: str | type[Policy] | Policy, label: str
) -> None:
    result = simulated(policy)

    assert (result.policy, {each.state for each in result.jobs}) == (label, {"succeeded"})


def test_an_entry_point_names_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint(name="steady", value=f"{HERE}:Steady", group="ones.policies")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] * (group == point.group))

    assert simulated("steady").policy == "steady"
    with pytest.raises(SettingsError, match="did you mean steady"):
        entry("stedy")


def test_a_class_declares_its_properties_and_options() -> None:
    found = entry(f"{HERE}:WithOptions")

    assert (found.gangs, found.needs, found.epochs, found.searches) == (
        True, ("losses",), True, False,
    )  # fmt: skip
    assert entry(f"{HERE}:Improves").searches
    assert entry(f"{HERE}:Observes").telemetry
    assert entry(f"{HERE}:Rebatches").rebatches
    assert check_options(f"{HERE}:WithOptions", {"share": 1.0}) == outside_policies.SteadyOptions(
        1.0
    )
    assert simulated(f"{HERE}:WithOptions", share=0.25).options == {"share": 0.25}


def test_a_subclass_inherits_the_properties_of_a_policy_of_the_package() -> None:
    found = entry(outside_policies.LikeTiresias)

    inherited = {"factory": found.factory, "options": found.options}
    assert msgspec.structs.replace(entry("tiresias"), **inherited) == found
    assert type(check_options(outside_policies.LikeTiresias, {})).__name__ == "TiresiasOptions"
    assert simulated(outside_policies.LikeTiresias, limits=[100.0]).policy == "LikeTiresias"


@pytest.mark.parametrize(
    ("policy", "options", "problem"),
    [
        ("no_such_module:Las", {}, "module cannot be imported: ModuleNotFoundError: .*PYTHONPATH"),
        (f"{HERE}:Steedy", {}, "has no 'Steedy'; did you mean Steady"),
        (f"{HERE}:", {}, "has no ''"),
        (":Steady", {}, "module cannot be imported: ValueError"),
        (f"{HERE}:function", {}, "is no class; derive it from ImmediatePolicy"),
        (f"{HERE}:Incomplete", {}, "is a class without plan; derive it from ImmediatePolicy"),
        (f"{HERE}:WrongAttribute", {}, r"Expected `bool`, got `str` - at `\$.gangs`; correct"),
        (f"{HERE}:WrongOptions", {}, "Options is not a msgspec.Struct"),
        (f"{HERE}:CannotBeMade", {}, r"cannot be made: RuntimeError: no model \(outside_pol"),
        (f"{HERE}:Steady", {"x": 1}, "unknown field `x`; known: none"),
        (f"{HERE}:WithOptions", {"x": 1}, "unknown field `x`; known: share"),
        (f"{HERE}:WithOptions", {"share": "a"}, r"Expected `float`, got `str` - at `\$.share`"),
    ],
)
def test_what_cannot_be_used_is_refused(policy: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem) as refused:
        make(policy, options)

    assert policy in refused.value.message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1 +", "SyntaxError: .*; correct the module"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(broken.py:1\)"),
        ("import sys; sys.exit(0)", r"SystemExit: 0 \(broken.py:1\)"),
        ("import no_such_module", "No module named 'no_such_module'"),
    ],
)
def test_a_module_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(SettingsError, match=problem):
        entry("broken:Las")


# --- what happens if they misbehave

MISBEHAVIOUR: Final = {
    "Observes": r"`observe` raised ValueError: boom \(outside_policies.py:\d+\)",
    "Improves": r"`improve` raised ValueError: boom \(outside_policies.py:\d+\)",
    "Raises": r"`plan` raised ValueError: boom \(outside_policies.py:\d+\)",
    "Leaves": r"`plan` raised SystemExit: 0 \(outside_policies.py:\d+\)",
    "Rebatches": "`batches` is impossible: job a-1 gets slot nowhere/0, which is not in the view",
    "Mutates": "`plan` changed its view",
    "NoPlan": "`plan` returned dict, not a Plan",
    "NoStatistics": "`stats` returned NoneType, not a SearchStats",
    "Old": r"`plan` is based on version \d+, not \d+ \(`view.version`\)",
    "Restless": "`plan` is impossible: wake_at is nan",
    "UnknownJob": "`plan` is impossible: job z-9 is not in the view",
    "UnknownSlot": "`plan` is impossible: job a-1 gets slot nowhere/0, which is not in the view",
    "SameSlot": r"`plan` is impossible: jobs a-1( \(not movable\))? and b-2 both get slot n0000/0",
    "NegativeBatch": "`plan` is impossible: job a-1 gets a batch of -8 on slot n0000/0, not 1 to 128",
    "NanBatch": "`plan` returned a Plan with a wrong value: Expected `int`, got `float`",
    "HugeBatch": "`plan` is impossible: job a-1 gets a batch of 10000000 on slot n0000/0, not 1 to",
    "ManySlots": "`plan` is impossible: job a-1 gets 2 slots, not 1 to 1",
    "WrongType": "`plan` returned a Plan with a wrong value: Expected `object`, got `array`",
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_a_simulation_ends_with_the_policy_the_problem_and_the_time(name: str) -> None:
    with pytest.raises(PolicyError) as failed:
        simulated(f"{HERE}:{name}")

    problem = f"policy {HERE}:{name}: {MISBEHAVIOUR[name]}"
    assert failed.match(rf"^{problem}.*, at \d+\.\d s of virtual time; correct the policy")


def test_jobs_that_cannot_change_keep_their_slots_until_the_policy_is_asked_again() -> None:
    late = Seconds(NOW + 30.0)
    view = view_of(
        row_of(2),
        job_view(A, running_on={S0: 64}, retry_at=late),
        job_view(B, ready_at=Seconds(NOW + 7.0)),
    )
    seen: list[dict[str, bool]] = []

    class Stops(outside_policies.Steady):
        def plan(self, view: ClusterView, now: Seconds) -> Plan:
            seen.append({name: one.movable for name, one in view.jobs.items()})
            past = Seconds(now - 1.0)
            return Plan(based_on=view.version, local_batch={B: {S1: 64}}, wake_at=past)

    plan = GuardedPolicy(Stops(), "Stops").plan(view, NOW)

    assert seen == [{A: False, B: False}]
    assert (plan.local_batch, plan.wake_at) == ({A: {S0: 64}}, NOW + 7.0)
    assert {name: reason.code for name, reason in plan.reasons.items()} == {B: "backing_off"}


def test_a_slot_that_no_policy_can_give_is_refused() -> None:
    taken, free = row_of(2)
    view = view_of((msgspec.structs.replace(taken, usable=False), free), job_view(A))

    with pytest.raises(PolicyError, match=f"{A} gets slot {S0}, which is neither usable nor leav"):
        GuardedPolicy(outside_policies.SameSlot(), "SameSlot").plan(view, NOW)
