"""Handlers of manual overrides, which bring each job to the size that an operator ordered.

A job gets the ordered slots when they are available.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import Final

from msgspec.structs import replace

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers.lifecycle import withdraw
from controlplane.core.handlers.plans import begin_swap
from controlplane.core.handlers.plans import reconcile_all as reconcile_swaps
from controlplane.core.handlers.recovery import abandon
from controlplane.core.handlers.rescale import order_change
from controlplane.core.handlers.start import OPERATOR, start
from controlplane.core.history import Decided
from controlplane.core.inputs import (
    OverrideDue,
    PauseRequested,
    ResizeRequested,
    ResumeRequested,
)
from controlplane.core.model.job import Job, ManualOverride
from controlplane.core.model.job_phases import JobTrigger, Phase
from controlplane.core.model.rescale import RescalePhase, RescaleTrigger
from controlplane.core.state import State
from controlplane.core.swap_plan import Mover, swaps_among
from controlplane.policy.api import Reason
from controlplane.policy.placement.slot_partition import split
from schemas.ids import JobId, Seconds, SlotId, node_of
from schemas.wire.agent import SUSPEND
from schemas.wire.client import Decision
from schemas.wire.feed import Detail

RESERVATION_S: Final = 60.0  # free slots are withheld from policies for so long

# --- requests of operators


def on_resize_requested(ctx: HandlerContext, event: ResizeRequested) -> None:
    """Override the size of a job. Fields that are None keep the values of an earlier override.

    An order for 0 slots pauses the job. An ended job is left alone.
    """
    job = ctx.state.job(event.job)
    if job.ended:
        return
    slots, on, before = event.slots, event.on, job.override
    if slots is None and not on:
        slots = before.slots if before else None
    if before is not None and not on and not event.slots:
        # An order for the batch, or a pause, does not move the job.
        on = tuple(SlotId(slot) for slot in before.on)
    paused = event.slots == 0 or (event.slots is None and bool(before and before.paused))
    if event.slots == 0:
        slots = before.slots if before else None
    batch = event.batch if event.batch is not None else (before.batch if before else None)
    override = ManualOverride(user=event.user, slots=slots, batch=batch, on=on, paused=paused)
    asked = _order_text(event.slots, event.batch, event.on) if event.slots != 0 else "a pause"
    _set_override(ctx, job, override, f"asked for {asked}")


def on_pause_requested(ctx: HandlerContext, event: PauseRequested) -> None:
    """Order a job to give up all of its slots. An ended job is left alone."""
    job = ctx.state.job(event.job)
    if job.ended:
        return
    was = job.override or ManualOverride(user=event.user)
    override = ManualOverride(
        user=event.user, slots=was.slots, batch=was.batch, on=was.on, paused=True
    )
    _set_override(ctx, job, override, "asked for a pause")


def on_resume_requested(ctx: HandlerContext, event: ResumeRequested) -> None:
    """End a pause, or return a job to the policy's control.

    With `auto` the job returns to the policy. Without it, earlier orders of slots or batch apply
    again. A job that has ended or has no override is left alone.
    """
    job = ctx.state.job(event.job)
    was = job.override
    if job.ended or was is None:
        return
    if event.auto or (was.slots is None and was.batch is None and not was.on):
        job.override, job.override_wait_reason, job.changed_version = None, "", ctx.state.version
        ctx.state.overrides.pop(job.job, None)
        ended = "returned the job to the policy" if event.auto else "ended the pause"
        _record_order(ctx, job, was, f"{event.user} {ended}", f"resumed by {event.user}")
        ctx.announce("job.override", job, {"user": event.user, "override": "off"})
        ctx.plan_needed = True
        return
    override = ManualOverride(user=event.user, slots=was.slots, batch=was.batch, on=was.on)
    _set_override(ctx, job, override, "ended the pause")


def _set_override(ctx: HandlerContext, job: Job, override: ManualOverride, order: str) -> None:
    state = f"{'paused' if override.paused else 'resumed'} by {override.user}"
    _record_order(ctx, job, job.override, f"{override.user} {order}", state)
    until = 0.0 if override.paused or override.slots is None else ctx.now + RESERVATION_S
    job.override = replace(override, reserves_until=Seconds(until))
    job.attempts.next_change_at, job.attempts.changes = Seconds(0.0), 0
    ctx.state.overrides[job.job] = None
    slots = ", ".join(override.on) or override.slots
    detail: Detail = {
        "user": override.user,
        "override": "pause" if override.paused else "resize",
        "slots": slots,
        "batch": override.batch,
    }
    ctx.announce("job.override", job, detail)
    ctx.plan_needed = True  # other jobs may use the slots that this job leaves


def _record_order(
    ctx: HandlerContext, job: Job, was: ManualOverride | None, order: str, state: str
) -> None:
    """Record an order as a decision.

    If the order pauses or resumes a waiting job, `state` becomes the job's reason.
    """
    decision = Decision(
        time=ctx.now, before=job.size, to=job.size, reason=order, code="order", by=OPERATOR,
        outcome="ordered",
    )  # fmt: skip
    ctx.records.append(Decided(job=job.job, decision=decision))
    changes = state.startswith("paused") or (was is not None and was.paused)
    if job.phase in {Phase.QUEUED, Phase.PAUSED} and changes:
        job.reason = state
    ctx.changed_jobs[job.job] = None


def on_override_due(ctx: HandlerContext, event: OverrideDue) -> None:
    """Allow the next attempt to carry out an operator's order, or end its reservation of slots."""
    job = ctx.state.jobs.get(event.job)
    if job is None:
        return
    if 0 < job.attempts.next_change_at <= ctx.now:
        job.attempts.next_change_at = Seconds(0.0)
    if job.override is not None and 0 < job.override.reserves_until <= ctx.now:
        job.override = replace(job.override, reserves_until=Seconds(0.0))
        ctx.plan_needed = True
    ctx.changed_jobs[job.job] = None


def is_due(job: Job, now: Seconds) -> bool:
    """True if an order may be tried again, or its reservation of slots has ended."""
    reserved = job.override.reserves_until if job.override is not None else 0.0
    return 0 < job.attempts.next_change_at <= now or 0 < reserved <= now


# --- execution of orders


def reconcile_all(ctx: HandlerContext) -> None:
    """Order the next step for every job under a manual override.

    The loop runs twice, because a job may wait for slots that a later job gives up.
    """
    naming, tried = ctx.state.orders_naming_slots, False
    for _ in range(2):
        before = len(ctx.out)
        trading = {name for swap in ctx.state.swaps for name in swap.targets}
        for name in _orders_to_try(ctx):
            tried = True
            job = ctx.state.jobs[name]
            naming.pop(name, None)
            if job.override is not None and job.override.on:
                naming[name] = None
            if job.override is None:
                del ctx.state.overrides[name]
            elif not job.ended and name not in trading:
                _reconcile(ctx, job, job.override)
        if len(ctx.out) == before:
            break
    if tried and len(naming) > 1:
        _trade_places(ctx, naming)


def _orders_to_try(ctx: HandlerContext) -> list[JobId]:
    """Return orders with a changed job, or with slots that may have become free, by age.

    All other orders would lead to the same result as at their last attempt.
    """
    state, index = ctx.state, ctx.state.slot_index
    index.keep_up()
    state.note_changes(ctx.changed_jobs)
    dirty, changed, everything = state.changed_orders, state.changed_slots, state.all_slots_changed
    state.changed_orders, state.changed_slots, state.all_slots_changed = {}, {}, False
    if not changed and not everything:
        if len(dirty) > 1:
            return [name for name in state.overrides if name in dirty]
        return [name for name in dirty if name in state.overrides]
    available = index.available()
    free, soon = len(available.free), len(available.releasing)

    def may_proceed(job: Job, override: ManualOverride) -> bool:
        if not job.override_wait_reason:
            return False
        if override.on:
            return everything or not changed.keys().isdisjoint(override.on)
        if job.phase in {Phase.QUEUED, Phase.PAUSED}:
            return free >= _least(job, override)
        return free + soon > 0

    return [
        name
        for name in state.overrides
        if name in dirty
        or ((override := (job := state.jobs[name]).override) and may_proceed(job, override))
    ]


def _trade_places(ctx: HandlerContext, naming: Container[JobId]) -> None:
    """Start swaps of jobs that were ordered to each other's slots. `naming` has these orders."""
    trading = {name for swap in ctx.state.swaps for name in swap.targets}
    movers: list[Mover] = []
    claimed: set[SlotId] = set()
    for name in [name for name in ctx.state.overrides if name in naming]:
        job = ctx.state.jobs[name]
        mover = None if name in trading else _mover(job)
        if mover is not None and claimed.isdisjoint(mover.target):
            movers.append(mover)
            claimed |= mover.target.keys()
    if len(movers) < len("ab"):
        return
    free = ctx.state.slot_index.available().free
    spare = [slot for slot in free if slot not in claimed]
    for swap in swaps_among(movers, spare, set(free).__contains__):
        swap.by = OPERATOR
        begin_swap(ctx, swap)
    reconcile_swaps(ctx)


def _mover(job: Job) -> Mover | None:
    """Return the move of a running job to the slots named in its order, or None if it has none."""
    override, group = job.override, job.group
    if override is None or override.paused or group is None:
        return None
    if job.phase is not Phase.RUNNING or not (job.override_wait_reason and override.on):
        return None
    on = [SlotId(slot) for slot in override.on]
    if len({*on, *(member.slot for member in group.members)}) > job.spec.batch_limit:
        return None
    reason = Reason("operator", f"{override.user} asked for {', '.join(on)}")
    return Mover(job, split(_batch(job, override, len(on)), on), reason)


def _reconcile(ctx: HandlerContext, job: Job, override: ManualOverride) -> None:
    job.override_wait_reason = ""
    phase = job.status.phase
    if override.paused or override.slots == 0:
        _pause(ctx, job, override)
    elif phase in {Phase.QUEUED, Phase.PAUSED}:
        _start(ctx, job, override)
    elif phase is Phase.RUNNING:
        _resize(ctx, job, override)
    elif _preparing(job) and _outdated(job, override):
        abandon(ctx, job, RescaleTrigger.SUPERSEDED, "replaced by a newer order")
        _reconcile(ctx, job, override)
    elif not override.on:
        more = (override.slots or 0) - len(job.members())
        if more > 0:  # views withhold these slots from policies
            job.override_wait_reason = (
                f"waiting for {_more_slots(more)}, as {override.user} ordered"
            )


def _pause(ctx: HandlerContext, job: Job, override: ManualOverride) -> None:
    why = f"paused by {override.user}"
    phase = job.status.phase
    if phase is Phase.STARTING:
        withdraw(ctx, job, "paused", JobTrigger.SUSPENDED, f"{why} {_before_training(job)}")
    elif phase is Phase.RUNNING and job.attempts.next_change_at <= ctx.now:
        order_change(ctx, job, {}, Reason("operator", why), by=OPERATOR)
    elif _preparing(job) and job.change is not None and job.change.kind != SUSPEND:
        abandon(ctx, job, RescaleTrigger.SUPERSEDED, "replaced by a newer order")
        _pause(ctx, job, override)


def _before_training(job: Job) -> str:
    """Describe how a job continues after its workers are stopped before they have trained."""
    progress = job.progress
    if progress.checkpoint is None:
        return "before its first epoch: the script was stopped and will restart from the beginning"
    return f"while starting: the script was stopped and will resume from step {progress.step}"


def _start(ctx: HandlerContext, job: Job, override: ManualOverride) -> None:
    if (gate := job.gate_reason) is not None:
        job.override_wait_reason = gate.text
        return
    if job.attempts.next_start_at > ctx.now:
        job.attempts.next_change_at, job.override_wait_reason = (
            job.attempts.next_start_at,
            "waiting for its next retry",
        )
        return
    size = _size(job, override)
    free = ctx.state.available_to(job).free
    fits = ctx.state.fit(job).slots
    allowed = override.on or fits  # an operator may name others
    free = [slot for slot in free if allowed is None or slot in allowed]
    least = _least(job, override)
    asked = _order_text(size, None, ())
    if len(free) < least:
        needs = f", at least {least} are needed" if least < size else ""
        job.override_wait_reason = (
            f"waiting for slots: {override.user} ordered {asked}{needs}{_shared(override)}"
        )
        return
    chosen = _nearby_slots(free, (), size)
    reason = _reason(override, asked, size, len(chosen))
    start(ctx, job, split(_batch(job, override, len(chosen)), chosen), reason, by=OPERATOR)


def _least(job: Job, override: ManualOverride) -> int:
    """Return the number of slots with which a waiting job may start under its order."""
    size = _size(job, override)
    return size if override.on else min(size, job.spec.slots[0])


def _shared(override: ManualOverride) -> str:
    return "" if override.reserves_until else "; others may use free slots meanwhile"


def _resize(ctx: HandlerContext, job: Job, override: ManualOverride) -> None:
    group = job.group
    if group is None:
        return
    current = [member.slot for member in group.members]
    size = _size(job, override)
    new, missing = _slots_to_add(ctx.state, job, override, current, size)
    if override.on:
        # A migration: grow to the union, and shrink when that change has settled.
        target = [*current, *new] if new else [slot for slot in current if slot in override.on]
    else:
        target = [*current[:size], *new]
    batch = _batch(job, override, len(target))
    same = target == current and group.global_batch == batch
    if missing or same:
        more = size - len(current)
        waits = ", ".join(missing) or (_more_slots(more) if more > 0 else "")
        job.override_wait_reason = (
            f"waiting for {waits}, as {override.user} ordered" if waits else ""
        )
    elif job.attempts.next_change_at > ctx.now:
        job.override_wait_reason = "waiting for its next retry"
    else:
        asked = _order_text(size, override.batch, override.on)
        reason = _reason(override, asked, size, len(target))
        order_change(ctx, job, split(batch, target), reason, by=OPERATOR)


def _more_slots(count: int) -> str:
    return f"{count} more slot{'s' * (count != 1)}"


def _slots_to_add(
    state: State, job: Job, override: ManualOverride, current: list[SlotId], size: int
) -> tuple[list[SlotId], list[SlotId]]:
    """Return the slots that the job needs in addition, and which of them are not available.

    If the order names no slots, return free slots nearby, then slots that their owners are leaving.
    """
    named = [SlotId(slot) for slot in override.on if slot not in current]
    need = len(named) if override.on else size - len(current)
    if need <= 0:
        return [], []
    available = state.available_to(job)
    free = [slot for slot in available.free if slot not in current]
    soon = [
        slot
        for slot, owner in available.releasing.items()
        if owner != job.job and slot not in current
    ]
    if named:
        room = {*free, *soon}
        return named, [slot for slot in named if slot not in room]
    fits = state.fit(job).slots
    if fits is not None:
        free, soon = ([slot for slot in some if slot in fits] for some in (free, soon))
    near = _nearby_slots(free, current, need)
    soon = [slot for slot in soon if slot not in free]
    return [*near, *soon[: need - len(near)]], []


def _preparing(job: Job) -> bool:
    change = job.status.change
    return change is not None and change.phase is RescalePhase.PREPARING


def _outdated(job: Job, override: ManualOverride) -> bool:
    """True if the change in preparation does not lead to the ordered size."""
    change = job.status.change
    if change is None or change.kind == SUSPEND:
        return True
    group = change.group
    planned = {member.slot for member in group.members}
    if override.on:
        slots = not planned >= set(override.on)
    else:
        size = _size(job, override)
        # A partial growth must settle before the next one. Abandoning the first would stop its
        # newcomers, and their free slots would start another partial growth, without end.
        part = len(job.size.slots) < len(planned) < size
        slots = len(planned) != size and not part
    if override.batch is None:
        return slots
    return slots or _batch(job, override, len(planned)) != group.global_batch


def _reason(override: ManualOverride, asked: str, size: int, got: int) -> Reason:
    free = f"; {got} for now, no more are free" if got < size else ""
    return Reason("operator", f"{override.user} asked for {asked}{free}")


def _order_text(slots: int | None, batch: int | None, on: Sequence[str]) -> str:
    """Return an order as text, without the fields that are None or empty."""
    size = "" if slots is None else f"{slots} slot{'s' * (slots != 1)}"
    parts = (", ".join(on) or size, "" if batch is None else f"batch {batch}")
    return ", ".join(filter(None, parts))


def _size(job: Job, override: ManualOverride) -> int:
    if override.on:
        return len(override.on)
    if override.slots is not None:
        return override.slots
    group = job.status.group
    return len(group.members) if group else job.spec.wanted


def _batch(job: Job, override: ManualOverride, size: int) -> int:
    if override.batch is not None:
        return max(override.batch, size)
    group = job.status.group
    now = group.global_batch if group else job.spec.batch_size
    return min(max(now, size), job.spec.batch_limit)


def _nearby_slots(free: list[SlotId], current: Sequence[SlotId], size: int) -> list[SlotId]:
    """Return up to `size` free slots: first the job's nodes, then nodes with most free slots."""
    own = Counter(node_of(slot) for slot in current)
    room = Counter(node_of(slot) for slot in free)
    position = {slot: place for place, slot in enumerate(free)}
    return sorted(
        free, key=lambda s: (-own[node_of(s)], -room[node_of(s)], node_of(s), position[s])
    )[:size]
