"""What every benchmark prints and writes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def parser(about: str) -> argparse.ArgumentParser:
    """The command line of a benchmark, to be added to."""
    made = argparse.ArgumentParser(prog="bin/bench", description=about)
    made.add_argument("--quick", action="store_true", help="fewer repeats")
    made.add_argument("--json", type=Path, help="write the figures here as one flat object")
    return made


def arguments(about: str) -> argparse.Namespace:
    """What the command line says, where nothing is added."""
    return parser(about).parse_args()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table."""
    shown = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for column in columns:
        shown.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        shown.add_row(*(f"{c:.4g}" if isinstance(c, float) else str(c) for c in row))
    Console(width=None if sys.stdout.isatty() else 160).print(shown)


def write(figures: dict[str, float], path: Path | None) -> None:
    """Write the figures, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")
