"""Order of claims by the rules of sharing: guarantees first, then fair share, then arrival.

Rules count *firm* slots: those of rigid jobs, and the minimum of each running elastic job. What an
elastic job has above its minimum can be taken at any time without lost work.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from controlplane.policy.api import ClusterView, Reason
from controlplane.policy.placement.slot_partition import slots_in_words
from controlplane.policy.sharing.caps import Ledger
from controlplane.policy.sharing.reasons import words
from controlplane.policy.sharing.rigid_view import RigidView
from schemas.ids import JobId, Seconds
from schemas.sharing import Project, Sharing, UserShare

OVERDUE_S: Final = 86_400.0  # a claim that has waited for this long goes before fair share


FAIR: Final = 2  # class of claims that are neither entitled nor overdue


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Order and rights of the claims of a moment, by the rules of sharing."""

    order: Sequence[RigidView] = ()  # claims that may start, in the order in which they are served
    entitled: frozenset[JobId] = frozenset()  # claims within the guarantee of their project
    borrowed: Mapping[str, int] = {}  # firm slots of a project above its guarantee
    refused: Mapping[JobId, Reason] = {}  # claims that would exceed a limit
    share: int | None = None  # most slots of rigid jobs; None: no bound
    exempt: frozenset[JobId] = frozenset()  # claims that this share does not bound


def standing(
    view: ClusterView, rigid: Sequence[RigidView], sharing: Sharing, ledger: Ledger, now: Seconds
) -> Standing:
    """Return the claims in their order: entitled, overdue, by level fair share, by arrival.

    A claim is entitled if its project's firm slots stay within the guarantee with it. Of several
    claims, only those that fit together are entitled, in the order of their arrival.
    """
    # Rigid and elastic jobs share the cluster by their demand, or one kind would starve the other.
    firm, held = _firm_slots(view, rigid), _held_slots(view, rigid)
    guarantees = _guarantees(sharing, len(view.slots))
    entitled: set[JobId] = set()
    refused: dict[JobId, Reason] = {}
    waiting: list[RigidView] = []
    promised = Counter(firm)
    for job in rigid:
        project = _project(job.account)
        if not job.waits:
            continue
        if (reason := _beyond_limit(job, sharing, held)) is not None:
            refused[job.job] = reason
            continue
        waiting.append(job)
        if promised[project] + job.slots <= guarantees.get(project, 0):
            promised[project] += job.slots
            entitled.add(job.job)

    used: dict[str, float] = defaultdict(float)  # by projects
    for account, value in ledger.usage.items():
        used[_project(account)] += value

    def key(job: RigidView) -> tuple[int, float, float, float]:
        if job.job in entitled:
            return (0, 0.0, 0.0, job.submitted_at)
        if now - job.submitted_at >= OVERDUE_S:
            return (1, 0.0, 0.0, job.submitted_at)
        if not sharing.fair_share:
            return (FAIR, 0.0, 0.0, job.submitted_at)
        return (FAIR, *_level_usage(job.account, sharing, ledger, used), job.submitted_at)

    return Standing(
        order=sorted(waiting, key=key),
        entitled=frozenset(entitled),
        borrowed={name: most - guarantees.get(name, 0) for name, most in firm.items()},
        refused=refused,
        share=_share(view, rigid),
        exempt=frozenset(job.job for job in waiting if key(job)[0] < FAIR),
    )


def _project(account: str) -> str:
    return account.partition("/")[0]


def _firm_slots(view: ClusterView, rigid: Sequence[RigidView]) -> Counter[str]:
    found: Counter[str] = Counter()
    for job in view.jobs.values():
        if job.running_on:
            found[_project(job.account)] += min(job.least, len(job.running_on))
    for one in rigid:
        found[_project(one.account)] += len(one.holds)
    return found


def _held_slots(view: ClusterView, rigid: Sequence[RigidView]) -> Counter[str]:
    """Return the slots that each account and each project has."""
    found: Counter[str] = Counter()
    for job in view.jobs.values():
        found[job.account] += len(job.running_on)
        found[_project(job.account)] += len(job.running_on)
    for one in rigid:
        found[one.account] += len(one.holds)
        found[_project(one.account)] += len(one.holds)
    return found


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


def _beyond_limit(job: RigidView, sharing: Sharing, held: Mapping[str, int]) -> Reason | None:
    project, _, user = job.account.partition("/")
    rules = sharing.projects.get(project, Project())
    own = rules.users.get(user, UserShare()).limit
    for who, name, limit in (
        (job.account, words(job.account), own),
        (project, f"project {project}", rules.limit),
    ):
        if limit is not None and held.get(who, 0) + job.slots > limit:
            has = held.get(who, 0)
            text = f"{name} may have {slots_in_words(limit)} and has {has}; it needs {job.slots}"
            numbers = {"needs": float(job.slots), "limit": float(limit), "has": float(has)}
            return Reason("limit", text, numbers)
    return None


def _level_usage(
    account: str, sharing: Sharing, ledger: Ledger, used: Mapping[str, float]
) -> tuple[float, float]:
    """Return the usage of a project and of its user, each over its weight; less goes first."""
    project, _, user = account.partition("/")
    rules = sharing.projects.get(project, Project())
    own = rules.users.get(user, UserShare()).weight
    return used.get(project, 0.0) / rules.weight, ledger.usage.get(account, 0.0) / own
