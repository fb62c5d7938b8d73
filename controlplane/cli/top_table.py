"""The table of jobs of `ones top`: as many columns as there is room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from controlplane.cli.output import STYLES
from controlplane.cli.promised_ends import clock
from controlplane.cli.timeline_allocations import job_colour
from schemas.ids import JobId
from schemas.messages.client import JobSummary

FREE: Final = "grey35"
BAR: Final = 16  # columns of a job's progress
WHY_LEAST: Final = 24  # columns; a shorter reason is left out
GAP: Final = 2  # columns between two of them
RIGHT: Final = frozenset({"slots", "batch", "lr", "samples/s", "loss", "predicted", "re-scales"})
COLUMNS: Final = (
    "job", "state", "progress", "%", "slots", "batch", "lr", "samples/s", "loss", "predicted",
    "promised", "re-scales", "why",
)  # fmt: skip
SPARED: Final = ("progress", "re-scales", "why", "lr", "batch", "samples/s", "slots")  # in order
IF_ANY: Final = frozenset({"predicted", "promised"})  # of policies that tell them


def job_table(
    jobs: Sequence[JobSummary], colours: Mapping[JobId, int], width: int, most: int | None = None
) -> Table:
    """Jobs, oldest first; if there is no room for all, those on slots come before the others.

    Args:
        width: columns; what has no room is left out.
        most: lines of jobs; None: all.
    """
    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    shown = chosen(jobs, most)
    rows = [_cells(job, colours[job.job]) for job in shown]
    columns = fitting(width, rows)
    for column in columns:
        right = column in RIGHT
        drawn.add_column(column, justify="right" if right else "left", no_wrap=column != "why")
    for cells in rows:
        drawn.add_row(*(cells[column] for column in columns))
    if len(shown) < len(jobs):
        drawn.add_row(Text(f"and {len(jobs) - len(shown)} more", style="dim"))
    return drawn


def chosen(jobs: Sequence[JobSummary], most: int | None) -> list[JobSummary]:
    """The jobs for which there is room, in their order; those on slots first."""
    if most is None or len(jobs) <= most:
        return list(jobs)
    ranked = sorted(jobs, key=lambda job: job.slots == 0)[: most - 1]
    names = {job.job for job in ranked}
    return [job for job in jobs if job.job in names]


def fitting(width: int, rows: Sequence[Mapping[str, RenderableType]]) -> list[str]:
    """The columns of the table for which there is room.

    Args:
        rows: the cells of each job by column.
    """
    kept = [name for name in COLUMNS if name not in IF_ANY or any(str(row[name]) for row in rows)]
    wide = {name: max([len(name), *(_wide(row[name]) for row in rows)]) for name in kept}
    wide["why"] = min(wide["why"], WHY_LEAST)
    for name in SPARED:
        if sum(wide[column] + GAP for column in kept) - GAP <= width:
            break
        kept.remove(name)
    return kept


def _wide(cell: RenderableType) -> int:
    return BAR if isinstance(cell, ProgressBar) else cell_len(str(cell))


def _cells(job: JobSummary, colour: int) -> dict[str, RenderableType]:
    known = job.progress is not None
    return {
        "job": Text(job.job, style=job_colour(colour)),
        "state": Text(job.state, style=STYLES.get(job.state, "")),
        "progress": ProgressBar(1.0, job.progress or 0.0, BAR, style=FREE) if known else "",
        "%": f"{job.progress:.0%}" if known else f"epoch {job.epoch}",
        "slots": str(job.slots or ""),
        "batch": str(job.global_batch or ""),
        "lr": f"{job.lr:.3g}" if job.lr is not None else "",
        "samples/s": f"{job.samples_per_s:.0f}" if job.samples_per_s else "",
        "loss": f"{job.train_loss:.4g}" if job.train_loss is not None else "",
        "predicted": f"{job.predicted_loss:.4g}" if job.predicted_loss is not None else "",
        "promised": _promised(job),
        "re-scales": str(job.rescales),
        "why": Text(job.reason, no_wrap=True, overflow="ellipsis"),
    }


def _promised(job: JobSummary) -> Text:
    """By when it was promised to be done; yellow where it is expected later."""
    if job.promised_end is None:
        return Text()
    late = job.expected_end is not None and job.expected_end > job.promised_end
    return Text(clock(job.promised_end), style="yellow" if late else "")
