"""Plans of a cluster that rigid jobs and accounts share.

Claims of rigid jobs are served first. Then the rest is divided among accounts, and the policy
decides about the elastic jobs. Controllers and simulations request their plans through one class.

Policies know nothing of requests. An elastic job with requests is shown with at most as many slots
as fit it, and slots of a plan that do not fit are exchanged afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from controlplane.core.model.job import Job, local_limit
from controlplane.core.plan_check import difference
from controlplane.core.policy_view import job_view, places, rigid_view
from controlplane.core.reactor import Reactor
from controlplane.core.state import State
from controlplane.policy.api import ClusterView, JobView, Plan, Reason
from controlplane.policy.placement.slot_partition import slots_in_words, split
from controlplane.policy.sharing.claim_order import standing
from controlplane.policy.sharing.claims import NO_CLAIMS, decide, mask, without_kept
from controlplane.policy.sharing.division import Divided, Division
from controlplane.policy.sharing.start_times import Present
from controlplane.policy.sharing.turns import Turns
from schemas.ids import JobId, Seconds, SlotId
from schemas.jobs import JobSpec
from schemas.sharing import Sharing


class PlanCycle:
    """Division of the cluster of a reactor, between the core and a policy.

    Args:
        reactor: returns the reactor, which may be replaced after an error.
        gangs: True if the policy gives a job exactly its wanted slots or none.
    """

    def __init__(self, reactor: Callable[[], Reactor], *, gangs: bool = False) -> None:
        self._reactor = reactor
        self._claims = NO_CLAIMS  # latest decision about rigid jobs
        # Why elastic jobs wait that the latest view does not show.
        self._unfit: Mapping[JobId, Reason] = {}
        self.use(gangs=gangs)

    def use(self, *, gangs: bool) -> None:
        """Divide the cluster for another policy from the next view on."""
        self._gangs = gangs
        self._division = Division(gangs=gangs)
        self._divided: Divided | None = None  # for the latest view

    def serve_claims(self, now: Seconds) -> Turns[Plan]:
        """Decide which rigid jobs start now, and which elastic jobs give up slots for them.

        The plan applies before the policy is asked. It leaves out jobs that stay. The state may
        change until the last turn, so entries of the plan may not fit any more, see
        `changes_for_claims`.
        """
        yield from self._reactor().refresh_views()
        reactor = self._reactor()
        rigid = reactor.rigid_views()
        if not rigid:
            self._claims = NO_CLAIMS
            return self._claims.plan
        view, rules, beside = reactor.view(), None, None
        if any(job.waits and not job.slots for job in rigid):
            beside = places(reactor.state)
        if any(job.waits for job in rigid):
            sharing = reactor.state.sharing or Sharing(fair_share=False)
            rules = yield from standing(view, rigid, sharing, reactor.ledger(now), now)
        self._claims = yield from decide(view, rigid, now, rules=rules, places=beside)
        return self._claims.plan

    def changes_for_claims(self, now: Seconds) -> tuple[Plan, bool]:
        """Return what the latest decision about claims still changes.

        The second value is True if some of it does not fit any more, because the state has changed.
        No job gives up slots for a claim that has changed.
        """
        claims, state = self._claims, self._reactor().state
        plan = claims.plan
        fits = {
            name: slots
            for name, slots in plan.local_batch.items()
            if all(_is_same(state, claim, plan.based_on) for claim in claims.takers.get(name, ()))
        }
        changes = difference(replace(plan, local_batch=fits), state, now, whole=False)
        is_late = plan.based_on < state.version and not state.scheduling_paused
        return changes, is_late and len(changes.local_batch) < len(plan.local_batch)

    @property
    def claim_reasons(self) -> Mapping[JobId, Reason]:
        """Why jobs wait that no policy sees: rigid ones, and those that fit no slot."""
        return {**self._unfit, **self._claims.reasons} if self._unfit else self._claims.reasons

    @property
    def budgets(self) -> Mapping[str, int]:
        """Most slots of each account that is bounded, at the latest view."""
        return {} if self._divided is None else self._divided.budgets

    def view(self, now: Seconds) -> Turns[ClusterView]:
        """Find the view that the policy should see. The state may change until the last turn.

        Do not start another one before this one has ended.
        """
        yield from self._reactor().refresh_views()
        reactor = self._reactor()
        view, sharing = mask(reactor.view(), self._claims.kept), reactor.state.sharing
        view, self._unfit = fitting_view(view, reactor.state)
        if sharing is None:
            self._divided = None
            return view
        division = self._division  # another policy may be used before the last turn
        divided = yield from division.divide(view, sharing, reactor.ledger(now), now)
        if division is self._division:
            self._divided = divided
        return divided.view

    def merged(self, plan: Plan) -> Plan:
        """Return a plan of the policy without kept slots, and with the reasons of the division."""
        reactor, kept = self._reactor(), self._claims.kept
        if kept:
            plan = without_kept(plan, reactor.view(), kept)
        plan = fitting_plan(plan, reactor.view, reactor.state, kept)
        return plan if self._divided is None else self._division.merge(self._divided, plan)

    def present_with(self, spec: JobSpec, user: str, project: str, now: Seconds) -> Present:
        """Return the present state with a job that is not submitted, to predict its start."""
        reactor, state = self._reactor(), self._reactor().state
        name = JobId(f"{spec.name}-{state.jobs_accepted + 1}")
        job = Job(job=name, spec=spec, snapshot="", user=user, project=project, submitted_at=now)
        job.accounting.since = job.accounting.placed_at = now
        job.attempts.next_start_at = spec.earliest_start(now)
        view, rigid = reactor.view(), reactor.rigid_views()
        if spec.rigid:
            rigid.append(rigid_view(state, job))
        else:
            view = replace(view, jobs={**view.jobs, name: job_view(job)})
        return Present(
            job=name,
            view=view,
            rigid=rigid,
            sharing=state.sharing,
            ledger=reactor.ledger(now),
            past=dict(state.past_runs),
            now=now,
            gangs=self._gangs,
        )


def _is_same(state: State, name: JobId, version: int) -> bool:
    """True if a job has not changed since a version of the state."""
    job = state.jobs.get(name)
    return job is not None and not job.ended and job.changed_version <= version


# --- elastic jobs with requests


def fitting_view(view: ClusterView, state: State) -> tuple[ClusterView, Mapping[JobId, Reason]]:
    """Return the view that a policy should see, and why jobs that it does not show wait.

    Slots of programs do not count as fitting, because no plan can take them.
    """
    shaped = _shaped(view.jobs, state)
    if not shaped:
        return view, {}
    closed = [set(state.closed_to(state.jobs[name])) for name in view.jobs]
    unusable = set.intersection(*closed)  # nodes that no job of the policy may use
    view = mask(view, frozenset(slot.slot for slot in view.slots if slot.node in unusable))
    held = {slot for job in view.jobs.values() for slot in job.running_on}
    open_slots = {s.slot for s in view.slots if s.usable or s.leaving or s.slot in held}
    jobs, reasons = dict(view.jobs), dict[JobId, Reason]()
    for name, fits in shaped.items():
        job, most = jobs[name], len(open_slots & fits)
        if not job.running_on and most < job.least:
            reasons[name] = _waits(job, most, state)
            del jobs[name]
        elif most < job.most:
            most = max(job.least, len(job.running_on), most)
            wanted = min(job.wanted, most)
            jobs[name] = replace(job, most=most, wanted=wanted)
    return replace(view, jobs=jobs), reasons


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
            mended.exchange(name, slot)
        job = view.jobs.get(name)
        if lacks and job is not None and len(mended.placed[name]) < job.least:
            mended.placed[name] = dict(has)
            if not has:
                reasons[name] = _waits(job, len(fits), state)
    return replace(plan, local_batch=mended.placed, reasons=reasons)


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

    def exchange(self, name: JobId, slot: SlotId) -> None:
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
    shaped = state.job_counters.shaped
    names: Iterable[JobId] = [name for name in jobs if name in shaped] if shaped else ()
    if state.reserved_nodes:  # closed to some jobs
        names = jobs
    known = (name for name in names if name in state.jobs)
    found = {name: state.fit(state.jobs[name]).slots for name in known}
    return {name: fits for name, fits in found.items() if fits is not None}


def _renamed(slots: Mapping[SlotId, int], old: SlotId, new: SlotId) -> dict[SlotId, int]:
    return {new if slot == old else slot: batch for slot, batch in slots.items()}


def _waits(job: JobView, fit: int, state: State) -> Reason:
    known = state.jobs[job.job]
    kept = sorted({f"the {what} of {n}" for n, (at, what) in state.closes(known).items() if not at})
    needs = f"needs {slots_in_words(job.least)}"
    text = state.slot_index.fit(known.spec).missing
    text = text or f"{needs} that fit its requests, {fit} could"
    if kept:
        text = f"{needs}, could have {fit} beside {' and '.join(kept)}"
    numbers = {"needs": float(job.least), "slots": float(fit)}
    return Reason("reservation" if kept else "shape", text, numbers)
