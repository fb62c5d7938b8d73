"""Rules by which projects and their users share the slots of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Final

import msgspec

MAX_NAME: Final = 64  # characters
DAY_S: Final = 86_400.0
YEAR_S: Final = 365 * DAY_S
MAX_LIMIT: Final = 2**31 - 1  # slots
MAX_RANK: Final = 1000
ROLES: Final = frozenset({"admin", "operator", "user"})  # that may submit jobs
Weight = Annotated[float, msgspec.Meta(ge=0.01, le=1000.0)]
SlotCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_LIMIT)]
HalfLife = Annotated[float, msgspec.Meta(ge=60.0, le=10 * YEAR_S)]
Rank = Annotated[int, msgspec.Meta(ge=-MAX_RANK, le=MAX_RANK)]
Rate = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Turn = Annotated[float, msgspec.Meta(ge=1.0, le=YEAR_S)]


class UserShare(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Share of a user among the users of a project."""

    weight: Weight = 1.0  # relative to the other users
    limit: SlotCount | None = None  # most slots at once; None: no limit


class Project(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Share of a project among all projects."""

    weight: Weight = 1.0  # relative to the other projects
    guaranteed: SlotCount = 0  # slots that others cannot keep from the project
    limit: SlotCount | None = None  # most slots at once; None: no limit
    users: dict[str, UserShare] = {}  # users that differ from `UserShare()`


class UserLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one user in all projects together; None: no limit."""

    running: SlotCount | None = None  # jobs with slots
    queued: SlotCount | None = 20_000  # jobs without slots, and indices of arrays that are no jobs
    slots: SlotCount | None = None  # at once
    submissions_per_minute: Rate | None = None  # further ones are refused


class PriorityClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Class of jobs that go before others. Without roles, users and projects, all may use it."""

    rank: Rank  # a higher one goes first; jobs without a class have rank 0
    roles: tuple[str, ...] = ()  # that may use it
    users: tuple[str, ...] = ()  # likewise
    projects: tuple[str, ...] = ()  # likewise
    limit: SlotCount | None = None  # most slots at once of all its jobs; None: no limit
    preempts: bool = False  # its programs take slots of jobs of lower rank

    def admits(self, role: str, user: str, project: str) -> bool:
        """True if this user may submit a job of the class to this project."""
        stated = self.roles or self.users or self.projects
        return not stated or role in self.roles or user in self.users or project in self.projects


class Sharing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules of sharing. A project or user without an entry has weight 1 and no limit."""

    EXAMPLES: ClassVar = {
        "projects": "{ vision = { weight = 2, guaranteed = 4, users = { al = { limit = 4 } } } }",
        "users": "{ alice = { running = 20 } }",
        "classes": '{ urgent = { rank = 10, roles = ["admin"], limit = 8, preempts = true } }',
    }
    revision: SlotCount = 0  # counted by the controller
    projects: dict[str, Project] = {}
    user_limits: UserLimits = UserLimits()  # of each user without an entry in `users`
    users: dict[str, UserLimits] = {}
    classes: dict[str, PriorityClass] = {}
    fair_share: bool = True  # False: only limits and guarantees bound an account
    half_life_s: HalfLife = 7 * DAY_S  # after this time, used slot seconds count half
    turn_s: Turn = 1800.0  # the last running job of an account is paused only after this time

    def limits_of(self, user: str) -> UserLimits:
        """Return the limits of a user."""
        return self.users.get(user, self.user_limits)


class SharingProblem(msgspec.Struct, frozen=True):
    """Problem of the rules, with its remedy. `field` is the path of the value."""

    field: str
    what: str
    remedy: str


def problems(sharing: Sharing) -> tuple[SharingProblem, ...]:
    """Return all problems of decoded rules that their types cannot express."""
    return tuple(_problems(sharing))


def _problems(sharing: Sharing) -> Iterator[SharingProblem]:
    if sharing.revision:
        yield SharingProblem("revision", "is counted by the controller", "leave it out")
    for name, project in sharing.projects.items():
        field = f"projects.{name[:MAX_NAME]}"
        yield from _name(name, field)
        if project.limit is not None and project.guaranteed > project.limit:
            what = f"guarantees {project.guaranteed} slots, but its limit is {project.limit}"
            yield SharingProblem(f"{field}.guaranteed", what, "raise the limit, or guarantee less")
        for user in project.users:
            yield from _name(user, f"{field}.users.{user[:MAX_NAME]}")
    for user in sharing.users:
        yield from _name(user, f"users.{user[:MAX_NAME]}")
    for name, one in sharing.classes.items():
        yield from _name(name, field := f"classes.{name[:MAX_NAME]}")
        for role in set(one.roles) - ROLES:
            what = f"{role[:MAX_NAME]!r} is no role that may submit jobs"
            yield SharingProblem(f"{field}.roles", what, f"choose from {', '.join(sorted(ROLES))}")


def _name(name: str, field: str) -> Iterator[SharingProblem]:
    if not 0 < len(name) <= MAX_NAME or not name.isprintable() or set(name) & {" ", "/"}:
        remedy = f"give 1 to {MAX_NAME} printable characters without spaces and slashes"
        yield SharingProblem(field, f"{name[:MAX_NAME]!r} is not a name", remedy)
