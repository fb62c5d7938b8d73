"""Trials are added, granted epochs, scored, and end.

Units that came to nothing: whose fault it is, and when that is the end of a trial or of all.

The last trials go on as elastic jobs, once they are fewer than half the slots.

With fewer models than workers, some workers idle. A trial that graduates uses all slots that its
job is given, and is no longer bit-equal to one that was trained alone: its user has to want it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from controlplane.sweeps.orders import (
    DataRefused,
    Graduate,
    Order,
    StateName,
    TrialEnded,
    TrialScored,
)
from controlplane.sweeps.states import ModelState
from controlplane.sweeps.sweep_state import Lease, SweepState
from controlplane.sweeps.trials import (
    Add,
    Decision,
    Stop,
    Trial,
    apply,
    failed,
    graduated,
    score,
    with_later_score,
    with_score,
)
from schemas.ids import NodeId, Seconds


def decide(state: SweepState, decisions: Sequence[Decision]) -> list[Order]:
    """Carry out what a searcher or a user decided, as a whole."""
    found: list[Order] = []
    state.trials = apply(state.trials, decisions)
    for one in decisions:
        if isinstance(one, Add):
            model = ModelState(len(state.models), state.partitions)
            if one.parent is not None:
                whole = state.models[one.parent]
                model.visits, model.at = list(whole.visits), len(whole.visits)
                model.parents = (*whole.parents, StateName(one.parent, model.at))
                model.metrics = list(whole.metrics)
            state.models.append(model)
        elif isinstance(one, Stop):
            _void(state, one.trial)
            found.append(TrialEnded(one.trial, "stopped", one.why))
    return found


def add_score(state: SweepState, number: int, metrics: dict[str, float]) -> list[Order]:
    """An epoch of a trial is over.

    Args:
        metrics: of the epoch; without a finite one that counts, the trial fails.
    """
    value, wrong = score(state.spec, metrics)
    found: list[Order] = [TrialScored(number, state.models[number].whole_epochs, metrics)]
    if wrong:
        return [*found, *fail(state, number, wrong)]
    state.trials[number] = with_score(state.trials[number], value, state.spec.epochs)
    if state.trials[number].ended:
        found.append(TrialEnded(number, "done", f"trained {state.spec.epochs} epochs"))
    return found


def fail(state: SweepState, number: int, why: str) -> list[Order]:
    """A trial trains no further, through its own fault.

    Args:
        number: of the trial; nothing happens if it has ended.
    """
    if state.trials[number].ended:
        return []
    state.trials[number] = failed(state.trials[number])
    _void(state, number)
    return [TrialEnded(number, "failed", why)]


def _void(state: SweepState, trial: int) -> None:
    """What its unit leaves counts for nothing; the unit runs to its end: to kill costs more."""
    lease = state.lease_of(trial)
    if lease is not None:
        lease.void = True


Fault = Literal["trial", "state", "data", "disk"]
HANGS: Final = 2  # units of a trial that were given up, before it fails
CRASHES: Final = 3  # workers in a row that ended in units of one trial by a fault, before it fails
KILLS: Final = 9  # the same of workers that somebody killed: the kernel, for want of memory, too
READS: Final = 3  # of one state in a row that failed, before it is taken to be lost
STAGINGS: Final = 2  # of a partition on one node that failed, before it is left to others
FULL_DISKS: Final = 20  # units in a row whose states found no room, before the sweep fails


def unit_fault(
    state: SweepState, lease: Lease, node: NodeId, why: str, fault: Fault
) -> list[Order]:
    """A worker says that a unit came to nothing.

    Args:
        state: of the sweep; the lease is out of it.
        fault: whose it is: of the trial, of a state that could not be read, of the data, or of a
            disk that has no room for the state.
    """
    order = lease.order
    match fault:
        case "trial":
            return fail(state, lease.trial, why)
        case "data":
            return refuse_data(state, node, order.partition, why)
        case "state" if order.state is not None:
            times = state.unreadable[order.state] = state.unreadable.get(order.state, 0) + 1
            if times >= READS:
                del state.unreadable[order.state]
                for source in order.sources:
                    state.stored.lose(source, order.state)
        case "disk":
            state.full_disks += 1
            if state.full_disks >= FULL_DISKS:
                state.stuck = f"{FULL_DISKS} units in a row could not leave their state: {why}"
    return []


def refuse_data(
    state: SweepState, node: NodeId, partition: int, why: str, *, for_good: bool = False
) -> list[Order]:
    """A node could not give a partition; after `STAGINGS` times it is left to other nodes.

    Args:
        state: of the sweep, which is stuck if no node that has workers is left for the partition.
        for_good: at once: it would be the same the next time.
    """
    failed = state.data.failed
    failed[node, partition] = STAGINGS if for_good else failed.get((node, partition), 0) + 1
    if failed[node, partition] >= STAGINGS:
        state.staged.get(node, set()).discard(partition)
        others = {place.node for place in state.workers.values()} - {node}
        if not any(can_hold(state, other, partition) for other in others):
            state.stuck = f"no node has partition {partition}: {why}"
    return [DataRefused(node, partition, why)]


def can_hold(state: SweepState, node: NodeId, partition: int) -> bool:
    """Whether a partition may be given to a node: it did not fail there too often."""
    return state.data.failed.get((node, partition), 0) < STAGINGS


def crash(state: SweepState, trial: int, why: str, *, fault: bool = True) -> list[Order]:
    """A worker ended in a unit, by its own fault or killed by somebody.

    Args:
        trial: of the unit; it fails if that happens `CRASHES` times in a row, or `KILLS` times.
    """
    faults, kills = state.crashes.get(trial, (0, 0))
    faults, kills = faults + fault, kills + (not fault)
    state.crashes[trial] = faults, kills
    if faults < CRASHES and kills < KILLS:
        return []
    return fail(state, trial, f"{faults + kills} workers in a row ended in its units: {why}")


def release_late_leavers(state: SweepState, now: Seconds) -> list[Order]:
    """Give up units of workers that were to be gone by now; their trials are not to blame.

    Args:
        now: seconds on the controller's clock.
    """
    found: list[Order] = []
    for worker, place in list(state.workers.items()):
        if place.leaves_by is not None and place.leaves_by <= now:
            found += state.release(worker)
    return found


def give_up_late_units(state: SweepState, now: Seconds) -> list[Order]:
    """Give up units that take far too long, with their workers.

    Args:
        state: of the sweep. A trial fails if that happens to it `HANGS` times.
        now: seconds on the controller's clock.
    """
    found: list[Order] = []
    for lease in list(state.leases.values()):
        if lease.deadline > now:
            continue
        found += state.release(lease.order.worker)
        if not lease.trains:
            node = lease.order.worker
            what = f"data or state were not there after {lease.limit_s:.0f} s on {node}"
            found += crash(state, lease.trial, what)
            continue
        state.hangs[lease.trial] = state.hangs.get(lease.trial, 0) + 1
        if state.hangs[lease.trial] >= HANGS:
            took = f"{lease.limit_s:.0f} s"
            why = f"{HANGS} units took longer than {took}; is there a deadlock in train_fn?"
            found += fail(state, lease.trial, why)
    return found


def graduate_last_trials(state: SweepState) -> list[Order]:
    """Let those go that are at the end of an epoch; the others end theirs first."""
    state.graduating = _last_trials(state)
    found: list[Order] = []
    for number in sorted(state.graduating):
        trial, model = state.trials[number], state.models[number]
        name = _newest(state, number)
        if not at_the_end_of_an_epoch(state, number) or name is None:
            continue
        state.trials[number] = graduated(trial)
        state.graduating.discard(number)
        state.left_with[number] = name
        digest = model.digest(name.version)
        found.append(Graduate(number, trial.values, name, digest, model.whole_epochs))
    return found


def at_the_end_of_an_epoch(state: SweepState, number: int) -> bool:
    """Whether a trial has trained whole epochs, at least one, and is at no unit."""
    model = state.models[number]
    begun = len(model.visits) % state.partitions
    return bool(model.visits) and not begun and not model.again and state.lease_of(number) is None


def score_graduate(state: SweepState, number: int, score: float) -> None:
    """A trial that graduated ended another epoch, elsewhere.

    Args:
        score: larger is better; one that is not finite counts for nothing.
    """
    trial = state.trials[number]
    if trial.ended == "graduated":
        state.trials[number] = with_later_score(trial, score)


def _last_trials(state: SweepState) -> set[int]:
    """Those that train on, if they are few and nobody can join them any more.

    Who waits for a promotion when all others may train to the end waits for nothing: no score that
    is still to come is compared with its own.
    """
    left: list[Trial] = [trial for trial in state.trials if not trial.ended and not trial.waits]
    final = all(trial.granted >= state.spec.epochs for trial in left)
    if not final or 2 * len(left) >= state.graduate_slots:
        return set()
    return {
        trial.number
        for trial in left
        if trial.number not in state.paused and _has_own_state(state, trial.number)
    }


def _has_own_state(state: SweepState, number: int) -> bool:
    """Whether it trained itself: until then its state has its parent's name."""
    model = state.models[number]
    return not model.parents or len(model.visits) > model.parents[-1].version


def _newest(state: SweepState, number: int) -> StateName | None:
    """Of its states the one after all of its visits, if a node has it."""
    model = state.models[number]
    having = state.stored.nodes([StateName(number, len(model.visits))])
    return having[0][1] if having else None
