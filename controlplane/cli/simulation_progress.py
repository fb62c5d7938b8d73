"""How far one simulation is, on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Final

from controlplane.cli.terminal import terminal_console
from controlplane.core.commands import Announce, Command
from controlplane.core.inputs import Input
from controlplane.sim.engine.simulation import Recorder
from schemas.ids import Seconds
from schemas.jobs import ENDED

ENDS: Final = frozenset(f"job.{state}" for state in ENDED)
HOUR_S: Final = 3600.0


@contextlib.contextmanager
def jobs_bar(policy: str, jobs: int) -> Iterator[Recorder | None]:
    """A bar on stderr of the jobs that have ended, for as long as the context lasts.

    Yields:
        What to give `simulate` as `record`; None where nobody looks.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress  # noqa: PLC0415 - slow to import

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("jobs ended"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[at]}"),
    )
    with progress.Progress(
        *columns, console=terminal_console(on_stderr=True), transient=True
    ) as shown:
        task = shown.add_task(f"simulating {policy}", total=jobs, at="")

        def record(now: Seconds, _: Input, commands: Sequence[Command]) -> None:
            if over := ended(commands):
                shown.update(task, advance=over, at=f"hour {now / HOUR_S:.1f}")

        yield record


def ended(commands: Sequence[Command]) -> int:
    """How many jobs ended with these commands of the core.

    Args:
        commands: that followed from one input.
    """
    return sum(isinstance(c, Announce) and c.event.event in ENDS for c in commands)
