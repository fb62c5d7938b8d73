"""Messages between node agent, zygote and training library, on one host."""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.ids import JobId, Pid, Rank, Version
from schemas.jobs import JobSpec
from schemas.nodes import Group, Member
from schemas.wire import Message
from schemas.wire.agent import START, StepsReported, WorkerStalled
from schemas.wire.sweeps import UnitTask

ZYGOTE_TITLE: Final = "ones: zygote"  # process title, followed by the path of the socket


class Assignment(Message, tag="worker.assignment.3"):
    """Orders for one worker, which the agent writes into the worker's folder before the fork."""

    job: JobId
    version: Version
    rank: Rank
    slot: int
    group: Group
    spec: JobSpec
    workdir: str  # the extracted snapshot
    checkpoints: str  # the job's checkpoint folder
    socket: str  # the agent's ipc address
    env: dict[str, str]  # variables in addition to the zygote's
    address: str = "127.0.0.1"  # address at which workers on other nodes reach this worker
    kind: str = START  # join: the job is training, and its members hand over the state
    granted: bool = True  # the slot's device is free; False: `SlotGranted` follows
    states: str = ""  # folder of a sweep's states on the node
    token: str = ""  # repeated in `WorkerHello`; empty: agent or zygote is older
    user: str = ""  # owner of the job; empty: older agent
    journal: str = ""  # of the job, see `GroupDelta`
    environment: str = ""  # folder of the environment that the worker uses; empty: none
    python: str = ""  # interpreter on which that environment is based
    container: tuple[str, ...] = ()  # beginning of the command that runs its program; empty: none


class ShellOrder(Message, tag="worker.shell_order.1"):
    """A file beside the assignment of a shell, with what differs from its worker."""

    argv: tuple[str, ...]
    env: dict[str, str]  # variables in addition to those of the worker
    worker: Pid | None  # process of the worker, with which the shell ends
    limit_s: float  # seconds after which the shell ends


class WorkerHello(Message, tag="worker.hello.1"):
    """Worker to agent: sent when the worker starts and whenever the agent has restarted."""

    job: JobId
    version: Version
    rank: Rank
    pid: Pid
    token: str = ""  # as in the assignment; proves the worker's identity


class Reported(Message, tag="worker.reported.1"):
    """Worker to agent: the report file has grown to `count` reports."""

    job: JobId
    version: Version
    rank: Rank
    count: int


class GroupOrder(Message, tag="worker.group_order.2"):
    """Agent to worker: the newest desired group of the job, ordered by (version, stage).

    A worker that is not in `group` leaves at the boundary step.
    """

    version: Version
    stage: int
    kind: str
    group: Group
    former: tuple[Member, ...] = ()
    store: str = ""
    source: Rank | None = None


class SlotGranted(Message, tag="worker.slot_granted.1"):
    """Agent to worker: the slot's former owner has exited, so the device can be used."""


class Fork(Message, tag="zygote.fork.1"):
    """Agent to zygote: fork a process for the worker of this folder."""

    folder: str
    held: bool = True  # always; zygotes of earlier checkouts start other workers at once


class Held(Message, tag="zygote.held.1"):
    """Zygote to agent: the process exists and waits for `LetGo`."""

    folder: str
    pid: Pid


class LetGo(Message, tag="zygote.let_go.1"):
    """Agent to zygote: release a held worker."""

    folder: str
    error: str = ""  # reason why the worker must not start and the process must exit
    # Variables of the worker that are in no file
    secrets: dict[str, str] = msgspec.field(default_factory=dict)


class Forked(Message, tag="zygote.forked.1"):
    """Zygote to agent: the worker was started."""

    folder: str
    pid: Pid
    started_ticks: int


class ForkFailed(Message, tag="zygote.fork_failed.1"):
    """Zygote to agent: no process was started."""

    folder: str
    error: str


class ZygoteReady(Message, tag="zygote.ready.1"):
    """Zygote to agent, once for each connection: the zygote accepts requests."""

    pid: Pid
    python: str
    torch: str  # version of torch


class ExitStatus(Message, tag="worker.exit_status.1"):
    """A file in the worker's folder, written by the process that reaped the worker."""

    code: int | None
    signal: int | None
    at: float  # seconds since the epoch
    max_rss_bytes: int
    cpu_s: float


class ProcessMark(Message, tag="worker.process_mark.1"):
    """A file in the worker's folder that identifies the process of the worker."""

    pid: Pid
    started_ticks: int


FromWorker = WorkerHello | Reported | StepsReported | WorkerStalled
ToWorker = GroupOrder | SlotGranted | UnitTask
FromZygote = Forked | ForkFailed | Held | ZygoteReady
ToZygote = Fork | LetGo
