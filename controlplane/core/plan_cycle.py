"""Plans of a cluster that rigid jobs and accounts share.

Claims of rigid jobs are served first. Then the rest is divided among accounts, and the policy
decides about the elastic jobs. Controllers and simulations request their plans through one class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from controlplane.core.fit_slots import NO_REASONS, fitting_plan, fitting_view
from controlplane.core.model.job import Job
from controlplane.core.model.usage import usage_now
from controlplane.core.policy_view import job_view, places, rigid_view
from controlplane.core.reactor import Reactor
from controlplane.core.state import State
from controlplane.policy.api import ClusterView, Plan, Reason
from controlplane.policy.sharing.caps import Ledger
from controlplane.policy.sharing.claim_order import standing
from controlplane.policy.sharing.claims import NO_CLAIMS, decide, mask, without_kept
from controlplane.policy.sharing.division import Divided, Division
from controlplane.policy.sharing.start_times import Present
from schemas.ids import JobId, Seconds
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
        self._unfit = NO_REASONS  # why elastic jobs wait that the latest view does not show
        self.use(gangs=gangs)

    def use(self, *, gangs: bool) -> None:
        """Divide the cluster for another policy from the next view on."""
        self._gangs = gangs
        self._division = Division(gangs=gangs)
        self._divided: Divided | None = None  # for the latest view

    def serve_claims(self, now: Seconds) -> Plan:
        """Return which rigid jobs start now, and which elastic jobs give up slots for them.

        The plan applies at once, before the policy is asked. It leaves out jobs that stay.
        """
        reactor = self._reactor()
        rigid = reactor.rigid_views()
        if not rigid:
            self._claims = NO_CLAIMS
            return self._claims.plan
        view, rules = reactor.view(), None
        if any(job.waits for job in rigid):
            sharing = reactor.state.sharing or Sharing(fair_share=False)
            ledger = ledger_of(reactor.state, now, sharing.half_life_s)
            state = reactor.state
            nodes = [state.nodes[name] for name in state.planned if name in state.nodes]
            closes = {node.node: node.windows[0].begin for node in nodes if node.windows}
            rules = replace(standing(view, rigid, sharing, ledger, now), closes=closes)
        beside = None
        if any(job.waits and not job.slots for job in rigid):
            beside = places(reactor.state)
        self._claims = decide(view, rigid, now, rules=rules, places=beside)
        return self._claims.plan

    @property
    def claim_reasons(self) -> Mapping[JobId, Reason]:
        """Why jobs wait that no policy sees: rigid ones, and those that fit no slot."""
        return {**self._unfit, **self._claims.reasons} if self._unfit else self._claims.reasons

    @property
    def budgets(self) -> Mapping[str, int]:
        """Most slots of each account that is bounded, at the latest view."""
        return {} if self._divided is None else self._divided.budgets

    def view(self, now: Seconds) -> ClusterView:
        """Return the view of the current state that the policy should see."""
        reactor = self._reactor()
        view, sharing = mask(reactor.view(), self._claims.kept), reactor.state.sharing
        view, self._unfit = fitting_view(view, reactor.state)
        if sharing is None:
            self._divided = None
            return view
        self._divided = self._division.divide(
            view, sharing, ledger_of(reactor.state, now, sharing.half_life_s), now
        )
        return self._divided.view

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
            ledger=ledger_of(state, now, (state.sharing or Sharing()).half_life_s),
            past=dict(state.past_runs),
            now=now,
            gangs=self._gangs,
        )


def ledger_of(state: State, now: Seconds, half_life_s: float) -> Ledger:
    """Return the usage and the slots of accounts that the view of the state does not show."""
    holding = [state.jobs[name] for name in state.jobs_with_processes]
    outside: Counter[str] = Counter()
    holders: dict[JobId, tuple[str, int]] = {}
    for name in {**state.overrides, **state.rigid}:
        if many := len(state.jobs[name].members()):
            outside[state.jobs[name].account] += many
            holders[name] = state.jobs[name].account, many
    known = {} if state.sharing is None else state.sharing.classes
    classes = {name: state.jobs[name].spec.stated_class for name in state.active if known}
    classes = {name: one for name, one in classes.items() if one in known}
    return Ledger(
        usage=usage_now(state.usage, holding, now, half_life_s),
        outside=outside,
        began_at=state.began_at,
        holders=holders,
        classes=classes,
        ranks={name: known[one].rank for name, one in classes.items() if known[one].rank},
    )
