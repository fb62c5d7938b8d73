"""Policy `harmony-drl`: placement, expected losses, online training, models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.policy.api import Budget, ClusterView, JobView, Plan
from controlplane.policy.learned.gang_model import (
    CLASSES,
    FEATURES,
    POLICY,
    SHAPES,
    STRUCTURE,
    Actor,
    TrainedModel,
    load,
)
from controlplane.policy.learned.harmony_drl import Classes, HarmonyDrl, HarmonyDrlOptions
from controlplane.policy.learned.model_file import DenseNet, ModelCard, encode_model
from controlplane.policy.learned.shared_nodes import RewardModel, SharedNodes
from controlplane.policy.registry import make
from schemas.errors import SettingsError
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import A, B, C, job_view
from tests.support.sizes import examples
from tests.support.views import row_of, steps_seen, view_of

NOW = Seconds(100.0)
FAMILIES = ("loud", "quiet")
LOUD, QUIET = range(2)
NONE_LOG = -30.0  # its softplus is about 0


def linear(inputs: int, bias: float, **weights: float) -> DenseNet:
    """Return a layer; `i3=2.0` is the weight of input 3."""
    layer = np.zeros((inputs, 1))
    for name, weight in weights.items():
        layer[int(name[1:]), 0] = weight
    return DenseNet(((layer, np.array([bias])),))


def model(*, quiet: float = NONE_LOG, apart: float = 0.0) -> TrainedModel:
    """Neighbours of a loud job lose much; being on several nodes costs `apart`."""
    loud_here = {f"i{3 * CLASSES + 2 + LOUD}": 1.0 - quiet}
    reward = RewardModel(
        linear(4 * CLASSES + 2, quiet, **loud_here), linear(CLASSES + 3, apart), CLASSES
    )
    return TrainedModel(reward, Actor(linear(STRUCTURE + 2 * CLASSES, 0.0), 1.0), FAMILIES)


def policy(trained: TrainedModel | None = None, **options: Any) -> HarmonyDrl:
    return HarmonyDrl(HarmonyDrlOptions(**options), trained or model())


def job(name: JobId, family: str, slots: int = 1, on: tuple[str, ...] = ()) -> JobView:
    placed = {SlotId(slot): 8 for slot in on}
    return job_view(name, 0.0, slots=(slots, slots), family=f"ann/{family}", running_on=placed)


def taken(plan: Plan, name: JobId) -> list[str]:
    return [*plan.local_batch.get(name, {})]


ON_BOTH = (job(A, "loud", on=("n1/0",)), job(B, "quiet", on=("n2/0",)))
DENSE = (job(A, "quiet", on=("n1/0",)), job(B, "quiet", on=("n1/1",)))
OTHER = job(JobId("d-4"), "quiet", on=("n2/0",))


@pytest.mark.parametrize(
    ("nodes", "jobs", "new", "apart", "slots"),
    [
        ((2, 2), ON_BOTH, job(C, "quiet"), 0.0, ["n2/1"]),
        ((3, 2), (*DENSE, OTHER), job(C, "loud"), 0.0, ["n2/1"]),  # two jobs would suffer on n1
        ((1, 2), (DENSE[0], job(B, "loud", on=("n2/0",))), job(C, "quiet"), 0.0, ["n2/1"]),
        ((2, 2), (), job(C, "quiet", slots=2), 1.0, ["n1/0", "n1/1"]),
        ((2, 2), (), job(C, "quiet", slots=2), -1.0, ["n1/0", "n2/0"]),
    ],
    ids=["own loss", "losses of neighbours", "no free slot", "together", "apart"],
)
def test_a_job_goes_where_the_total_loss_is_least(
    nodes: tuple[int, ...], jobs: tuple[JobView, ...], new: JobView, apart: float, slots: list[str]
) -> None:
    view = view_of(row_of(*nodes), *jobs, new)

    assert taken(policy(model(apart=apart)).plan(view, NOW), C) == slots


def test_a_reason_names_the_node_and_its_losses_or_the_queue() -> None:
    view = view_of(row_of(2, 2), *ON_BOTH, job(C, "quiet"))

    reason = policy().plan(view, NOW).reasons[C]

    assert reason.text == (
        "starts on 1 slot: n2 scored best: it keeps 100% of its speed and slows down no neighbour;"
        " next is n1 (-0.00 against -0.73)"
    )
    assert set(reason.numbers) == {
        "slots_now", "slots_then", "own_loss", "neighbours_loss", "score", "next_score",
    }  # fmt: skip
    large, small = job(B, "quiet", slots=3), job(C, "quiet")
    full = view_of(row_of(2, 2), job(A, "quiet", slots=2, on=("n1/0", "n1/1")), large, small)
    plan = policy().plan(full, NOW)
    assert (taken(plan, B), taken(plan, C)) == ([], [])
    assert plan.reasons[C].text == "waits: for 1 slot behind 1 job, 2 were free"


# --- expected losses


@st.composite
def crowds(draw: st.DrawFn) -> SharedNodes:
    """Jobs anywhere on nodes of three, with a random reward model."""
    rng = default_rng(draw(st.integers(0, 1000)))
    nets = [
        DenseNet(((rng.normal(size=(width, 4)), rng.normal(size=4)), (rng.normal(size=(4, 1)), rng.normal(size=1))))
        for width in (4 * CLASSES + 2, CLASSES + 3)
    ]  # fmt: skip
    shared = SharedNodes(RewardModel(nets[0], nets[1], CLASSES), [3, 3, 3])
    for number in range(draw(st.integers(0, 5))):
        room = int(shared.free.sum())
        if room > 1:
            size = draw(st.integers(1, min(3, room - 1)))
            shared.add(f"j{number}", draw(st.integers(0, 3)), size)
            for _ in range(size):
                open_ = np.flatnonzero(shared.free > 0).tolist()
                shared.put(f"j{number}", draw(st.sampled_from(open_)))
    return shared


@settings(max_examples=examples(60), deadline=None)
@given(shared=crowds(), number=st.integers(0, 3), first=st.booleans())
def test_the_expected_cost_of_a_worker_is_the_loss_of_all_jobs(
    shared: SharedNodes, number: int, *, first: bool
) -> None:
    shared.add("new", number, 2)
    if not first and shared.free.sum() > 1:
        shared.put("new", int(np.flatnonzero(shared.free > 0)[0]))
    before = shared.losses()
    nodes = np.flatnonzero(shared.free > 0)
    own, neighbours = shared.costs_of_next("new", nodes)
    at = int(np.argmax(own + neighbours))

    shared.put("new", int(nodes[at]))

    after = shared.losses()
    assert after.pop("new") == pytest.approx(own[at])
    by_it = sum(after.values()) - sum(before[name] for name in after)
    assert by_it == pytest.approx(neighbours[at], abs=1e-9)


@settings(max_examples=examples(30), deadline=None)
@given(shared=crowds())
def test_a_removed_job_leaves_no_trace(shared: SharedNodes) -> None:
    before, free = shared.losses(), shared.free.tolist()
    shared.add("guest", 1, 1)
    shared.put("guest", int(np.flatnonzero(shared.free > 0)[0]))

    shared.remove("guest")

    assert shared.losses() == pytest.approx(before)
    assert shared.free.tolist() == free


def test_untrained_families_get_numbers_in_order_and_share_the_last() -> None:
    classes = Classes(("loud", "quiet"))

    numbers = [classes.number(f"ann/f{k}") for k in range(CLASSES)] + [classes.number("bob/quiet")]

    assert numbers == [*range(2, CLASSES), CLASSES - 1, CLASSES - 1, 1]


# --- online training


def told(learner: HarmonyDrl, view: ClusterView, speeds: dict[JobId, float], times: int) -> None:
    """Report speeds of the jobs of a view, several times."""
    for _ in range(times):
        learner.improve(view, Budget(generations=1), default_rng(0), NOW)
        for name, speed in speeds.items():
            here = view.jobs[name]
            nodes = len({slot.split("/")[0] for slot in here.running_on})
            seen = steps_seen(name, family=here.family, slots=len(here.running_on), nodes=nodes,
                              global_batch=8, samples_per_s=speed)  # fmt: skip
            learner.observe(seen, NOW)
    learner.improve(view, Budget(generations=1), default_rng(0), NOW)


def learnt(**options: Any) -> list[str]:
    """Return the slot of a quiet job after reports that quiet jobs slow each other down."""
    learner = policy(model(quiet=-2.0), **options)
    alone = view_of(row_of(2, 2, 2), job(A, "quiet", on=("n1/0",)), job(B, "loud", on=("n2/0",)))
    told(learner, alone, {A: 100.0, B: 100.0}, 10)
    beside = view_of(
        row_of(2, 2, 2),
        job(A, "quiet", on=("n1/0",)),
        job(B, "loud", on=("n2/0",)),
        job(C, "quiet", on=("n1/1",)),
        job(JobId("d-4"), "quiet", on=("n2/1",)),
    )
    told(learner, beside, {A: 20.0, C: 20.0, B: 100.0, JobId("d-4"): 100.0}, 60)
    view = view_of(
        row_of(2, 2), job(A, "quiet", on=("n1/0",)), job(B, "loud", on=("n2/0",)), job(C, "quiet")
    )
    return taken(learner.plan(view, NOW), C)


def test_reports_train_the_reward_model() -> None:
    assert learnt() == ["n2/1"]
    assert learnt(learn=False) == ["n1/1"]


@pytest.mark.parametrize("speed", [0.0, -1.0, 1e300, float("nan"), float("inf")])
def test_an_implausible_speed_is_ignored(speed: float) -> None:
    one, other = policy(), policy()
    view = view_of(row_of(2), job(A, "quiet", on=("n1/0",)), job(B, "loud", on=("n1/1",)))
    for learner in (one, other):
        told(learner, view, {A: 100.0, B: 50.0}, 20)
    before = one._reports.model

    told(one, view, {A: speed}, 5)

    assert one._reports.model is before


# --- models and options


def written(folder: Path, *, arrays: dict[str, Any] | None = None, **card: Any) -> str:
    said = {
        "policy": POLICY, "features": FEATURES, "shapes": {}, "slots": (12, 12), "cluster": "x",
        "command": "x", "seed": 0, "date": "2026-01-01", "figures": {}, "families": FAMILIES,
    }  # fmt: skip
    file = folder / "m.npz"
    drawn = {name: np.zeros(shape) for name, shape in SHAPES.items()} | (arrays or {})
    file.write_bytes(encode_model(ModelCard(**{**said, **card}), drawn))
    return str(file)


def test_the_shipped_model_knows_the_testbeds_families() -> None:
    assert load(None).families == ("resnet50", "vgg16", "resnext110", "seq2seq", "ctc", "wlm")


@pytest.mark.parametrize(
    ("card", "arrays", "problem"),
    [
        ({"policy": "drl"}, {}, "a model of policy 'drl', not of 'harmony-drl'"),
        ({"features": 7}, {}, "trained on version 7 of what the policy sees, this one has 1"),
        ({}, {"sharpness": np.zeros(2)}, r"sharpness has shape \(2,\), not \(1,\)"),
        ({}, {"sharpness": np.array([np.nan])}, "sharpness has values that are not finite"),
        ({"families": tuple("abcdefghijklm")}, {}, "13 families, more than 11"),
        ({"families": ("a", "a")}, {}, "family 'a' twice"),
    ],
)
def test_an_unusable_model_is_refused_by_its_option(
    tmp_path: Path, card: dict[str, Any], arrays: dict[str, Any], problem: str
) -> None:
    with pytest.raises(SettingsError, match=problem) as refused:
        make("harmony-drl", {"model": written(tmp_path, arrays=arrays, **card)})
    assert refused.value.field == "policy.options.model"


def test_exploration_is_reproducible_for_each_seed() -> None:
    view = view_of(
        row_of(*[2] * 8),
        *(job(JobId(f"j-{k}"), "quiet", on=(f"n{k + 1}/0",)) for k in range(8)),
        job(C, "quiet"),
    )

    plans = [policy(explore=True, seed=seed).plan(view, NOW) for seed in (1, 1, *range(2, 8))]

    assert msgspec.msgpack.encode(plans[0]) == msgspec.msgpack.encode(plans[1])
    assert len({tuple(taken(plan, C)) for plan in plans}) > 1
