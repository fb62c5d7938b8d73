"""Machinery of every benchmark: command line, progress, folders, waits, tables and figures."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from controlplane.sim.experiment import ExperimentProgress
    from tests.support.cluster import Cluster

AGAIN_S: Final = 10.0
SELDOM_S: Final = 1.0
Item = TypeVar("Item")


def arguments(
    about: str | None, quick: str = "fewer repeats", **own: tuple[Any, Any, str]
) -> argparse.Namespace:
    """Parse the command line of a benchmark and begin to print its progress.

    Args:
        about: the benchmark's docstring.
        quick: what `--quick` reduces, which takes at most two minutes on two idle cores.
        own: further options by name, each with its type (bool: a switch), default (...: it has to
            be given), and help.
    """
    made = argparse.ArgumentParser(prog=f"bin/bench {Path(sys.argv[0]).stem}", description=about)
    made.add_argument("--quick", action="store_true", help=f"{quick}; at most two minutes")
    made.add_argument("--json", type=Path, help="write the figures here as one flat object")
    for name, (kind, default, said) in own.items():
        named = made.add_argument(
            f"--{name.replace('_', '-')}",
            **({"action": "store_true"} if kind is bool else {"type": kind, "default": default}),
            help=said,
        )
        named.required = default is ...
    chosen = made.parse_args()
    threading.Thread(target=_progress.repeat, daemon=True).start()
    return chosen


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return the type of an option that names some of `known`, with commas."""

    def names(text: str) -> list[str]:
        found = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"no {name!r}; there are {', '.join(known)}")
        return found

    return names


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
    """Yield `of` items, such as jobs (`what`); before each, print its number."""
    coming = iter(items)
    for number in range(1, of + 1):
        now(f"{what} {number} of {of}")
        yield next(coming)


def simulated(state: ExperimentProgress) -> None:
    """Print the progress of an experiment; for its `on_progress`."""
    now(f"{state.done} of {state.total} simulations are done")


class Printed(NamedTuple):
    """A table that a benchmark printed."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


printed: Final[list[Printed]] = []  # by this process


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table, and add it to `printed`."""
    cells = [[f"{c:.4g}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    printed.append(Printed(title, columns, cells))
    shown = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for column in columns:
        shown.add_column(column, justify="left" if column == columns[0] else "right")
    for row in cells:
        shown.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(shown)
    sys.stdout.flush()


def say(text: str) -> None:
    """Print lines."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write(figures: Mapping[str, float], path: Path | None) -> None:
    """Write the figures, if a file was asked for; JSON has null for infinity."""
    if path is not None:
        finite = {name: one if math.isfinite(one) else None for name, one in figures.items()}
        path.write_text(json.dumps(finite, indent=2) + "\n")


def finish(figures: Mapping[str, float], path: Path | None, title: str = "figures") -> None:
    """Print and write the figures."""
    table(title, ["figure", "value"], list(figures.items()))
    write(figures, path)


@contextlib.contextmanager
def folder(keep: Path | None = None) -> Iterator[Path]:
    """Yield `keep`, or a temporary folder that is deleted afterwards."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="ones-bench-") as made:
        yield Path(made)


@contextlib.contextmanager
def running(cluster: Cluster, controller: str = "", agent: str = "") -> Iterator[dict[str, Any]]:
    """Start a cluster and yield its process ids; stop the cluster afterwards.

    Args:
        cluster: which.
        controller: lines at the end of the controller's settings.
        agent: lines at the beginning of the first agent's settings.
    """
    try:
        pids = cluster.up()
        if controller or agent:
            cluster.down()
            files = (cluster.home / name for name in ("controller.toml", "agent-1.toml"))
            for file, first, last in zip(files, ("", agent), (controller, ""), strict=True):
                file.write_text(first + file.read_text(encoding="utf-8") + last, encoding="utf-8")
            pids = cluster.up()
        yield pids
    finally:
        if (cluster.home / "controller.toml").exists():
            cluster.down()


def until(
    holds: Callable[[], object],
    limit_s: float,
    look_s: float = 0.5,
    said: Callable[[], object] = lambda: "too late",
) -> None:
    """Wait until `holds`; fail with `said` after `limit_s`."""
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, said()
        time.sleep(look_s)


def seeds(text: str) -> range:
    """Return the seeds of FIRST-LAST, or of FIRST alone."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def quantile(samples: Iterable[float], share: float) -> float:
    """Return the smallest sample that is not below `share` of them, or nan."""
    ranked = sorted(samples)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else math.nan


def ratios(key: str, ours: Iterable[float], theirs: Iterable[float]) -> dict[str, float]:
    """Return the geometric mean of the ratios of paired figures, and each of them by its number."""
    each = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {key: geometric_mean(each)} | {f"{key}_{n}": one for n, one in enumerate(each, start=1)}
