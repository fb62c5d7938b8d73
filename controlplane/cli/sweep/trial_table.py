"""Trials of a sweep as a table of a terminal, for `show` and `top`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from controlplane.cli.job_lines import cut
from controlplane.cli.sweep.trial_columns import trial_cells
from controlplane.client.sweeps.tables import best_of
from schemas.messages.client import SweepDetail, TrialInfo

GAP: Final = 2
WHY: Final = "why"
WHY_LEAST: Final = 20  # columns that say something
SPARED: Final = (WHY, "partition", "curve", "slot", "best")  # in order
RIGHT: Final = frozenset({"trial", "epoch", "partition"})
TRIAL_STYLES: Final = {
    "training": "green",
    "done": "bold green",
    "graduated": "bold blue",
    "failed": "bold red",
    "paused": "yellow",
    "stopped": "dim",
    "deleted": "dim",
    "waiting": "cyan",
    "granted": "cyan",
}


def trial_table(detail: SweepDetail, shown: Sequence[TrialInfo], width: int) -> Table:
    """Trials, one a line.

    Args:
        shown: in their order.
        width: columns; what has no room is left out.
    """
    rows = trial_cells(detail, shown)
    columns, why = _fitting(rows, width)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for name in columns:
        right = name in RIGHT or name in detail.spec.search.space
        table.add_column(
            name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis"
        )
    best = best_of(detail)
    for trial, cells in zip(shown, rows, strict=True):
        style = "bold" if best is not None and trial.number == best.trial.number else ""
        drawn = {**cells, WHY: cut(cells.get(WHY, ""), why)}
        table.add_row(*(_styled(name, drawn[name]) for name in columns), style=style)
    return table


def _styled(name: str, cell: str) -> Text:
    style = TRIAL_STYLES.get(cell, "") if name == "state" else "cyan" if name == "curve" else ""
    return Text(cell, style=style)


def _fitting(rows: Sequence[Mapping[str, str]], width: int) -> tuple[list[str], int]:
    """The columns that there is room for, and how wide the reason may be."""
    if not rows:
        return [], 0
    kept = list(rows[0])
    wide = {name: max(cell_len(name), *(cell_len(row[name]) for row in rows)) for name in kept}
    longest = wide.get(WHY, 0)
    wide[WHY] = min(longest, WHY_LEAST)
    for name in SPARED:
        if sum(wide[one] + GAP for one in kept) - GAP <= width:
            break
        kept = [one for one in kept if one != name]
    left = width - sum(wide[one] + GAP for one in kept if one != WHY)
    return kept, min(longest, max(left, 1))
