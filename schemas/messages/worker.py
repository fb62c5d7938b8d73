"""Node agent, zygote and in-training library, on one host."""

from __future__ import annotations

from schemas.groups import Group
from schemas.ids import JobId, Rank, Version
from schemas.jobs import JobSpec
from schemas.messages import Message
from schemas.messages.agent import (
    EpochReported,
    GroupFormed,
    ScriptFailed,
    StepsReported,
    TrainingFinished,
    WorkerReady,
)


class Assignment(Message, tag="worker.assignment.1"):
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


class WorkerHello(Message, tag="worker.hello.1"):
    """Worker to agent, at the start and whenever an agent comes back."""

    job: JobId
    version: Version
    rank: Rank
    pid: int


class Reported(Message, tag="worker.reported.1"):
    """Worker to agent: my report file has grown to `count` reports."""

    job: JobId
    version: Version
    rank: Rank
    count: int


class SwitchOrder(Message, tag="worker.switch_order.1"):
    """Agent to worker: join the group of this version at the next boundary."""

    version: Version


class Fork(Message, tag="zygote.fork.1"):
    """Agent to zygote: start the worker whose folder this is."""

    folder: str


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
ToWorker = SwitchOrder
Report = WorkerReady | GroupFormed | EpochReported | TrainingFinished | ScriptFailed
FromZygote = Forked | ForkFailed | ZygoteReady
ToZygote = Fork
