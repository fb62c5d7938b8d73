"""Command line, progress, tables and figures of every benchmark."""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from controlplane.sim.experiment import ExperimentProgress

AGAIN_S: Final = 10.0
SELDOM_S: Final = 1.0
Item = TypeVar("Item")


def parser(about: str, quick: str = "fewer repeats") -> argparse.ArgumentParser:
    """Return the command line that every benchmark has, for options to be added.

    Args:
        about: the benchmark's docstring.
        quick: what `--quick` reduces; it takes at most two minutes on two idle cores.
    """
    made = _Parser(prog=f"bin/bench {Path(sys.argv[0]).stem}", description=about)
    made.add_argument("--quick", action="store_true", help=f"{quick}; at most two minutes")
    made.add_argument("--json", type=Path, help="write the figures here as one flat object")
    return made


def arguments(about: str, quick: str = "fewer repeats") -> argparse.Namespace:
    """Parse the command line of a benchmark without options of its own."""
    return parser(about, quick).parse_args()


class _Parser(argparse.ArgumentParser):
    """Begins to repeat what runs when the arguments are understood."""

    def parse_args(self, *given: Any, **named: Any) -> Any:  # type: ignore[override]
        chosen = super().parse_args(*given, **named)
        threading.Thread(target=_progress.repeat, daemon=True).start()
        return chosen


class _Progress:
    """Prints what runs on stderr: at most every `SELDOM_S`, at least every `AGAIN_S`."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._what, self._printed = "begins", -math.inf

    def now(self, what: str) -> None:
        self._what = what
        if time.monotonic() > self._printed + SELDOM_S:
            self._print()

    def repeat(self) -> None:
        while True:
            time.sleep(max(0.0, self._printed + AGAIN_S - time.monotonic()))
            if time.monotonic() >= self._printed + AGAIN_S:
                self._print()

    def _print(self) -> None:
        self._printed = time.monotonic()
        sys.stderr.write(f"{self._printed - self._began:4.0f} s: {self._what}\n")
        sys.stderr.flush()


_progress: Final = _Progress()


def now(what: str) -> None:
    """Print on stderr what runs now, with the time so far; repeated every ten seconds."""
    _progress.now(what)


def counted(what: str, items: Iterable[Item], of: int) -> Iterator[Item]:
    """Yield the items; before each, print which it is.

    Args:
        what: an item is, for example "job".
        items: may take their time to come, as those of a process pool.
        of: how many there are.
    """
    coming = iter(items)
    for number in range(1, of + 1):
        now(f"{what} {number} of {of}")
        yield next(coming)


def simulated(state: ExperimentProgress) -> None:
    """Print how far an experiment is; for its `on_progress`."""
    now(f"{state.done} of {state.total} simulations are done")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table."""
    shown = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for column in columns:
        shown.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        shown.add_row(*(f"{c:.4g}" if isinstance(c, float) else str(c) for c in row))
    Console(width=None if sys.stdout.isatty() else 160).print(shown)
    sys.stdout.flush()


def write(figures: Mapping[str, float], path: Path | None) -> None:
    """Write the figures, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")
