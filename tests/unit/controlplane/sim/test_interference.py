"""Rules of interference between jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.sim.cluster import TraceError
from controlplane.sim.models import interference
from controlplane.sim.models.demands import DEMANDS, Demand, Interference, demand_of
from schemas.ids import JobId, NodeId
from tests.support.simulations import N0, N1, A, B, C
from tests.support.sizes import examples

SPREAD = {A, B}
On = dict[NodeId, dict[JobId, int]]  # workers of each job on each node
SIX = ("resnet50", "vgg16", "resnext110", "seq2seq", "ctc", "wlm")


@dataclass
class ToyJobs:
    """Jobs that train where they were put."""

    on: On
    families: Mapping[JobId, str] = field(default_factory=dict)
    servers: int = 0
    gpus: Mapping[NodeId, str] = field(default_factory=dict)
    alike: Demand | None = None  # what every job asks for, whatever its family

    def family(self, job: JobId) -> str:
        return self.families.get(job, "resnet50")

    def placement(self, job: JobId) -> Mapping[NodeId, int]:
        return {node: here[job] for node, here in self.on.items() if job in here}

    def demand(self, job: JobId) -> Demand:
        return self.alike or replace(demand_of(self.family(job)), servers=self.servers)

    def gpu(self, node: NodeId) -> str:
        return self.gpus.get(node, "")

    def slots(self, node: NodeId) -> int:
        return 2


def all_of(*names: str) -> tuple[Demand, ...]:
    return tuple(DEMANDS[name] for name in names)


# --- the option


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("none", interference.InterferenceSpec("none")), ("pollux:0.25", interference.InterferenceSpec("pollux", 0.25)),
        ("pairwise:0.1", interference.InterferenceSpec("pairwise", 0.1)),
        ("class:0.3", interference.InterferenceSpec("class", 0.3)),
        ("resources:0.3", interference.InterferenceSpec("resources", 0.3)),
        ("gavel:a:b.json", interference.InterferenceSpec("gavel", file="a:b.json")),
        ("pollux:0", interference.InterferenceSpec("none")), ("pairwise", interference.InterferenceSpec("none")),
    ],
)  # fmt: skip
def test_an_option_has_a_kind_and_a_share_or_a_file(
    text: str, meant: interference.InterferenceSpec
) -> None:
    assert interference.parse_interference(text) == meant


@pytest.mark.parametrize(
    "text",
    [
        "", "gavel", "gavel:", "classes:0.1", "resources:x", "pollux:1", "pollux:-0.1",
        "pollux:nan", "pollux:inf", "pollux:a", "pollux:0.1:2",
    ],
)  # fmt: skip
def test_other_options_are_refused(text: str) -> None:
    with pytest.raises(TraceError) as raised:
        interference.parse_interference(text)

    assert repr(text) in str(raised.value)
    assert "pollux:SHARE" in str(raised.value)


@given(st.text(max_size=20))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        form = interference.parse_interference(text)
    except TraceError:
        return
    assert 0.0 <= form.share < 1.0


# --- whatever the rule


@st.composite
def crowds(draw: st.DrawFn) -> tuple[On, ToyJobs]:
    """Up to five jobs of any families on up to three nodes."""
    names = [JobId(f"j-{number}") for number in range(draw(st.integers(1, 5)))]
    nodes = [NodeId(f"n{number}") for number in range(draw(st.integers(1, 3)))]
    on: On = {node: {} for node in nodes}
    for job in names:
        for node in draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3, unique=True)):
            on[node][job] = draw(st.integers(1, 2))
    families = {job: draw(st.sampled_from([*SIX, "bert", "something"])) for job in names}
    return on, ToyJobs(on, families, draw(st.integers(0, 3)))


def speed_shares(rule: Interference, on: On) -> dict[JobId, float]:
    jobs = dict.fromkeys(job for here in on.values() for job in here)
    return {
        job: rule(job, {node: here for node, here in on.items() if job in here}) for job in jobs
    }


def rules_of(jobs: ToyJobs, pairs: Path) -> list[Interference]:
    forms = ("pollux:0.3", "pairwise:0.3", "class:0.3", "resources:0.3", f"gavel:{pairs}")
    made = [interference.make_interference(form, jobs, 1, all_of(*SIX, "bert")) for form in forms]
    return [rule for rule in made if rule is not None]


@settings(max_examples=examples(40), deadline=None)
@given(crowd=crowds())
def test_a_lonely_job_keeps_its_speed_and_another_neighbour_never_adds_to_it(
    crowd: tuple[On, ToyJobs], gavel_file: Path
) -> None:
    """The order of nodes and jobs does not matter."""
    on, jobs = crowd
    for rule in rules_of(jobs, gavel_file):
        shares = speed_shares(rule, on)
        turned = {node: dict(reversed(here.items())) for node, here in reversed(on.items())}
        assert speed_shares(rule, turned) == shares
        for job, share in shares.items():
            its = {node: here for node, here in on.items() if job in here}
            assert 0.0 < share <= 1.0
            alone = {node: {job: here[job]} for node, here in its.items()}
            assert rule(job, alone) == 1.0
            for gone in {other for here in its.values() for other in here} - {job}:
                fewer = {n: {k: v for k, v in h.items() if k != gone} for n, h in its.items()}
                assert rule(job, fewer) >= share


@pytest.mark.parametrize("kind", ["class", "resources"])
def test_random_pairs_of_the_models_lose_the_given_share(kind: str) -> None:
    """Each has a worker and a server on both of two nodes."""
    on: On = {N0: {A: 1, B: 1}, N1: {A: 1, B: 1}}
    demands = tuple(replace(DEMANDS[name], servers=2) for name in SIX)
    losses = []
    for mine, other in permutations(SIX, 2):
        jobs = ToyJobs(on, {A: mine, B: other}, servers=2)
        rule = interference.make_interference(f"{kind}:0.3", jobs, 1, demands)
        assert rule is not None
        losses.append(1.0 - rule(A, on))

    assert sum(losses) / len(losses) == pytest.approx(0.3, abs=1e-6)


# --- rules by neighbours


def test_spread_jobs_slow_each_other_down_once_and_jobs_on_one_node_never() -> None:
    rule = interference.of_spread_jobs(0.25, SPREAD.__contains__)

    for at, share in (({N0: {A: 1, B: 1}, N1: {A: 1, B: 1}}, 0.75), ({N0: {A: 1}, N1: {A: 1, B: 1}}, 0.75),
                      ({N0: {A: 1, C: 1}, N1: {A: 1}}, 1.0)):  # fmt: skip
        assert rule(A, at) == share
    assert rule(C, {N0: {A: 1, B: 1, C: 1}}) == 1.0


def pairwise(mean: float = 0.3, seed: int = 1) -> Interference:
    return interference.of_pairs(mean, seed, lambda name: str(name)[0])


def test_the_worst_neighbour_counts_and_a_pair_of_families_has_one_loss() -> None:
    rule, late = pairwise(), pairwise()
    one, other = rule(A, {N0: {A: 1, B: 1}}), rule(A, {N0: {A: 1, C: 1}})
    late(C, {N0: {A: 1, B: 1, C: 1}})

    assert rule(A, {N0: {A: 1, B: 1}, N1: {A: 1, C: 1}}) == min(one, other)
    assert late(A, {N0: {B: 1, A: 1}}) == one
    assert one != rule(B, {N0: {A: 1, B: 1}})
    assert one != pairwise(seed=2)(A, {N0: {A: 1, B: 1}})


@given(st.floats(0.0, 0.99), st.integers(0, 99))
def test_a_job_keeps_a_share_of_its_speed(mean: float, seed: int) -> None:
    kept = pairwise(mean, seed)(A, {N0: {A: 1, B: 1, C: 1}})

    assert max(0.1, 1.0 - 2.0 * mean) - 1e-9 <= kept <= 1.0


def test_losses_have_the_given_mean() -> None:
    kept = [pairwise(0.25, seed)(A, {N0: {A: 1, B: 1}}) for seed in range(400)]

    assert 1.0 - sum(kept) / len(kept) == pytest.approx(0.25, abs=0.03)


# --- classes


def test_classes_slow_down_their_like_most_and_every_neighbour_counts() -> None:
    families = {A: "vgg16", B: "wlm", C: "resnext110"}
    jobs = ToyJobs({}, families)
    rule = interference.make_interference("class:0.3", jobs, 1, all_of(*SIX))
    assert rule is not None

    like = rule(A, {N0: {A: 1, B: 1}})
    unlike = rule(A, {N0: {A: 1, C: 1}})

    assert like < unlike < 1.0
    assert rule(A, {N0: {A: 1, B: 1, C: 1}}) == pytest.approx(like * unlike)
    assert rule(A, {N0: {A: 1, B: 1}, N1: {A: 1, C: 1}}) == like


# --- resources

PLAIN = Demand("cpu", 2.0, 1e9, 1e9, 1.0, (0.5, 0.25, 1.0))


SERVED = replace(PLAIN, servers=3)


@pytest.mark.parametrize(
    ("demand", "on", "asks"),
    [
        # A ring of three workers: 2 x 2/3 of the gradients for each.
        (PLAIN, {N0: 2, N1: 1}, (4.0, 2 * (1e9 + 4 / 3 * 1e9), 4 / 3 * 1e9)),
        (PLAIN, {N0: 2}, (4.0, 2 * (1e9 + 1e9), 0.0)),
        (PLAIN, {N0: 1}, (2.0, 1e9, 0.0)),
        # Two servers here and one there: half of all gradients cross over.
        (SERVED, {N0: 2, N1: 1}, (2 * 2.0 + 2 * 1.5, 2 * 3e9, 2 / 3 * 1e9 + 2 / 3 * 1e9)),
        (SERVED, {N1: 2, N0: 1}, (2.0 + 1.5, 3e9, 2 / 3 * 1e9 + 2 / 3 * 1e9)),
    ],
    ids=["a ring over two nodes", "within one", "of one worker", "more servers here", "more there"],
)  # fmt: skip
def test_workers_and_servers_ask_a_node_for_cores_memory_and_network(
    demand: Demand, on: dict[NodeId, int], asks: tuple[float, float, float]
) -> None:
    assert interference.node_demand(demand, on, N0) == pytest.approx(asks)


def test_servers_are_spread_like_workers() -> None:
    assert interference.servers_on({N0: 2, N1: 1}, 3) == {N0: 2, N1: 1}
    assert interference.servers_on({N0: 2, N1: 1}, 1) == {N0: 1, N1: 0}


def test_a_job_waits_for_its_share_of_a_resource_that_is_asked_for_too_often() -> None:
    """Each asks for 6 of 8 cores: all get 2/3 of them, and half of a step waits for cores."""
    busy = replace(PLAIN, cores=6.0, input_bytes_per_s=0.0)
    on: On = {N0: {A: 1, B: 1}}
    jobs = ToyJobs(on, alike=busy)

    assert interference.of_resources(jobs)(A, on) == pytest.approx(1 / 1.25)
    assert interference.of_resources(jobs, 2.0)(A, on) == pytest.approx(1 / 1.5)


def test_a_job_that_does_not_use_the_network_does_not_wait_for_it() -> None:
    on: On = {N0: {A: 1, B: 1, C: 1}, N1: {B: 1, C: 1}}
    modest = replace(PLAIN, cores=1.0, input_bytes_per_s=0.0)
    rule = interference.of_resources(ToyJobs(on, alike=modest))

    assert (rule(A, {N0: on[N0]}), rule(B, on) < 1.0) == (1.0, True)


def test_an_unreachable_share_is_refused() -> None:
    idle = replace(PLAIN, cores=0.1, input_bytes_per_s=0.0, gradient_bytes=1.0)
    with pytest.raises(TraceError, match=r"at most 0\.00 on average; give a smaller SHARE"):
        interference.scale_for(0.3, (idle, idle))


def test_unknown_names_have_a_demand_of_their_own() -> None:
    assert demand_of("resnet50-imagenet") == DEMANDS["resnet50"]
    assert demand_of("LM (batch size 5)") == DEMANDS["wlm"]
    assert demand_of("toy") == demand_of("toy") != demand_of("boy")


# --- measured pairs


def gavel_table(**changed: Any) -> dict[str, Any]:
    """A3C loses half beside an LM, which does not fit beside its like; on K80 three quarters."""
    rows = {
        "('A3C', 1)": {
            "null": 8.0, "('A3C', 1)": [8.0, 8.0], "('LM (batch size 20)', 1)": [4.0, 9],
        },
        "('A3C', 2)": {"null": 3.0},
        "('LM (batch size 20)', 1)": {
            "null": 10.0, "('A3C', 1)": [9.0, 4.0], "('LM (batch size 20)', 1)": [0.0, 0.0],
        },
    }  # fmt: skip
    slower = {**rows, "('A3C', 1)": {"null": 8.0, "('LM (batch size 20)', 1)": [2.0, 9]}}
    return {"v100": rows, "k80": slower, "v100_unconsolidated": rows, **changed}


@pytest.fixture(scope="session")
def gavel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gavel") / "pairs.json"
    path.write_text(json.dumps(gavel_table()))
    return path


def test_measured_pairs_are_read_by_gpu_and_pairs_that_did_not_fit(gavel_file: Path) -> None:
    lm = "LM (batch size 20)"

    assert interference.read_pairs(gavel_file) == {
        "v100": {"A3C": {"A3C": 1.0, lm: 0.5}, lm: {"A3C": 0.9, lm: 0.9}},
        "k80": {"A3C": {lm: 0.25}, lm: {"A3C": 0.9, lm: 0.9}},
    }


def test_the_worst_measured_neighbour_counts_on_gpus_of_that_type(gavel_file: Path) -> None:
    jobs = ToyJobs({}, {A: "A3C", B: "wlm", C: "nobody-knows"}, gpus={N1: "k80"})
    rule = interference.make_interference(f"gavel:{gavel_file}", jobs, 1, ())
    assert rule is not None

    assert rule(A, {N0: {A: 1, B: 1}, N1: {A: 1}}) == 0.5
    assert rule(A, {N0: {A: 1, B: 1}, N1: {A: 1, B: 1}}) == 0.25
    assert rule(A, {N0: {A: 1, C: 1}}) == 1.0  # as A3C beside A3C


def test_families_find_the_nearest_measured_job() -> None:
    known = {"A3C": {}, "ResNet-50 (batch size 64)": {}, "LM (batch size 20)": {}}
    nearest = {"A3C": "A3C", "vgg16-imagenet": "ResNet-50 (batch size 64)",
               "wlm": "LM (batch size 20)", "bert": "A3C"}  # fmt: skip

    assert {name: interference.measured_name(name, known) for name in nearest} == nearest


def one_speed(*speeds: object) -> bytes:
    return json.dumps(gavel_table(v100=dict(speeds))).encode()


NEGATIVE = "a speed is not a number of at least 0"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "No such file"), (b"", "is not JSON"), (b'{"v100": "\xff"}', "is not JSON"),
        (b"[" * 100_000, "is not JSON"), (b"\x00", "is not JSON"), (b"[]", "is not a table by GPU type"),
        (b"{}", "has no pairs of A3C on v100"), (b'{"v100": []}', "has no table of v100"),
        (one_speed(("('A3C', 1)", {})), "v100, A3C: no steps per second"),
        (one_speed(("('A3C', 1)", {"null": 0})), NEGATIVE),
        (one_speed(("('A3C', 1)", {"null": 1, "('A3C', 1)": [-1, 1]})), NEGATIVE),
    ],
)  # fmt: skip
def test_another_file_is_refused_in_one_line(data: bytes | None, said: str, tmp_path: Path) -> None:
    if data is not None:
        (tmp_path / "pairs.json").write_bytes(data)

    with pytest.raises(TraceError, match=said) as raised:
        interference.read_pairs(tmp_path / "pairs.json")

    assert raised.value.field == "interference"
    assert "\n" not in str(raised.value)
