"""Who may do what: one table of roles and jobs, and one of requests.

Whose a job is, whether it is here or has left: looked up for every right.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from controlplane.core.model.job import JobOwner
from controlplane.service.commit_loop import CommitLoop
from schemas.errors import BadFieldError, DeniedError, UnknownJobError
from schemas.ids import JobId
from schemas.transport import Identity, Incoming
from schemas.wire import Message, client
from schemas.wire import client as asked
from schemas.wire.feed import ReadLog
from schemas.wire.files import ListFiles, ReadFile

READERS: Final = frozenset({"admin", "operator", "user", "viewer"})  # may ask at all
WRITERS: Final = frozenset({"admin", "operator", "user"})  # have jobs of their own
OPERATORS: Final = frozenset({"admin", "operator"})  # drain nodes
ADMINS: Final = frozenset({"admin"})  # keep keys
NODE: Final = "node"  # an agent: says what happens on the node that its key names
REVOKED: Final = ("this key is not authorised any more", "ask an admin for another one")
WATCHER: Final = "viewer of all"  # a viewer without a project


class Action(Enum):
    """What somebody may do with a job."""

    STATE = "know of it: its row, state, decisions, events"
    ARGS = "read the arguments of its script"
    ENV = "read the values of its environment"
    OUTPUT = "read its output"
    FILES = "have its files and its working directory"
    CHANGE = "cancel, resize, pause or resume it, and change its trials"


class Whose(Enum):
    """A job, as somebody sees it."""

    OWN = "own"
    PROJECT = "of a project that his key names, or is his own"
    OTHER = "of others"


_ALL: Final = frozenset(Action)
_NOTHING: Final[frozenset[Action]] = frozenset()
_KNOWS: Final = frozenset({Action.STATE})
_READS: Final = frozenset({Action.STATE, Action.ARGS, Action.OUTPUT})
_ADMIN: Final = _ALL - {Action.ENV}

RIGHTS: Final[Mapping[tuple[str, Whose], frozenset[Action]]] = {
    ("admin", Whose.OWN): _ALL,
    ("admin", Whose.PROJECT): _ADMIN,
    ("admin", Whose.OTHER): _ADMIN,
    ("operator", Whose.OWN): _ALL,
    ("operator", Whose.PROJECT): _KNOWS,
    ("operator", Whose.OTHER): _KNOWS,
    ("user", Whose.OWN): _ALL,
    ("user", Whose.PROJECT): _READS | {Action.FILES},
    ("user", Whose.OTHER): _NOTHING,
    ("viewer", Whose.PROJECT): _READS,
    ("viewer", Whose.OTHER): _NOTHING,
    (WATCHER, Whose.OTHER): _KNOWS,
}

REQUESTS: Final[Mapping[type[Message], Action | frozenset[str]]] = {
    # answered with what the asker may know
    asked.GetCluster: READERS,
    asked.GetSearch: READERS,
    asked.CheckJob: READERS,
    asked.ListJobs: READERS,
    asked.ListNodes: READERS,
    asked.ReadEvents: READERS,
    # about one job
    asked.GetJob: Action.STATE,
    asked.WaitJob: Action.STATE,
    asked.ExplainJob: Action.STATE,
    asked.GetSweep: Action.STATE,
    asked.GetLedger: Action.STATE,
    asked.CancelJob: Action.CHANGE,
    asked.ResizeJob: Action.CHANGE,
    asked.PauseJob: Action.CHANGE,
    asked.ResumeJob: Action.CHANGE,
    asked.ChangeSweep: Action.CHANGE,
    ReadLog: Action.OUTPUT,
    ListFiles: Action.FILES,
    ReadFile: Action.FILES,
    # of some roles
    asked.PutSnapshot: WRITERS,
    asked.SubmitJob: WRITERS,
    asked.DrainNode: OPERATORS,
    asked.UndrainNode: OPERATORS,
    client.AddKey: ADMINS,
    client.ListKeys: ADMINS,
    client.RevokeKey: ADMINS,
}


def may(who: Identity, action: Action, job: JobOwner) -> bool:
    """Whether somebody may do that with a job."""
    return action in RIGHTS.get((_kind(who), _whose(who, job)), _NOTHING)


def sees_all(who: Identity) -> bool:
    """Whether somebody may know of every job."""
    return Action.STATE in RIGHTS.get((_kind(who), Whose.OTHER), _NOTHING)


def projects_of(who: Identity) -> tuple[str, ...]:
    """Whose jobs somebody may know of, beside his own; what he submits is the first one's."""
    return who.projects or ((who.name,) if who.role in WRITERS else ())


def permit(who: Identity, request: Message, job: JobOwner | None) -> None:
    """Refuse what somebody may not ask for.

    Args:
        who: the owner of the key that asks.
        job: whose the job is that it names; None: there is no such job, or it names none.

    Raises:
        DeniedError: if it is for others.
        UnknownJobError: if there is no such job, or he may not know of it.
        BadFieldError: if it is no request.
    """
    if who.role not in READERS:
        raise DeniedError(f"the key of {who} may not use this port", "use a user's key")
    needs = REQUESTS.get(type(request))
    if needs is None:
        raise BadFieldError(f"{type(request).__name__} is no request", "", "type")
    if isinstance(needs, Action):
        _permit_on_job(who, needs, JobId(getattr(request, "job", "")), job)
    elif who.role not in needs:
        of_few = {OPERATORS: "may not drain nodes", ADMINS: "may not keep keys"}
        what = of_few.get(needs, "may only read")
        hint = f"ask for a key of {' or '.join(sorted(needs))}"
        raise DeniedError(f"{who.role} {who.name} {what}", hint)


def _permit_on_job(who: Identity, action: Action, name: JobId, job: JobOwner | None) -> None:
    if action is Action.CHANGE and who.role not in WRITERS:
        raise DeniedError(f"{who.role} {who.name} may only read", "ask for a user's key")
    if job is None or not may(who, Action.STATE, job):
        raise UnknownJobError(name)
    if not may(who, action, job):
        verb = {Action.CHANGE: "change", Action.OUTPUT: "read the output of"}
        what = f"you may not {verb.get(action, 'have the files of')} {name}"
        raise DeniedError(f"{what}: it belongs to {job.user}", "ask its owner, or an admin")


def granted_topics(who: Identity, topic: bytes) -> tuple[bytes, ...]:
    """What somebody hears of the feed who asks for a topic.

    Args:
        topic: the first bytes of the messages that he wants.

    Returns:
        Topics that are granted in its place; none if there is nothing for him below it.
    """
    if who.role not in READERS:
        return ()
    if sees_all(who) and topic.startswith(b"project/"):
        return (topic,)  # the same events once more: only for those who name it
    found = dict.fromkeys(
        topic if topic.startswith(mine) else mine
        for mine in map(str.encode, topics_of(who))
        if topic.startswith(mine) or mine.startswith(topic)
    )
    return tuple(found)


def topics_of(who: Identity) -> tuple[str, ...]:
    """All of the feed that somebody may hear, as prefixes.

    Args:
        who: the owner of a key that may read.
    """
    jobs = ["job/"] if sees_all(who) else [f"project/{name}/" for name in projects_of(who)]
    return (*jobs, "node/", "cluster")


def refuse_revoked(incoming: Incoming) -> None:
    """Whoever connected while his key was authorised may do nothing when it is not any more.

    Raises:
        DeniedError: if it is not.
    """
    if incoming.revoked:
        raise DeniedError(*REVOKED)


def _kind(who: Identity) -> str:
    return WATCHER if who.role == "viewer" and not who.projects else who.role


def _whose(who: Identity, job: JobOwner) -> Whose:
    if who.name == job.user and who.role in WRITERS:  # a viewer has no jobs: his name says nothing
        return Whose.OWN
    return Whose.PROJECT if job.project in projects_of(who) else Whose.OTHER


REMEMBERED: Final = 10_000  # of those that left: it never changes


class JobOwners:
    """Answers from the newest state, else from the journal."""

    def __init__(self, commit_loop: CommitLoop) -> None:
        self._commit_loop = commit_loop
        self._left: dict[JobId, JobOwner] = {}

    def of(self, name: JobId) -> JobOwner | None:
        """Whose a job is; None if there is none, or it is not kept any more.

        Raises:
            JournalError: if the journal cannot be read.
        """
        loop = self._commit_loop
        job = loop.reactor.state.jobs.get(name) or loop.committed.state.jobs.get(name)
        if job is not None:
            return job.owner
        known = self._left.get(name)
        if known is None and (known := loop.reader.ended.owner(name)) is not None:
            if len(self._left) >= REMEMBERED:
                self._left.clear()
            self._left[name] = known
        return known
