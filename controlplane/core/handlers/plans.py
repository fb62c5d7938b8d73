"""Follows a plan: what still fits of it becomes starts, changes and pauses."""

from __future__ import annotations

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers import swaps
from controlplane.core.handlers.group_rescale import order_change
from controlplane.core.handlers.group_start import start
from controlplane.core.handlers.job_ends import end
from controlplane.core.history_records import Decided, EndPromised
from controlplane.core.inputs import PlanProposed
from controlplane.core.model.job import Job, PromisedEnd
from controlplane.core.model.job_phases import JobTrigger, Phase
from controlplane.core.plan_check import Move, check
from controlplane.policy.api import Reason
from controlplane.policy.planning.packing import split
from schemas.ids import Seconds, SlotId
from schemas.messages.client import Decision, PromiseInfo


def on_plan_proposed(ctx: HandlerContext, event: PlanProposed) -> None:
    """Do what fits of a plan; ask again if something did not.

    Args:
        event: the plan, and how the search stood that made it; without that, it is not announced.
    """
    verdict, stats = check(event.plan, ctx.state, ctx.now), event.stats
    for name, reason in verdict.rejected.items():
        _reject(ctx, ctx.state.jobs[name], reason)
    for name, at in verdict.promised.items():
        _promise(ctx, ctx.state.jobs[name], at)
    done = [move for move in verdict.moves if _follow(ctx, move)]
    begun = [swap for swap in verdict.swaps if swaps.begin(ctx, swap)]
    changes = len(done) + sum(len(swap.targets) for swap in begun)
    if changes:
        ctx.totals.plans_taken += 1
    if changes and stats is not None:
        ctx.announce(
            "policy.plan",
            detail={
                "changes": changes,
                "generations": stats.generations,
                "best_fitness": stats.best_fitness,
                "mean_fitness": stats.mean_fitness,
                "diversity": stats.diversity,
                "decision_ms": stats.decision_ms,
            },
        )
    if verdict.refused or len(begun) < len(verdict.swaps):
        ctx.ask = True


def _reject(ctx: HandlerContext, job: Job, reason: Reason) -> None:
    """A job that never started ends, and its history says why."""
    decision = Decision(
        time=ctx.now,
        was=job.size,
        to=job.size,
        why=f"rejected: {reason.text}",
        code=reason.code,
        numbers=reason.numbers,
        outcome="rejected",
    )
    ctx.records.append(Decided(job=job.job, decision=decision))
    end(ctx, job, JobTrigger.REJECTED, reason.text, {"code": reason.code, **reason.numbers})


def _promise(ctx: HandlerContext, job: Job, at: Seconds) -> None:
    """The first promise of a job's end counts; what is said later is news of it."""
    ctx.state.living_counts.promised.add(job.job)
    first = job.promised_end.first if job.promised_end else at
    job.promised_end = PromisedEnd(first=first, latest=at)
    ctx.changed_jobs[job.job] = None
    promise = PromiseInfo(time=ctx.now, end=at)
    ctx.records.append(EndPromised(job=job.job, promise=promise))
    ctx.announce("job.promised", job, {"end": at, "first": first})


def _follow(ctx: HandlerContext, move: Move) -> bool:
    job = ctx.state.jobs[move.job]
    if job.phase is not Phase.RUNNING:
        start(ctx, job, move.local_batch, move.reason)
        return True
    before = job.version
    placed, reason = _first_step(job, move), move.reason
    if placed.keys() != move.local_batch.keys():  # the expected speed is that of the last step
        numbers = {name: value for name, value in reason.numbers.items() if name != "speed_then"}
        reason = Reason(reason.code, reason.text, numbers)
    order_change(ctx, job, placed, reason)
    return job.version != before


def _first_step(job: Job, move: Move) -> dict[SlotId, int]:
    """A job that gets new slots and gives up others grows to all of them first.

    When that has settled, the next plan takes back what is too much: a migration.
    """
    have = [member.slot for member in job.group.members] if job.group else []
    new = [slot for slot in move.local_batch if slot not in have]
    if not new or all(slot in move.local_batch for slot in have):
        return dict(move.local_batch)
    union = [*have, *new]  # not above the limit of its batch: `plan_check.check` saw to that
    return split(max(sum(move.local_batch.values()), len(union)), union)
