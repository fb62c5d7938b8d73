"""A control group for each job of this node, to limit it and to kill what workers leave behind."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import structlog

from nodeagent import cgroups
from nodeagent.settings import Jobs
from schemas.errors import SettingsError
from schemas.ids import JobId, WorkerId
from schemas.jobs import Shape

log = structlog.get_logger("cgroups")
PREFIX: Final = "ones-run-"
ZYGOTES: Final = "zygotes"
GROUPS_NEEDED: Final = (
    "set jobs.cgroup to a group that the agent may divide, such as that of "
    "ones-jobs.service, or remove the limit"
)


def group_of_job(job: JobId) -> str:
    """Return the name of the control group of a job."""
    return f"job-{job}"


class JobGroups:
    """Groups `ones-run-RUN/job-JOB/WORKER` in each tree of this host, if it has trees.

    Limits apply to the job's group and are multiplied by the job's slots here. What a job file
    states for a slot replaces the limit of the settings. A worker's group
    also contains the processes that the worker leaves behind. Methods use kernel files and might
    take some 10 ms, so call them in threads. Concurrent calls are allowed.
    """

    def __init__(
        self,
        trees: tuple[cgroups.Hierarchy, ...] = (),
        run: Path = Path(),
        limits: Jobs | None = None,
    ) -> None:
        self.name = f"{PREFIX}{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]}"
        self._tops = [(tree, tree.base / self.name) for tree in trees]
        self._limits = Jobs() if limits is None else limits
        self._held: dict[WorkerId, JobId] = {}
        self._stated: dict[str, Shape] = {}  # requests of jobs, by group
        self._killed: dict[Path, int] = {}  # numbers of killed processes that were reported
        self._lock = threading.RLock()

    @property
    def there(self) -> bool:
        """True if this host has control groups for jobs."""
        return bool(self._tops)

    def bounds(self, controller: str) -> bool:
        """True if this host's control groups have the controller (`MEMORY` or `PIDS`)."""
        return any(controller in tree.controllers for tree, _ in self._tops)

    def use(self, limits: Jobs) -> None:
        """Apply new limits (per slot) to all jobs. A job that exceeds a new limit keeps the old."""
        with self._lock:
            self._limits = limits
            try:
                self._divide()
            except OSError as error:
                log.warning("limits could not be set", file=error.filename, why=error.strerror)
                return
            for job in set(self._held.values()):
                self._reduce_limits(job)

    def open(self) -> None:
        """Prepare the trees for jobs, and remove empty groups that any agent left."""
        with self._lock:
            try:
                self._divide()
            except OSError as error:
                what = f"jobs: limits cannot be set: {error.filename}: {error.strerror}"
                raise SettingsError(what, GROUPS_NEEDED, "jobs.memory_bytes") from None
            for tree, _ in self._tops:
                for group in cgroups.below(tree.base):
                    if group.name.startswith(PREFIX):
                        cgroups.remove(group)

    def adopt(
        self, worker: WorkerId, job: JobId, pid: int | None, stated: Shape | None = None
    ) -> None:
        """Register a worker of an earlier agent, and move its process, if any, into its group."""
        try:
            self.hold(worker, job, stated)
            if pid is not None:
                self.enter(worker, pid)
        except OSError as error:
            log.warning("limits could not be set", job=job, file=error.filename, why=error.strerror)

    def end_left(self) -> None:
        """Kill processes of workers that exited while no agent ran."""
        with self._lock:
            left = [leaf for leaf in self._leaves() if leaf.name not in {*self._held, ZYGOTES}]
        for leaf in left:
            if cgroups.members(leaf):
                log.warning("killing processes that a worker left", group=str(leaf))
            cgroups.end_all(leaf)
        self.tidy()

    def hold(self, worker: WorkerId, job: JobId, stated: Shape | None = None) -> None:
        """Register a worker that is about to start. This adds one slot to the limits of its job.

        `stated` has the cores and the memory that the job states for each slot.
        """
        group = group_of_job(job)
        with self._lock, self._ignored_without_limits():
            self._held[worker] = job
            if stated is not None:
                self._stated[group] = stated
            held = [name for name, other in self._held.items() if other == job]
            try:
                self._make_leaves(group, held, len(held))
            except FileNotFoundError:  # another agent, starting, removed the empty group
                self._make_leaves(group, held, len(held))

    def enter(self, worker: WorkerId, pid: int) -> None:
        """Move a worker's process, with its later children, into the worker's group.

        A process that exited is ignored.
        """
        if (job := self._held.get(worker)) is not None:
            self._enter(group_of_job(job), worker, pid)

    def enter_zygote(self, group: str, pid: int) -> None:
        """Move a zygote into the control group of the job or user that it serves.

        A user's group has the limits of one slot.
        """
        self._enter(group, ZYGOTES, pid)

    def processes(self, worker: WorkerId) -> list[int]:
        """Return the processes in a worker's group. Without groups there are none."""
        group = group_of_job(self._held.get(worker, JobId("")))
        return [pid for _, top in self._tops for pid in cgroups.members(top / group / worker)]

    def release(self, worker: WorkerId) -> int | None:
        """Kill the processes left by a worker that exited or failed to start, and remove its group.

        Return the job's memory limit here in bytes if processes were killed for exceeding it.
        """
        job = self._held.get(worker)
        if job is None:
            return None
        exceeded = self._exceeded(job, worker)
        limit = self._memory_bytes(group_of_job(job)) * self._slots(group_of_job(job))
        leaves = [top / group_of_job(job) / worker for _, top in self._tops]
        for leaf in leaves:
            cgroups.end_all(leaf)
        with self._lock:
            self._held.pop(worker, None)
            for leaf in leaves:
                cgroups.remove(leaf)
            last = job not in self._held.values()
            if last:
                self._stated.pop(group_of_job(job), None)
            else:
                self._reduce_limits(job)
        if last:  # a zygote may have left processes, too
            for _, top in self._tops:
                cgroups.end_all(top / group_of_job(job) / ZYGOTES)
        self.tidy()
        return limit if exceeded and limit else None

    def tidy(self) -> None:
        """Remove groups of jobs that have no workers here."""
        with self._lock:
            held = {group_of_job(job) for job in self._held.values()}
            for _, top in self._tops:
                for group in cgroups.below(top):
                    if group.name not in held and cgroups.remove(group):
                        self._killed.pop(group, None)

    def close(self) -> None:
        """Remove empty groups when the agent exits. Groups with workers stay."""
        self.tidy()
        for _, top in self._tops:
            cgroups.remove(top)

    def end_everything(self) -> None:
        """Kill all processes in groups of this node, and remove the groups."""
        for leaf in list(self._leaves()):
            cgroups.end_all(leaf)
        for _, top in self._tops:
            cgroups.remove(top)

    def _leaves(self) -> Iterator[Path]:
        for _, top in self._tops:
            for group in cgroups.below(top):
                yield from cgroups.below(group)

    def _exceeded(self, job: JobId, worker: WorkerId) -> bool:
        found = False
        for tree, top in self._tops:
            group = top / group_of_job(job)
            count = cgroups.killed_for_memory(tree, group, group / worker)
            known = group if tree.unified else group / worker
            found = found or count > self._killed.get(known, 0)
            if tree.unified:
                self._killed[known] = count
        return found

    def _divide(self) -> None:
        """Enable controllers for the jobs' groups. Version 2 requires parents without processes."""
        stated = self._stated.values()
        wanted = {
            cgroups.MEMORY: self._limits.memory_bytes or any(one.memory_bytes for one in stated),
            cgroups.PIDS: self._limits.pids,
            cgroups.CPU: any(one.cpus for one in stated),
        }
        names = frozenset(name for name, most in wanted.items() if most)
        for tree, top in self._tops:
            if tree.unified and names & tree.controllers:
                cgroups.divide(tree.base, names & tree.controllers)
                top.mkdir(exist_ok=True)
                cgroups.divide(top, names & tree.controllers)

    def _make_leaves(self, group: str, names: Sequence[str], slots: int) -> None:
        with self._ignored_without_limits():
            self._divide()  # a starting agent removes empty groups, including its own
        for name in names:
            self._make_leaf(group, name)
        self._bound(group, slots)

    def _make_leaf(self, group: str, name: str) -> None:
        for _, top in self._tops:
            (top / group / name).mkdir(parents=True, exist_ok=True)

    def _enter(self, group: str, name: str, pid: int) -> None:
        with self._ignored_without_limits():
            try:
                self._put(group, name, pid)
            except FileNotFoundError:  # another agent, starting, removed the empty group
                with self._lock:
                    self._make_leaves(group, [name], max(1, self._slots(group)))
                self._put(group, name, pid)

    def _put(self, group: str, name: str, pid: int) -> None:
        for _, top in self._tops:
            cgroups.enter(top / group / name, pid)

    def _slots(self, group: str) -> int:
        return sum(group_of_job(job) == group for job in self._held.values())

    def _memory_bytes(self, group: str) -> int:
        """Return the memory limit of a slot, or 0 for none."""
        stated = self._stated.get(group)
        return (stated.memory_bytes if stated else 0) or self._limits.memory_bytes

    def _bound(self, group: str, slots: int) -> None:
        for tree, top in self._tops:
            if cgroups.MEMORY in tree.controllers:
                cgroups.bound_memory(tree, top / group, self._memory_bytes(group) * slots)
            if cgroups.CPU in tree.controllers and (stated := self._stated.get(group)):
                cgroups.bound_cpus(tree, top / group, stated.cpus * slots)
            if cgroups.PIDS in tree.controllers:
                cgroups.bound_pids(top / group, self._limits.pids * slots)

    def _reduce_limits(self, job: JobId) -> None:
        """Reduce the limits of a job. Version 1 refuses a limit below the current use."""
        try:
            group = group_of_job(job)
            self._bound(group, self._slots(group))
        except OSError as error:
            log.warning(
                "limit could not be changed", job=job, file=error.filename, why=error.strerror
            )

    @contextlib.contextmanager
    def _ignored_without_limits(self) -> Iterator[None]:
        """If no limits are set, log errors of the `with` block instead of raising them."""
        try:
            yield
        except OSError as error:
            if self._limits.memory_bytes or self._limits.pids:
                raise
            log.warning("control group not available", file=error.filename, why=error.strerror)
