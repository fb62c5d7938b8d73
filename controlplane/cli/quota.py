"""`ones quota`, `ones project` and pauses of scheduling: how users and projects share a cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from cyclopts import App, Parameter

from controlplane.cli.output import COMMON, Common, say, say_table
from controlplane.cli.usage import HOUR_S, cell
from controlplane.client import BlockingClient
from schemas.errors import BadFieldError
from schemas.sharing import Project, Sharing, UserLimits, UserShare
from schemas.wire.client import AccountShare, SharingInfo

COLUMNS: Final = (
    "project", "user", "slots", "may have", "guaranteed", "limit", "weight", "running", "waiting",
    "used, h",
)  # fmt: skip
NO_LIMIT: Final = "none"
Limit = Annotated[str | None, Parameter(help="most slots at once, or none")]

T = TypeVar("T", Project, UserShare, UserLimits)

quota = App(name="quota", help="Show shares of users and projects, or set them.")
project = App(name="project", help="Set shares of projects and their users (admins).")


@quota.default
@quota.command(name="list")
def list_(*, common: Common = COMMON) -> None:
    """Show what projects and users have, may have and have used, and the rules for it.

    "may have" is the present budget: with spare slots, everybody may have more than a share.
    """
    with BlockingClient(common.home) as client:
        _show(client.sharing(), common)


@quota.command(name="user")
def user_limits(
    name: Annotated[str, Parameter(help="user (default: all users without own limits)")] = "",
    /,
    *,
    running: Annotated[str | None, Parameter(help="most jobs with slots, or none")] = None,
    queued: Annotated[str | None, Parameter(help="most jobs without slots, or none")] = None,
    slots: Limit = None,
    submissions: Annotated[str | None, Parameter(help="most in a minute, or none")] = None,
    common: Common = COMMON,
) -> None:
    """Set the limits of user NAME, or of every user, in all projects; what is not named stays."""
    stated = {"running": running, "queued": queued, "slots": slots}
    stated["submissions_per_minute"] = submissions
    numbers = {key: _number(key, text) for key, text in stated.items() if text is not None}
    with BlockingClient(common.home) as client:
        before = client.sharing().sharing
        limits = msgspec.structs.replace(before.limits_of(name), **numbers)
        if name:
            changed = msgspec.structs.replace(before, users={**before.users, name: limits})
        else:
            changed = msgspec.structs.replace(before, user_limits=limits)
        _apply(client, changed, common)


@quota.command(name="set")
@project.command(name="set")
def set_(
    name: str,
    /,
    *,
    weight: Annotated[float | None, Parameter(help="share among projects (default: 1)")] = None,
    guaranteed: Annotated[
        int | None, Parameter(help="slots that others cannot keep from the project")
    ] = None,
    limit: Limit = None,
    user: Annotated[str | None, Parameter(help="set weight and limit of this user of it")] = None,
    common: Common = COMMON,
) -> None:
    """Set the share of project NAME, or of one of its users; what is not named stays."""
    if user is not None and guaranteed is not None:
        raise BadFieldError(
            "guaranteed: only projects have guarantees", "leave --user out", "guaranteed"
        )
    with BlockingClient(common.home) as client:
        before = client.sharing().sharing
        former = before.projects.get(name, Project())
        if user is None:
            changed = _changed(former, weight=weight, guaranteed=guaranteed, limit=limit)
        else:
            share = _changed(former.users.get(user, UserShare()), weight=weight, limit=limit)
            changed = msgspec.structs.replace(former, users={**former.users, user: share})
        projects = {**before.projects, name: changed}
        _apply(client, msgspec.structs.replace(before, projects=projects), common)


@project.command
def remove(name: str, /, *, common: Common = COMMON) -> None:
    """Remove the rules of project NAME, which then has weight 1 and no limit."""
    with BlockingClient(common.home) as client:
        before = client.sharing().sharing
        if name not in before.projects:
            problem = f"project: there are no rules for {name}"
            raise BadFieldError(problem, "see `ones quota`", "project")
        projects = {key: value for key, value in before.projects.items() if key != name}
        _apply(client, msgspec.structs.replace(before, projects=projects), common)


def scheduling(
    what: Literal["pause", "resume"],
    /,
    *,
    reason: Annotated[str, Parameter(help="shown to users whose jobs wait")] = "",
    common: Common = COMMON,
) -> None:
    """Pause all starts and growths of jobs, or resume them; running jobs go on."""
    with BlockingClient(common.home) as client:
        found = client.pause_scheduling(what == "pause", reason)
        text = f"scheduling is {found.paused}" if found.paused else "scheduling runs"
        say(common, {"paused": found.paused}, text, quiet=[text])


def _changed(former: T, *, limit: str | None, **fields: Any) -> T:
    found = {name: value for name, value in fields.items() if value is not None}
    if limit is not None:
        found["limit"] = _number("limit", limit)
    return msgspec.structs.replace(former, **found)


def _number(field: str, text: str) -> int | None:
    if text != NO_LIMIT and not text.isdecimal():
        raise BadFieldError(f"{field}: {text!r} is not a number", "give one, or none", field)
    return None if text == NO_LIMIT else int(text)


def _apply(client: BlockingClient, changed: Sharing, common: Common) -> None:
    """Set rules that are a change of the revision that they name."""
    sent = msgspec.structs.replace(changed, revision=0)
    _show(client.change_sharing(sent, changed.revision), common)


def _show(info: SharingInfo, common: Common) -> None:
    if common.in_json:
        say(common, info)
        return
    rows = list(_rows(info))
    say_table(common, info, [row[1] or row[0] for row in rows], COLUMNS, rows)
    rules = info.sharing
    half_life = f"half-life {rules.half_life_s / 86_400:g} d"
    share = f"by weight and past use ({half_life})" if rules.fair_share else "off"
    notes = [f"{info.slots} slots; fair share: {share}"]
    promised = sum(one.guaranteed for one in rules.projects.values())
    if promised > info.slots:
        notes.append(f"guarantees add up to {promised} slots and are scaled down")
    notes += _limits_in_words("each user", rules.user_limits)
    for name, limits in sorted(rules.users.items()):
        notes += _limits_in_words(f"user {name}", limits)
    for name, one in sorted(rules.classes.items(), key=lambda each: -each[1].rank):
        what = [f"rank {one.rank}", *(["preempts"] if one.preempts else [])]
        what += [] if one.limit is None else [f"at most {one.limit} slots"]
        what += [*one.roles, *one.users, *one.projects]
        notes.append(f"class {name}: {', '.join(what)}")
    if info.paused:
        notes.append(f"scheduling is {info.paused}")
    if common.output == "table":
        say(common, info, "", *notes)


def _limits_in_words(who: str, limits: UserLimits) -> list[str]:
    stated = msgspec.structs.asdict(limits).items()
    found = [f"{name} {value}" for name, value in stated if value is not None]
    return [f"{who}: {', '.join(found)}"] if found else []


def _rows(info: SharingInfo) -> Iterable[Sequence[str]]:
    """Yield a row for each project, followed by its users."""
    users: dict[str, list[AccountShare]] = defaultdict(list)
    for one in info.accounts:
        users[one.project].append(one)
    for name in sorted({*users, *info.sharing.projects}):
        rules, mine = info.sharing.projects.get(name, Project()), users[name]
        used_h = sum(one.usage_s for one in mine) / HOUR_S
        yield (
            name, "", str(sum(one.slots for one in mine)), "", str(rules.guaranteed or ""),
            cell(rules.limit), f"{rules.weight:g}", str(sum(one.running for one in mine)),
            str(sum(one.waiting for one in mine)), f"{used_h:.1f}",
        )  # fmt: skip
        for one in mine:
            share = rules.users.get(one.user, UserShare())
            yield (
                "", one.user, str(one.slots), cell(one.budget), "", cell(share.limit),
                f"{share.weight:g}", str(one.running), str(one.waiting),
                f"{one.usage_s / HOUR_S:.1f}",
            )  # fmt: skip


By = Literal["user", "project"]
SUMS: Final = ("slots", "running", "waiting", "used, h")


def show_by(client: BlockingClient, by: By, common: Common) -> None:
    """Print the slots, jobs and usage of each user or project, those with most slots first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(SUMS))
    for one in client.sharing().accounts:
        numbers = (one.slots, one.running, one.waiting, one.usage_s / HOUR_S)
        name = one.user if by == "user" else one.project
        sums[name] = [sum(pair) for pair in zip(sums[name], numbers, strict=True)]
    ordered = sorted(sums.items(), key=lambda item: (-item[1][0], -item[1][3], item[0]))
    rows = [(name, *(f"{n:.0f}" for n in found[:3]), f"{found[3]:.1f}") for name, found in ordered]
    columns = ("slots", "running", "waiting", "used_h")
    data = [{by: name, **dict(zip(columns, found, strict=True))} for name, found in ordered]
    say_table(common, data, sums, (by, *SUMS), rows)
