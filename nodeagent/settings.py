"""Settings of the agent."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

import msgspec

from schemas.host import settings
from schemas.host.archives import ArchiveBounds
from schemas.wire.agent import MAX_NOTICE_S

DAY_S: Final = 86_400.0
MAX_FENCE_S: Final = 3600.0
MIN_FENCE_S: Final = 3.0  # a third of it is the longest pause between heartbeats
Interval = Annotated[float, msgspec.Meta(ge=0)]  # seconds
Bytes = Annotated[int, msgspec.Meta(ge=0)]


class Controller(msgspec.Struct, frozen=True, kw_only=True):
    """Address of the controller. The controller's welcome names its other ports."""

    host: str = "127.0.0.1"  # host name or address; with standbys several, with commas between
    agents: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 7701  # its port for agents
    key: str = "keys/server.key"  # public key of the controller

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of the controllers, of which one is active."""
        return tuple(host.strip() for host in self.host.split(","))


Limit = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Jobs(msgspec.Struct, frozen=True, kw_only=True):
    """Accounts and limits of the jobs of this node."""

    run_as: Literal["", "agent", "submitter", "job"] = ""  # default: what is safe on this host
    users: dict[str, str] = {}  # account of each user, for run_as = "submitter"
    uids: tuple[int, int] = (0x7000_0000, 0x1000_0000)  # first and count, for run_as = "job"
    trust_each_other: bool = False  # all users of the cluster may read each other's files
    files: Limit = 0  # open files of one process; 0: the agent's limit
    pids: Limit = 0  # processes and threads for each slot of a job here; 0: the agent's limit
    memory_bytes: Bytes = 0  # for each slot of a job here; 0: unlimited
    disk_bytes: Bytes = 0  # of a job's files in one folder; 0: half of the file system
    cgroup: str = ""  # parent of the jobs' control groups; default: the agent's own group
    variables: tuple[str, ...] = ()  # of the agent, which jobs get too; patterns such as "HF_*"


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """Notices that the node will go away, at which its jobs move to other nodes."""

    on_term_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_NOTICE_S)] = 0.0  # 0: TERM is no notice
    file: str = ""  # file whose appearance is a notice; it may contain the seconds that are left
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_NOTICE_S)] = 30.0  # if it contains none


class Containers(msgspec.Struct, frozen=True, kw_only=True):
    """Engine that runs jobs with an image."""

    engine: Literal["", "podman"] = ""  # "": this node runs no containers
    options: tuple[str, ...] = ()  # of `podman run`, such as "--device=nvidia.com/gpu=all"


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """Cores and memory that the node sets aside for jobs without slots."""

    cpus: Annotated[float, msgspec.Meta(ge=0)] | None = None  # default: a 16th of the cores, >= 1
    memory_bytes: Bytes | None = None  # default: a 16th of the memory


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of an agent's TOML file. Relative paths start at the file's folder."""

    EXAMPLES: ClassVar = {"node": '"node-1"'}

    node: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]  # its name
    controller: Controller = Controller()
    key: str = ""  # default: keys/NODE.key_secret
    address: str = "127.0.0.1"  # address at which workers on other nodes reach workers here
    states_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0  # for other nodes; 0: any
    metrics: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0  # HTTP, for Prometheus; 0: off
    devices: str = "auto"  # "auto": all GPUs, else CPU slots; "cpu": CPU slots
    slots: int = 4  # CPU slots, where GPUs are not used
    cores: int = 0  # shared by the slots; 0: as many as the agent may use
    python: str = ""  # interpreter of jobs that name none; default: the agent's own
    run: str = "run"  # sockets and worker folders; must outlive the agent process
    work: str = "work"  # working directories of jobs
    checkpoints: str = "checkpoints"  # shared by all nodes that a job may resume on
    kill_grace_s: Interval = 10.0  # between TERM and KILL
    # Time without a reply of the controller after which workers are stopped; 0: never.
    fence_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_FENCE_S)] = 0.0
    keep_work_s: Interval = 7 * DAY_S  # working directories and states, after a job's end
    keep_work_bytes: Bytes = 100 << 30  # of all ended jobs; states may use as much again
    keep_checkpoints_s: Interval = 30 * DAY_S  # after a job's end
    keep_checkpoints_bytes: Bytes = 500 << 30  # of all ended jobs
    workdir: ArchiveBounds = ArchiveBounds()  # limits of an unpacked working directory
    jobs: Jobs = Jobs()
    notice: Notice = Notice()
    containers: Containers = Containers()
    places: Places = Places()
    labels: dict[str, str] = {}  # by which jobs choose nodes
    log_bytes: Bytes = 1 << 30  # of one worker's output on this node's disk; more is dropped
    disk_reserve_bytes: Bytes = 64 << 20  # a node with less free space starts no new workers
    pid_file: str = ""  # file for the number of the process; "": none


def load(path: Path) -> AgentSettings:
    """Return the settings in `path`, overridden by `ONES__KEY` variables, with unresolved paths.

    Raises:
        SettingsError: if the file cannot be read, a key is unknown, or a value has a wrong type.
    """
    return settings.load(AgentSettings, path, os.environ)


def python_of(settings: AgentSettings) -> str:
    """Return the interpreter of jobs that name none."""
    return settings.python or sys.executable
