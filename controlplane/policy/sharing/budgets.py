"""Budgets: whole numbers of slots for the accounts that share a cluster.

An account is a user in a project, named PROJECT/USER. Projects share the cluster, and the users of
a project share its budget. Slots are dealt one by one to the claim with the smallest (slots + 1/2)
/ weight, the method of Sainte-Laguë. Design: the largest remainder. Here: a divisor method, because
with largest remainders a claim can lose a slot when its weight or the cluster grows.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from schemas.sharing import Project, Sharing, UserShare

MIN_FACTOR: Final = 0.25  # bounds of what past usage can do to a weight
MAX_FACTOR: Final = 4.0
BISECTIONS: Final = 64
PRIOR_HALF_LIVES: Final = 0.1  # usage of the full cluster, assumed to be shared as the weights say


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Claim of a project or of a user to slots."""

    demand: int  # most slots that it can use
    floor: int = 0  # slots that it cannot give up now
    guaranteed: int = 0
    weight: float = 1.0
    usage: float = 0.0  # decayed slot seconds, divided by the weight before the level fair share
    order: int = 0  # place in the order of arrival, which decides between equal claims


def split_slots(room: int, claims: Sequence[Claim]) -> list[int]:
    """Return the slots of each claim; their sum is the smaller of `room` and all demand.

    A claim gets its floor first, then its guarantee, if its demand is that large. Guarantees that
    exceed the room are scaled down. The rest is shared by weight, beyond the guarantees.
    """
    demands = [claim.demand for claim in claims]
    secured = [min(claim.guaranteed, claim.demand) for claim in claims]
    floors = [min(claim.floor, claim.demand) for claim in claims]
    weights = [claim.weight for claim in claims]
    guarantees = [float(claim.guaranteed) for claim in claims]
    got = [0] * len(claims)
    for most, by in ((floors, weights), (secured, guarantees), (demands, weights)):
        wants = [max(0, limit - has) for limit, has in zip(most, got, strict=True)]
        beyond = [max(0, has - due) for has, due in zip(got, secured, strict=True)]
        added = _deal(room - sum(got), wants, claims, by, beyond)
        got = [has + more for has, more in zip(got, added, strict=True)]
    return got


def _deal(
    room: int,
    wants: Sequence[int],
    claims: Sequence[Claim],
    weights: Sequence[float],
    before: Sequence[int],
) -> list[int]:
    """Return the slots that each claim is dealt, at most `wants`; it was dealt `before` already.

    Equal claims: the one with the smaller usage comes first, then the earlier one.
    """
    if sum(wants) <= room:
        return list(wants)
    got = _surely_dealt(room, wants, weights, before)
    heap = [
        ((before[i] + got[i] + 0.5) / weights[i], claims[i].usage, claims[i].order, i)
        for i, want in enumerate(wants)
        if want > got[i]
    ]
    heapq.heapify(heap)
    for _ in range(room - sum(got)):
        _, usage, order, i = heap[0]
        got[i] += 1
        if got[i] < wants[i]:
            heapq.heapreplace(heap, ((before[i] + got[i] + 0.5) / weights[i], usage, order, i))
        else:
            heapq.heappop(heap)
    return got


def _surely_dealt(
    room: int, wants: Sequence[int], weights: Sequence[float], before: Sequence[int]
) -> list[int]:
    """Return a lower bound of the slots of each claim. The bounds lack at most a few slots each.

    Claims get all slots below some level of (slots + 1/2) / weight, which bisection finds. The
    bounds are one slot smaller, because the level is rounded.
    """
    some = [i for i, want in enumerate(wants) if want > 0]
    got, low = [0] * len(wants), 0.0
    high = max(((before[i] + wants[i]) / weights[i] for i in some), default=0.0)
    for _ in range(BISECTIONS):
        level = (low + high) / 2
        below = [
            min(wants[i], max(0, math.floor(level * weights[i] - before[i] + 0.5))) for i in some
        ]
        left = room - sum(below)
        if left < 0:
            high = level
            continue
        low = level
        for i, many in zip(some, below, strict=True):
            got[i] = max(0, many - 1)
        if left <= len(some):
            break
    return got


def level_fair_shares(claims: Sequence[Claim], capacity: int, half_life_s: float) -> list[float]:
    """Return the level fair share of each claim: its share by weight over its share of the usage.

    Slurm fair tree, clamped to 1/4 .. 4. Slurm: the usage alone. Here: a prior of a tenth of a
    half-life of the full cluster is added, because otherwise the first minutes of a new cluster
    move the weights between the bounds.
    """
    prior = PRIOR_HALF_LIVES * half_life_s * max(1, capacity)
    weights, usage = sum(c.weight for c in claims), sum(c.usage for c in claims)
    factors = []
    for claim in claims:
        share = claim.weight / weights
        factor = share * (usage + prior) / (claim.usage + share * prior)
        factors.append(min(MAX_FACTOR, max(MIN_FACTOR, factor)))
    return factors


def account_budgets(claims: Mapping[str, Claim], sharing: Sharing, capacity: int) -> dict[str, int]:
    """Return the most slots that each account may have now.

    Args:
        claims: demand, floor, usage and order of each account; the rules give the rest.
        capacity: slots of the cluster.
    """
    members: dict[str, dict[str, Claim]] = defaultdict(dict)
    for account, claim in claims.items():
        project, _, user = account.partition("/")
        rule = sharing.projects.get(project, Project()).users.get(user, UserShare())
        members[project][account] = msgspec.structs.replace(
            claim, demand=_limited(claim.demand, rule.limit), weight=rule.weight
        )
    projects = [
        _project_claim(sharing.projects.get(name, Project()), list(users.values()))
        for name, users in members.items()
    ]
    found: dict[str, int] = {}
    rooms = _rooms(projects, sharing, capacity)
    for room, users in zip(rooms, members.values(), strict=True):
        weighed = _weighed(list(users.values()), sharing, capacity)
        found |= zip(users, split_slots(room, weighed), strict=True)
    return found


def _project_claim(rule: Project, users: Sequence[Claim]) -> Claim:
    demand = _limited(sum(user.demand for user in users), rule.limit)
    return Claim(
        demand=demand,
        floor=sum(min(user.floor, user.demand) for user in users),
        guaranteed=rule.guaranteed,
        weight=rule.weight,
        usage=sum(user.usage for user in users),
        order=min(user.order for user in users),
    )


def _rooms(projects: Sequence[Claim], sharing: Sharing, capacity: int) -> list[int]:
    """Return the slots of each project. Without fair share, only guarantees of others count."""
    if sharing.fair_share:
        return split_slots(capacity, _weighed(projects, sharing, capacity))
    secured = [min(project.demand, project.guaranteed) for project in projects]
    if sum(secured) > capacity:
        secured = split_slots(capacity, [
            msgspec.structs.replace(one, demand=due, floor=0)
            for one, due in zip(projects, secured, strict=True)
        ])  # fmt: skip
    others = [sum(secured) - due for due in secured]
    return [
        max(0, min(project.demand, capacity - kept))
        for project, kept in zip(projects, others, strict=True)
    ]


def _weighed(claims: Sequence[Claim], sharing: Sharing, capacity: int) -> list[Claim]:
    """Return claims whose weights have the factor of their usage, and whose usage is per weight."""
    if not sharing.fair_share:
        return list(claims)
    factors = level_fair_shares(claims, capacity, sharing.half_life_s)
    return [
        msgspec.structs.replace(
            claim, weight=claim.weight * factor, usage=claim.usage / claim.weight
        )
        for claim, factor in zip(claims, factors, strict=True)
    ]


def _limited(demand: int, limit: int | None) -> int:
    return demand if limit is None else min(demand, limit)
