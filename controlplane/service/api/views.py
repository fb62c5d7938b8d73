"""Filters that reduce replies to what the reader may know, and divide them into pages."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Container, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from controlplane.core.model.job import JobOwner
from controlplane.service.rights import WRITERS, Action, may, projects_of, sees_all
from schemas.errors import BadFieldError
from schemas.ids import JobId
from schemas.jobs import JobSpec
from schemas.transport.keys import Identity
from schemas.wire.client import (
    EpochInfo,
    Explanation,
    JobDetail,
    JobSummary,
    Ledger,
    NodeInfo,
    SweepDetail,
)
from schemas.wire.feed import Detail, FeedEvent

HIDDEN: Final = "***"  # replaces a value that the reader must not see
OTHER_JOB: Final = "a job of others"
OTHER_USER: Final = "another user"
WORD: Final = re.compile(r"[A-Za-z0-9_-]+")
OF_ACCOUNTS: Final = re.compile(r"wants? the rest|gives back \d+ slots?")  # reasons with users
USER: Final = re.compile(r"user (\S+?)(?: of project (\S+?))?(?=[,;:]?(?: |$))")
JOB: Final = re.compile(r"[A-Za-z0-9_-]+-[0-9]+")
_SALT: Final = secrets.token_bytes(16)  # so that pseudonyms of families cannot be guessed


class View:
    """Filter for replies to one reader."""

    def __init__(self, who: Identity, owner_of: Callable[[JobId], JobOwner | None]) -> None:
        self._who = who
        self._owner_of = owner_of
        self._all = sees_all(who)

    def sees(self, job: JobOwner | None) -> bool:
        """True if the reader may know of a job with this owner. None means a job no longer kept."""
        return self._all or (job is not None and may(self._who, Action.STATE, job))

    def text(self, text: str) -> str:
        """Replace the names of jobs and users that the reader must not know; return the text."""
        if self._all:
            return text
        return hide_users(hide_names(text, self._hides), projects_of(self._who))

    def summary(self, row: JobSummary) -> JobSummary:
        """Filter a row of `ones ps`."""
        return row if self._all else replace(row, reason=self.text(row.reason))

    def detail(self, detail: JobDetail, owner: JobOwner) -> JobDetail:
        """Filter a page of `ones show`."""
        history = tuple(
            replace(one, reason=self.text(one.reason), detail=self._detail(one.detail))
            for one in detail.history
        )
        return replace(
            detail,
            summary=self.summary(detail.summary),
            spec=redacted_spec(detail.spec, self._who, owner),
            snapshot=detail.snapshot if may(self._who, Action.FILES, owner) else "",
            history=detail.history if self._all else history,
            epochs=tuple(map(self._epoch, detail.epochs)),
        )

    def explanation(self, reply: Explanation) -> Explanation:
        """Filter a page of `ones explain`."""
        if self._all:
            return reply
        decisions = (replace(one, reason=self.text(one.reason)) for one in reply.decisions)
        return replace(reply, decisions=tuple(decisions))

    def sweep(self, reply: SweepDetail) -> SweepDetail:
        """Filter a page of `ones sweep show` about a visible sweep."""
        return replace(reply, summary=self.summary(reply.summary))

    def ledger(self, reply: Ledger, owner: JobOwner) -> Ledger:
        """Filter a page of a ledger. A digest gives access to a state or a working directory."""
        if may(self._who, Action.FILES, owner):
            return reply
        units = tuple(replace(unit, digest="") for unit in reply.units)
        return replace(reply, units=units, snapshot="")

    def node(self, node: NodeInfo) -> NodeInfo:
        """Filter a row of `ones node list`. Slots of invisible jobs are shown only as occupied."""
        if self._all:
            return node
        jobs = tuple(job for job in node.jobs if self.sees(self._owner_of(job)))
        name, text = self._who.name, self.text(node.reason)
        hidden = (
            replace(one, users=tuple(u if u == name else OTHER_USER for u in one.users))
            for one in node.reservations
        )
        return replace(node, jobs=jobs, reason=text, reservations=tuple(hidden))

    def event(self, event: FeedEvent) -> FeedEvent | None:
        """Filter an event of the feed. Return None if the event is about an invisible job."""
        if self._all:
            return event
        if event.job is not None and not self.sees(self._owner_of(event.job)):
            return None
        return replace(event, detail=self._detail(event.detail))

    def _detail(self, detail: Detail) -> Detail:
        return {
            name: self.text(value) if isinstance(value, str) else value
            for name, value in detail.items()
        }

    def _epoch(self, epoch: EpochInfo) -> EpochInfo:
        """Replace the families (script names and arguments) of other users by pseudonyms."""
        if epoch.beside is None or self._who.role == "admin":
            return epoch
        mine = f"{self._who.name}/" if self._who.role in WRITERS else "\0"
        beside = tuple(
            (count, tuple(one if one.startswith(mine) else _pseudonym(one) for one in families))
            for count, families in epoch.beside
        )
        return replace(epoch, beside=beside)

    def _hides(self, job: JobId) -> bool:
        owner = self._owner_of(job)
        return owner is not None and not self.sees(owner)


def redacted_spec(spec: JobSpec, who: Identity, owner: JobOwner) -> JobSpec:
    """Return a job file without the values that the reader must not see. Keep variable names."""
    env, args, trial = spec.env, spec.args, spec.stated_trial
    if not may(who, Action.ENV, owner):
        env = dict.fromkeys(env, HIDDEN)
    if not may(who, Action.ARGS, owner):
        args = (HIDDEN,) * len(args)
    if trial is not None:
        trial = replace(trial, states_key="")
        if not may(who, Action.FILES, owner):
            trial = replace(trial, digest="", sources=())
    return replace(spec, env=env, args=args, trial=msgspec.UNSET if trial is None else trial)


def hide_names(text: str, hides: Callable[[JobId], bool]) -> str:
    """Return a text in which the names of hidden jobs are replaced."""

    def shown(word: re.Match[str]) -> str:
        name = word[0]
        return OTHER_JOB if JOB.fullmatch(name) and hides(JobId(name)) else name

    return WORD.sub(shown, text)


def hide_users(text: str, projects: Container[str]) -> str:
    """Return a reason of the division without the users of other projects."""
    if OF_ACCOUNTS.search(text) is None:
        return text
    return USER.sub(lambda one: one[0] if (one[2] or one[1]) in projects else OTHER_USER, text)


@lru_cache(4096)
def _pseudonym(family: str) -> str:
    digest = hashlib.blake2b(family.encode(errors="replace"), key=_SALT, digest_size=6)
    return f"other/{digest.hexdigest()}"


PAGE_BYTES: Final = 1 << 20  # bytes of encoded rows in a page
CURSOR: Final = re.compile(r"([a-z]{1,16})\.([0-9]{1,18})")
CURSOR_REMEDY: Final = "restart without a cursor, then use the one of each page"


class Rows(NamedTuple):
    """List in a reply that is sent in pages."""

    after: Callable[[int], Iterator[tuple[int, Any]]]  # pairs (position, row) after a position
    last: int  # position of the last row; positions grow and never change


def page_of(lists: Mapping[str, Rows], cursor: str) -> tuple[dict[str, tuple[Any, ...]], str]:
    """Return the next page of several consecutive lists, and the cursor of the following page.

    A page has at most `PAGE_BYTES` of rows, or a single larger row. An empty cursor requests the
    first page. The cursor that is returned with the last page is also empty.

    Raises:
        BadFieldError: if the cursor does not belong to these lists.
    """
    first, position = parse_cursor({name: rows.last for name, rows in lists.items()}, cursor)
    found: dict[str, list[Any]] = {name: [] for name in lists}
    room, any_row = PAGE_BYTES, False
    for name in list(lists)[list(lists).index(first) :]:
        for at, row in lists[name].after(position):
            size = len(msgspec.msgpack.encode(row))
            if size > room and any_row:
                return _frozen(found), f"{name}.{position}"
            room, position, any_row = room - size, at, True
            found[name].append(row)
        position = 0
    return _frozen(found), ""


def numbered(rows: list[Any]) -> Rows:
    """Return the rows of an append-only list. Positions start at 1."""
    return Rows(lambda after: enumerate(rows[after:], after + 1), len(rows))


def _frozen(found: Mapping[str, list[Any]]) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(rows) for name, rows in found.items()}


def parse_cursor(lasts: Mapping[str, int], cursor: str) -> tuple[str, int]:
    """Return the list and the position of a cursor. `lasts` has the last position of each list.

    Raises:
        BadFieldError: if the cursor does not belong to these lists.
    """
    if not cursor:
        return next(iter(lasts)), 0
    known = CURSOR.fullmatch(cursor)
    if known is None or known[1] not in lasts:
        what = f"cursor: {cursor[:40]!r} does not belong to this list"
        raise BadFieldError(what, CURSOR_REMEDY, "cursor")
    if int(known[2]) > lasts[known[1]]:
        what = f"cursor: {cursor!r} is beyond the end of this list"
        raise BadFieldError(what, CURSOR_REMEDY, "cursor")
    return known[1], int(known[2])
