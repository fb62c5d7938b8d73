"""Checks a plan against newer state and keeps what still fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.core.job import HOLDING, Job
from controlplane.core.node import Node, NodePhase
from controlplane.core.state import State
from controlplane.policy.api import Plan
from schemas.ids import JobId, Seconds, SlotId


@dataclass(frozen=True, slots=True)
class Start:
    """Give a waiting job these slots, with these local batches."""

    job: JobId
    local_batch: Mapping[SlotId, int]
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is left of a plan: the changes to make, and what was refused and why."""

    starts: tuple[Start, ...] = ()
    refused: Mapping[JobId, str] | None = None

    @property
    def empty(self) -> bool:
        """Whether the plan changes nothing."""
        return not self.starts


def check(plan: Plan, state: State, now: Seconds) -> Verdict:
    """Re-check every entry of `plan` against the present, entry by entry.

    A plan may be based on an older state (as Nomad's plan applier allows): entries that still
    fit are kept, the others are refused one by one. A running job is left as it is (no policy
    moves one yet), and so is a job under an operator's hand.
    """
    nodes = state.slots()
    taken = {*state.owners(), *state.claims()}
    starts: list[Start] = []
    refused: dict[JobId, str] = {}
    for name, placed in plan.local_batch.items():
        job = state.jobs.get(name)
        if job is None or job.ended or job.phase in HOLDING or job.hand or not placed:
            continue
        why_not = _unfit(job, placed, nodes, taken, now)
        if why_not:
            refused[name] = why_not
            continue
        taken.update(placed)
        reason = plan.reasons.get(name)
        starts.append(Start(name, dict(placed), reason.text if reason else "planned"))
    return Verdict(tuple(starts), refused)


def _unfit(
    job: Job,
    placed: Mapping[SlotId, int],
    nodes: Mapping[SlotId, Node],
    taken: set[SlotId],
    now: Seconds,
) -> str:
    least, most = job.spec.slots
    if not least <= len(placed) <= most:
        return f"{len(placed)} slots are outside its bounds"
    if any(not 1 <= batch <= job.spec.local_limit for batch in placed.values()):
        return "a local batch is outside its bounds"
    if sum(placed.values()) > job.spec.batch_limit:
        return "the global batch is above its limit"
    if job.ready_at > now:
        return "it waits before its next try"
    for slot in placed:
        node = nodes.get(slot)
        if node is None or node.phase is not NodePhase.UP:
            return f"slot {slot} is not there any more"
        if slot in taken:
            return f"slot {slot} is taken by now"
    return ""
