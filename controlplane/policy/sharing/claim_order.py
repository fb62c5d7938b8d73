"""Order of claims by the rules of sharing: guarantees first, then fair share, then arrival.

Rules count *firm* slots: those of rigid jobs, and the minimum of each running elastic job. What an
elastic job has above its minimum can be taken at any time without lost work.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from controlplane.policy.api import ClusterView
from controlplane.policy.sharing.caps import Ledger
from controlplane.policy.sharing.limits import Quota
from controlplane.policy.sharing.rigid_view import RigidView
from controlplane.policy.sharing.turns import Turns
from schemas.ids import JobId, Seconds
from schemas.sharing import Project, Sharing, UserShare

OVERDUE_S: Final = 86_400.0  # a claim that has waited for this long goes before fair share
FAIR: Final = 2  # place of claims that are neither entitled nor overdue


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Order and rights of the claims of a moment, by the rules of sharing."""

    order: Sequence[RigidView] = ()  # claims that may start, in the order in which they are served
    entitled: frozenset[JobId] = frozenset()  # claims within the guarantee of their project
    borrowed: Mapping[str, int] = {}  # firm slots of a project above its guarantee
    quota: Quota | None = None  # limits of users, classes and projects; None: no limits
    ranks: Mapping[JobId, int] = {}  # of the classes of jobs, where they are not 0
    preempting: frozenset[JobId] = frozenset()  # claims whose class takes slots of lower ranks
    share: int | None = None  # most slots of rigid jobs; None: no bound
    exempt: frozenset[JobId] = frozenset()  # claims that this share does not bound


def standing(
    view: ClusterView, rigid: Sequence[RigidView], sharing: Sharing, ledger: Ledger, now: Seconds
) -> Turns[Standing]:
    """Put the claims in their order: entitled, overdue, by class, by fair share, by arrival.

    A claim is entitled if its project's firm slots stay within the guarantee with it. Of several
    claims, only those that fit together are entitled, in the order of their arrival. Claims of
    classes that take slots from others go first, or what starts before them would be stopped.
    """
    # Rigid and elastic jobs share the cluster by their demand, or one kind would starve the other.
    firm = yield from _firm_slots(view, rigid)
    quota = yield from _quota(view, rigid, sharing, ledger)
    guarantees = _guarantees(sharing, len(view.slots))
    yield
    entitled: set[JobId] = set()
    waiting = [job for job in rigid if job.waits]
    preempting = frozenset(
        job.job
        for job in waiting
        if (its := sharing.classes.get(ledger.classes.get(job.job, ""))) is not None
        and its.preempts
    )
    promised = Counter(firm)
    for job in (one for one in waiting if guarantees and one.slots):
        yield
        project = _project(job.account)
        if promised[project] + job.slots > guarantees.get(project, 0):
            continue
        if quota.refusal(job.job, job.account, job.slots) is None:
            promised[project] += job.slots
            entitled.add(job.job)

    used: dict[str, float] = defaultdict(float)  # by projects
    for account, value in ledger.usage.items() if sharing.fair_share else ():
        used[_project(account)] += value

    levels: dict[str, tuple[float, float]] = {}  # by accounts

    def place(job: RigidView) -> tuple[int, int, int, tuple[float, float], float]:
        rank = -ledger.ranks.get(job.job, 0)
        first, level = min(0, rank) if job.job in preempting else 0, (0.0, 0.0)
        if job.job in entitled:
            return (first, 0, 0, level, job.submitted_at)
        if now - job.submitted_at >= OVERDUE_S:
            return (first, 1, 0, level, job.submitted_at)
        if sharing.fair_share:
            if job.account not in levels:
                levels[job.account] = _level_usage(job.account, sharing, ledger, used)
            level = levels[job.account]
        return (first, FAIR, rank, level, job.submitted_at)

    places = dict[JobId, tuple[int, int, int, tuple[float, float], float]]()
    for job in waiting:
        yield
        places[job.job] = place(job)
    return Standing(
        order=sorted(waiting, key=lambda job: places[job.job]),
        entitled=frozenset(entitled),
        borrowed={name: most - guarantees.get(name, 0) for name, most in firm.items()},
        quota=quota,
        ranks=ledger.ranks,
        preempting=preempting,
        share=_share(view, rigid),
        exempt=frozenset(name for name, place in places.items() if place[1] < FAIR) | preempting,
    )


def _project(account: str) -> str:
    return account.partition("/")[0]


def _firm_slots(view: ClusterView, rigid: Sequence[RigidView]) -> Turns[Counter[str]]:
    found: Counter[str] = Counter()
    for job in view.jobs.values():
        yield
        if job.running_on:
            found[_project(job.account)] += min(job.least, len(job.running_on))
    for one in rigid:
        yield
        found[_project(one.account)] += len(one.holds)
    return found


def _quota(
    view: ClusterView, rigid: Sequence[RigidView], sharing: Sharing, ledger: Ledger
) -> Turns[Quota]:
    quota, holders = Quota(sharing, ledger, ledger.holders, projects=True), ledger.holders
    for job in view.jobs.values():
        yield
        if job.running_on and job.job not in holders:
            quota.take(job.job, job.account, len(job.running_on))
    for one in rigid:
        yield
        if one.holds and one.job not in holders:
            quota.take(one.job, one.account, len(one.holds))
    return quota


def _share(view: ClusterView, rigid: Sequence[RigidView]) -> int | None:
    """Return the rigid jobs' share of the cluster, by demand, or None if all demand can be met.

    The demand of an elastic job is its minimum.
    """
    programs = sum(job.slots for job in rigid)
    trainings = sum(job.least for job in view.jobs.values())
    if not trainings or programs + trainings <= len(view.slots):
        return None
    return len(view.slots) * programs // (programs + trainings)


def _guarantees(sharing: Sharing, capacity: int) -> dict[str, int]:
    """Return the guarantees of projects, scaled down if they add up to more than there is."""
    stated = {name: one.guaranteed for name, one in sharing.projects.items()}
    total = sum(stated.values())
    if total <= capacity:
        return stated
    return {name: many * capacity // total for name, many in stated.items()}


def _level_usage(
    account: str, sharing: Sharing, ledger: Ledger, used: Mapping[str, float]
) -> tuple[float, float]:
    """Return the usage of a project and of its user, each over its weight; less goes first."""
    project, _, user = account.partition("/")
    rules = sharing.projects.get(project, Project())
    own = rules.users.get(user, UserShare()).weight
    return used.get(project, 0.0) / rules.weight, ledger.usage.get(account, 0.0) / own
