"""Views and plans in which elastic jobs with requests have fitting slots.

Policies know nothing of requests. A job with requests is shown with at most as many slots as fit
it, and slots of a plan that do not fit are exchanged afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import msgspec

from controlplane.core.model.job import local_limit
from controlplane.core.state import State
from controlplane.policy.api import ClusterView, JobView, Plan, Reason
from controlplane.policy.placement.slot_partition import slots_in_words, split
from schemas.ids import JobId, SlotId

NO_REASONS: Final[Mapping[JobId, Reason]] = {}


def fitting_view(view: ClusterView, state: State) -> tuple[ClusterView, Mapping[JobId, Reason]]:
    """Return the view that a policy should see, and why jobs that it does not show wait.

    Slots of programs do not count as fitting, because no plan can take them.
    """
    shaped = _shaped(view.jobs, state)
    if not shaped:
        return view, NO_REASONS
    held = {slot for job in view.jobs.values() for slot in job.running_on}
    open_slots = {s.slot for s in view.slots if s.usable or s.leaving or s.slot in held}
    jobs, reasons = dict(view.jobs), dict[JobId, Reason]()
    for name, fits in shaped.items():
        job, most = jobs[name], len(open_slots & fits)
        if not job.running_on and most < job.least:
            reasons[name] = _waits(job, most, state.slot_index.fit(state.jobs[name].spec).missing)
            del jobs[name]
        elif most < job.most:
            most = max(job.least, len(job.running_on), most)
            wanted = min(job.wanted, most)
            jobs[name] = msgspec.structs.replace(job, most=most, wanted=wanted)
    return msgspec.structs.replace(view, jobs=jobs), reasons


def fitting_plan(
    plan: Plan, view_now: Callable[[], ClusterView], state: State, kept: AbstractSet[SlotId]
) -> Plan:
    """Return the plan with a fitting slot for each new slot that does not fit its job.

    It is a free slot, or one of another job of the plan, which gets the other slot instead, or a
    slot that another job has above its minimum. Without such a slot the job has fewer, or waits.

    Args:
        view_now: returns the view of the state.
        kept: free slots that no job may take.
    """
    shaped = _shaped(plan.local_batch, state)
    if not shaped:
        return plan
    view, reasons = view_now(), dict(plan.reasons)
    mended = _MendedPlan(plan, shaped, view, state, kept)
    for name, fits in shaped.items():
        has = state.slot_index.allocations().get(name, {})
        lacks = [s for s in mended.placed[name] if s not in fits and s not in has]
        for slot in lacks:
            mended.replace(name, slot)
        job = view.jobs.get(name)
        if lacks and job is not None and len(mended.placed[name]) < job.least:
            mended.placed[name] = dict(has)
            if not has:
                reasons[name] = _waits(job, len(fits), "")
    return msgspec.structs.replace(plan, local_batch=mended.placed, reasons=reasons)


class _MendedPlan:
    """Slots of a plan while slots that do not fit are replaced."""

    def __init__(
        self,
        plan: Plan,
        shaped: Mapping[JobId, frozenset[SlotId]],
        view: ClusterView,
        state: State,
        kept: AbstractSet[SlotId],
    ) -> None:
        self.placed = {name: dict(slots) for name, slots in plan.local_batch.items()}
        self._owner = {slot: name for name, slots in self.placed.items() for slot in slots}
        self._shaped, self._jobs, self._state = shaped, view.jobs, state
        trading = {slot for swap in state.swaps for slot in swap.slots()}
        taken = self._owner.keys() | trading | kept
        self._free = [s for s in state.slot_index.available().free if s not in taken]

    def replace(self, name: JobId, slot: SlotId) -> None:
        """Replace a slot of a job by one that fits, or remove it."""
        fits = self._shaped[name]
        others = [one for one, other in self._owner.items() if one in fits and other != name]
        if (found := next((s for s in self._free if s in fits), None)) is not None:
            self._free.remove(found)
        elif (found := self._exchangeable(slot, others)) is not None:
            other = self._owner[slot] = self._owner[found]
            self.placed[other] = _renamed(self.placed[other], found, slot)
        elif (found := self._surplus(others)) is not None:
            self._shrink(self._owner[found], found)
        else:
            self._shrink(name, slot)
            return
        self._owner[found] = name
        self.placed[name] = _renamed(self.placed[name], slot, found)

    def _exchangeable(self, slot: SlotId, others: Sequence[SlotId]) -> SlotId | None:
        """Return a slot of a job that can use `slot` instead, preferably a new one."""
        now, shaped = self._state.slot_index.allocations(), self._shaped
        found = [
            one
            for one in others
            if (other := self._owner[one]) not in shaped or slot in shaped[other]
        ]
        return min(found, key=lambda one: one in now.get(self._owner[one], {}), default=None)

    def _surplus(self, others: Sequence[SlotId]) -> SlotId | None:
        """Return a slot of the job that has most above its minimum, if any."""
        known = [one for one in others if self._owner[one] in self._jobs]
        found = max(known, key=self._more, default=None)
        return found if found is not None and self._more(found) > 0 else None

    def _more(self, slot: SlotId) -> int:
        name = self._owner[slot]
        return len(self.placed[name]) - self._jobs[name].least

    def _shrink(self, name: JobId, gone: SlotId) -> None:
        """Remove a slot of a job. The others process the same batch if they can."""
        slots = self.placed[name]
        left = [slot for slot in slots if slot != gone]
        batch = min(sum(slots.values()), local_limit(self._state.jobs[name]) * len(left))
        self.placed[name] = split(max(batch, len(left)), left) if left else {}


def _shaped(jobs: Mapping[JobId, object], state: State) -> dict[JobId, frozenset[SlotId]]:
    """Return the fitting slots of the jobs that have requests."""
    known = (name for name in jobs if name in state.jobs)
    found = {name: state.slot_index.fit(state.jobs[name].spec).slots for name in known}
    return {name: fits for name, fits in found.items() if fits is not None}


def _renamed(slots: Mapping[SlotId, int], old: SlotId, new: SlotId) -> dict[SlotId, int]:
    return {new if slot == old else slot: batch for slot, batch in slots.items()}


def _waits(job: JobView, fit: int, missing: str) -> Reason:
    text = missing or f"needs {slots_in_words(job.least)} that fit its requests, {fit} could"
    return Reason("shape", text, {"needs": float(job.least), "slots": float(fit)})
