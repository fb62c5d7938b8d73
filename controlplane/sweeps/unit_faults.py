"""Units that came to nothing: whose fault it is, and when that is the end of a trial or of all."""

from __future__ import annotations

from typing import Final, Literal

from controlplane.sweeps.orders import DataRefused, Order
from controlplane.sweeps.sweep_state import Lease, SweepState
from controlplane.sweeps.trial_changes import fail
from schemas.ids import NodeId, Seconds

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
