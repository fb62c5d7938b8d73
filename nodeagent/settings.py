"""Agent settings.

Errors of the agent, and what becomes of those that nobody thought of.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

import msgspec
import structlog

from schemas.errors import OnesError
from schemas.host import settings
from schemas.host.archives import ArchiveBounds

DAY_S: Final = 86_400.0
MAX_FENCE_S: Final = 3600.0
LEAST_FENCE_S: Final = 3.0  # heartbeats are a second apart, and an answer takes its time
Interval = Annotated[float, msgspec.Meta(ge=0)]  # seconds
Bytes = Annotated[int, msgspec.Meta(ge=0)]


class Controller(msgspec.Struct, frozen=True, kw_only=True):
    """Where the controller is; its other ports come with its welcome."""

    host: str = "127.0.0.1"
    agents: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 7701
    key: str = "keys/server.key"  # its public key


Limit = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Jobs(msgspec.Struct, frozen=True, kw_only=True):
    """As whom the jobs of this node run."""

    run_as: Literal["", "agent", "submitter", "job"] = ""  # default: what is safe here
    users: dict[str, str] = {}
    uids: tuple[int, int] = (0x7000_0000, 0x1000_0000)  # first and count, of jobs with own ones
    trust_each_other: bool = False  # all users of the cluster may read each other's files
    files: Limit = 0  # that one process may have open; 0: as many as the agent
    pids: Limit = 0  # processes and threads for each slot that a job has here; 0: as the agent
    memory_bytes: Bytes = 0  # for each slot that a job has here; 0: as much as there is
    cgroup: str = ""  # below which jobs have their groups; default: the agent's own


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's TOML file; paths are relative to it."""

    EXAMPLES: ClassVar = {"node": '"node-1"'}

    node: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    controller: Controller = Controller()
    key: str = ""  # default: keys/NODE.key_secret
    address: str = "127.0.0.1"  # where workers on other nodes reach this one's
    states_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = (
        0  # where it serves states of sweeps to them; 0: any
    )
    devices: str = "auto"  # "auto": all GPUs, else CPU slots; "cpu": CPU slots
    slots: int = 4  # CPU slots, where GPUs are not used
    cores: int = 0  # that they share; 0: as many as the agent may use
    python: str = ""  # interpreter of jobs that name none; default: the agent's own
    run: str = "run"  # sockets and worker folders; must outlive the agent process
    work: str = "work"  # working directories of jobs
    checkpoints: str = "checkpoints"  # shared by all nodes that a job may resume on
    kill_grace_s: Interval = 10.0  # between TERM and KILL
    fence_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_FENCE_S)] = (
        0.0  # without an answer of the controller workers are ended after so long; 0: never
    )
    keep_work_s: Interval = 7 * DAY_S  # working directories and states, behind a job's end
    keep_work_bytes: Bytes = 100 << 30  # of all ended jobs; of their states as much again
    keep_checkpoints_s: Interval = 30 * DAY_S  # behind a job's end
    keep_checkpoints_bytes: Bytes = 500 << 30  # of all ended jobs
    workdir: ArchiveBounds = ArchiveBounds()  # of a job's working directory, unpacked
    jobs: Jobs = Jobs()
    log_bytes: Bytes = 1 << 30  # of one worker's output on this node's disk; more is dropped
    disk_reserve_bytes: Bytes = 64 << 20  # a node with less room takes no new workers
    pid_file: str = ""


def load(path: Path) -> AgentSettings:
    """The settings in `path`, overridden by `ONES__KEY` variables.

    Args:
        path: a TOML file; relative paths in it are left as they stand.

    Raises:
        SettingsError: if the file cannot be read, a key is unknown or a value of the wrong type.
    """
    return settings.load(AgentSettings, path, os.environ)


log = structlog.get_logger("agent")


class AgentError(OnesError):
    """Base of what the agent raises on purpose."""

    code = "agent"
    node_fault = False  # the job is not to blame, and another node may well do it


class StartError(AgentError):
    """A worker, or the zygote that would fork it, could not be started."""


class NodeStartError(StartError):
    """The same, for the node's fault."""

    node_fault = True


class WorkspaceError(AgentError):
    """A job's working directory could not be laid out on this node."""


class NodeWorkspaceError(WorkspaceError):
    """The same, for the node's fault."""

    node_fault = True


@contextlib.contextmanager
def passed_over(what: str, **detail: str) -> Iterator[None]:
    """What fails in there is a line in the log, and holds up nothing behind it."""
    try:
        yield
    except Exception:
        log.exception("failed, and passed over", what=what, **detail)
