"""An operator's hand: bring jobs to the size that somebody asked for, as slots allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers.lifecycle import OPERATOR, start, withdraw
from controlplane.core.handlers.rescale import abandon, order
from controlplane.core.model.job import Job, JobTrigger, Phase
from controlplane.core.model.node import NodePhase
from controlplane.core.model.rescale import Hand, RescalePhase, RescaleTrigger
from controlplane.core.state import State
from controlplane.policy.api import Reason
from controlplane.policy.planning.packing import split
from schemas.ids import Seconds, SlotId, node_of
from schemas.messages.agent import SUSPEND


def steer_all(ctx: HandlerContext) -> None:
    """Do the next thing for every job that is under somebody's hand.

    Twice: what a later one gives up, an earlier one may have waited for.
    """
    for _ in range(2):
        before = len(ctx.out)
        for name in list(ctx.state.hands):
            job = ctx.state.jobs[name]
            if job.hand is None:
                del ctx.state.hands[name]
            elif not job.ended:
                _steer(ctx, job, job.hand)
        if len(ctx.out) == before:
            return


def _steer(ctx: HandlerContext, job: Job, hand: Hand) -> None:
    job.hand_waits = ""
    if hand.paused or hand.slots == 0:
        _pause(ctx, job, hand)
    elif job.phase in {Phase.QUEUED, Phase.PAUSED}:
        _start(ctx, job, hand)
    elif job.phase is Phase.RUNNING:
        _resize(ctx, job, hand)
    elif _preparing(job) and _outdated(job, hand):
        abandon(ctx, job, RescaleTrigger.SUPERSEDED, "a newer order takes its place")
        _steer(ctx, job, hand)


def _pause(ctx: HandlerContext, job: Job, hand: Hand) -> None:
    why = f"paused by {hand.user}"
    if job.phase is Phase.STARTING:
        withdraw(ctx, job, "paused")
        ctx.advance(job, JobTrigger.SUSPENDED, why)
        ctx.ask = True
    elif job.phase is Phase.RUNNING and job.retry_at <= ctx.now:
        order(ctx, job, {}, Reason("operator", why), by=OPERATOR)
    elif _preparing(job) and job.change is not None and job.change.kind != SUSPEND:
        abandon(ctx, job, RescaleTrigger.SUPERSEDED, "a newer order takes its place")
        _pause(ctx, job, hand)


def _start(ctx: HandlerContext, job: Job, hand: Hand) -> None:
    if job.ready_at > ctx.now:
        job.retry_at, job.hand_waits = job.ready_at, "waits before its next try"
        return
    size = _size(job, hand)
    free = [slot for slot in _free(ctx.state) if not hand.on or slot in hand.on]
    if len(free) < size:
        job.hand_waits = f"waits for {size} slots as {hand.user} asked, {len(free)} free"
        return
    chosen = _close_together(free, (), size)
    why = f"{hand.user} asked for {size} slots"
    start(ctx, job, split(_batch(job, hand, size), chosen), Reason("operator", why), by=OPERATOR)


def _resize(ctx: HandlerContext, job: Job, hand: Hand) -> None:
    group = job.group
    if group is None:
        return
    have = [member.slot for member in group.members]
    size = _size(job, hand)
    batch = _batch(job, hand, size)
    if hand.on:
        new = [SlotId(slot) for slot in hand.on if slot not in have]
        # Grow to the union first, shrink when that has settled: a migration.
        target = [*have, *new] if new else [slot for slot in have if slot in hand.on]
    else:
        new = _room(ctx.state, job, have, size - len(have))
        target = [*have[:size], *new]
    room = {*_free(ctx.state), *_releasing(ctx.state, job)}
    if len(target) < size or any(slot not in room for slot in new):
        short = ", ".join(slot for slot in new if slot not in room) or f"{size - len(have)} more"
        job.hand_waits = f"waits for slots as {hand.user} asked: {short}"
    elif target == have and group.global_batch == batch:
        job.hand_waits = ""
    elif job.retry_at > ctx.now:
        job.hand_waits = "waits before its next try"
    else:
        why = f"{hand.user} asked for {_asked(hand, size, batch)}"
        order(ctx, job, split(batch, target), Reason("operator", why), by=OPERATOR)


def _room(state: State, job: Job, have: list[SlotId], need: int) -> list[SlotId]:
    """Up to `need` more slots: free ones close by, then ones that are about to be free."""
    if need <= 0:
        return []
    free = _free(state)
    near = _close_together(free, have, need)
    soon = [slot for slot in _releasing(state, job) if slot not in free]
    return [*near, *soon[: need - len(near)]]


def _preparing(job: Job) -> bool:
    return job.change is not None and job.change.phase is RescalePhase.PREPARING


def _outdated(job: Job, hand: Hand) -> bool:
    """Whether the change that is prepared leads to something else than the hand wants."""
    if job.change is None or job.change.kind == SUSPEND:
        return True
    group = job.change.group
    there = {member.slot for member in group.members}
    slots = not there >= set(hand.on) if hand.on else len(there) != _size(job, hand)
    return slots or (hand.batch is not None and hand.batch != group.global_batch)


def _asked(hand: Hand, size: int, batch: int) -> str:
    slots = ", ".join(hand.on) if hand.on else f"{size} slot{'s' * (size != 1)}"
    return f"{slots}, batch {batch}" if hand.batch is not None else slots


def _size(job: Job, hand: Hand) -> int:
    if hand.on:
        return len(hand.on)
    if hand.slots is not None:
        return hand.slots
    return len(job.group.members) if job.group else job.spec.wanted


def _batch(job: Job, hand: Hand, size: int) -> int:
    if hand.batch is not None:
        return max(hand.batch, size)
    now = job.group.global_batch if job.group else job.spec.batch_size
    return min(max(now, size), job.spec.batch_limit)


def _free(state: State) -> list[SlotId]:
    """Slots of nodes that are up, which nobody has or was promised."""
    taken = {*state.owners(), *state.reservations()}
    return [
        slot
        for slot, node in state.slots().items()
        if node.phase is NodePhase.UP and slot not in taken
    ]


def _releasing(state: State, job: Job) -> list[SlotId]:
    """Slots that others leave already."""
    return [slot for slot, owner in state.releasing().items() if owner != job.job]


def _close_together(free: list[SlotId], have: Sequence[SlotId], size: int) -> list[SlotId]:
    """`size` of the free slots: where the job is already, then where most are free."""
    here = Counter(node_of(slot) for slot in have)
    room = Counter(node_of(slot) for slot in free)
    order_ = {slot: place for place, slot in enumerate(free)}
    return sorted(
        free, key=lambda s: (-here[node_of(s)], -room[node_of(s)], node_of(s), order_[s])
    )[:size]


def ready_again(job: Job, now: Seconds) -> bool:
    """Whether a pause before the next try of an operator's order is over."""
    return 0 < job.retry_at <= now
