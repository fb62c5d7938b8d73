"""`ones ps`: print a table of jobs at any width, once or repeatedly."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TextIO

from cyclopts import Parameter

from controlplane.cli.job_options import pairs_of
from controlplane.cli.output import (
    ABSENT_AFTER_S,
    COLOURS,
    COMMON,
    Common,
    fitting,
    readings,
    say,
    seconds_of,
)
from controlplane.cli.terminal import CONTROL_CHARACTER, drawn, harmless, width_of
from controlplane.client import BlockingClient
from controlplane.client.formats import second, span
from schemas.errors import BadFieldError
from schemas.wire.client import Jobs, JobSummary


def describe_promise(job: JobSummary) -> str:
    """Return a job's promised end and whether the promise was kept, or "" without a promise."""
    if job.promised_end is None:
        return ""
    said = second(job.promised_end)
    if job.ended_at is None:
        expected = job.promised_end if job.expected_end is None else job.expected_end
        if expected == job.promised_end:
            return said
        return f"{said}, expected {clock(expected, job.promised_end)}: {_distance(job, expected)}"
    if job.state != "succeeded":
        return f"{said}, but it {'was ' * (job.state == 'cancelled')}{job.state}"
    done, kept = job.ended_at, "kept" if job.ended_at <= job.promised_end else "broken"
    return f"{said}, done {clock(done, job.promised_end)}: {kept}, {_distance(job, done)}"


def clock(time_s: float, beside_s: float | None = None) -> str:
    """Format a time as time of day (UTC), with the date if `beside_s` is on another day.

    Both times are seconds since the epoch. If `beside_s` is None, the date is omitted.
    """
    whole = second(time_s)
    same = beside_s is None or second(beside_s)[:10] == whole[:10]
    return whole[11:] if same else whole


def _distance(job: JobSummary, came: float) -> str:
    """Return by how much `came` is before or after a job's promised end, such as `5m00s late`."""
    late_s = came - (job.promised_end or came)
    return f"{span(abs(late_s))} {'late' if late_s > 0 else 'early'}"


def start_in_words(job: JobSummary) -> str:
    """Return the time until the expected start of a waiting job, or "" if it is not known."""
    return "" if job.start_at is None else span(max(0.0, job.start_at - time.time()))


MIB: Final = 1 << 20
GIB: Final = 1 << 30


def use_in_words(job: JobSummary) -> str:
    """Return what a job's processes and GPUs use now, or "" if it is not known."""
    parts = []
    if job.cpu_cores is not None and job.memory_bytes is not None:
        parts.append(f"{job.cpu_cores:.1f} cores {_size(job.memory_bytes)}")
    if job.gpu_memory_bytes is not None:
        share = "" if job.gpu_share is None else f" {job.gpu_share:.0%}"
        parts.append(f"GPU{share} {_size(job.gpu_memory_bytes)}")
    return ", ".join(parts)


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


GAP: Final = "  "
WHY: Final = "why"
ALWAYS: Final = frozenset({"job", "state", WHY})
MIN_REASON_WIDTH: Final = 24  # characters; columns are omitted before the reason gets narrower
OMIT_ORDER: Final = (  # the first of these columns is omitted first
    "lr", "queued", "epoch", "metrics", "ran", "predicted", "loss", "user", "samples/s", "promised"
)  # fmt: skip
LEFT_ALIGNED: Final = frozenset({"job", "user", "state", "metrics", WHY})
COLUMNS: Final[dict[str, Callable[[JobSummary], str]]] = {
    "job": lambda job: job.job,
    "user": lambda job: job.user,
    "state": lambda job: job.state,
    "slots": lambda job: str(job.slots or ""),
    "batch": lambda job: str(job.global_batch or ""),
    "lr": lambda job: "" if job.lr is None else f"{job.lr:g}",
    "epoch": lambda job: str(job.epoch),
    "done": lambda job: "" if job.progress is None else f"{job.progress:.0%}",
    "samples/s": lambda job: f"{job.samples_per_s:.0f}" if job.samples_per_s else "",
    "loss": lambda job: "" if job.train_loss is None else f"{job.train_loss:.4g}",
    "predicted": lambda job: "" if job.predicted_loss is None else f"{job.predicted_loss:.4g}",
    "metrics": lambda job: ", ".join(f"{name} {value:.4g}" for name, value in job.metrics.items()),
    "queued": lambda job: span(job.queued_s),
    "ran": lambda job: span(job.running_s),
    "promised": lambda job: "" if job.promised_end is None else clock(job.promised_end),
    WHY: lambda job: job.reason,
}


def job_lines(
    jobs: Sequence[JobSummary], width: int | None, styled: Callable[[str], str] = str
) -> list[str]:
    """Return a table: a header line, and one line for each job.

    If the table is wider than `width` (None: unlimited), the least informative columns are omitted
    first. Then the reason is cut. `styled` adds colours to the state.
    """
    filled = {name: _one_lines([cell(job) for job in jobs]) for name, cell in COLUMNS.items()}
    cells = {name: column for name, column in filled.items() if name in ALWAYS or any(column)}
    wide = {name: max(len(name), _widest(column)) for name, column in cells.items()}
    narrow = wide | {WHY: min(MIN_REASON_WIDTH, wide[WHY])}
    kept = fitting(narrow, width, OMIT_ORDER, len(GAP))
    padded = [_padded([name, *cells[name]], name, wide[name]) for name in kept]
    head, *lines = [_line(parts, width) for parts in zip(*padded, strict=True)]
    if styled is not str:
        left = padded[: kept.index("state")]
        for place, job in enumerate(jobs):
            start = sum(len(column[place + 1]) + len(GAP) for column in left)
            line, end = lines[place], start + len(job.state)
            lines[place] = line[:start] + styled(line[start:end]) + line[end:]
    return [head, *lines]


def _padded(texts: Sequence[str], name: str, wide: int) -> list[str]:
    if all(map(str.isascii, texts)):
        return [text.ljust(wide) if name in LEFT_ALIGNED else text.rjust(wide) for text in texts]
    spaces = [" " * (wide - _columns(text)) for text in texts]
    pairs = zip(texts, spaces, strict=True)
    return [text + space if name in LEFT_ALIGNED else space + text for text, space in pairs]


def _line(parts: Sequence[str], width: int | None) -> str:
    line = GAP.join(parts).rstrip()
    return line if width is None else cut(line, width)


def cut(text: str, width: int) -> str:
    """Shorten `text` to at most `width` columns, with an ellipsis."""
    if len(text) * 2 <= width or _columns(text) <= width:
        return text
    while text and _columns(text) >= width:
        text = text[: min(len(text) - 1, width)]
    return text.rstrip() + "…"


def one_line(text: str) -> str:
    """Return output of a script as one printable line without control characters."""
    if text.isprintable() and (text.isascii() or not CONTROL_CHARACTER.search(text)):
        return text
    line = harmless(" ".join(text.split()))
    return line if line.isprintable() else "".join(c if c.isprintable() else "?" for c in line)


def _one_lines(texts: list[str]) -> list[str]:
    """Apply `one_line` to many texts; return them unchanged if all are printable ASCII."""
    together = "".join(texts)
    if together.isascii() and together.isprintable():
        return texts
    return [one_line(text) for text in texts]


def _widest(texts: list[str]) -> int:
    if all(map(str.isascii, texts)):
        return max(map(len, texts), default=0)
    return max(map(_columns, texts), default=0)


def _columns(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(1 + (unicodedata.east_asian_width(char) in "WF") for char in text)


HOME: Final = "\x1b[H"  # moves the cursor to the top left corner
CLEAR_LINE: Final = "\x1b[K"
CLEAR_BELOW: Final = "\x1b[J"


@Parameter(name="*")
@dataclass(frozen=True)
class Filters:
    """Options that select jobs."""

    state: Annotated[str | None, Parameter(help="only jobs in STATE[,STATE...], ended or not")] = (
        None
    )
    user: Annotated[str | None, Parameter(help="only jobs of this user")] = None
    name: Annotated[
        str | None,
        Parameter(help="only jobs named NAME, NAME-N or matching a pattern such as 'lr-*'"),
    ] = None

    older: Annotated[
        str | None, Parameter(help="only jobs submitted at least so long ago, such as 2h")
    ] = None
    label: Annotated[
        list[str] | None,
        Parameter(name=["--label", "-l"], help="only jobs with this KEY=VALUE", negative=""),
    ] = None

    @property
    def stated(self) -> bool:
        """True if a filter is set."""
        return bool(self.state or self.user or self.name or self.older or self.label)

    def fields(self) -> dict[str, Any]:
        """Return the filters as arguments of `find_jobs` and `history`."""
        return {
            "states": [each.strip() for each in (self.state or "").split(",") if each.strip()],
            "user": self.user or "",
            "name": self.name or "",
            "labels": pairs_of(self.label or ()),
            "older_s": 0.0 if self.older is None else seconds_of(self.older, "older"),
        }


NO_FILTERS: Final = Filters()


@Parameter(name="*")
@dataclass(frozen=True)
class Choice(Filters):
    """The filters of `ones ps`."""

    all_: Annotated[bool, Parameter(name=["--all", "-a"], help="include ended jobs")] = False

    def ask(self, client: BlockingClient) -> Jobs:
        """Request the jobs that match the filters now."""
        return client.find_jobs(ended=self.all_, **self.fields())


def ps(
    *,
    choice: Choice = Choice(),
    watch: Annotated[
        bool, Parameter(name=["--watch", "-w"], help="redraw every second until Ctrl-C")
    ] = False,
    common: Common = COMMON,
) -> None:
    """List jobs, oldest first, one line each; `ones show` prints a job in full."""
    if watch and (common.output != "table" or not sys.stdout.isatty()):
        raise BadFieldError("--watch requires a terminal", "omit -w or -o", "watch")
    with BlockingClient(common.home, ABSENT_AFTER_S if watch else None) as client:
        if watch:
            with contextlib.suppress(KeyboardInterrupt):
                redraw(lambda: choice.ask(client), drawn(sys.stdout), time.sleep)
            return
        found = choice.ask(client)
    if common.output != "table":
        say(common, found.jobs, quiet=(job.job for job in found.jobs))
    else:
        lines = table(found, width_of(sys.stdout))  # escaped already, with our own colours
        drawn(sys.stdout).writelines(f"{line}\n" for line in lines)
    if not found.jobs:
        sys.stderr.write(f"ones: {none_found(choice)}\n")


def table(found: Jobs, width: int | None, *, coloured: bool | None = None) -> list[str]:
    """Return the lines of `ones ps`: header, rule and one line for each job, or [] without jobs.

    If `coloured` is None, colours are used on a terminal unless NO_COLOR is set.
    """
    if not found.jobs:
        return []
    if coloured is None:
        coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    head, *rows = job_lines(found.jobs, width, _coloured if coloured else str)
    return [head, "─" * (len(head) if width is None else width), *rows]


def none_found(choice: Choice) -> str:
    """Return the message that replaces an empty list."""
    filtered, more = choice.stated, "; -a includes ended jobs"
    if choice.all_ or choice.state:
        return "no such job" if filtered else "no job yet"
    return ("no such job" if filtered else "no job waits or runs") + more


def screen(found: Jobs, columns: int, lines: int, note: str = "") -> list[str]:
    """Return the lines of `ps --watch`: as many jobs as fit, then the number of omitted jobs."""
    shown = table(found, columns, coloured="NO_COLOR" not in os.environ)
    waiting = sum(job.state == "queued" for job in found.jobs)
    running = sum(bool(job.slots) for job in found.jobs)
    top = cut(f"{running} on slots, {waiting} queued{note and ' - ' + note}", columns)
    room = max(lines - 2, 1)
    if len(shown) > room:
        more = len(shown) - room + 1
        shown = [*shown[: room - 1], cut(f"{more} more: --state, --user, --name", columns)]
    return [top, *shown]


def redraw(ask: Callable[[], Jobs], out: TextIO, pause: Callable[[float], None]) -> None:
    """Redraw the table every second until cancelled, even while the controller does not reply."""
    for found, note in readings(ask, pause):
        size = shutil.get_terminal_size()
        lines = screen(found, size.columns, size.lines, note)
        below = "".join(f"{line}{CLEAR_LINE}\n" for line in lines)
        out.write(f"{HOME}{below}{CLEAR_BELOW}")
        out.flush()


def _coloured(state: str) -> str:
    return f"\x1b[{COLOURS[state]}m{state}\x1b[0m" if state in COLOURS else state
