"""Requests that change something. Each is checked against the newest state and becomes an input.

The checks refuse drains, resizes and trial changes that could never be carried out.
`JobQuota` limits how many jobs of a user can wait.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from controlplane.core.commands import Accept, Command
from controlplane.core.inputs import (
    CancelRequested,
    DrainRequested,
    HoldRequested,
    Input,
    JobSubmitted,
    NodeForgotten,
    NodesReserved,
    PauseRequested,
    PolicyChosen,
    ReleaseRequested,
    ReservationCancelled,
    ResizeRequested,
    ResumeRequested,
    SchedulingPaused,
    SharingChanged,
    SweepChangeRequested,
    UndrainRequested,
)
from controlplane.core.model.job import Job
from controlplane.core.model.node import Node, NodePhase
from controlplane.core.model.sweep import JobSweep
from controlplane.core.state import State
from controlplane.service.api.reads import ReadRequests
from controlplane.service.api.replies import node_info, shown_state, size_notes
from controlplane.service.api.sweep_replies import sweep_of, trial_state
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.rights import OPERATORS, Action, may, projects_of
from controlplane.service.secret_store import SecretStore
from controlplane.service.settings import Limits
from controlplane.service.uploads import SnapshotStore
from schemas.errors import (
    BadFieldError,
    DeniedError,
    OnesError,
    UnavailableError,
    UnknownNodeError,
    suggestion,
)
from schemas.ids import JobId, NodeId
from schemas.jobs import (
    MAX_SECRET_BYTES,
    JobSpec,
    SecretEnv,
    are_secrets,
    problems,
    spec_bytes,
)
from schemas.sharing import Sharing
from schemas.sharing import problems as problems_of_sharing
from schemas.sweeps import MAX_CONFIGURATIONS, SweepSpec, Value, check_values
from schemas.transport.keys import Identity
from schemas.wire.client import (
    CancelJob,
    CancelReservation,
    ChangeSharing,
    ChangeSweep,
    CheckJob,
    ChoosePolicy,
    DrainNode,
    ForgetNode,
    GetPolicy,
    GetSharing,
    HoldJob,
    JobAccepted,
    JobChecked,
    JobDetail,
    Nodes,
    PauseJob,
    PauseScheduling,
    PolicyInfo,
    PutSnapshot,
    ReleaseJob,
    RerunJob,
    ReserveNodes,
    ResizeJob,
    ResumeJob,
    SharingInfo,
    SnapshotStored,
    SubmitJob,
    SweepChanged,
    UndrainNode,
)

MAX_DRAIN_S: Final = 1e8  # three years
MAX_REASON: Final = 500
MINUTE_S: Final = 60.0


def _known_node(state: State, name: NodeId) -> Node:
    node = state.nodes.get(name)
    if node is None:
        what = f"no node {name[:64]!r} ever joined"
        hint = suggestion(name, state.nodes, "`ones node list` lists all nodes")
        raise UnknownNodeError(what, hint, "node")
    return node


def forget_input(state: State, name: NodeId, who: Identity) -> NodeForgotten:
    """Return the input that removes a lost node."""
    node = _known_node(state, name)
    if node.phase is not NodePhase.LOST:
        what = f"node: {name} is {node.phase.value}, only a lost node can be forgotten"
        raise BadFieldError(what, "stop its agent, and wait until the node is lost", "node")
    return NodeForgotten(node=name, user=who.name)


def drain_input(
    state: State, request: DrainNode | UndrainNode, who: Identity
) -> DrainRequested | UndrainRequested | None:
    """Return the input for a request, or None if the drain to be ended does not exist.

    Raises:
        UnknownNodeError: if no such node ever joined.
        BadFieldError: if the deadline is out of range, or the reason is too long.
    """
    node = _known_node(state, request.node)
    if isinstance(request, UndrainNode):
        if not (node.drains or node.is_suspected or node.windows):
            return None
        return UndrainRequested(node=node.node, user=who.name)
    within_s = request.within_s
    if within_s is not None and not (math.isfinite(within_s) and 0 <= within_s <= MAX_DRAIN_S):
        what = f"within_s: {within_s} is not between 0 and {MAX_DRAIN_S:g} seconds"
        raise BadFieldError(what, "omit it to wait without limit", "within_s")
    _check_reason(request.reason)
    if request.cordon and within_s is not None:
        raise BadFieldError("within_s: a cordon moves no job", "drain the node instead", "within_s")
    return DrainRequested(
        node=node.node,
        user=who.name,
        reason=request.reason,
        within_s=within_s,
        cordon=request.cordon,
    )


def reserve_input(
    state: State, request: ReserveNodes, who: Identity, now: float, keys: Iterable[Identity]
) -> NodesReserved:
    """Return the input for a reservation.

    Args:
        keys: all valid keys, which tell the known users and projects.

    Raises:
        UnknownNodeError: if one of the nodes never joined.
        BadFieldError: if the time, a project or a user cannot be, or nodes are reserved already.
    """
    asked, nodes = request.reservation, tuple(dict.fromkeys(request.nodes))
    begin, end = asked.begin, asked.end
    if not nodes:
        raise BadFieldError("nodes: none is named", "name at least one node", "nodes")
    if not now <= begin < end <= now + MAX_DRAIN_S:
        what = f"begin: {begin:.0f} to {end:.0f} is not a time to come"
        raise BadFieldError(what, "give a begin in the future, and an end after it", "begin")
    _check_reason(asked.reason)
    known = list(keys)
    stated = {} if state.sharing is None else state.sharing.projects
    projects = {*stated, *(project for one in known for project in projects_of(one))}
    _check_names("projects", asked.projects, projects)
    _check_names("users", asked.users, {one.name for one in known})
    for node in (_known_node(state, name) for name in nodes):
        for other in node.reservations:
            if begin < other.end and other.begin < end:
                remedy = f"choose another time, or `ones node unreserve {other.id}`"
                raise BadFieldError(f"begin: {node.node} has {other.text}", remedy, "begin")
    return NodesReserved(nodes=nodes, reservation=msgspec.structs.replace(asked, user=who.name))


def _check_names(field: str, names: Sequence[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            hint = suggestion(name, known, "`ones key list` shows all keys with their projects")
            raise BadFieldError(f"{field}: {name[:64]!r} is unknown", hint, field)


def _check_reason(reason: str) -> None:
    if len(reason) > MAX_REASON:
        what = f"reason: {len(reason)} characters exceed {MAX_REASON}"
        raise BadFieldError(what, "shorten it", "reason")


def reserved_nodes(state: State, reservation: str) -> list[NodeId]:
    """Return the nodes of a reservation.

    Raises:
        BadFieldError: if there is no such reservation.
    """
    found = [
        node.node
        for node in state.nodes.values()
        if any(window.id == reservation for window in node.reservations)
    ]
    if not found:
        hint = "`ones node reservations` lists all"
        raise BadFieldError(f"id: no reservation {reservation[:64]!r}", hint, "id")
    return found


def sharing_input(state: State, request: ChangeSharing, who: Identity) -> SharingChanged:
    """Return the input for new rules of sharing."""
    for problem in problems_of_sharing(request.sharing):
        raise BadFieldError(
            f"sharing.{problem.field}: {problem.what}", problem.remedy, problem.field
        )
    revision = state.sharing.revision if state.sharing is not None else 0
    if request.based_on != revision:
        what = f"based_on: the rules have changed since revision {request.based_on}"
        raise BadFieldError(what, "read them again, and repeat the change", "based_on")
    sharing = msgspec.structs.replace(request.sharing, revision=revision + 1)
    return SharingChanged(sharing=sharing, user=who.name)


class JobQuota:
    """Limits of each user on submissions, and on the jobs that wait. They hold for every role."""

    def __init__(
        self,
        state: Callable[[], State],
        limits: Callable[[], Limits],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._limits = limits
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}  # submissions left at a time, by user

    def take(self, user: str, spec: JobSpec) -> None:
        """Count a job that the user is about to submit."""
        state, most_bytes = self._state(), self._limits().live_bytes
        limits = (state.sharing or Sharing()).limits_of(user)
        first, last, _ = spec.indices or (0, 0, 0)
        has, adds = state.queued_jobs(user), last - first + 1
        if limits.queued is not None and has + adds > limits.queued:
            what = f"{user} has {has} queued jobs and may have {limits.queued}; this adds {adds}"
            remedy = "wait until some start, cancel some, or have sharing.user_limits.queued raised"
            raise DeniedError(what, remedy)
        if state.job_counters.bytes[user] + spec_bytes(spec) > most_bytes:
            what = f"this job file and the live jobs of {user} exceed {most_bytes} bytes"
            remedy = "wait until some end, cancel some, or have limits.live_bytes raised"
            raise DeniedError(what, remedy)
        if (rate := limits.submissions_per_minute) is not None:
            now = self._clock()
            left, at = self._left.get(user, (float(rate), now))
            left = min(float(rate), left + (now - at) * rate / MINUTE_S)
            if left < 1.0:
                what = f"{user} has submitted {rate} times in a minute, as often as one user may"
                remedy = f"try again in {(1.0 - left) * MINUTE_S / rate:.0f} s, or submit an array"
                raise DeniedError(what, remedy)
            self._left[user] = left - 1.0, now


def check_class(state: State, spec: JobSpec, project: str, who: Identity) -> None:
    """Refuse a job whose class is unknown, or is not for this user."""
    classes = (state.sharing or Sharing()).classes
    allowed = [name for name, one in classes.items() if one.admits(who.role, who.name, project)]
    if spec.stated_class and spec.stated_class not in allowed:
        what = f"class: {who.name} may not use {spec.stated_class[:64]!r}"
        known = f"choose from {', '.join(allowed)}, or leave it out" if allowed else "leave it out"
        raise BadFieldError(what, known, "class")


def check_resize(state: State, job: Job, request: ResizeJob) -> None:
    """Refuse a resize that could never be carried out. Each field of the request is optional."""
    least, most = job.spec.slots
    size = len(request.on) if request.on else request.slots
    if request.on and request.slots not in {None, len(request.on)}:
        what = f"slots: {request.slots} differs from the number of slots in `on`, {len(request.on)}"
        raise BadFieldError(what, "omit one of them", "slots")
    if size is None and request.batch is None:
        raise BadFieldError(
            "slots: the request changes nothing", "give slots, batch or both", "slots"
        )
    if job.spec.rigid and size != 0:
        what = f"slots: a {job.spec.kind} job keeps its {most} slots while it runs"
        raise BadFieldError(what, "pause it, or submit it again with other slots", "slots")
    if size is not None and size != 0 and not least <= size <= most:
        what = f"slots: {size} is outside the job's slots [{least}, {most}]"
        raise BadFieldError(what, f"choose {least} to {most}, or 0 to pause it", "slots")
    known = state.slot_index.slots()
    for slot in request.on:
        if slot not in known:
            what = f"on: there is no slot {slot[:80]!r}"
            raise BadFieldError(what, "give NODE/INDEX as in `ones show`", "on")
    if len(set(request.on)) != len(request.on):
        raise BadFieldError("on: a slot is listed twice", "list each slot once", "on")
    if size is not None and size > len(known):
        what = f"slots: {size} exceeds the {len(known)} slots of the cluster"
        raise BadFieldError(what, "choose fewer, or add nodes", "slots")
    batch = request.batch
    if batch is not None and size != 0:
        now = len(job.group.members) if job.group else least
        lowest = max(1, size if size is not None else now)
        if not lowest <= batch <= job.spec.batch_limit:
            what = f"batch: {batch} is outside {lowest} to {job.spec.batch_limit}"
            limit_source = "max_batch_size of the job file"
            if job.spec.batch_limit_is_auto:
                limit_source = "what fits its slots, where the job file has no max_batch_size"
            hint = f"at least one sample for each slot, at most {limit_source}"
            raise BadFieldError(what, hint, "batch")


def check_ordered_slots(state: State, job: JobId, slots: int, user: str, most: int) -> None:
    """Refuse an order if all orders of the user together would exceed the limit of slots."""
    orders = ((name, state.jobs[name].override) for name in state.overrides if name != job)
    others = sum(one.slots or 0 for _, one in orders if one is not None and one.user == user)
    if others + slots > most:
        what = f"the orders of {user} would ask for {others + slots} slots, the limit is {most}"
        raise DeniedError(
            what, "end other orders (`ones resize JOB --auto`), or choose fewer slots"
        )


def check_user_limits(state: State, job: Job, slots: int) -> None:
    """Refuse an order of a user, if the user's jobs and orders together would exceed a limit."""
    limits = (state.sharing or Sharing()).limits_of(job.user)
    names = {**state.jobs_with_processes, **state.overrides}
    others = [state.jobs[name] for name in names if name != job.job]
    ordered = [(one.override.slots or 0) if one.override else 0 for one in others]
    has = [
        max(len(one.members()), size)
        for one, size in zip(others, ordered, strict=True)
        if one.user == job.user
    ]
    for what, many, limit in (
        ("running jobs", sum(map(bool, has)) + 1, limits.running),
        ("slots", sum(has) + slots, limits.slots),
    ):
        if limit is not None and many > limit:
            raise DeniedError(
                f"{job.user} would have {many} {what}, the limit for one user is {limit}",
                "pause others, choose fewer slots, or ask an operator",
            )


def change_or_repeat(
    job: Job, request: ChangeSweep, user: str
) -> tuple[int, SweepChangeRequested | None]:
    """Return the changed trial and the input. The input is None if the key was used before."""
    sweep, _ = sweep_of(job)
    known = sweep.keys.get(f"{user}/{request.key}") if request.key else None
    if known is not None:
        return known, None
    event = change_input(job, request, user)
    return event.trial if event.trial is not None else len(sweep.engine.state.trials), event


def change_input(job: Job, request: ChangeSweep, user: str) -> SweepChangeRequested:
    """Return the input that changes a sweep. A new trial inherits the values of its parent."""
    sweep, spec = sweep_of(job)
    if job.ended:
        raise BadFieldError(f"job: {job.job} has {job.phase.value}", "submit it again", "job")
    values = dict(request.values)
    if request.change == "add":
        values = _values_of_new(sweep, spec, request)
    else:
        _check_trial(sweep, request)
    return SweepChangeRequested(
        job=job.job,
        user=user,
        change=request.change,
        trial=None if request.change == "add" else request.trial,
        values=values,
        parent=request.parent if request.change == "add" else None,
        key=request.key,
    )


def _values_of_new(sweep: JobSweep, spec: SweepSpec, request: ChangeSweep) -> dict[str, Value]:
    trials = sweep.engine.state.trials
    if len(trials) >= MAX_CONFIGURATIONS:
        what = f"change: the sweep has {len(trials)} trials, the maximum"
        raise BadFieldError(what, "submit another sweep", "change")
    values = dict(request.values)
    if request.parent is not None:
        _check_number(sweep, "parent", request.parent)
        state = sweep.engine.state
        if state.models[request.parent].whole_epochs >= state.spec.epochs:
            what = f"parent: trial {request.parent} has trained all {state.spec.epochs} epochs"
            remedy = "add a trial without a parent, or choose another parent"
            raise BadFieldError(what, remedy, "parent")
        values = {**trials[request.parent].values, **values}
    check_values(spec.search.space, values)
    return dict(values)


def _check_trial(sweep: JobSweep, request: ChangeSweep) -> None:
    if request.trial is None:
        what = f"trial: missing, {request.change} needs one"
        raise BadFieldError(what, "give its number", "trial")
    _check_number(sweep, "trial", request.trial)
    trial = sweep.engine.state.trials[request.trial]
    if trial.ended and request.change != "delete":
        what = f"trial: {trial.number} is already {trial.ended}"
        raise BadFieldError(
            what, "add a trial with it as `parent` to continue from its state", "trial"
        )
    if request.change == "resume" and trial.number not in sweep.engine.state.paused:
        what = f"trial: {trial.number} is not paused"
        raise BadFieldError(what, "only paused trials can be resumed", "trial")


def _check_number(sweep: JobSweep, field: str, number: int) -> None:
    count = len(sweep.engine.state.trials)
    if not 0 <= number < count:
        what = f"{field}: no trial {number}"
        raise BadFieldError(what, f"give one of 0 to {count - 1}", field)


STATES_KEY_BYTES: Final = 32
MAX_KEY: Final = 200  # characters; all keys are kept
JobChange = CancelJob | HoldJob | ReleaseJob | ResizeJob | PauseJob | ResumeJob
PreparePolicy = Callable[[PolicyChosen], Callable[[], None]]


@dataclass(eq=False)
class ChangeRequests:
    """Handlers of requests that become inputs. Each request is answered once its input is durable.

    A request that cannot be carried out raises an `OnesError` and changes nothing.
    """

    commit_loop: CommitLoop
    reads: ReadRequests
    snapshots: SnapshotStore
    secrets: SecretStore
    quota: JobQuota
    limits: Callable[[], Limits]
    prepare_policy: PreparePolicy  # raises if it cannot be used, else returns the exchange
    files_stored: Callable[[], Awaitable[None]]  # waits until standbys have new files

    @property
    def _state(self) -> State:
        """Durable state, used for replies."""
        return self.commit_loop.committed.state

    @property
    def _newest(self) -> State:
        """State ahead of the journal, used for decisions."""
        return self.commit_loop.reactor.state

    async def check(self, request: CheckJob, who: Identity) -> JobChecked:
        """Return the notes for a job file that would be accepted, and its start if requested."""
        _check(request.spec)
        self._check_image(request.spec)
        stated = "" if request.spec.project is msgspec.UNSET else request.spec.project
        mine = projects_of(who)
        project = request.project or stated or (mine[0] if mine else "")
        check_class(self._newest, request.spec, project, who)
        notes = (*size_notes(self._state, request.spec), *self.reads.notes.of_spec(request.spec))
        start = await self.reads.expected_start(request, who) if request.when else None
        return JobChecked(notes=notes, start=start)

    async def put_snapshot(self, request: PutSnapshot, who: Identity) -> SnapshotStored:
        """Store a piece of a working directory."""
        size = await self.snapshots.put(
            who.name, request.digest, request.offset, request.data, request.total
        )
        if size >= request.total:
            await self.files_stored()
        return SnapshotStored(digest=request.digest, size=size)

    async def submit(self, request: SubmitJob, who: Identity) -> JobAccepted:
        """Submit a job. A repeated request with the same key submits nothing."""
        _check(request.spec)
        self._check_image(request.spec)
        _check_key(request.key)
        if not self._may_use(request.snapshot, who):
            what = f"snapshot {request.snapshot[:64]!r} is not stored"
            raise BadFieldError(what, "send it with PutSnapshot first", "snapshot")
        stated = "" if request.spec.project is msgspec.UNSET else request.spec.project
        project = _project(request.project or stated, who)
        return await self._submit(request, request.spec, request.snapshot, project, who)

    async def rerun(self, request: RerunJob, who: Identity) -> JobAccepted:
        """Submit a job again, even if it has ended. The new job waits for nothing."""
        _check_key(request.key)
        job = self.commit_loop.job(request.job)
        if job.spec.stated_trial is not None:
            what = f"job: {job.job} continues a trial of {job.spec.stated_trial.sweep}"
            raise BadFieldError(what, "rerun the sweep", "job")
        if not self.snapshots.has(job.snapshot):
            what = f"job: the working directory of {job.job} is no longer stored"
            raise BadFieldError(what, "submit its job file", "job")
        fresh = dict.fromkeys(("not_before", "deadline", "after"), msgspec.UNSET)
        spec = msgspec.structs.replace(job.spec, **fresh)
        if request.secrets:
            secret_env = SecretEnv(names=tuple(request.secrets))
            spec = msgspec.structs.replace(spec, secret_env=secret_env)
            _check(spec)
        mine = projects_of(who)
        project = job.owner.project if job.owner.project in mine else mine[0]
        return await self._submit(request, spec, job.snapshot, project, who)

    async def _submit(
        self,
        request: SubmitJob | RerunJob,
        spec: JobSpec,
        snapshot: str,
        project: str,
        who: Identity,
    ) -> JobAccepted:
        key, values = request.key, request.secrets
        _check_secrets(spec, values)
        await self.snapshots.inspect(snapshot)
        submitted = JobSubmitted(
            spec=spec,
            snapshot=snapshot,
            user=who.name,
            key=key,
            project=project,
            states_key=secrets.token_hex(STATES_KEY_BYTES) if spec.stated_sweep else "",
        )
        known = self._earlier_job(f"{who.name}/{key}") if key else None
        if known and (self.commit_loop.stalled or known not in self._newest.jobs):
            if self._is_durable(known):
                return self._accepted(known)
            if not self.commit_loop.stalled:
                await self.commit_loop.caught_up()
                return self._accepted(known)
            what = f"{known} waits until the journal can be written ({self.commit_loop.stalled})"
            raise UnavailableError(what, "free space there; the job need not be submitted again")
        if known is None:
            self._refuse_if_outdated()
            outcomes = await self._outcomes(spec, who)  # the last wait before the decision
            check_class(self._newest, spec, project, who)
            self.quota.take(who.name, spec)
            if values:
                spec = msgspec.structs.replace(spec, secret_env=self._stored(values))
            submitted = msgspec.structs.replace(submitted, spec=spec, outcomes=outcomes)
        for command in await self._durable(submitted):
            if isinstance(command, Accept):
                return self._accepted(command.job)
        raise UnavailableError("the submission was not accepted", "see the controller's log")

    def _check_image(self, spec: JobSpec) -> None:
        """Refuse an image if no node runs containers."""
        nodes = self._newest.nodes.values()
        if spec.stated_image and not any(node.spec.containers for node in nodes):
            what = "image: no node of this cluster runs containers"
            hint = 'leave it out, or have [containers] engine = "podman" set for an agent'
            raise BadFieldError(what, hint, "image")

    def _stored(self, values: dict[str, str]) -> SecretEnv:
        try:
            self.commit_loop.refuse_while_stalled()
            return self.secrets.put(values)
        except OSError as error:
            what = f"the controller cannot store secrets: {error.strerror}"
            raise UnavailableError(what, "free space there, and submit the job again") from None

    async def _outcomes(self, spec: JobSpec, who: Identity) -> dict[JobId, str]:
        """Return the final states of parents that have ended.

        Raises:
            BadFieldError: if the user may not know of a parent, or it is not kept any more.
        """
        while True:
            found = {}
            for parent in spec.parents:
                owner = self.reads.owners.of(parent.job)
                if owner is None or not may(who, Action.STATE, owner):
                    what = f"after: no job {parent.job[:80]!r}"
                    raise BadFieldError(what, "`ones ps --all` lists every job", "after")
                newest = self._newest.jobs.get(parent.job)
                if newest is None or newest.ended:
                    found[parent.job] = newest or self.commit_loop.job(parent.job)
            if all(job.ended for job in found.values()):
                return {name: job.phase.value for name, job in found.items()}
            await self.commit_loop.caught_up()  # its end is not durable yet

    def _may_use(self, snapshot: str, who: Identity) -> bool:
        """True if `who` sent the stored archive, or may read the files of a job that uses it."""
        if self.snapshots.is_of(who.name, snapshot):
            return True
        jobs = self._newest.jobs.values()
        return self.snapshots.has(snapshot) and any(
            job.snapshot == snapshot and may(who, Action.FILES, job.owner) for job in jobs
        )

    def _earlier_job(self, key: str) -> JobId | None:
        """Return the job that was submitted with this key, even if the job has left the state."""
        newest = self._newest
        known = newest.submission_keys.get(key) or newest.left_submission_keys.get(key)
        return known or self.commit_loop.reader.ended.of_key(key)

    def _is_durable(self, name: JobId) -> bool:
        return name in self._state.jobs or self.commit_loop.reader.ended.get(name) is not None

    def _accepted(self, name: JobId) -> JobAccepted:
        job = self.commit_loop.job(name)
        size = () if job.ended else size_notes(self._state, job.spec)
        notes = (*size, *self.reads.notes.of(job))
        if job.ended and job.spec.parents and not job.nodes:  # it waited in vain
            notes = (job.reason,)
        return JobAccepted(job=name, state=shown_state(job), notes=notes)

    async def change_job(self, request: JobChange, who: Identity) -> JobDetail:
        """Cancel, hold or release a job, or override the policy for it. See `_change_of`."""
        await self._apply(lambda: self._change_of(request, who))
        return self.reads.detail(self.commit_loop.job(request.job), self.reads.view(who))

    def _change_of(self, request: JobChange, who: Identity) -> Input | None:
        """Return the input for a request. There is none if a job to be cancelled has ended."""
        if isinstance(request, CancelJob):
            known = self._newest.jobs.get(request.job)
            live = known is not None and not known.ended
            return CancelRequested(job=request.job, user=who.name) if live else None
        job = self._live_job(request.job)
        if isinstance(request, HoldJob | ReleaseJob):
            kind = HoldRequested if isinstance(request, HoldJob) else ReleaseRequested
            return kind(job=job.job, user=who.name)
        if job.array is not None:
            what = f"job: {job.job} is an array and has no slots"
            raise BadFieldError(what, "hold it, or name one of its elements", "job")
        match request:
            case ResizeJob(slots=slots, batch=batch, on=on):
                check_resize(self._newest, job, request)
                ordered, most = len(request.on) or request.slots or 0, self.limits().ordered_slots
                check_ordered_slots(self._newest, job.job, ordered, who.name, most)
                if ordered and who.role not in OPERATORS:
                    check_user_limits(self._newest, job, ordered)
                return ResizeRequested(job=job.job, user=who.name, slots=slots, batch=batch, on=on)
            case PauseJob():
                return PauseRequested(job=job.job, user=who.name)
            case ResumeJob(auto=auto):
                if job.override is None:
                    what = f"job: {job.job} has no manual override"
                    raise BadFieldError(what, "the policy already controls it", "job")
                return ResumeRequested(job=job.job, user=who.name, auto=auto)

    def _live_job(self, name: JobId) -> Job:
        job = self._newest.jobs.get(name) or self.commit_loop.job(name)
        if job.ended or job.job not in self._newest.jobs:
            state = job.phase.value if job.ended else "ended"
            raise BadFieldError(f"job: {job.job} has {state}", f"`ones rerun {job.job}`", "job")
        return job

    async def drain(self, request: DrainNode | UndrainNode, who: Identity) -> Nodes:
        """Drain a node, or end its drain."""
        await self._apply(lambda: drain_input(self._newest, request, who))
        return self._nodes([request.node], who)

    async def reserve(
        self, request: ReserveNodes, who: Identity, keys: Iterable[Identity]
    ) -> Nodes:
        """Reserve nodes."""
        now = self.commit_loop.now()
        await self._apply(lambda: reserve_input(self._newest, request, who, now, keys))
        return self._nodes(dict.fromkeys(request.nodes), who)

    async def cancel_reservation(self, request: CancelReservation, who: Identity) -> Nodes:
        """Cancel a reservation."""
        nodes = reserved_nodes(self._newest, request.id)
        await self._apply(lambda: ReservationCancelled(id=request.id, user=who.name))
        return self._nodes(nodes, who)

    def _nodes(self, names: Iterable[NodeId], who: Identity) -> Nodes:
        view = self.reads.view(who)
        return Nodes(nodes=tuple(view.node(node_info(self._state, name)) for name in names))

    async def change_sharing(self, request: ChangeSharing, who: Identity) -> SharingInfo:
        """Replace the rules of sharing."""
        await self._apply(lambda: sharing_input(self._newest, request, who))
        return self.reads.sharing(GetSharing(), who)

    async def pause_scheduling(self, request: PauseScheduling, who: Identity) -> SharingInfo:
        """Pause all starts and growths, or resume them."""
        if len(request.reason) > MAX_REASON or not request.reason.isprintable():
            what = f"reason: more than {MAX_REASON} characters, or not printable"
            raise BadFieldError(what, "shorten it", "reason")
        event = SchedulingPaused(user=who.name, paused=request.paused, reason=request.reason)
        await self._apply(lambda: event)
        return self.reads.sharing(GetSharing(), who)

    async def choose_policy(self, request: ChoosePolicy, who: Identity) -> PolicyInfo:
        """Exchange the policy once the choice is durable. A check may import code for a minute."""
        try:
            options = msgspec.json.decode(request.options, type=dict[str, Any])
        except (msgspec.DecodeError, ValueError) as error:
            what = f"options: not a JSON object: {error}"
            raise BadFieldError(what, "write {} for the defaults", "options") from None
        chosen = PolicyChosen(name=request.name, options=options, user=who.name)
        exchange = await asyncio.to_thread(self.prepare_policy, chosen)
        await self._durable(chosen, exchange)
        return self.reads.policy(GetPolicy(), who)

    async def forget_node(self, request: ForgetNode, who: Identity) -> Nodes:
        """Remove a lost node; the reply shows the node as it was before."""
        event = forget_input(self._newest, request.node, who)
        before = node_info(self._newest, request.node)
        await self._apply(lambda: event)
        return Nodes(nodes=(self.reads.view(who).node(before),))

    async def change_sweep(self, request: ChangeSweep, who: Identity) -> SweepChanged:
        """Change a trial of a sweep, or add one."""
        _check_key(request.key)
        number = 0

        def check() -> SweepChangeRequested | None:
            nonlocal number
            job = self._newest.jobs.get(request.job) or self.commit_loop.job(request.job)
            number, event = change_or_repeat(job, request, who.name)
            return event

        await self._apply(check)
        sweep, _ = sweep_of(self.commit_loop.job(request.job))
        return SweepChanged(job=request.job, trial=number, state=trial_state(sweep, number))

    async def _apply(self, check: Callable[[], Input | None]) -> None:
        """Make the input that `check` returns durable. If it returns none, await earlier inputs."""
        try:
            event = check()
        except OnesError:
            await self.commit_loop.caught_up()
            raise
        if event is None:
            await self.commit_loop.caught_up()
        else:
            await self._durable(event)

    def _refuse_if_outdated(self) -> None:
        """Refuse new jobs while nodes know inputs that the journal lost, until an admin decides."""
        if outdated := self._newest.outdated:
            remedy = (
                "an admin stops the controller, and restores a newer backup (`ones admin restore`) "
                "or continues without the lost inputs (`ones admin accept-loss`)"
            )
            raise UnavailableError(outdated, remedy)

    async def _durable(
        self, event: Input, before_effects: Callable[[], None] | None = None
    ) -> list[Command]:
        done: asyncio.Future[list[Command]] = asyncio.get_running_loop().create_future()

        def committed(commands: list[Command]) -> None:
            if not done.done():
                done.set_result(commands)

        self.commit_loop.refuse_while_stalled()
        self.commit_loop.handle(event, before_effects, committed)
        return await done


def _project(asked: str, who: Identity) -> str:
    mine = projects_of(who)
    if asked and asked not in mine:
        what = f"project: {asked[:64]!r} is not one of {', '.join(mine)}"
        raise BadFieldError(what, "omit it, or ask an admin for a key with this project", "project")
    return asked or mine[0]


def _check_key(key: str) -> None:
    if len(key) > MAX_KEY:
        what = f"key: {len(key)} characters exceed {MAX_KEY}"
        raise BadFieldError(what, "use a shorter key", "key")


def _check_secrets(spec: JobSpec, values: dict[str, str]) -> None:
    if set(values) != set(spec.secret_names):
        what = f"secret_env: the values of {', '.join(sorted(spec.secret_names))} are needed"
        raise BadFieldError(what, "name their file with --secret-env FILE", "secret_env")
    if not are_secrets(values):
        what = f"secret_env: a value has a NUL byte, or all have more than {MAX_SECRET_BYTES} bytes"
        raise BadFieldError(what, "put large secrets into a file on the nodes", "secret_env")


def _check(spec: JobSpec) -> None:
    for problem in problems(spec):
        raise BadFieldError(f"{problem.field}: {problem.what}", problem.remedy, problem.field)
