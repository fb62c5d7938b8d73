"""Node agent, zygote and in-training library, on one host."""

from __future__ import annotations

from typing import Final

from schemas.ids import JobId, Rank, Version
from schemas.jobs import JobSpec
from schemas.nodes import Group, Member
from schemas.wire import Message
from schemas.wire.agent import (
    START,
    EpochReported,
    GroupBroken,
    GroupFormed,
    HopperOpened,
    JoinFailed,
    Quiesced,
    ScriptFailed,
    SlotAwaited,
    StepsReported,
    StoreOpened,
    Suspended,
    TrainingFinished,
    UnitBegun,
    UnitEnded,
    UnitFailed,
    WorkerReady,
)
from schemas.wire.sweeps import UnitTask

ZYGOTE_TITLE: Final = "ones: zygote"  # of its process; the path of its socket follows


class Assignment(Message, tag="worker.assignment.3"):
    """What one worker is to do; a file in its folder, written by the agent before the fork."""

    job: JobId
    version: Version
    rank: Rank
    slot: int
    group: Group
    spec: JobSpec
    workdir: str  # the extracted snapshot
    checkpoints: str  # the job's checkpoint folder
    socket: str  # the agent's ipc address
    env: dict[str, str]  # beside the zygote's own
    address: str = "127.0.0.1"  # where members on other nodes reach this worker
    kind: str = START  # join: the job trains already, its members hand over the state
    granted: bool = True  # the slot's device is free; else it is granted later
    states: str = ""  # folder of the job's states on the node, if it is a sweep
    token: str = ""  # to be shown in greetings; empty: an older agent or zygote knows of none
    user: str = ""  # who submitted the job; empty: an older agent


class WorkerHello(Message, tag="worker.hello.1"):
    """Worker to agent, at the start and whenever an agent comes back."""

    job: JobId
    version: Version
    rank: Rank
    pid: int
    token: str = ""  # of the assignment: shows that it is this worker who speaks


class Reported(Message, tag="worker.reported.1"):
    """Worker to agent: my report file has grown to `count` reports."""

    job: JobId
    version: Version
    rank: Rank
    count: int


class GroupOrder(Message, tag="worker.group_order.2"):
    """Agent to worker: the newest that the controller wants of the job's group.

    Ordered by (version, stage). A worker that is not in `group` leaves at the boundary.
    """

    version: Version
    stage: int
    kind: str
    group: Group
    former: tuple[Member, ...] = ()
    store: str = ""
    source: Rank | None = None


class SlotGranted(Message, tag="worker.slot_granted.1"):
    """Agent to worker: the process that had the slot before has exited, the device is yours."""


class Fork(Message, tag="zygote.fork.1"):
    """Agent to zygote: start the worker whose folder this is."""

    folder: str
    held: bool = False  # the worker waits for a `LetGo` before it begins


class Held(Message, tag="zygote.held.1"):
    """Zygote to agent: the process is there and waits."""

    folder: str
    pid: int


class LetGo(Message, tag="zygote.let_go.1"):
    """Agent to zygote: the worker that is held may begin."""

    folder: str
    error: str = ""  # why it may not: it ends


class Forked(Message, tag="zygote.forked.1"):
    """Zygote to agent."""

    folder: str
    pid: int
    started_ticks: int


class ForkFailed(Message, tag="zygote.fork_failed.1"):
    """Zygote to agent: no process was started."""

    folder: str
    error: str


class ZygoteReady(Message, tag="zygote.ready.1"):
    """Zygote to agent, once for each connection."""

    pid: int
    python: str
    torch: str  # its version
    tokens: bool = False  # its workers show those of their assignments
    holds: bool = False  # it knows `Fork.held`


class ExitStatus(Message, tag="worker.exit_status.1"):
    """A file in the worker's folder, written by the process that reaped it."""

    code: int | None
    signal: int | None
    at: float  # seconds since the epoch
    max_rss_bytes: int
    cpu_s: float


class ProcessMark(Message, tag="worker.process_mark.1"):
    """A file in the worker's folder: which process it is."""

    pid: int
    started_ticks: int


FromWorker = WorkerHello | Reported | StepsReported
ToWorker = GroupOrder | SlotGranted | UnitTask
Report = (
    WorkerReady
    | SlotAwaited
    | StoreOpened
    | GroupFormed
    | JoinFailed
    | GroupBroken
    | Quiesced
    | Suspended
    | EpochReported
    | TrainingFinished
    | HopperOpened
    | UnitBegun
    | UnitEnded
    | UnitFailed
    | ScriptFailed
)
FromZygote = Forked | ForkFailed | Held | ZygoteReady
ToZygote = Fork | LetGo
