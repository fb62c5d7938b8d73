"""Whatever comes, goes and is lost, every trial ends as alone; the last ones go on as jobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from inspect import cleandoc
from typing import Any, cast, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controlplane.sweeps.configurations import stream
from controlplane.sweeps.orders import (
    CopyState,
    DataRefused,
    DropState,
    Graduate,
    Order,
    ReleaseWorker,
    RunUnit,
    StateDiffers,
    StateName,
    StopUnit,
    TrialEnded,
    TrialScored,
    UnitReport,
)
from controlplane.sweeps.sweep import Sweep
from controlplane.sweeps.trial_changes import MAX_FAILED_READS
from controlplane.sweeps.trials import Trial, merged
from schemas.ids import NodeId, Seconds, WorkerId
from schemas.sweeps import (
    Asha,
    Grid,
    Hyperband,
    MedianStopping,
    PopulationBased,
    RandomSearch,
    Searcher,
    SuccessiveHalving,
    VisitOrder,
    choice,
)
from tests.support.sizes import examples
from tests.support.sweeps import NOW, History, SweepSite, goodness, loss_and_samples, search, step

N0, N1 = NodeId("n0"), NodeId("n1")
W0, W1 = WorkerId("w0"), WorkerId("w1")
LR = {"lr": choice(0.1, 0.2)}


def histories(site: SweepSite) -> dict[int, History]:
    """What each trial's visits amount to, trained alone in their order."""
    found: dict[int, History] = {}
    state = site.sweep.state
    for model in state.models:
        history: History = ()
        for at, visit in enumerate(model.finished_units):
            epoch = 1 + at // state.partitions
            history = step(history, state.trials[visit.trial].values, epoch, visit.partition)
        found[model.trial] = history
    return found


SEARCHERS: list[Searcher] = [
    Grid(), RandomSearch(3), SuccessiveHalving(5, eta=2), Hyperband(2), PopulationBased(4),
]  # fmt: skip
sizes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("searcher", SEARCHERS, ids=lambda one: type(one).__name__)
@settings(max_examples=examples(60), deadline=None)
@given(
    size=sizes, faults=st.sampled_from([0, 12]), seed=st.integers(0, 10_000),
    order=st.sampled_from(get_args(VisitOrder)), lost_disks=st.booleans(),
)  # fmt: skip
def test_faults_change_no_result_and_repeat_no_finished_unit(
    searcher: Searcher, size: tuple[int, int, int], faults: int, seed: int, order: VisitOrder, *,
    lost_disks: bool,
) -> None:  # fmt: skip
    nodes, partitions, workers = size
    rng = stream(seed)
    names = [NodeId(f"n{at}") for at in range(nodes)]
    held = {node: set(range(partitions)) for node in names}
    spec = search(searcher, 4, LR if isinstance(searcher, Grid) else None, seed)
    sweep = Sweep(spec, partitions, order=order)
    site = SweepSite(sweep, held, workers, lost_disks=lost_disks)

    site.run(rng, faults)

    alone = histories(site)
    state = site.sweep.state
    for model in state.models:
        for epoch in range(model.whole_epochs):
            visits = model.finished_units[epoch * partitions : (epoch + 1) * partitions]
            assert sorted(one.partition for one in visits) == list(range(partitions))
    for one in site.scored:
        assert one.metrics == {
            "accuracy": goodness(alone[one.trial][: one.epoch * partitions]),
            "loss": pytest.approx(mean_loss(partitions)),
        }
    done = sum(
        len(model.finished_units) - (model.parents[-1].version if model.parents else 0)
        for model in state.models
    )
    assert site.units >= done
    if not faults:
        assert site.units == done
    for states in site.states.values():
        for name, history in states.items():
            assert history == alone[name.trial][: name.version]


def mean_loss(partitions: int) -> float:
    samples = [loss_and_samples(partition) for partition in range(partitions)]
    return sum(loss * many for loss, many in samples) / sum(many for _, many in samples)


class Conversation:
    """A random search on nodes that have everything; a line is an event and what follows from it."""

    def __init__(self, *workers: str, many: int = 1, epochs: int = 1, partitions: int = 2, graduate_slots: int = 0) -> None:  # fmt: skip
        self.sweep = Sweep(
            search(RandomSearch(many), epochs), partitions, graduate_slots=graduate_slots
        )
        self.units: dict[str, RunUnit] = {}  # the last one of each worker
        self.deadline: float | None = None
        self.now = NOW
        nodes = {NodeId(worker.split("@")[1]): range(partitions) for worker in workers}
        orders: list[object] = [*self.sweep.begin(NOW), *self.sweep.nodes_hold(nodes, NOW)]
        for worker in workers:
            orders += self.sweep.worker_came(*named(worker), NOW)
        self.told(orders)
        self.lines: list[str] = []

    def go_on(self, event: str) -> None:
        """Let "[SECOND ]SUBJECT EVENT [ARGUMENT...]" happen, and write down its orders."""
        if event[0].isdigit():
            self.now = Seconds(float(event.split(maxsplit=1)[0]))
        who, what, *rest = event.removeprefix(f"{self.now:g} ").split()
        orders = self._orders(who, what, rest, WorkerId(who), NodeId(who))
        self.lines.append(f"{event}: {self.told(orders)}")

    def _orders(self, who: str, what: str, rest: list[str], worker: WorkerId, node: NodeId) -> list[Order]:  # fmt: skip
        sweep, now, unit = self.sweep, self.now, self.units.get(who)
        given = dict(one.split("=") for one in rest if "=" in one)
        match what:
            case "comes":
                return sweep.worker_came(*named(f"{who}@{rest[0]}"), now)
            case "goes" | "crashes":
                crash = what == "crashes"
                return sweep.worker_gone(worker, now, "SIGSEGV" if crash else "", fault=crash)
            case "revoked":
                return sweep.worker_revoked(worker, now, float(rest[0]))
            case "kept":
                return sweep.worker_kept(worker, now)
            case "begins" if unit:
                return sweep.unit_begun(unit.attempt, int(rest[0]), now)
            case "fails" if unit:
                return sweep.unit_failed(unit.attempt, "why", cast("Any", rest[0]), now)
            case "ends" if unit:
                scores = {name: float(given[name]) for name in given if name == "accuracy"}
                seconds, digest = float(given.get("s", 2.0)), given.get("digest", "")
                report = UnitReport({"loss": 1.0}, 10, seconds, scores, digest)
                return sweep.unit_done(unit.attempt, report, now)
            case "lost":
                return sweep.node_lost(node, now)
            case "back":
                return [*sweep.node_back(node, now), *sweep.nodes_hold({node: range(2)}, now)]
            case "stores" | "misses":
                change = sweep.state_stored if what == "stores" else sweep.state_missing
                return change(StateName(*map(int, rest[0].split(":"))), node, now)
            case "paused":
                return sweep.pause(int(who[1:]))
            case "resumed":
                return sweep.resume(int(who[1:]), now)
            case "stopped":
                return sweep.stop(int(who[1:]), "ended by anna", now)
            case "added":
                return sweep.add({"lr": 0.5}, now, int(rest[0]) if rest else None)
            case "passes":
                return sweep.deadline_passed(now)
        raise AssertionError(what)

    def told(self, orders: Sequence[object]) -> str:
        said = []
        for order in orders:
            match order:
                case RunUnit(_, worker, trial, values, state, _, result, epoch, partition):
                    self.units[worker] = order
                    assert (result.trial, values) == (trial, self.sweep.state.trials[trial].values)
                    start = f"{state.trial}:{state.version}" if state else "new"
                    evaluates = ", evaluate" if order.evaluate else ""
                    evaluates += " lr 0.5" if values == {"lr": 0.5} else ""  # of an added trial
                    said.append(
                        f"{worker} {start}>{trial}:{result.version} e{epoch} p{partition}{evaluates}"
                    )
                case StopUnit(_, worker) | ReleaseWorker(worker):
                    said.append(f"{'stop' if isinstance(order, StopUnit) else 'release'} {worker}")
                case CopyState(state, source, node):
                    said.append(f"copy {state.trial}:{state.version} {source} {node}")
                case DropState(state, node):
                    said.append(f"drop {state.trial}:{state.version} {node}")
                case TrialScored(trial, epoch, metrics):
                    said.append(f"scored {trial} {metrics.get('accuracy', '')} e{epoch}")
                case TrialEnded(trial, how, reason):
                    said.append(f"{trial} {how}: {reason}")
                case DataRefused(node, partition, why):
                    said.append(f"refuse {node} p{partition}: {why}")
                case StateDiffers(state):
                    said.append(f"differs {state.trial}:{state.version}")
                case Graduate(trial, values, state, digest, epochs):
                    assert values == self.sweep.state.trials[trial].values
                    said.append(
                        f"graduate {trial} {state.trial}:{state.version} {digest} e{epochs}"
                    )
        if self.sweep.deadline != self.deadline:
            self.deadline = self.sweep.deadline
            said.append(f"deadline {self.deadline}")
        if self.sweep.state.stuck_reason:
            said.append(f"stuck: {self.sweep.state.stuck_reason}")
        return "; ".join([*said, "over"] if self.sweep.over else said) or "nothing"


def named(worker: str) -> tuple[WorkerId, NodeId]:
    name, node = worker.split("@")
    return WorkerId(name), NodeId(node)


ONE, TWO = "w0@n0", ("w0@n0", "w1@n1")
CONVERSATIONS = {
    "a state is dropped when the next one has two replicas": (partial(Conversation, *TWO, many=2, epochs=2), """
        w0 ends: copy 0:1 n0 n1; w0 0:1>0:2 e1 p1, evaluate
        n1 stores 0:1: nothing
        w1 ends: copy 1:1 n1 n0; w1 1:1>1:2 e1 p0, evaluate
        w0 ends accuracy=0.5: scored 0 0.5 e1; copy 0:2 n0 n1; w0 0:2>0:3 e2 p0
        n1 stores 0:2: drop 0:1 n0; drop 0:1 n1"""),
    "a copy is tried three times on different nodes": (partial(Conversation, *TWO, "w2@n2"), """
        w0 ends: copy 0:1 n0 n1; w1 0:1>0:2 e1 p1, evaluate
        n1 misses 0:1: copy 0:1 n0 n2
        n2 misses 0:1: copy 0:1 n0 n1
        n1 misses 0:1: nothing"""),
    "the result of an older attempt counts for nothing": (partial(Conversation, ONE), """
        w0 goes: deadline None
        w0 ends: nothing
        w1 comes n0: w1 new>0:1 e1 p0; deadline 3600.0"""),
    "a revoked worker ends its unit first": (partial(Conversation, ONE), """
        w0 revoked 120: deadline 120.0
        w0 ends: release w0; deadline None"""),
    "unless it has no time": (partial(Conversation, ONE), """
        w0 revoked 0: stop w0; release w0; deadline None
        w1 comes n0: w1 new>0:1 e1 p0; deadline 3600.0"""),
    "a unit of a leaving worker is given up without blame": (partial(Conversation, ONE), """
        10 w0 revoked 120: deadline 130.0
        129 time passes: nothing
        130 time passes: stop w0; release w0; deadline None
        131 w1 comes n0: w1 new>0:1 e1 p0; deadline 3731.0
        w1 begins 10: nothing
        3731 time passes: stop w1; release w1; deadline None"""),
    "a unit of 200 s that cannot end in time is given up at once": (partial(Conversation, ONE), """
        w0 ends s=200: w0 0:1>0:2 e1 p1, evaluate
        w0 begins 10: deadline 1000.0
        50 w0 revoked 120: stop w0; release w0; deadline None"""),
    "a unit of 200 s that can end in time ends first": (partial(Conversation, ONE), """
        w0 ends s=200: w0 0:1>0:2 e1 p1, evaluate
        w0 begins 10: deadline 1000.0
        90 w0 revoked 120: deadline 210.0"""),
    "a kept worker takes units again": (partial(Conversation, ONE), """
        w0 revoked 120: deadline 120.0
        w0 kept: deadline 3600.0
        w0 ends: w0 0:1>0:2 e1 p1, evaluate"""),
    "a trial that fails ends alone": (partial(Conversation, ONE, many=2), """
        w0 fails trial: 0 failed: why; w0 new>1:1 e1 p0"""),
    "a missing metric fails its trial": (partial(Conversation, ONE, partitions=1), """
        w0 ends: scored 0  e1; 0 failed: no unit reported metric 'accuracy' (reported: loss); return it from eval_fn; drop 0:1 n0; deadline None; over"""),
    "an infinite metric fails its trial": (partial(Conversation, ONE, partitions=1), """
        w0 ends accuracy=nan: scored 0 nan e1; 0 failed: metric accuracy is nan, not a finite number; drop 0:1 n0; deadline None; over"""),
    "a second hanging unit fails its trial": (partial(Conversation, ONE), """
        100 w0 begins 10: deadline 3700.0
        3600 time passes: nothing
        3700 time passes: stop w0; release w0; deadline None
        w1 comes n0: w1 new>0:1 e1 p0; deadline 7300.0
        w1 begins 10: nothing
        7300 time passes: stop w1; release w1; 0 failed: 2 units exceeded 3600 s; check train_fn for a deadlock; deadline None; over"""),
    "a unit has five times its expected duration": (partial(Conversation, ONE), """
        100 w0 ends s=100: w0 0:1>0:2 e1 p1, evaluate; deadline 3700.0
        200 w0 begins 10: deadline 700.0"""),
    "an unreadable state is trained again from the earlier one": (partial(Conversation, ONE), """
        w0 ends: w0 0:1>0:2 e1 p1, evaluate
        w0 fails state: w0 0:1>0:2 e1 p1, evaluate
        w0 fails state: w0 0:1>0:2 e1 p1, evaluate
        w0 fails state: w0 new>0:1 e1 p0"""),
    "a paused trial takes no unit until it is resumed": (partial(Conversation, ONE), """
        t0 paused: nothing
        w0 ends: deadline None
        t0 resumed: w0 0:1>0:2 e1 p1, evaluate; deadline 3600.0"""),
    "a configuration continues from its parent's state until the last epoch": (
        partial(Conversation, ONE, partitions=1, epochs=2), """
        t0 paused: nothing
        w0 ends accuracy=0.5: scored 0 0.5 e1; deadline None
        t1 added 0: w0 0:1>1:2 e2 p0, evaluate lr 0.5; deadline 3600.0
        w0 ends accuracy=0.5: scored 1 0.5 e2; 1 done: trained 2 epochs; drop 1:2 n0; deadline None
        t2 added 1: 2 stopped: trial 1 has already trained all 2 epochs"""),
    "a copy of a copy continues from the state of the first": (
        partial(Conversation, ONE, partitions=1, epochs=3), """
        t0 paused: nothing
        w0 ends accuracy=0.5: scored 0 0.5 e1; deadline None
        w0 goes: nothing
        t1 added 0: nothing
        t1 paused: nothing
        t2 added 1: nothing
        w1 comes n0: w1 0:1>2:2 e2 p0, evaluate lr 0.5; deadline 3600.0"""),
    "the running unit of a stopped trial does not count": (partial(Conversation, ONE, many=2), """
        t0 stopped: 0 stopped: ended by anna
        w0 ends: w0 new>1:1 e1 p0"""),
    "states of a returned node count again": (partial(Conversation, ONE), """
        w0 ends digest=d1: w0 0:1>0:2 e1 p1, evaluate
        n0 lost: deadline None
        n0 back: nothing
        w1 comes n0: w1 0:1>0:2 e1 p1, evaluate; deadline 3600.0"""),
    "a repeated unit with another state is announced": (partial(Conversation, ONE), """
        w0 ends digest=d1: w0 0:1>0:2 e1 p1, evaluate
        n0 misses 0:1: nothing
        w0 fails state: w0 new>0:1 e1 p0
        w0 fails state: w0 new>0:1 e1 p0
        w0 fails state: w0 new>0:1 e1 p0
        w0 ends digest=d2: differs 0:1; w0 0:1>0:2 e1 p1, evaluate"""),
    "three consecutive crashes fail a trial": (partial(Conversation, ONE), """
        w0 crashes: deadline None
        w1 comes n0: w1 new>0:1 e1 p0; deadline 3600.0
        w1 crashes: deadline None
        w2 comes n0: w2 new>0:1 e1 p0; deadline 3600.0
        w2 crashes: 0 failed: 3 consecutive workers exited in units of this trial: SIGSEGV; deadline None; over"""),
    "a node with other data is left out, and a search without data says why": (
        partial(Conversation, *TWO, many=2), """
        w0 begins 10: nothing
        w0 ends: copy 0:1 n0 n1; w0 0:1>0:2 e1 p1, evaluate
        w1 ends: copy 1:1 n1 n0; w1 1:1>1:2 e1 p0, evaluate
        w1 begins 9: stop w1; release w1; refuse n1 p0: n1 has 9 samples of the partition, n0 has 10; input_fn must return the same data on every node
        w0 fails data: refuse n0 p1: why; w0 0:1>0:2 e1 p1, evaluate
        w0 fails data: refuse n0 p1: why; w0 1:1>1:2 e1 p0, evaluate; stuck: no node can provide partition 1: why"""),
    "a trial on four slots graduates after its epoch": (
        partial(Conversation, ONE, partitions=1, epochs=3, graduate_slots=4), """
        w0 ends accuracy=0.5 digest=d: scored 0 0.5 e1; graduate 0 0:1 d e1; deadline None; over"""),
    "a trial on two slots does not graduate": (
        partial(Conversation, ONE, partitions=1, epochs=3, graduate_slots=2), """
        w0 ends accuracy=0.5 digest=d: scored 0 0.5 e1; w0 0:1>0:2 e2 p0, evaluate"""),
    "a trial at its end does not graduate": (partial(Conversation, ONE, partitions=1, graduate_slots=4), """
        w0 ends accuracy=0.5 digest=d: scored 0 0.5 e1; 0 done: trained 1 epochs; deadline None; over"""),
    "a copy trains an epoch before it graduates": (
        partial(Conversation, ONE, partitions=1, epochs=3, graduate_slots=8), """
        t0 paused: nothing
        w0 ends accuracy=0.5: scored 0 0.5 e1; deadline None
        t1 added 0: w0 0:1>1:2 e2 p0, evaluate lr 0.5; deadline 3600.0
        w0 ends accuracy=0.6 digest=d: scored 1 0.6 e2; graduate 1 1:2 d e2; deadline None"""),
}  # fmt: skip


@pytest.mark.parametrize(("begin", "told"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_events_are_answered_with_these_orders(
    begin: Callable[[], Conversation], told: str
) -> None:
    talk = begin()
    expected = cleandoc(told).splitlines()

    for line in expected:
        talk.go_on(line.partition(": ")[0])

    assert talk.lines == expected


def test_the_digest_of_a_repeated_unit_is_the_new_one() -> None:
    talk = Conversation(ONE)
    for event in ("w0 ends digest=d1", "n0 misses 0:1", *["w0 fails state"] * MAX_FAILED_READS):
        talk.go_on(event)
    talk.go_on("w0 ends digest=d2")

    assert talk.sweep.state.models[0].digest(1) == "d2"


def test_a_node_keeps_few_states_while_copies_fail() -> None:
    talk, most = Conversation(*TWO, epochs=50), 0
    for _ in range(60):
        (lease,) = talk.sweep.state.leases.values()
        talk.go_on(f"{lease.order.worker} ends accuracy=0.5")
        most = max(most, sum(len(talk.sweep.state.stored.on(node)) for node in (N0, N1)))

    assert most <= 4


def test_a_graduate_keeps_its_state_and_counts_the_epochs_of_its_job() -> None:
    talk = Conversation(ONE, partitions=1, epochs=3, graduate_slots=4)
    sweep = talk.sweep
    talk.go_on("w0 ends accuracy=0.5 digest=d")

    sweep.graduate_ended_epoch(0, {"accuracy": 0.75})
    sweep.graduate_ended_epoch(0, {"loss": 0.1})
    kept = sweep.state.stored.on(N0)  # until its job has it
    sweep.close("it is over")

    (trial,) = sweep.state.trials
    assert (trial.scores, trial.ended) == ((0.5, 0.75), "graduated")
    assert kept == sweep.state.stored.on(N0) == [StateName(0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "searcher",
    [RandomSearch(5), SuccessiveHalving(9), Asha(9), Hyperband(), PopulationBased(4)],
    ids=lambda one: type(one).__name__,
)
@settings(max_examples=examples(20), deadline=None)
@given(
    seed=st.integers(0, 99), workers=st.integers(1, 5), chance=st.integers(0, 999),
    faults=st.sampled_from([0, 6]),
)  # fmt: skip
def test_the_fixed_order_gives_the_same_trials_on_any_slots(
    searcher: Searcher, seed: int, workers: int, chance: int, faults: int
) -> None:
    def trials(workers: int, chance: int, faults: int) -> list[Trial]:
        one = Sweep(search(searcher, epochs=9, seed=seed), 4, order="fixed")
        held = {N0: {0, 1, 2}, N1: {1, 2, 3}}
        SweepSite(one, held, workers=2 + workers).run(stream("chance", chance), faults)
        return one.state.trials

    assert trials(workers, chance, faults) == trials(0, 0, 0)


JOINED: list[Searcher] = [
    RandomSearch(4), SuccessiveHalving(9), Asha(9), Hyperband(), MedianStopping(4),
    PopulationBased(4, interval_epochs=2),
]  # fmt: skip


@pytest.mark.parametrize("searcher", JOINED, ids=lambda one: type(one).__name__)
@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 99), after=st.integers(0, 60), failing=st.booleans())
def test_a_sweep_ends_with_trials_added_at_any_time(
    searcher: Searcher, seed: int, after: int, *, failing: bool
) -> None:
    rng = stream("joining", seed)
    one = Sweep(search(searcher, epochs=9, seed=seed), 2)
    site = SweepSite(one, {N0: {0, 1}, N1: {0, 1}}, workers=3)
    for _ in range(after):
        if site.running:
            site.end_unit(sorted(site.running)[rng.randrange(len(site.running))])
    if failing and (scored := [trial for trial in one.state.trials if not trial.ended]):
        lease = one.state.lease_of(scored[0].number)
        if lease is not None:
            site.running.pop(lease.order.worker)
            site.idle.add(lease.order.worker)
            nan = UnitReport({}, 10, 1.0, {"accuracy": math.nan}, "d")
            site.do(one.unit_done(lease.order.attempt, nan, NOW))
    for _ in range(3):
        many = len(one.state.trials)
        parent = rng.choice([None, *range(many)])
        site.do(one.add({"lr": 0.01}, NOW, parent))

    site.run(rng)

    for trial in one.state.trials:
        model = one.state.models[trial.number]
        assert trial.ended
        assert trial.epochs <= 9
        if trial.ended == "done":
            assert trial.epochs == model.whole_epochs == 9


@pytest.mark.parametrize(
    ("losses", "mean"), [((math.inf, -math.inf), math.nan), ((1e306, 1.2e306), 1.1e306)]
)
def test_huge_metrics_are_merged(losses: tuple[float, float], mean: float) -> None:
    parts = [({"loss": loss}, 100) for loss in losses]

    assert merged(parts) == {"loss": pytest.approx(mean, nan_ok=True)}


def test_the_winner_of_asha_graduates_and_the_other_trials_stop() -> None:
    sweep = Sweep(search(Asha(4, eta=2), 4), 1, graduate_slots=4)
    site = SweepSite(sweep, {N0: {0}}, 1)

    site.run(stream(1))

    ended = [trial.ended for trial in sweep.state.trials]
    assert ended.count("graduated") == 1
    assert set(ended) == {"graduated", "stopped"}


@pytest.mark.parametrize(
    "searcher",
    [RandomSearch(5), SuccessiveHalving(5, eta=2), Asha(7, eta=2)],
    ids=["random", "halving", "asha"],
)
@settings(max_examples=examples(40), deadline=None)
@example(slots=3, faults=8, seed=3126)  # a state that comes back lets its trial go
@given(slots=st.integers(0, 12), faults=st.sampled_from([0, 8]), seed=st.integers(0, 10_000))
def test_losses_leave_every_trial_ended_and_every_graduate_with_a_state(
    searcher: Searcher, slots: int, faults: int, seed: int
) -> None:
    nodes = {NodeId(f"n{at}"): {0, 1, 2} for at in range(2)}
    sweep = Sweep(search(searcher, 4, seed=seed), 3, graduate_slots=slots)
    site = SweepSite(sweep, nodes, 4, lost_disks=False)

    site.run(stream(seed), faults)

    gone = [trial for trial in sweep.state.trials if trial.ended == "graduated"]
    assert 2 * len(gone) <= max(0, slots)
    for trial in gone:
        name = sweep.state.graduated_states[trial.number]
        assert name.version % 3 == 0
        assert name.version == len(sweep.state.models[trial.number].finished_units)
        assert any(name in states for states in site.states.values())
    assert {trial.ended for trial in sweep.state.trials} <= {"done", "stopped", "graduated"}
