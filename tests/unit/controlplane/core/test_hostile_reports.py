"""Whatever a node says of its workers, at whatever time: the core takes it, and its invariants hold.

A delayed, repeated or forged report changes nothing or ends its own job. None may be one that the
core cannot take, and none may announce or order what cannot be written down.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from controlplane.core.commands import Announce, Command
from controlplane.core.inputs import DrainRequested, Input, UndrainRequested
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import Rescaling, Starting
from controlplane.core.model.rescale import RescalePhase
from controlplane.core.model.worker import Worker, WorkerPhase
from controlplane.core.state import State
from controlplane.journal.database import input_from
from controlplane.journal.replay import replay
from schemas.codec import encode
from schemas.ids import JobId, NodeId, Rank, SlotId, Version, node_of
from schemas.wire.agent import (
    MAX_NOTICE_S,
    SUSPEND,
    AgentEvent,
    EpochReported,
    GroupBroken,
    GroupFormed,
    JobCleared,
    JoinFailed,
    NodeHealth,
    NodeNoticed,
    Quiesced,
    ScriptReport,
    StoreOpened,
    Suspended,
    WorkerEvent,
    WorkerExited,
    WorkerReady,
)
from tests.support import builders
from tests.support.builders import BATCH, N1, N2, S0, S1, T0, T1, A
from tests.support.controller import cluster_of, running, starting, training
from tests.support.sizes import examples
from tests.unit.controlplane.core.steps import ON_N1, Story, place, played, stories, submit

KINDS: tuple[type[AgentEvent], ...] = get_args(AgentEvent)
OF_GROUPS: tuple[type[AgentEvent], ...] = (
    WorkerReady, StoreOpened, GroupFormed, JoinFailed, GroupBroken, Quiesced, Suspended,
    EpochReported, WorkerExited,
)  # fmt: skip
INTS = (1, 2, 0, 3, -1, 2**63 - 1, -(2**63))
FLOATS = (1.0, 0.0, -1.0, math.nan, math.inf, -math.inf, 1e308, 5e-324)
TEXTS = ("", "no room", "CUDA out of memory", "127.0.0.1:1", "\x1b[2J")
SLOTS: tuple[SlotId, ...] = (S0, S1, T0, T1)
GHOST = JobId("ghost-9")
ANY = st.integers(0, 15)
SIZE = settings(
    max_examples=examples(250),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class Hostile(RuleBasedStateMachine):
    """Jobs on two nodes that train as they should, and reports of anything in between."""

    def __init__(self) -> None:
        super().__init__()
        self.controller = cluster_of(n1=2, n2=2)

    @initialize(
        slots=st.lists(st.sampled_from(SLOTS), min_size=1, max_size=4, unique=True), well=ANY
    )
    def one_is_ordered(self, slots: list[SlotId], well: int) -> None:
        self.a_job_is_placed(slots)
        self.all_goes_well_for_a_moment(0, well)

    # --- what may happen to good jobs

    @precondition(lambda self: len(self.controller.names) < 3)
    @rule(slots=st.lists(st.sampled_from(SLOTS), min_size=1, max_size=4, unique=True))
    def a_job_is_placed(self, slots: list[SlotId]) -> None:
        accepted = self.controller.state.jobs_accepted
        self.controller.submit("a", slots=(1, 4), max_batch_size=4 * BATCH, retries=1)
        self.place(JobId(f"a-{accepted + 1}"), slots)

    @precondition(lambda self: self.controller.names)
    @rule(
        which=ANY,
        slots=st.lists(st.sampled_from(SLOTS), max_size=4, unique=True),
        late=st.booleans(),
    )
    def a_job_is_moved(self, which: int, slots: list[SlotId], *, late: bool) -> None:
        if late:
            self.controller.now += 100.0
        self.place(pick(self.controller.names, which), slots)

    def place(self, job: JobId, slots: list[SlotId]) -> None:
        share = BATCH // max(1, len(slots))
        self.take(
            builders.proposal(
                {job: dict.fromkeys(slots, share)}, based_on=self.controller.state.version
            )
        )

    @precondition(lambda self: self.controller.names)
    @rule(which=ANY, how=st.sampled_from(["pause", "resume", "pause", "resume", "cancel"]))
    def a_user_intervenes(self, which: int, how: str) -> None:
        job = pick(self.controller.names, which)
        ask: dict[str, Any] = {
            "cancel": builders.cancelled, "pause": builders.paused, "resume": builders.resumed
        }  # fmt: skip
        self.take(ask[how](job))

    @precondition(lambda self: self.controller.names)
    @rule(which=ANY, messages=st.sampled_from((1, 2, 3, 5, 20)))
    def all_goes_well_for_a_moment(self, which: int, messages: int) -> None:
        name = pick(self.controller.names, which)
        for _ in range(messages):
            said = next(expected(self.controller.job(name)), None)
            if said is None:
                return
            self.tell(*said)

    @rule(node=st.sampled_from((N1, N2)), how=st.sampled_from(["lost", "greets", "forgets"]))
    def a_node_comes_or_goes(self, node: NodeId, how: str) -> None:
        if how == "lost":
            self.check(self.controller.lose(node))
            return
        here = self.controller.state.slot_index.workers_on(node)
        seen = [
            builders.seen(
                job.job, worker.version, rank=worker.rank, slot=int(worker.slot.rpartition("/")[2])
            )
            for job, worker in here
        ]
        boot = self.controller.state.nodes[node].boot
        self.take(builders.greeting(node, *(seen if how == "greets" else ()), slots=2, boot=boot))

    @rule(node=st.sampled_from((N1, N2)), within_s=st.sampled_from((None, 0.0, 100.0, -1.0)))
    def a_node_is_drained_or_given_back(self, node: NodeId, within_s: float | None) -> None:
        if node in self.controller.state.draining:
            self.take(UndrainRequested(node=node, user="ann"))
        else:
            self.take(DrainRequested(node=node, user="ann", reason="", within_s=within_s))

    @rule(seconds=st.sampled_from((1.0, 700.0, 2000.0)))
    def time_passes(self, seconds: float) -> None:
        self.controller.now += seconds
        for event in self.controller.due():
            self.take(event)

    # --- what may be said

    @rule(
        kind=st.sampled_from((*KINDS, *OF_GROUPS, *OF_GROUPS)),
        which=ANY,
        whose=ANY,
        group=st.sampled_from((0, 1, -1, 2)),
        number=st.sampled_from(INTS),
        fraction=st.sampled_from(FLOATS),
        text=st.sampled_from(TEXTS),
        flag=st.booleans(),
        strange=st.sampled_from(("", "", "", "", "ghost", "elsewhere", "unborn")),
    )
    def a_node_says_anything(  # noqa: PLR0917
        self,
        kind: type[AgentEvent],
        which: int,
        whose: int,
        group: int,
        number: int,
        fraction: float,
        text: str,
        strange: str,
        *,
        flag: bool,
    ) -> None:
        job = self.controller.job(JobId(f"a-{1 + which % self.controller.state.jobs_accepted}"))
        worker = pick(list(job.workers.values()), whose) if job.workers else None
        given = {int: number, float: fraction, str: text, bool: flag}
        fields = {name: value_of(hint, given) for name, hint in get_type_hints(kind).items()}
        fields["job"] = GHOST if strange == "ghost" else job.job
        if "group" in fields:
            fields["group"] = Version(max(0, job.version + group))
        if "pid" in fields:
            fields["pid"] = 4711  # the wire refuses numbers that are not positive
        if issubclass(kind, WorkerEvent) and worker is not None:
            fields["version"], fields["rank"] = worker.version, worker.rank
            if strange == "unborn":
                fields["rank"] = Rank(7)
        elif kind is JobCleared:
            fields["version"] = Version(job.version + group)
        if issubclass(kind, ScriptReport) and worker is not None:
            fields["index"] = worker.reports + 1
        if kind is NodeHealth:
            fields = {"problems": (text,) if flag else ()}
        elif kind is NodeNoticed:
            within_s = (
                fraction if 0.0 <= fraction <= MAX_NOTICE_S else 0.0
            )  # the wire refuses others
            fields = {"within_s": within_s, "reason": text}
        node = node_of(worker.slot) if worker is not None else N1
        if strange == "elsewhere":
            node = N2 if node == N1 else N1
        self.tell(node, kind(**fields))

    # --- how

    def tell(self, node: NodeId, event: AgentEvent) -> None:
        self.check(self.controller.tell(node, event))

    def take(self, event: Input) -> None:
        self.check(self.controller.take(event))

    def check(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Announce):
                encode(command.event)
        self.controller.view()

    def teardown(self) -> None:
        again = replay((at, input_from(body)) for at, body in self.controller.history)
        assert written(again.state) == written(self.controller.state)


def written(state: State) -> bytes:
    return msgspec.msgpack.encode(state)


def pick(choices: list[Any], which: int) -> Any:
    return choices[which % len(choices)]


def value_of(hint: Any, given: dict[type, Any]) -> Any:
    """A value for a field of that type."""
    hint = getattr(hint, "__supertype__", hint)  # of a NewType
    if hint in given:
        return given[hint]
    parts = get_args(hint)
    if type(None) in parts:
        return value_of(parts[0], given) if given[bool] else None
    if getattr(hint, "__origin__", None) is dict:
        return {"accuracy": given[float], "noise_scale": given[float], given[str][:20]: 1.0}
    if getattr(hint, "__origin__", None) is tuple:
        return ()
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint(**{name: value_of(one, given) for name, one in get_type_hints(hint).items()})
    raise AssertionError(f"no value for {hint}")


def expected(job: Job) -> Iterator[tuple[NodeId, AgentEvent]]:
    """What the workers of a job say next when all goes well."""
    status, change = job.status, job.change
    for worker in job.workers.values():
        for event in _own_way(job, worker):
            yield node_of(worker.slot), event
    if isinstance(status, Starting) and status.forming:
        for member in status.group.members:
            worker = job.workers[member.worker]
            if worker.phase is WorkerPhase.READY:
                yield said(builders.formed, job, worker, group=status.group.version)
    if not isinstance(status, Rescaling) or change is None:
        return
    version, members = change.group.version, [job.workers[m.worker] for m in change.group.members]
    if change.phase is RescalePhase.PREPARING and members and not change.store:
        yield said(builders.store, job, members[0], group=version, port=29500)
    elif change.phase is RescalePhase.SWITCHING and change.kind == SUSPEND:
        yield said(builders.suspended, job, job.group_workers()[0], group=version)
    elif change.phase in {RescalePhase.SWITCHING, RescalePhase.REJOINING}:
        for worker in members:
            if worker.group_version != version:
                yield said(builders.formed, job, worker, group=version)
    elif change.phase is RescalePhase.QUIESCING:
        for worker in members:
            if worker.worker not in change.quiesce_points:
                yield said(builders.quiesced, job, worker, group=version)


def _own_way(job: Job, worker: Worker) -> Iterator[AgentEvent]:
    born = {"version": worker.version, "rank": worker.rank}
    if worker.phase is WorkerPhase.ORDERED:
        yield builders.started(job.job, **born)
    elif worker.phase is WorkerPhase.STARTED and not worker.reserved:
        yield builders.ready(job.job, **born, index=worker.reports + 1, port=29500)
    elif worker.phase in {WorkerPhase.LEAVING, WorkerPhase.RETIRING}:
        yield builders.exited(job.job, **born, code=0)


def said(build: Any, job: Job, worker: Worker, **more: Any) -> tuple[NodeId, AgentEvent]:
    born = {"version": worker.version, "rank": worker.rank, "index": worker.reports + 1}
    return node_of(worker.slot), build(job.job, **born, **more)


TestHostile = Hostile.TestCase
TestHostile.settings = SIZE


# --- those that were met


def ignored(reason: str) -> dict[str, Any]:
    about: dict[str, Any] = {"rank": 0, "slot": S0, "version": 1}
    return {"commands": [builders.news("worker.report_ignored", A, **about, reason=reason)]}


HALF_FORMED = [
    submit(slots=(1, 4), max_batch_size=4 * BATCH), place({A: ON_N1}),
    *(say(A, rank=rank) for rank in (0, 1) for say in (builders.started, builders.ready)),
    builders.formed(A),
]  # fmt: skip
MET: dict[str, Story] = {
    "a worker that is ready a second time changes nothing": [
        running, builders.ready(A, index=9),
        ignored('report "ready" is impossible: the worker is member and the job is running') | {"phase": "running"},
    ],
    "a worker that was never ready joins no group": [
        starting, builders.formed(A, index=1),
        ignored('report "joined its group" is impossible: the worker is ordered and the job is starting'),
    ],
    "a worker is not suspended that nobody asked to pause": [
        lambda: training(cluster_of(n1=2), S0, S1), builders.exited(A, rank=1, signal=9), builders.suspended(A, index=3, group=2),
        ignored('report "suspended" is impossible: the worker is member and the job is rescaling') | {"phase": "rescaling"},
    ],
    "a group that breaks before it ever trained starts again": [
        lambda: cluster_of(n1=2), *HALF_FORMED, builders.broken(A, index=3, group=2, error="gone"), {"phase": "paused"},
    ],
}  # fmt: skip


@stories(MET)
def test_a_report_that_cannot_be_is_ignored(story: Story) -> None:
    for found, expected in played(*story):
        assert found == expected


def test_a_sum_of_absurd_reports_can_still_be_written_down() -> None:
    controller = running()
    absurd = {"epoch_samples": 2**63 - 1, "trained_samples": -(2**63)}

    for epoch in (1, 2, 3):
        controller.tell(N1, builders.epoch_end(A, epoch, **absurd))

    assert controller.job(A).progress.untrained_samples == 2**53
    assert written(controller.state)
