"""Settings of the autoscaler, which `ones cluster up` writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from controlplane.autoscaler.decision import Bounds
from schemas.errors import SettingsError
from schemas.host import settings

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Slurm(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the Slurm jobs that agents run in; each job is one whole machine."""

    partition: str = ""  # default: Slurm's own default
    time: str = ""  # time limit in Slurm's format, such as 12:00:00; default: the partition's
    gpus: Count = 0  # GPUs of each machine, as in --gpus-per-node
    slots: Count = 0  # CPU slots of a machine without GPUs; 0: its cores
    notice_s: Seconds = 120.0  # before the end of the time limit, when jobs begin to move away
    options: tuple[str, ...] = ()  # further options of sbatch, such as "--account=vision"


class Ray(msgspec.Struct, frozen=True, kw_only=True):
    """The Ray cluster whose nodes run agents."""

    address: str = "auto"  # HOST:PORT of its head; auto: the cluster that this host belongs to
    notice_s: Seconds = 120.0  # that jobs have to leave a node which is returned


class AutoscalerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of autoscaler.toml. Relative paths start at the file's folder."""

    EXAMPLES: ClassVar = {"name": '"ones-3fa2"', "python": '"/opt/ones/bin/python"'}

    engine: Literal["slurm", "ray"]
    name: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9-]{1,40}$")]  # of its jobs at the engine
    python: str  # interpreter of the agents; its path is the same on all machines
    min_nodes: Count
    max_nodes: Count
    wait_s: Seconds = 60.0  # jobs wait for slots this long before nodes are requested
    idle_s: Seconds = 300.0  # a node has no job this long before it is returned
    join_s: Seconds = 120.0  # from the start of an allocation until its agent joins
    interval_s: Annotated[float, msgspec.Meta(ge=0.5, le=60)] = 5.0  # between two decisions
    pid_file: str = ""
    slurm: Slurm = Slurm()
    ray: Ray = Ray()

    @property
    def bounds(self) -> Bounds:
        """Limits for the decision."""
        names = ("min_nodes", "max_nodes", "wait_s", "idle_s", "join_s")
        return Bounds(**{name: getattr(self, name) for name in names})


def load(path: Path) -> AutoscalerSettings:
    """Return the settings in `path`, overridden by `ONES__KEY` variables.

    Raises:
        SettingsError: if the file cannot be read, or a value is invalid.
    """
    found = settings.load(AutoscalerSettings, path, os.environ)
    if found.max_nodes < max(1, found.min_nodes):
        what = f"{path}: max_nodes: {found.max_nodes} is below min_nodes, {found.min_nodes}, or 0"
        raise SettingsError(what, "give max_nodes of at least min_nodes and 1", "max_nodes")
    return found
