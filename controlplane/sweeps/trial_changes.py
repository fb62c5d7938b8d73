"""Functions that add, score, fail and graduate trials, and that handle failed units.

Once the last trials are fewer than half the slots, they can graduate: each continues as an elastic
job. Its result is then no longer bit-equal in every run, so users have to opt in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from controlplane.sweeps.trials import Add, Decision, Stop, apply, score, with_score
from schemas.ids import NodeId, Seconds


def decide(state: SweepState, decisions: Sequence[Decision]) -> list[Order]:
    """Carry out all decisions of a searcher or a user, and return the resulting orders."""
    found: list[Order] = []
    state.trials = apply(state.trials, decisions)
    for one in decisions:
        if isinstance(one, Add):
            model = ModelState(len(state.models), state.partitions)
            if one.parent is not None:
                whole = state.models[one.parent]
                model.finished_units = list(whole.finished_units)
                model.at = len(whole.finished_units)
                model.parents = (*whole.parents, StateName(one.parent, model.at))
                model.metrics = list(whole.metrics)
            state.models.append(model)
        elif isinstance(one, Stop):
            _void_lease(state, one.trial)
            found.append(TrialEnded(one.trial, "stopped", one.reason))
    return found


def add_score(state: SweepState, number: int, metrics: dict[str, float]) -> list[Order]:
    """Record the metrics of a finished epoch; without a finite score the trial fails."""
    value, wrong = score(state.spec, metrics)
    found: list[Order] = [TrialScored(number, state.models[number].whole_epochs, metrics)]
    if wrong:
        return [*found, *fail(state, number, wrong)]
    state.trials[number] = with_score(state.trials[number], value, state.spec.epochs)
    if state.trials[number].ended:
        found.append(TrialEnded(number, "done", f"trained {state.spec.epochs} epochs"))
    return found


def fail(state: SweepState, number: int, reason: str) -> list[Order]:
    """Mark a trial as failed through its own fault; a trial that has ended is left alone."""
    if state.trials[number].ended:
        return []
    state.trials[number] = replace(state.trials[number], ended="failed")
    _void_lease(state, number)
    return [TrialEnded(number, "failed", reason)]


def _void_lease(state: SweepState, trial: int) -> None:
    """Ignore the result of the trial's unit, which runs to its end because a kill costs more."""
    lease = state.lease_of(trial)
    if lease is not None:
        lease.ignored = True


Fault = Literal["trial", "state", "data", "disk"]
MAX_HANGS: Final = 2  # late units after which their trial fails
MAX_FAULTS: Final = 3  # consecutive crashes in a trial's units after which the trial fails
MAX_KILLS: Final = 9  # the same for kills, including kills by the kernel for lack of memory
MAX_FAILED_READS: Final = 3  # consecutive failed reads after which a state counts as lost
MAX_FAILED_STAGINGS: Final = 2  # failures on a node after which only other nodes get a partition
MAX_FULL_DISKS: Final = 20  # consecutive units without disk space after which a sweep fails


def unit_fault(
    state: SweepState, lease: Lease, node: NodeId, reason: str, fault: Fault
) -> list[Order]:
    """Handle a failed unit after its lease was removed; `fault` is the cause of the failure."""
    order = lease.order
    match fault:
        case "trial":
            return fail(state, lease.trial, reason)
        case "data":
            return refuse_data(state, node, order.partition, reason)
        case "state" if order.state is not None:
            times = state.unreadable[order.state] = state.unreadable.get(order.state, 0) + 1
            if times >= MAX_FAILED_READS:
                del state.unreadable[order.state]
                for source in order.sources:
                    state.stored.lose(source, order.state)
        case "disk":
            state.full_disks += 1
            if state.full_disks >= MAX_FULL_DISKS:
                state.stuck_reason = (
                    f"{MAX_FULL_DISKS} consecutive units could not store their state: {reason}; "
                    "free disk space on the nodes"
                )
    return []


def refuse_data(
    state: SweepState, node: NodeId, partition: int, reason: str, *, for_good: bool = False
) -> list[Order]:
    """Record that a node could not provide a partition; if `for_good`, one failure is enough.

    If no other node with workers can provide the partition, the sweep is stuck.
    """
    times = state.data.failed.get((node, partition), 0) + 1
    state.data.failed[node, partition] = MAX_FAILED_STAGINGS if for_good else times
    if not can_hold(state, node, partition):
        state.staged.get(node, set()).discard(partition)
        others = {record.node for record in state.workers.values()} - {node}
        if not any(can_hold(state, other, partition) for other in others):
            state.stuck_reason = f"no node can provide partition {partition}: {reason}"
    return [DataRefused(node, partition, reason)]


def can_hold(state: SweepState, node: NodeId, partition: int) -> bool:
    """True unless the node has failed to provide the partition `MAX_FAILED_STAGINGS` times."""
    return state.data.failed.get((node, partition), 0) < MAX_FAILED_STAGINGS


def crash(state: SweepState, trial: int, reason: str, *, fault: bool = True) -> list[Order]:
    """Record that a worker crashed, or was killed (`fault` is False), in a unit of `trial`."""
    faults, kills = state.crashes.get(trial, (0, 0))
    faults, kills = faults + fault, kills + (not fault)
    state.crashes[trial] = faults, kills
    if faults < MAX_FAULTS and kills < MAX_KILLS:
        return []
    exited = f"{faults + kills} consecutive workers exited in units of this trial"
    return fail(state, trial, f"{exited}: {reason}")


def release_late_leavers(state: SweepState, now: Seconds) -> list[Order]:
    """Release revoked workers that had to be gone by now; no trial is blamed for this."""
    late = [
        worker
        for worker, record in state.workers.items()
        if record.must_leave_by is not None and record.must_leave_by <= now
    ]
    return [order for worker in late for order in state.release(worker)]


def give_up_late_units(state: SweepState, now: Seconds) -> list[Order]:
    """Give up late units and release their workers; late data or states count as a crash."""
    found: list[Order] = []
    for lease in list(state.leases.values()):
        if lease.deadline > now:
            continue
        found += state.release(lease.order.worker)
        if not lease.training:
            waited = f"{lease.limit_s:.0f} s on {lease.order.worker}"
            found += crash(state, lease.trial, f"data or state not available after {waited}")
            continue
        state.hung_units[lease.trial] = state.hung_units.get(lease.trial, 0) + 1
        if state.hung_units[lease.trial] >= MAX_HANGS:
            reason = f"{MAX_HANGS} units exceeded {lease.limit_s:.0f} s"
            found += fail(state, lease.trial, f"{reason}; check train_fn for a deadlock")
    return found


def graduate_last_trials(state: SweepState) -> list[Order]:
    """Graduate the last trials; a trial that is within an epoch finishes the epoch first."""
    state.graduating = _last_trials(state)
    found: list[Order] = []
    for number in sorted(state.graduating):
        trial, model = state.trials[number], state.models[number]
        having = state.stored.nodes([StateName(number, len(model.finished_units))])
        if not at_the_end_of_an_epoch(state, number) or not having:
            continue
        name = having[0][1]
        state.trials[number] = replace(trial, ended="graduated")
        state.graduating.discard(number)
        state.graduated_states[number] = name
        digest = model.digest(name.version)
        found.append(Graduate(number, trial.values, name, digest, model.whole_epochs))
    return found


def at_the_end_of_an_epoch(state: SweepState, number: int) -> bool:
    """True if a trial has finished an epoch, is between epochs, and has no running unit."""
    model = state.models[number]
    units = len(model.finished_units)
    whole = units > 0 and units % state.partitions == 0
    return whole and not model.again and state.lease_of(number) is None


def _last_trials(state: SweepState) -> set[int]:
    """Return the last trials, which may graduate; none while too many trials still train.

    The result is empty until every trial that trains is granted the last epoch. Then a trial that
    waits for a promotion waits in vain, because no future score is compared with its score.
    """
    left = [trial for trial in state.trials if not trial.ended and not trial.waits]
    final = all(trial.granted >= state.spec.epochs for trial in left)
    if not final or 2 * len(left) >= state.graduate_slots:
        return set()
    return {
        trial.number
        for trial in left
        if trial.number not in state.paused and _has_own_state(state, trial.number)
    }


def _has_own_state(state: SweepState, number: int) -> bool:
    """True if the trial has finished a unit; until then its state has the parent's name."""
    model = state.models[number]
    return not model.parents or len(model.finished_units) > model.parents[-1].version
