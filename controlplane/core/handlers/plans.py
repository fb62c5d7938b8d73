"""Handlers of plans and swaps.

Entries of a plan that still fit the state become starts, changes and pauses. In a swap, running
jobs trade slots: one job yields its slots, the other jobs move, and the yielding job moves last.
Every move is an ordinary group change. A newcomer is prepared while the owner of its slot still
runs, and gets the slot when the owner has exited. A job that has to pause trains until the workers
for its slots are prepared. A swap only records the intention, which is checked after every input.
If anything else happens to its jobs, the swap is dropped. The jobs then stay where they are, and
any later plan can continue from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers.lifecycle import end, withdraw
from controlplane.core.handlers.recovery import abandon
from controlplane.core.handlers.rescale import order_change
from controlplane.core.handlers.start import start
from controlplane.core.history import Decided, EndPromised
from controlplane.core.inputs import PlanProposed
from controlplane.core.model.job import Job, ManualOverride, PromisedEnd
from controlplane.core.model.job_phases import JobTrigger, Phase, Running
from controlplane.core.model.rescale import RescalePhase, RescaleTrigger, Swap, YieldMode
from controlplane.core.plan_check import Move, check
from controlplane.policy.api import Reason
from controlplane.policy.placement.slot_partition import split
from schemas.ids import JobId, Seconds, SlotId
from schemas.nodes import Group
from schemas.wire.agent import RECOVER
from schemas.wire.client import Decision, PromiseInfo

MAX_PAUSE_WAIT_S: Final = 300.0  # longest time that a pause waits for newcomers


def begin_swap(ctx: HandlerContext, swap: Swap) -> bool:
    """Start a swap of running jobs. `reconcile_all` orders its steps.

    The jobs must not be in another swap. If the swap is impossible, change nothing and return
    False.
    """
    if _broken(ctx, swap):
        return False
    swap.started_at = ctx.now
    ctx.state.swaps.append(swap)
    _touch(ctx, swap)
    modes = [f"{name} {interim.mode.value}" for name, interim in swap.yields.items()]
    ctx.announce("policy.swap", detail={"jobs": _names(swap), "how": ", ".join(modes)})
    return True


def reconcile_all(ctx: HandlerContext) -> None:
    """Order the next steps of every swap. Remove swaps that are done or broken."""
    for swap in list(ctx.state.swaps):
        why = _broken(ctx, swap)
        if not why:
            _order_steps(ctx, swap)
            if all(_is_at_target(ctx.state.jobs[name], swap) for name in swap.targets):
                why = "done"
        if why:
            ctx.state.swaps.remove(swap)
            _touch(ctx, swap)
            _cancel_waits(ctx, swap)
            took_s = ctx.now - swap.started_at
            ctx.announce(
                "policy.swapped",
                detail={"jobs": _names(swap), "outcome": why, "took_s": took_s},
            )
            ctx.plan_needed = True


def _cancel_waits(ctx: HandlerContext, swap: Swap) -> None:
    """Cancel starts and growths that wait for those slots of the swap that will not become free."""
    for name in swap.targets:
        job = ctx.state.jobs[name]
        if job.phase is Phase.STARTING and any(w.reserved for w in job.workers.values()):
            why = "paused: its new slots are not available"
            withdraw(ctx, job, "abandoned", JobTrigger.SUSPENDED, why)
        preparing = job.change is not None and job.change.phase is RescalePhase.PREPARING
        leaving = ctx.state.slot_index.releasing()
        if preparing and any(w.reserved and w.slot not in leaving for w in job.workers.values()):
            abandon(ctx, job, RescaleTrigger.SUPERSEDED, "the reserved slots are not given up")


def _names(swap: Swap) -> str:
    return ", ".join(swap.targets)


def _touch(ctx: HandlerContext, swap: Swap) -> None:
    """Mark the jobs of a swap as changed for policies, which makes earlier plans for them stale."""
    for name in swap.targets:
        ctx.state.jobs[name].changed_version = ctx.state.version
        ctx.changed_jobs[name] = None


# --- conditions


def _broken(ctx: HandlerContext, swap: Swap) -> str:
    """Return the reason why a swap must be dropped, or "" if the swap can continue."""
    for name in swap.targets:
        job = ctx.state.jobs[name]
        why = _dropout_reason(ctx, job, swap) or _lost_slot(ctx, job, swap)
        if why:
            return f"dropped: {name} {why}"
    return ""


def _dropout_reason(ctx: HandlerContext, job: Job, swap: Swap) -> str:
    """Return the reason why a job cannot take part in a swap any more, or "" if it can."""
    interim = swap.yields.get(job.job)
    pauses = interim is not None and interim.mode is YieldMode.PAUSE and job.job in swap.yielded
    change = job.change
    if job.ended:
        return "ended"
    if job.override is not None and not _matches_override(job.override, swap.targets[job.job]):
        return "has another order of an operator"
    if isinstance(job.status, Running) and job.status.script.finished:
        return "has finished its training"
    if change is not None and change.kind == RECOVER:
        return "lost a member"
    if job.phase in {Phase.QUEUED, Phase.PAUSED, Phase.STARTING} and not pauses:
        return "lost its group"
    if max(job.attempts.next_change_at, job.attempts.next_start_at) > ctx.now:
        return "could not be changed"
    return ""


def _matches_override(override: ManualOverride, target: Mapping[SlotId, int]) -> bool:
    """True if an operator ordered the same slots and batch as the target of the swap."""
    batch = override.batch in {None, sum(target.values())}
    return batch and not override.paused and {*override.on} == {*target}


def _lost_slot(ctx: HandlerContext, job: Job, swap: Swap) -> str:
    """Return a text about a target or current slot that was lost or taken, or "" if none was."""
    nodes, owners = ctx.state.slot_index.slots(), ctx.state.slot_index.owners()
    for slot in (*swap.targets[job.job], *job.size.slots):
        node = nodes.get(slot)
        if node is None or not node.usable:
            return f"cannot get {slot}: its node accepts no new work"
        if slot in owners and owners[slot] not in swap.targets:
            return f"cannot get {slot}: {owners[slot]} owns it"
    return ""


# --- next steps


def _order_steps(ctx: HandlerContext, swap: Swap) -> None:
    """Order steps until none is possible. The step of one job may allow a step of another job."""
    while any(_order_step(ctx, ctx.state.jobs[name], swap) for name in swap.targets) or any(
        _pause(ctx, ctx.state.jobs[name], swap) for name in swap.yields
    ):
        pass


def _order_step(ctx: HandlerContext, job: Job, swap: Swap) -> bool:
    """Order the next step of a job. Return False if the job has to wait or is at its target."""
    target, interim = swap.targets[job.job], swap.yields.get(job.job)
    reason = swap.reasons[job.job]
    if job.phase is Phase.PAUSED:
        if not all(_becomes_free(ctx, slot, swap) for slot in target):
            return False
        start(ctx, job, target, reason, by=swap.by)
        return True
    if job.phase is not Phase.RUNNING or _is_at_target(job, swap):
        return False
    if interim is not None and job.job not in swap.yielded:
        if interim.mode is YieldMode.PAUSE:
            return False  # see `_pause`
        swap.yielded[job.job] = None
        return _change(ctx, job, interim.local_batch, _yield_reason(swap, job.job), swap.by)
    current = [member.slot for member in job.group.members] if job.group else []
    if interim is not None and not set(current) <= {*interim.local_batch, *target}:
        return _change(ctx, job, interim.local_batch, _yield_reason(swap, job.job), swap.by)
    if not _are_available(ctx, job, [slot for slot in target if slot not in current], swap):
        return False
    return _change(ctx, job, target, reason, swap.by)


def _pause(ctx: HandlerContext, job: Job, swap: Swap) -> bool:
    """Pause a job that yields by a pause, once the workers for its slots wait for nothing else.

    Return False if no pause was ordered.
    """
    interim, group = swap.yields[job.job], job.group
    if interim.mode is not YieldMode.PAUSE or job.job in swap.yielded or group is None:
        return False
    if job.phase is not Phase.RUNNING or not _successors_wait(ctx, group, swap):
        return False
    swap.yielded[job.job] = None
    return _change(ctx, job, interim.local_batch, _yield_reason(swap, job.job), swap.by)


def _successors_wait(ctx: HandlerContext, group: Group, swap: Swap) -> bool:
    """True if the workers that are prepared for slots of `group` wait only for these slots.

    After `MAX_PAUSE_WAIT_S` the result is True even if some of them are not ready. If no worker can
    be prepared yet, because each needs slots of other jobs, too, the result is True when no job of
    the swap is starting or changing.
    """
    reservations = ctx.state.slot_index.reservations()
    successors = [reservations[m.slot][1] for m in group.members if m.slot in reservations]
    if successors:
        return (
            all(successor.awaits_slot for successor in successors)
            or ctx.now - swap.started_at >= MAX_PAUSE_WAIT_S
        )
    jobs = (ctx.state.jobs[name] for name in swap.targets)
    return all(job.change is None and job.phase is not Phase.STARTING for job in jobs)


def _change(
    ctx: HandlerContext, job: Job, placed: dict[SlotId, int], reason: Reason, by: str
) -> bool:
    """Order a change to these slots, or first to the union of these and the current slots.

    Return True if a change was ordered.
    """
    current = [member.slot for member in job.group.members] if job.group else []
    new = [slot for slot in placed if slot not in current]
    before = job.version
    if new and not all(slot in placed for slot in current):
        union = [*current, *new]
        placed = split(max(sum(placed.values()), len(union)), union)
        reason = _without_speed(reason)
    order_change(ctx, job, placed, reason, by=by)
    return job.version != before


def _becomes_free(ctx: HandlerContext, slot: SlotId, swap: Swap) -> bool:
    """True if a slot is not reserved, and is free or is left by its owner in this swap."""
    index = ctx.state.slot_index
    owner = index.owners().get(slot)
    if slot in index.reservations():
        return False
    return owner is None or (owner in swap.targets and slot not in swap.targets[owner])


def _are_available(ctx: HandlerContext, job: Job, slots: list[SlotId], swap: Swap) -> bool:
    """True if each slot is free, is being left, or belongs to a job that will pause in the swap."""
    available = ctx.state.slot_index.available()
    pausing = _slots_of_pausing_jobs(ctx, swap)
    room = {*available.free, *pausing}
    return all(slot in room or available.releasing.get(slot, job.job) != job.job for slot in slots)


def _slots_of_pausing_jobs(ctx: HandlerContext, swap: Swap) -> set[SlotId]:
    """Return the unreserved slots of jobs that still train and will pause in this swap."""
    groups = [
        ctx.state.jobs[name].group
        for name, interim in swap.yields.items()
        if interim.mode is YieldMode.PAUSE and name not in swap.yielded
    ]
    slots = {member.slot for group in groups if group for member in group.members}
    return slots - ctx.state.slot_index.reservations().keys()


def _is_at_target(job: Job, swap: Swap) -> bool:
    target = swap.targets[job.job]
    if job.phase is not Phase.RUNNING or job.group is None:
        return False
    return {member.slot: member.local_batch for member in job.group.members} == target


def _yield_reason(swap: Swap, name: JobId) -> Reason:
    others = ", ".join(other for other in swap.targets if other != name)
    reason, words = _without_speed(swap.reasons[name]), swap.yields[name].mode.value
    text = f"{words}, because it trades slots with {others}: {reason.text}"
    return Reason("swap", text, reason.numbers)


def _without_speed(reason: Reason) -> Reason:
    """Return the reason without the expected speed, which only the last step will reach."""
    numbers = {name: value for name, value in reason.numbers.items() if name != "speed_then"}
    return Reason(reason.code, reason.text, numbers)


def on_plan_proposed(ctx: HandlerContext, event: PlanProposed) -> None:
    """Carry out the entries of a plan that fit. Request another plan if some entries do not fit.

    A plan without search statistics is not announced.
    """
    verdict, stats = check(event.plan, ctx.state, ctx.now), event.stats
    for name, reason in verdict.rejected.items():
        _reject(ctx, ctx.state.jobs[name], reason)
    for name, at in verdict.promised.items():
        _promise(ctx, ctx.state.jobs[name], at)
    done = [move for move in verdict.moves if _apply_move(ctx, move)]
    begun = [swap for swap in verdict.swaps if begin_swap(ctx, swap)]
    changes = len(done) + sum(len(swap.targets) for swap in begun)
    if changes:
        ctx.totals.plans_taken += 1
    if changes and stats is not None:
        ctx.announce(
            "policy.plan",
            detail={
                "changes": changes + event.later,
                "generations": stats.generations,
                "best_fitness": stats.best_fitness,
                "mean_fitness": stats.mean_fitness,
                **dict(zip(("lower_fitness", "upper_fitness"), stats.spread[1:4:2], strict=False)),
                "diversity": stats.diversity,
                "view_ms": stats.view_ms,
                "improve_ms": stats.improve_ms,
                "decision_ms": stats.decision_ms,
                "check_ms": stats.check_ms,
            },
        )
    if verdict.refused or len(begun) < len(verdict.swaps):
        ctx.plan_needed = True


def _reject(ctx: HandlerContext, job: Job, reason: Reason) -> None:
    """End a job that never started, with the reason in its history."""
    decision = Decision(
        time=ctx.now,
        before=job.size,
        to=job.size,
        reason=f"rejected: {reason.text}",
        code=reason.code,
        numbers=reason.numbers,
        outcome="rejected",
    )
    ctx.records.append(Decided(job=job.job, decision=decision))
    end(ctx, job, JobTrigger.REJECTED, reason.text, {"code": reason.code, **reason.numbers})


def _promise(ctx: HandlerContext, job: Job, at: Seconds) -> None:
    """Record a promised end. The first promise stays. Later ones only update the expected end."""
    ctx.state.job_counters.promised.add(job.job)
    first = job.promised_end.first if job.promised_end else at
    job.promised_end = PromisedEnd(first=first, latest=at)
    ctx.changed_jobs[job.job] = None
    promise = PromiseInfo(time=ctx.now, end=at)
    ctx.records.append(EndPromised(job=job.job, promise=promise))
    ctx.announce("job.promised", job, {"end": at, "first": first})


def _apply_move(ctx: HandlerContext, move: Move) -> bool:
    job = ctx.state.jobs[move.job]
    if job.phase is not Phase.RUNNING:
        start(ctx, job, move.local_batch, move.reason)
        return True
    before = job.version
    placed, reason = _first_step(job, move), move.reason
    if placed.keys() != move.local_batch.keys():  # the expected speed belongs to the last step
        reason = _without_speed(reason)
    order_change(ctx, job, placed, reason)
    return job.version != before


def _first_step(job: Job, move: Move) -> dict[SlotId, int]:
    """Return the slots and local batches of the first step towards the target of a move.

    A job that gets new slots and gives up old ones first grows to the union. When this change has
    settled, the next plan removes the old slots. The two steps together are a migration.
    """
    current = [member.slot for member in job.group.members] if job.group else []
    new = [slot for slot in move.local_batch if slot not in current]
    if not new or all(slot in move.local_batch for slot in current):
        return dict(move.local_batch)
    union = [*current, *new]  # `plan_check.check` has refused unions above the batch limit
    return split(max(sum(move.local_batch.values()), len(union)), union)
