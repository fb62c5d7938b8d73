"""Prints the transition tables of the core as Markdown.

`python -m tests.support.tables` writes them into the marked sections of the room's README.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

from controlplane.core.commands import IllegalTransitionError
from controlplane.core.model import job_phases, node, rescale, worker
from schemas.ids import Rank, Version, worker_id
from tests.support.builders import S0, A

README: Final = Path(__file__).parents[2] / "controlplane" / "core" / "README.md"
IGNORED: Final = "(ignored)"
NO_ARROW: Final = "-"
SECTION: Final = "<!-- table: {} -->\n{}<!-- end -->"


def job_table() -> str:
    return _printed(job_phases.Phase, job_phases.JobTrigger, _arrows(job_phases.NEXT))


def rescale_table() -> str:
    return _printed(rescale.RescalePhase, rescale.RescaleTrigger, _arrows(rescale.NEXT))


def worker_table() -> str:
    return _printed(worker.WorkerPhase, worker.WorkerTrigger, _worker_cell)


def node_table() -> str:
    return _printed(node.NodePhase, node.NodeTrigger, _arrows(node.NEXT))


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "job": job_table,
    "rescale": rescale_table,
    "worker": worker_table,
    "node": node_table,
}


def section(readme: str, table: str) -> str | None:
    """What stands between the marks of `table`; None if they are not there."""
    found = _marked(table).search(readme)
    return found.group(1) if found else None


def rewritten(readme: str) -> str:
    """`readme` with the tables as they are now between its marks."""
    for name, printed in TABLES.items():
        whole = SECTION.format(name, printed()).replace("\\", r"\\")
        readme = _marked(name).sub(whole, readme)
    return readme


def _marked(table: str) -> re.Pattern[str]:
    return re.compile(rf"<!-- table: {table} -->\n(.*?)<!-- end -->", re.DOTALL)


def _arrows(table: Mapping[Any, Enum]) -> Callable[[Enum, Enum], str]:
    def cell(phase: Enum, trigger: Enum) -> str:
        return str(table[phase, trigger].value) if (phase, trigger) in table else NO_ARROW

    return cell


def _worker_cell(phase: worker.WorkerPhase, trigger: worker.WorkerTrigger) -> str:
    tried = worker_in(phase)
    try:
        moved = worker.advance(tried, trigger)
    except IllegalTransitionError:
        return NO_ARROW
    return tried.phase.value if moved else IGNORED


def worker_in(phase: worker.WorkerPhase) -> worker.Worker:
    return worker.Worker(
        worker=worker_id(A, Version(1), Rank(0)), version=Version(1), rank=Rank(0), slot=S0,
        local_batch=1, phase=phase,
    )  # fmt: skip


def _printed(phases: type[Enum], triggers: type[Enum], cell: Callable[..., str]) -> str:
    rows = [
        ["", *(trigger.value for trigger in triggers)],
        ["---"] * (len(triggers) + 1),
        *(
            [f"**{phase.value}**", *(cell(phase, trigger) for trigger in triggers)]
            for phase in phases
        ),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{README}: wrote the tables {', '.join(TABLES)}\n")
