"""Rights of users, in one table of roles and permissions on jobs.

Each port lists the right that each request needs, and `permit` checks the right. `JobOwners`
looks up the owner of a job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Final

from controlplane.core.history import Process
from controlplane.core.model.job import Job, JobOwner
from controlplane.core.state import State
from controlplane.service.commit_loop import CommitLoop
from schemas.errors import DeniedError, UnknownJobError
from schemas.ids import JobId, NodeId, Rank, Version, WorkerId, node_of, stated_number, worker_id
from schemas.transport.keys import Identity
from schemas.transport.sockets import Incoming
from schemas.wire import Message

READERS: Final = frozenset({"admin", "operator", "user", "viewer"})  # may send requests
WRITERS: Final = frozenset({"admin", "operator", "user"})  # may have jobs of their own
OPERATORS: Final = frozenset({"admin", "operator"})  # may drain nodes, pause scheduling
ADMINS: Final = frozenset({"admin"})  # may manage keys, quotas, the policy
NODE: Final = "node"  # an agent that reports for the node named in its key
JOIN: Final = "join"  # a provider of nodes, which adds their keys
KEY_ADDERS: Final = WRITERS | {JOIN}
REVOKED: Final = ("this key is no longer authorised", "ask an admin for a new key")
VIEWER_OF_ALL: Final = "viewer of all"  # a viewer without a project


class Action(Enum):
    """Permissions on a job."""

    STATE = "know of it: its row, state, decisions, events"
    ARGS = "read the arguments of its script"
    ENV = "read the values of its environment"
    OUTPUT = "read its output"
    FILES = "have its files and its working directory"
    ATTACH = "open its terminal, a shell beside it, or its ports"
    CHANGE = "cancel, resize, pause, resume, hold or release it, and change its trials"


class Relation(Enum):
    """Relation of a user to a job."""

    OWN = "own"
    PROJECT = "of a project that his key names, or is his own"
    OTHER = "of others"


_ALL: Final = frozenset(Action)
_NOTHING: Final[frozenset[Action]] = frozenset()
_STATE_ONLY: Final = frozenset({Action.STATE})
_READS: Final = frozenset({Action.STATE, Action.ARGS, Action.OUTPUT})
_ADMIN: Final = _ALL - {Action.ENV, Action.ATTACH}

RIGHTS: Final[Mapping[tuple[str, Relation], frozenset[Action]]] = {
    ("admin", Relation.OWN): _ALL,
    ("admin", Relation.PROJECT): _ADMIN,
    ("admin", Relation.OTHER): _ADMIN,
    ("operator", Relation.OWN): _ALL,
    ("operator", Relation.PROJECT): _STATE_ONLY,
    ("operator", Relation.OTHER): _STATE_ONLY,
    ("user", Relation.OWN): _ALL,
    ("user", Relation.PROJECT): _READS | {Action.FILES},
    ("user", Relation.OTHER): _NOTHING,
    ("viewer", Relation.PROJECT): _READS,
    ("viewer", Relation.OTHER): _NOTHING,
    (VIEWER_OF_ALL, Relation.OTHER): _STATE_ONLY,
}

Right = Action | frozenset[str]  # an action on the named job, or the permitted roles


def may(who: Identity, action: Action, job: JobOwner) -> bool:
    """True if `who` may perform the action on a job of this owner."""
    return action in RIGHTS.get((_effective_role(who), _relation_to(who, job)), _NOTHING)


def sees_all(who: Identity) -> bool:
    """True if `who` may know of every job."""
    return Action.STATE in RIGHTS.get((_effective_role(who), Relation.OTHER), _NOTHING)


def projects_of(who: Identity) -> tuple[str, ...]:
    """Return the projects that `who` may see. New jobs belong to the first of them."""
    return who.projects or ((who.name,) if who.role in WRITERS else ())


def permit(who: Identity, right: Right, request: Message, job: JobOwner | None) -> None:
    """Refuse a request if `who` does not have the right that the request needs.

    `job` is the owner of the job that the request names. It is None if the request names no job, or
    a job that does not exist.

    Raises:
        DeniedError: if `who` may not send this request, or may not send it for this job.
        UnknownJobError: if the job does not exist, or if `who` must not know that it exists.
    """
    if who.role not in READERS and not (who.role == JOIN and right == KEY_ADDERS):
        raise DeniedError(f"a key of {who} may not use this port", "use a user's key")
    if isinstance(right, Action):
        _permit_on_job(who, right, JobId(getattr(request, "job", "")), job)
    elif who.role not in right:
        of_few = {
            OPERATORS: "may not manage nodes",
            ADMINS: "may not manage keys, quotas and the policy",
        }
        what = of_few.get(right, "may only read")
        hint = f"ask for a key of {' or '.join(sorted(right))}"
        raise DeniedError(f"{who.role} {who.name} {what}", hint)


def _permit_on_job(who: Identity, action: Action, name: JobId, job: JobOwner | None) -> None:
    if action is Action.CHANGE and who.role not in WRITERS:
        raise DeniedError(f"{who.role} {who.name} may only read", "ask for a user's key")
    if job is None or not may(who, Action.STATE, job):
        raise UnknownJobError(name)
    if not may(who, action, job):
        verb = {
            Action.CHANGE: "change",
            Action.OUTPUT: "read the output of",
            Action.ENV: "rerun",  # the new job has the values of its environment
            Action.ATTACH: "attach to",
        }
        what = f"you may not {verb.get(action, 'have the files of')} {name}"
        own = action in {Action.ENV, Action.ATTACH}
        hint = "ask its owner" if own else "ask its owner, or an admin"
        raise DeniedError(f"{what}: it belongs to {job.user}", hint)


def speaks_for(
    who: Identity | None,
    job: Job,
    version: int,
    rank: int,
    *,
    processes: Callable[[JobId], Mapping[WorkerId, Process]] = lambda _: {},
    state: State | None = None,
) -> bool:
    """True if `who` is the node that runs this worker, or that ran it according to `processes`.

    If the journal in `state` has lost inputs, a node speaks also for workers that it greeted with.

    Agents send output and telemetry outside their sessions, so the sender of each such message is
    checked here. The core checks the node of each event of a session.
    """
    if who is None or who.role != NODE:
        return False
    name = worker_id(job.job, Version(version), Rank(rank))
    if (worker := job.workers.get(name)) is not None:
        return node_of(worker.slot) == who.name
    former = processes(job.job).get(name) if who.name in job.nodes else None
    if former is not None:
        return former.node == who.name
    node = state.nodes.get(NodeId(who.name)) if state is not None else None
    lost = state is not None and bool(state.outdated or state.loss_accepted)
    return lost and node is not None and name in node.foreign_workers.values()


def granted_topics(who: Identity, topic: bytes) -> tuple[bytes, ...]:
    """Return the topics to grant to a key that subscribes to `topic`. The tuple can be empty."""
    if who.role not in READERS:
        return ()
    if sees_all(who) and topic.startswith(b"project/"):
        return (topic,)  # duplicates the job/ events, so the client must name this topic
    found = dict.fromkeys(
        topic if topic.startswith(mine) else mine
        for mine in map(str.encode, topics_of(who))
        if topic.startswith(mine) or mine.startswith(topic)
    )
    return tuple(found)


def topics_of(who: Identity) -> tuple[str, ...]:
    """Return the prefixes of all feed topics that the owner of a key may read."""
    jobs = ["job/"] if sees_all(who) else [f"project/{name}/" for name in projects_of(who)]
    return (*jobs, "node/", "cluster")


def refuse_revoked(incoming: Incoming) -> None:
    """Refuse a message on an open connection after its key was revoked."""
    if incoming.revoked:
        raise DeniedError(*REVOKED)


def _effective_role(who: Identity) -> str:
    return VIEWER_OF_ALL if who.role == "viewer" and not who.projects else who.role


def _relation_to(who: Identity, job: JobOwner) -> Relation:
    if who.name == job.user and who.role in WRITERS:  # a viewer's name means nothing
        return Relation.OWN
    return Relation.PROJECT if job.project in projects_of(who) else Relation.OTHER


MAX_DEPARTED: Final = 10_000  # owners kept for jobs that left the state; owners never change


class JobOwners:
    """Owners of jobs. The owner of a job that left the newest state is read from the journal."""

    def __init__(self, commit_loop: CommitLoop) -> None:
        self._commit_loop = commit_loop
        self._departed: dict[JobId, JobOwner] = {}

    def of(self, name: JobId) -> JobOwner | None:
        """Return the owner of a job, or None if the job does not exist or is no longer kept."""
        loop = self._commit_loop
        job = loop.reactor.state.jobs.get(name) or loop.committed.state.jobs.get(name)
        if job is not None:
            return job.owner
        if not 0 < stated_number(name) <= loop.reactor.state.jobs_accepted:
            return None  # a word of some text
        known = self._departed.get(name)
        if known is None and (known := loop.reader.ended.owner(name)) is not None:
            if len(self._departed) >= MAX_DEPARTED:
                self._departed.clear()
            self._departed[name] = known
        return known
