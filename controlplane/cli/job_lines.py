"""Jobs as lines for people: one for each at any width, and what does not fit is left out."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from controlplane.cli.output import span
from controlplane.cli.promised_ends import clock
from controlplane.cli.terminal import HARMFUL, harmless
from schemas.messages.client import JobSummary

GAP: Final = "  "
WHY: Final = "why"
ALWAYS: Final = frozenset({"job", "state", WHY})
WHY_LEAST: Final = 24  # columns; others go before the reason gets less
SPARED: Final = (  # in order
    "lr", "queued", "epoch", "metrics", "ran", "predicted", "loss", "user", "samples/s", "promised"
)  # fmt: skip
LEFT: Final = frozenset({"job", "user", "state", "metrics", WHY})  # the others are numbers
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


class JobLines(NamedTuple):
    """A table: its head, and a line for each job."""

    head: str
    rows: tuple[str, ...]


def job_lines(
    jobs: Sequence[JobSummary], width: int | None, styled: Callable[[str], str] = str
) -> JobLines:
    """A table of jobs, one line each.

    Args:
        jobs: in the order in which they are listed.
        width: columns of the screen; None: as wide as it gets. Columns that have no room go, the
            least telling first; then the reason is cut.
        styled: puts colour around the state, for example.
    """
    filled = {name: _one_lines([cell(job) for job in jobs]) for name, cell in COLUMNS.items()}
    cells = {name: column for name, column in filled.items() if name in ALWAYS or any(column)}
    wide = {name: max(len(name), _widest(column)) for name, column in cells.items()}
    kept = _fitting(wide, width)
    padded = [_padded([name, *cells[name]], name, wide[name]) for name in kept]
    head, *lines = [_line(parts, width) for parts in zip(*padded, strict=True)]
    if styled is str:
        return JobLines(head, tuple(lines))
    left = padded[: kept.index("state")]
    rows = []
    for place, (job, line) in enumerate(zip(jobs, lines, strict=True), start=1):
        start = sum(len(column[place]) + len(GAP) for column in left)
        end = start + len(job.state)
        rows.append(line[:start] + styled(line[start:end]) + line[end:])
    return JobLines(head, tuple(rows))


def _fitting(wide: dict[str, int], width: int | None) -> list[str]:
    """The columns that there is room for, with enough left for the reason."""
    kept = list(wide)
    for name in SPARED:
        fixed = sum(wide[column] + len(GAP) for column in kept if column != WHY)
        if width is None or fixed + min(WHY_LEAST, wide[WHY]) <= width:
            break
        kept = [column for column in kept if column != name]
    return kept


def _padded(texts: Sequence[str], name: str, wide: int) -> list[str]:
    if all(map(str.isascii, texts)):
        return [text.ljust(wide) if name in LEFT else text.rjust(wide) for text in texts]
    spaces = [" " * (wide - _columns(text)) for text in texts]
    pairs = zip(texts, spaces, strict=True)
    return [text + space if name in LEFT else space + text for text, space in pairs]


def _line(parts: Sequence[str], width: int | None) -> str:
    line = GAP.join(parts).rstrip()
    return line if width is None else cut(line, width)


def cut(text: str, width: int) -> str:
    """`text` on at most `width` columns; an ellipsis says that there is more."""
    if len(text) * 2 <= width or _columns(text) <= width:
        return text
    while text and _columns(text) >= width:
        text = text[: min(len(text) - 1, width)]
    return text.rstrip() + "…"


def one_line(text: str) -> str:
    """What a script said cannot break the table, nor say anything to a terminal."""
    if text.isprintable() and (text.isascii() or not HARMFUL.search(text)):
        return text
    line = harmless(" ".join(text.split()))
    return line if line.isprintable() else "".join(c if c.isprintable() else "?" for c in line)


def _one_lines(texts: list[str]) -> list[str]:
    """The same of many, which are looked at together: most say nothing to a terminal."""
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
