"""Histories by chance, the same for the same seed: what a journal may hold.

`python -m tests.support.recorded_history` writes the journals that are missing in
`tests/golden/journal/`, and never changes one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from controlplane.core.commands import Announce
from controlplane.core.inputs import (
    CommitsResumed,
    InputSkipped,
    SweepChangeRequested,
)
from controlplane.core.reactor import Reactor
from controlplane.core.state import PREPARE_LIMIT_S, RETRY_LONGEST_S, START_LIMIT_S, State
from controlplane.journal.database import Entry, input_from, open_for_writing
from controlplane.journal.reader import Reader
from controlplane.journal.replay import recover, replay
from controlplane.journal.take_snapshot import save_state
from controlplane.journal.writer import Writer
from schemas.ids import JobId, Seconds
from schemas.sweeps import Asha, PopulationBased
from tests.support.builders import N1, N2, S0, S1, T0, T1
from tests.support.controller import Controller
from tests.support.sweep_world import SweepCluster, sweep_job
from tests.unit.controlplane.core.test_properties import ENDS, Cluster

GOLDEN: Final = Path(__file__).parents[1] / "golden" / "journal"
GOLDEN_SEED: Final = 6  # with every kind of input
History = list[tuple[Seconds, bytes]]  # inputs as they are written down, each with its time


def of_jobs(seed: int, steps: int) -> Controller:
    """Jobs that come, grow, move, are paused and lost on two nodes."""
    rng = Random(seed)  # noqa: S311 - no secret comes of it
    cluster = Cluster()
    for _ in range(steps):
        _step(cluster, rng)
    return cluster.controller


def of_sweeps(seed: int, steps: int) -> Controller:
    """Two sweeps on three nodes that are lost and come back, and changes of their trials."""
    rng = Random(seed)  # noqa: S311 - no secret comes of it
    cluster = SweepCluster(n1=2, n2=2, n3=1)
    spec = sweep_job((1, 3), searcher=Asha(4, eta=2), epochs=3, partitions=3, replicas=2)
    names = [cluster.submit("a", **spec)]
    names.append(
        cluster.submit("b", **sweep_job((1, 2), searcher=PopulationBased(4), graduate_batch=8))
    )
    for at in range(steps):
        if rng.random() < 0.05:
            _disturb(cluster, rng)
        if at % 25 == 0:
            _deal(cluster, names, rng)
        if at in {steps // 4, steps // 3, steps // 2}:
            _change_a_trial(cluster, names[0], at)
        if not cluster.step(rng):
            cluster.later(100.0)
            for node in cluster.world.nodes.values():
                if not node.up:
                    cluster.bring_back(node, disk=rng.random() < 0.5)
    return cluster.controller


def _step(cluster: Cluster, rng: Random) -> None:
    state, controller = cluster.controller.state, cluster.controller
    node, which = rng.choice((N1, N2)), rng.randrange(10)

    def submit() -> None:
        if len(state.active) < 5:
            key = rng.choice(["", "k", "l"])
            cluster.submit(rng.choice("ab"), key=key, retries=1, wanted=rng.randint(1, 3))

    def order() -> None:
        if state.active:
            kind = rng.randrange(4)
            if kind == 0:
                cluster.a_user_resizes(which, rng.choice([1, 2, 3]), rng.choice([None, 16]), 2)
            elif kind == 1:
                cluster.a_user_moves(which, set(rng.sample((S0, S1, T0, T1), 2)), 2)
            elif kind == 2:
                cluster.a_user_pauses(which, 2)
        if state.overrides:
            cluster.a_user_resumes(which, auto=rng.random() < 0.5)

    def deal() -> None:
        if state.active:
            slots = rng.sample((S0, S1, T0, T1), 4)
            cluster.a_policy_deals_all_slots_anew(slots, [rng.randint(0, 3), 1, 1], 16, 2)

    def die() -> None:
        cluster.a_worker_dies(which, rng.choice(ENDS), seen=rng.random() < 0.7, rounds=1)

    def be_late() -> None:
        cluster.controller.now += rng.choice((2.0, RETRY_LONGEST_S, PREPARE_LIMIT_S, START_LIMIT_S))
        for event in controller.reactor.due(cluster.now):
            cluster.take(event)

    def fall_silent() -> None:
        cluster.a_link_breaks(node, keeps=False)
        cluster.a_node_is_silent(node, lost=rng.random() < 0.5)

    def be_heard() -> None:
        cluster.a_linked_node_is_suspected(node)
        cluster.a_suspect_node_is_heard(node)

    def lose_a_node() -> None:
        cluster.a_link_breaks(node, keeps=False)
        cluster.an_agent_begins_anew(node, reboots=rng.random() < 0.5)

    def skip() -> None:
        known = state.nodes[node]
        said = {"node": node, "boot": known.boot, "seq": known.committed}
        cluster.take(InputSkipped(what="NodeReported", error="KeyError()", **said))

    def have_room_again() -> None:
        since = Seconds(controller.now - 5.0)
        cluster.take(CommitsResumed(reason="database or disk is full", since=since))

    often: list[tuple[float, Callable[[], Any]]] = [
        (12.0, lambda: cluster.all_goes_well_for_a_moment(1, rng.choice((None, 2)))), (3.0, submit),
        (2.0, order), (2.0, deal), (1.0, die), (0.7, be_late), (0.5, fall_silent), (0.5, be_heard),
        (0.5, lose_a_node), (2.0, cluster.the_links_hold_again),
        (0.3, cluster.a_new_controller_takes_over), (0.2, skip), (0.2, have_room_again),
        (0.4, lambda: cluster.a_user_cancels(which) if cluster.controller.names else None),
        (0.5, lambda: cluster.an_agent_greets(node)),
        (0.5, lambda: cluster.a_greeting_arrives(node)),
    ]  # fmt: skip
    rng.choices([act for _, act in often], [weight for weight, _ in often])[0]()


def _disturb(cluster: SweepCluster, rng: Random) -> None:
    node = rng.choice(list(cluster.world.nodes.values()))
    if not node.up:
        cluster.bring_back(node, disk=rng.random() < 0.5)
        return
    match rng.randrange(5):
        case 0 if living := node.living():
            rng.choice(living).die()
        case 1:
            cluster.restart_agent(node)
        case 2:
            cluster.restart_controller()
        case 3:
            cluster.lose(node)
        case _:
            cluster.later(2000.0)


def _deal(cluster: SweepCluster, names: list[JobId], rng: Random) -> None:
    view = cluster.controller.view()
    slots = [slot.slot for slot in view.slots]
    rng.shuffle(slots)
    placed = {}
    for name in [*names, *view.jobs]:
        if name in view.jobs and name not in placed:
            most = view.jobs[name].most
            placed[name], slots = slots[:most], slots[most:]
    cluster.place(placed)


def _change_a_trial(cluster: SweepCluster, name: JobId, at: int) -> None:
    if cluster.job(name).ended:
        return
    cluster.take(
        SweepChangeRequested(
            job=name, user="ann", change="add", trial=None, values={"lr": 0.01}, parent=None,
            key=f"k{at}",
        )
    )  # fmt: skip


def summary(state: State) -> dict[str, Any]:
    """What a history came to, in words that outlive the classes of a release."""
    return {
        "term": state.term,
        "events": state.feed_seq,
        "accepted": state.jobs_accepted,
        "nodes": {node.node: node.phase.value for node in state.nodes.values()},
        "owners": dict(sorted(state.slot_index.owners().items())),
        "active": {
            name: [job.phase.value, job.reason, job.version, job.progress.epoch, list(job.workers)]
            for name, job in ((name, state.job(name)) for name in state.active)
        },
    }


def write(path: Path, history: History) -> None:
    """A journal with this history, as the present release writes it."""
    reactor, writer = Reactor(), Writer(path, lambda _: None)
    for at, body in history:
        event = input_from(body)
        commands = reactor.handle(event, at)
        feed = tuple(command.event for command in commands if isinstance(command, Announce))
        writer.append(Entry(at=at, input=event, feed=feed, records=tuple(reactor.records)))
    writer.close()
    for suffix in (".lock", ".mark"):
        path.with_suffix(suffix).unlink()


def snapshot_at(path: Path, number: int) -> None:
    """Add a snapshot to a journal, as a helper takes it."""
    with contextlib.closing(Reader(path)) as reader:
        found = recover(reader, most=number)
    save_state(path, found.reactor, found.last, found.at)


def main() -> None:
    """Write the golden journals that are missing."""
    GOLDEN.mkdir(exist_ok=True)
    for name, controller in {
        "jobs": of_jobs(GOLDEN_SEED, 300),
        "sweeps": of_sweeps(GOLDEN_SEED, 400),
    }.items():
        path = GOLDEN / f"{name}.sqlite"
        if not path.exists():
            history = controller.history
            write(path, history)
            snapshot_at(path, len(history) // 2)
            with contextlib.closing(open_for_writing(path)) as database:
                database.execute("PRAGMA journal_mode=DELETE")
            state = replay((at, input_from(body)) for at, body in history).state
            outcome = msgspec.json.format(msgspec.json.encode(summary(state)))
            path.with_suffix(".json").write_bytes(outcome + b"\n")


if __name__ == "__main__":
    main()
