"""`ones top`: a live dashboard of jobs and slots."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final, NamedTuple

from cyclopts import Parameter
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from controlplane.cli import job_list
from controlplane.cli.output import (
    ABSENT_AFTER_S,
    COMMON,
    DEFAULT_WIDTH,
    STYLES,
    Common,
    fitting,
    print_data,
)
from controlplane.cli.quota import By, show_by
from controlplane.cli.terminal import terminal_console, width_of
from controlplane.client import BlockingClient
from controlplane.client.allocations import job_colour
from schemas.errors import UnknownJobError
from schemas.ids import JobId, SlotId, slot_id
from schemas.jobs import ENDED
from schemas.wire.client import Cluster, JobSummary, NodeInfo, SearchInfo, WorkerInfo

FREE: Final = "grey35"
BAR: Final = 16  # columns of the progress bar of a job
MIN_REASON_WIDTH: Final = 24  # columns; a narrower reason is omitted
GAP: Final = 2  # blanks between two columns
RIGHT: Final = frozenset(
    {"slots", "batch", "lr", "samples/s", "loss", "predicted", "re-scales", "starts in"}
)
COLUMNS: Final = (
    "job", "state", "progress", "%", "slots", "batch", "lr", "samples/s", "loss", "predicted",
    "promised", "starts in", "re-scales", "uses", "why",
)  # fmt: skip
AS_LISTED: Final = ("slots", "batch", "samples/s", "loss", "predicted")  # as in `ones ps`
OMIT_ORDER: Final = ("progress", "re-scales", "uses", "why", "lr", "batch", "samples/s", "slots")
OPTIONAL_COLUMNS: Final = frozenset(
    {"predicted", "promised", "starts in", "uses"}
)  # not always known


def job_table(jobs: Sequence[JobSummary], colours: Mapping[JobId, int], width: int) -> Table:
    """Return a table of jobs, oldest first, without the columns that do not fit into `width`."""
    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    rows = [_cells(job, colours[job.job]) for job in jobs]
    columns = fitting_columns(width, rows)
    for column in columns:
        right = column in RIGHT
        drawn.add_column(column, justify="right" if right else "left", no_wrap=column != "why")
    for cells in rows:
        drawn.add_row(*(cells[column] for column in columns))
    return drawn


def fitting_columns(width: int, rows: Sequence[Mapping[str, RenderableType]]) -> list[str]:
    """Return the names of the columns that fit into `width`."""
    kept = [
        name
        for name in COLUMNS
        if name not in OPTIONAL_COLUMNS or any(str(row[name]) for row in rows)
    ]
    wide = {name: max([len(name), *(_wide(row[name]) for row in rows)]) for name in kept}
    wide["why"] = min(wide["why"], MIN_REASON_WIDTH)
    return fitting(wide, width, OMIT_ORDER, GAP)


def _wide(cell: RenderableType) -> int:
    return BAR if isinstance(cell, ProgressBar) else cell_len(str(cell))


def _cells(job: JobSummary, colour: int) -> dict[str, RenderableType]:
    known = job.progress is not None
    return {
        "job": Text(job.job, style=job_colour(colour)),
        "state": Text(job.state, style=STYLES.get(job.state, "")),
        "progress": ProgressBar(1.0, job.progress or 0.0, BAR, style=FREE) if known else "",
        "%": f"{job.progress:.0%}" if known else f"epoch {job.epoch}",
        "lr": f"{job.lr:.3g}" if job.lr is not None else "",
        **{name: job_list.COLUMNS[name](job) for name in AS_LISTED},
        "promised": _promised(job),
        "starts in": job_list.start_in_words(job),
        "re-scales": str(job.rescales),
        "uses": job_list.use_in_words(job),
        "why": Text(job.reason, no_wrap=True, overflow="ellipsis"),
    }


def _promised(job: JobSummary) -> Text:
    if job.promised_end is None:
        return Text()
    late = job.expected_end is not None and job.expected_end > job.promised_end
    return Text(job_list.clock(job.promised_end), style="yellow" if late else "")


NAMED_USERS: Final = 3  # if there are more users, only their number is shown


class ClusterStatus(NamedTuple):
    """State of the cluster at one moment."""

    cluster: Cluster
    search: SearchInfo
    jobs: tuple[JobSummary, ...]  # oldest first
    nodes: tuple[NodeInfo, ...]
    owners: Mapping[SlotId, JobId]
    colours: Mapping[JobId, int]  # indices, see `job_colour`


class StatusReader:
    """Reader of a cluster's state; it requests a job's workers only after changes in the feed."""

    def __init__(self, client: BlockingClient, *, ended: bool = False) -> None:
        self._client = client
        self._ended = ended
        self._next_seq = 0  # sequence number in the feed
        self._workers: dict[JobId, tuple[WorkerInfo, ...]] = {}
        self._colours: dict[JobId, int] = {}

    def read(self) -> ClusterStatus:
        """Return the current state of the cluster."""
        cluster = self._client.cluster()
        self._forget_changed(cluster.last_seq)
        jobs = self._client.jobs(ended=self._ended)
        nodes = self._client.nodes()
        on_slots = dict.fromkeys(job for node in nodes for job in node.jobs)
        self._workers = {
            job: self._workers[job] if job in self._workers else self._ask(job) for job in on_slots
        }
        self._colours = assign_colours(self._colours, [*on_slots, *(job.job for job in jobs)])
        owners = owners_of(nodes, self._workers)
        return ClusterStatus(cluster, self._client.search(), jobs, nodes, owners, self._colours)

    def _forget_changed(self, last_seq: int) -> None:
        if self._next_seq and last_seq >= self._next_seq:
            for event in self._client.events(self._next_seq):
                self._next_seq = event.seq + 1
                if event.job is not None and event.event != "job.epoch":
                    self._workers.pop(event.job, None)
        elif not self._next_seq:
            self._next_seq = last_seq + 1

    def _ask(self, job: JobId) -> tuple[WorkerInfo, ...]:
        try:
            return self._client.job(job).workers
        except UnknownJobError:  # a job of a former cluster
            return ()


def top(
    *,
    once: Annotated[bool, Parameter(help="print once instead of continuously")] = False,
    all_: Annotated[bool, Parameter(name=["--all", "-a"], help="include ended jobs")] = False,
    by: Annotated[
        By | None, Parameter(help="print the slots, jobs and usage of each one instead")
    ] = None,
    common: Common = COMMON,
) -> int | None:
    """Show jobs and slots on the whole screen; print them once if stdout is no terminal."""
    live = common.output == "table" and not once and by is None and sys.stdout.isatty()
    with BlockingClient(common.home, ABSENT_AFTER_S if live else None) as client:
        if live:
            client.cluster()  # an error before the screen is taken
        elif by is not None:
            show_by(client, by, common)
        elif common.in_json:
            status = StatusReader(client, ended=all_).read()
            row = {"jobs": status.jobs, "nodes": status.nodes, "search": status.search}
            print_data(row, common.output)
        else:
            console = terminal_console(width_of(sys.stdout) or DEFAULT_WIDTH)
            status = StatusReader(client, ended=all_).read()
            console.print(dashboard(status, console.width))
    if not live:
        return None
    from controlplane.cli.live_top import run  # noqa: PLC0415 - textual is slow to import

    return run(common.home, ended=all_)


# --- the dashboard


def dashboard(status: ClusterStatus, width: int) -> Group:
    """Return the header, the jobs, and the slots of every node."""
    jobs = job_table(status.jobs, status.colours, width)
    return Group(header(status), jobs, slot_strips(status))


def header(status: ClusterStatus) -> Text:
    """Return a line with the cluster's used slots, jobs, users, policy and problems."""
    there = [node for node in status.nodes if node.state != "lost"]
    slots, free = sum(node.slots for node in there), sum(node.free for node in there)
    now = [job for job in status.jobs if job.state not in ENDED]
    running = sum(bool(job.slots) for job in now)
    users = sorted({job.user for job in now if job.user})
    facts = {
        "slots": f"{slots - free} of {slots}",
        "jobs": f"{running} running, {len(now) - running} waiting",
        "users": ", ".join(users) if len(users) <= NAMED_USERS else len(users),
        "policy": status.cluster.policy,
    }
    parts = [Text.assemble((f"{name} ", "dim"), str(fact)) for name, fact in facts.items() if fact]
    if status.cluster.stalled:
        parts.append(Text(f"submissions are refused: {status.cluster.stalled}", style="red"))
    if not status.search.running:
        parts.append(Text("search unavailable, free slots are filled greedily", style="yellow"))
    return Text("   ").join(parts)


def slot_strips(status: ClusterStatus) -> RenderableType:
    """Return the slots of every node, in as many columns as fit, and a legend."""
    strips = [slot_strip(node, status.owners, status.colours) for node in status.nodes]
    used = "██ used, in the colour of the job   "
    legend = Text.assemble(used, ("▒▒", FREE), " taken   ", ("░░", FREE), " free")
    return Group(Columns(strips, padding=(0, 3)), legend)


def slot_strip(
    node: NodeInfo, owners: Mapping[SlotId, JobId], colours: Mapping[JobId, int]
) -> Text:
    """Return the slots of a node, coloured by job; slots without a known job are grey."""
    style = "" if node.state == "up" else STYLES.get(node.state, "")
    drawn = Text.assemble((node.node, style), " ")
    if node.state != "up":
        drawn.append(f"{node.state} ", style=style)
    here = [owners.get(slot_id(node.node, index)) for index in range(node.slots)]
    unknown = here.count(None) - node.free
    for owner in here:
        if owner is not None:
            drawn.append("██ ", style=job_colour(colours[owner]))
            continue
        drawn.append("▒▒ " if unknown > 0 else "░░ ", style=FREE)
        unknown -= 1
    drawn.rstrip()
    return drawn


# --- parts of the status


def owners_of(
    nodes: Iterable[NodeInfo], workers: Mapping[JobId, Sequence[WorkerInfo]]
) -> dict[SlotId, JobId]:
    """Return the job of each slot; a worker that is prepared beside another one is ignored."""
    jobs_on = {node.node: node.jobs for node in nodes}
    found: dict[SlotId, tuple[bool, JobId]] = {}
    for job, crew in workers.items():
        for worker in crew:
            if worker.phase == "exited" or job not in jobs_on.get(worker.node, ()):
                continue
            newcomer = worker.phase in {"ordered", "started", "ready"}
            rival = found.get(worker.slot)
            if rival is None or rival[0] > newcomer:
                found[worker.slot] = (newcomer, job)
    return {slot: job for slot, (_, job) in found.items()}


def assign_colours(before: Mapping[JobId, int], jobs: Iterable[JobId]) -> dict[JobId, int]:
    """Return a colour index for each job; known jobs keep theirs, new jobs get unused ones."""
    names = list(dict.fromkeys(jobs))
    colours = {job: before[job] for job in names if job in before}
    free = iter(sorted(set(range(len(names))) - set(colours.values())))
    return {job: colours[job] if job in colours else next(free) for job in names}
