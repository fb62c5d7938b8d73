"""Start a cluster on this host and train the three examples on it, which arrive one by one.

The first has all slots to itself and grows, makes room for the others, and grows back when they
are done. What decides, trains and is measured is the real thing.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from controlplane.cli.timeline import Window, all_slots, allocations_from, png, terminal
from controlplane.client import BlockingClient
from controlplane.client.allocations import colour_indices, job_colour, job_histories
from controlplane.client.job_file import load_job
from schemas.ids import JobId
from schemas.jobs import ENDED, JobSpec, StopRule
from schemas.wire.client import Decision, EpochInfo, JobSummary
from schemas.wire.feed import FeedEvent

FOLDER: Final = Path(__file__).parent
PLAIN_WIDTH: Final = 80  # columns of what is no terminal
WIDE: Final = 110  # columns of a screen that has room for everything
ASCII: Final = str.maketrans("─┬░█▒", "-+.##")
AXIS_S: Final = 60.0  # of the time line, to begin with
LOOK_S: Final = 0.3
SETTLED_S: Final = 1.5  # the next job comes when all have trained on all slots for so long
LATEST_S: Final = 30.0  # after the one before, it comes anyway
UNPACED_LATEST_S: Final = 10.0  # the same: where cores are few, no job takes all slots
LIMIT_S: Final = 600.0


@dataclass(frozen=True)
class Example:
    """Example job and the pace of its slots."""

    name: str
    epochs: int
    samples_per_s: int  # so slow that one core, which others use too, carries four slots
    samples: str  # what they are
    batch_size: int | None = None  # where the steps of the job file's would be too short


EXAMPLES: Final = (
    Example("language", 2, 100, "windows of text"),
    Example("digits", 1, 150, "images"),
    Example("embedding", 1, 20_000, "word pairs", batch_size=3072),
)
PACE: Final = "Each slot is paced like a device of {} or {} per second".format(
    ", ".join(f"{one.samples_per_s:,} {one.samples}" for one in EXAMPLES[:-1]),
    f"{EXAMPLES[-1].samples_per_s:,} {EXAMPLES[-1].samples}",
)
PACED: Final = f"{PACE}, so that growth pays on any host; --unpaced for the bare CPU"
UNPACED: Final = "Steps are as fast as the CPU makes them, so growth pays where cores are idle"
WATCH: Final = (
    "Three trainings on real data share the slots of this host. Watch the first: it grows while "
    "it is alone, makes room for those that come, and grows back. It never stops for that."
)


def spec(example: Example, slots: int, *, paced: bool) -> JobSpec:
    """Return the example's job, with its samples on record and any number of slots.

    Args:
        example: which.
        slots: of the cluster.
        paced: `paced.py` runs its script, for fewer epochs.
    """
    job = load_job(FOLDER / example.name / "job.toml")
    changes: dict[str, Any] = {"record_samples": True, "slots": (1, slots)}
    if paced:
        changes |= {
            "workdir": str(FOLDER),
            "script": "paced.py",
            "args": (str(example.samples_per_s), f"{example.name}/train.py"),
            "stop": StopRule(epochs=example.epochs),
        }
        if (batch := example.batch_size) is not None:
            changes |= dict.fromkeys(("batch_size", "max_batch_size", "max_local_batch"), batch)
    return msgspec.structs.replace(job, **changes)


@dataclass
class Arrivals:
    """Time of the next submission: when earlier jobs use all slots, or after a limit.

    Args:
        slots: of the cluster.
        settled_s: for how long they do.
        latest_s: after the one before.
    """

    slots: int
    settled_s: float
    latest_s: float
    _last: float | None = None
    _settled: float | None = None

    def is_due(self, jobs: Sequence[JobSummary], now: float) -> bool:
        """Return whether a job comes now; the next question is about the one after it.

        Args:
            jobs: all so far.
            now: seconds, any origin.
        """
        trains = all(job.state == "running" or job.state in ENDED for job in jobs)
        if not trains or sum(job.slots for job in jobs) < self.slots:
            self._settled = None
        elif self._settled is None:
            self._settled = now
        due = (
            self._last is None
            or now - self._last >= self.latest_s
            or (self._settled is not None and now - self._settled >= self.settled_s)
        )
        if due:
            self._last, self._settled = now, None
        return due


# --- what happened


@dataclass(frozen=True)
class Change:
    """A job went on with another number of slots."""

    job: JobId
    at: float  # seconds on the controller's clock, when all members trained in the new group
    before: int
    after: int
    pause_ms: float | None = None
    pause_steps: float | None = None


def changes_of(job: JobId, decisions: Iterable[Decision]) -> list[Change]:
    """Return the changes of a job that came to be, in order; starts and batches are none."""
    return [
        Change(
            job,
            one.time + one.took_s,
            len(one.before.slots),
            len(one.to.slots),
            one.numbers.get("pause_ms"),
            one.numbers.get("pause_steps"),
        )
        for one in decisions
        if one.outcome == "formed"
        and one.before.slots
        and one.to.slots
        and len(one.before.slots) != len(one.to.slots)
    ]


def tally(changes: Iterable[Change]) -> dict[str, int]:
    """Count how often jobs grew, shrank, and grew again after they had shrunk."""
    found = {"growths": 0, "shrinks": 0, "regrowths": 0}
    shrunk: set[JobId] = set()
    for one in changes:
        if one.after < one.before:
            found["shrinks"] += 1
            shrunk.add(one.job)
            continue
        found["growths"] += 1
        if one.job in shrunk:
            found["regrowths"] += 1
            shrunk.remove(one.job)
    return found


def is_exact(epochs: Iterable[EpochInfo], records: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether each sample of each finished epoch was trained on exactly once.

    Args:
        epochs: finished, with the size of the training set.
        records: `ids` of the samples that committed steps took, with their `epoch`.
    """
    ids: defaultdict[int, list[int]] = defaultdict(list)
    for record in records:
        ids[record["epoch"]] += record["ids"]
    sizes = {one.epoch: one.epoch_samples for one in epochs}
    return bool(sizes) and all(
        size > 0 and sorted(ids[epoch]) == list(range(size)) for epoch, size in sizes.items()
    )


def cold_starts(events: Iterable[FeedEvent]) -> dict[JobId, float]:
    """Return the seconds from each job's first order to its first step.

    Every restart costs that: a process, torch, the data, the model. State is not even read.
    """
    ordered: dict[JobId, float] = {}
    found: dict[JobId, float] = {}
    for event in events:
        if event.job is None:
            continue
        if event.event == "job.starting":
            ordered.setdefault(event.job, event.time)
        elif event.event == "job.running" and event.job in ordered:
            found.setdefault(event.job, event.time - ordered[event.job])
    return found


@dataclass(frozen=True)
class Outcome:
    """Result of the run; `changes` in order of time."""

    began: float  # seconds on the controller's clock
    jobs: tuple[JobSummary, ...]
    changes: tuple[Change, ...]
    cold_s: Mapping[JobId, float]
    epochs: int  # finished, of all jobs
    samples: int  # in these
    exact: bool

    def figures(self) -> dict[str, Any]:
        """Return what --json writes."""
        at = [one.at - self.began for one in self.changes]
        return {
            "jobs": len(self.jobs),
            "first_change_s": at[0] if at else None,
            "last_change_s": at[-1] if at else None,
            **tally(self.changes),
            "pause_ms": [one.pause_ms for one in self.changes if one.pause_ms is not None],
            "pause_steps": [one.pause_steps for one in self.changes if one.pause_steps is not None],
            "restart_s": self.restart_s,
            "samples_exact": self.exact,
        }

    @property
    def restart_s(self) -> float | None:
        """The usual cold start of the jobs that changed; of all, if none did."""
        jobs = {one.job for one in self.changes} or self.cold_s.keys()
        known = [self.cold_s[job] for job in jobs if job in self.cold_s]
        return median(known) if known else None


def outcome(client: BlockingClient, events: Iterable[FeedEvent], began: float) -> Outcome:
    """Ask the cluster for everything that is told at the end."""
    jobs = client.jobs(ended=True)
    details = [client.job(job.job) for job in jobs]
    changes = [
        one for job in jobs for one in changes_of(job.job, client.explain(job.job).decisions)
    ]
    epochs = [one for detail in details for one in detail.epochs]
    return Outcome(
        began=began,
        jobs=jobs,
        changes=tuple(sorted(changes, key=lambda one: one.at)),
        cold_s=cold_starts(events),
        epochs=len(epochs),
        samples=sum(one.epoch_samples for one in epochs),
        exact=all(is_exact(one.epochs, client.samples(one.summary.job)) for one in details),
    )


# --- in words


def told(event: FeedEvent, before: Sequence[FeedEvent]) -> str | None:
    """Put an event into words; None if it is not worth a line.

    Args:
        event: that just came.
        before: all others of the cluster so far, in order.
    """
    match event.event:
        case "job.submitted":
            return "is submitted"
        case "job.starting" | "job.rescaling":  # behind the reason come slots, named already
            return str(event.detail["reason"]).rpartition(": ")[0]
        case "job.running":
            return _trains(event, [one for one in before if one.job == event.job])
        case "job.succeeded" | "job.failed" | "job.cancelled":
            return f"{event.event.removeprefix('job.')}: {event.detail['reason']}"
    return None


def _trains(event: FeedEvent, own: Sequence[FeedEvent]) -> str | None:
    """A job trains in the group that was ordered; None if on as many slots as before."""
    detail, cold_s = event.detail, cold_starts([*own, event]).get(event.job or JobId(""))
    runs = [one.detail.get("slots") for one in own if one.event == "job.running"]
    slots = detail.get("slots", 0)
    if cold_s is None or slots in runs[-1:]:
        return None
    now = f"on {slots} slot{'s' * (slots != 1)}"
    if not runs:
        return f"trains {now}; a cold start took {cold_s:.1f} s"
    steps = f", {detail['pause_steps']:.2f} steps" if "pause_steps" in detail else ""
    pause = f"stood still {detail.get('pause_ms', 0.0):.0f} ms{steps}"
    return f"{now}; {pause} (restart: {cold_s:.1f} s)"


def summary(found: Outcome, picture: Path, following: str) -> list[tuple[str, str]]:
    """Return what was seen, in six lines: a name and a sentence each."""
    return [
        ("changes", _changes(found)),
        ("pauses", _pauses(found.changes)),
        ("restarts", _restarts(found)),
        ("samples", _samples(found)),
        ("picture", str(picture)),
        ("next", following),
    ]


def _changes(found: Outcome) -> str:
    count, ways = tally(found.changes), []
    for job in dict.fromkeys(one.job for one in found.changes):
        own = [one for one in found.changes if one.job == job]
        steps = (f"{one.after} at {one.at - found.began:.0f} s" for one in own)
        ways.append(f"{job} on {own[0].before}, {', '.join(steps)}")
    counted = (
        f"{count['growths']} growths ({count['regrowths']} after a shrink), "
        f"{count['shrinks']} shrinks"
    )
    return f"{counted}: {'; '.join(ways)}" if ways else counted


def _pauses(changes: Sequence[Change]) -> str:
    ms = [one.pause_ms for one in changes if one.pause_ms is not None]
    steps = [one.pause_steps for one in changes if one.pause_steps is not None]
    if not ms:
        return "none: nothing changed"
    in_steps = f"; {median(steps):.2f} steps, at most {max(steps):.2f}" if steps else ""
    return f"{median(ms):.0f} ms in the median, at most {max(ms):.0f} ms{in_steps}"


def _restarts(found: Outcome) -> str:
    if not found.changes or found.restart_s is None:
        return "none: nothing changed"
    cost = sum(found.cold_s.get(one.job, 0.0) for one in found.changes)
    paused = sum(one.pause_ms or 0.0 for one in found.changes) / 1e3
    return (
        f"{len(found.changes)} of them would have cost {cost:.1f} s ({found.restart_s:.1f} s each, "
        f"cold starts of this run); the changes cost {paused:.2f} s"
    )


def _samples(found: Outcome) -> str:
    if not found.exact:
        return "NOT exact: some sample of an epoch was left out or trained on twice"
    return (
        f"exact: in all {found.epochs} epochs each sample was trained on exactly once "
        f"({found.samples:,} samples, by the records of committed steps)"
    )


# --- on the screen


def hanging(head: str, words: str, width: int) -> str:
    """Wrap `words` behind `head`, in a column of their own."""
    return textwrap.fill(words, width - 1, initial_indent=head, subsequent_indent=" " * len(head))


def event_line(at: float, name: str, words: str, width: int) -> str:
    """Format one event: seconds, job and words."""
    return hanging(f"{at:3.0f} s  {name:<12} ", words, width)


def gantt(events: Sequence[FeedEvent], window: Window, now: float, console: Console) -> Text:
    """Draw the owner of each slot over time; the future is blank."""
    width = min(console.width, WIDE) - 1
    slots = all_slots(events)
    few = console.no_color or console.color_system in {None, "standard"}  # to tell jobs apart
    drawn = terminal(allocations_from(events, now), slots, width, window=window, colour=not few)
    columns = width - max((len(slot) for slot in slots), default=0) - 1
    to_come = int(columns * max(0.0, window.end - now) / window.length)
    lines = drawn.split("\n")
    for one in lines[: len(slots)] if to_come else ():
        one.right_crop(to_come)
    drawn = Text("\n").join(lines)
    if console.options.ascii_only:
        drawn.plain = drawn.plain.translate(ASCII)
    return drawn


def table(jobs: Iterable[JobSummary], colours: Mapping[JobId, str], width: int) -> Table:
    """Show jobs and how they train; a narrow screen has fewer columns."""
    wide = width >= WIDE
    names = ["job", "state", "progress", "slots", "batch", "samples/s", "loss"]
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in [*names, *(["lr", "epoch"] if wide else [])]:
        left = name in {"job", "state", "progress"}
        grid.add_column(name, justify="left" if left else "right", no_wrap=True)
    for job in jobs:
        cells: list[Text | ProgressBar | str] = [
            Text(job.job, style=colours.get(job.job, "")),
            job.state,
            ProgressBar(total=1.0, completed=job.progress or 0.0, width=24 if wide else 12),
            str(job.slots or ""),
            str(job.global_batch or ""),
            f"{job.samples_per_s:.0f}" if job.samples_per_s else "",
            f"{job.train_loss:.3f}" if job.train_loss is not None else "",
        ]
        if wide:
            cells += [f"{job.lr:.3g}" if job.lr is not None else "", str(job.epoch)]
        grid.add_row(*cells)
    return grid


def screen(
    jobs: Iterable[JobSummary],
    events: Sequence[FeedEvent],
    began: float,
    now: float,
    console: Console,
) -> Group:
    """Show the live part below the lines: jobs, and slots over time."""
    indices = colour_indices(allocations_from(events, now))
    colours = {job: job_colour(index) for job, index in indices.items()}
    window = Window(began, max(now, began + AXIS_S))
    drawn = gantt(events, window, now, console)
    return Group(Text(), table(jobs, colours, console.width), Text(), drawn)


# --- the run


def main() -> int:
    """Do what the README's first page promises; 0 when all three examples succeeded."""
    parser = argparse.ArgumentParser(prog="bin/quickstart", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    parser.add_argument("--unpaced", action="store_true", help="steps as fast as the CPU is")
    parser.add_argument("--json", type=Path, help="file to write figures into")
    parser.add_argument("--dir", type=Path, help="folder of the cluster; default: a new one")
    parser.add_argument("--picture", type=Path, help="file to draw into; default: a new one")
    chosen = parser.parse_args()
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in ends:
        signal.signal(number, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may know fewer letters
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    began = time.time()
    home = (chosen.dir or Path(tempfile.mkdtemp(prefix="ones-"))).resolve()
    try:
        return run(chosen, home, console, began)
    except KeyboardInterrupt:
        up = f"; the cluster is up: bin/ones local down --dir {home}" if chosen.keep else ""
        say(console, f"interrupted{up}")
        return 130
    finally:
        for number in ends:
            signal.signal(number, signal.SIG_IGN)  # it ends as it should, whatever is typed
        if not chosen.keep:
            if (home / "controller.toml").exists():
                ones("local", "down", "--dir", str(home))
            if chosen.dir is None:
                shutil.rmtree(home)


def run(chosen: argparse.Namespace, home: Path, console: Console, began: float) -> int:
    """Bring the cluster up, show the jobs, and say what came of them; return the exit code."""
    paced = not chosen.unpaced
    for text in (WATCH, PACED if paced else UNPACED):
        say(console, f"\n{hanging('', text, console.width)}")
    console.print()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(home / "torch"))  # else left in /tmp
    ones("local", "up", "--dir", str(home))
    say(console, hanging("", f"Watch it in a browser, too: {page_of(home)}\n", console.width))
    with BlockingClient(home) as client:
        while not client.search().running:  # until then nobody thinks about who gets which slot
            time.sleep(LOOK_S)
        slots = sum(node.slots for node in client.nodes())
        words = f"is up with {slots} slots"
        say(console, event_line(time.time() - began, "cluster", words, console.width))
        events = follow(client, console, began, paced=paced)
        found = outcome(client, events, began)
        failed = [job for job in found.jobs if job.state != "succeeded"]
        for job in failed:
            for text in list(client.tail(job.job, follow=False))[-10:]:
                say(console, f"  {text}")
    until = events[-1].time
    window = Window(began, until)
    console.print()
    console.print(gantt(events, window, until, console))
    console.print()
    file = chosen.picture or new_picture(chosen.dir)
    caption = f"Slots over time. {PACE if paced else UNPACED}."
    allocations, pasts = allocations_from(events, until), job_histories(events, until)
    png(allocations, all_slots(events), file, caption, window=window, pasts=pasts)
    following = "bin/quickstart --keep leaves the cluster and its page up, to look again"
    if chosen.keep:
        following = f"export ONES_HOME={home}; bin/ones ps --all; bin/ones local down --dir {home}"
    for name, text in summary(found, file, f"docs/tutorial.md, to train your own; {following}"):
        say(console, hanging(f"{name:<10}", text, console.width))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found.figures()) + "\n", encoding="utf-8")
    return 1 if failed or not found.exact else 0


def follow(
    client: BlockingClient, console: Console, began: float, *, paced: bool
) -> list[FeedEvent]:
    """Submit one job after the other and show them until all have ended; return the events."""
    slots = sum(node.slots for node in client.nodes())
    coming = [spec(example, slots, paced=paced) for example in EXAMPLES]
    arrivals = Arrivals(slots, SETTLED_S, LATEST_S if paced else UNPACED_LATEST_S)
    events: list[FeedEvent] = []
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while (now := time.time()) < began + LIMIT_S:
            jobs = client.jobs(ended=True)
            over = not coming and all(job.state in ENDED for job in jobs)
            for event in client.events(from_seq=len(events) + 1):
                if (words := told(event, events)) is not None:
                    at = event.time - began
                    say(console, event_line(at, event.job or "", words, console.width))
                events.append(event)
            if over:
                return events
            if console.is_terminal:
                live.update(screen(jobs, events, began, now, console), refresh=True)
            if coming and arrivals.is_due(jobs, now):
                client.submit(coming.pop(0))
            time.sleep(LOOK_S)
    sys.exit(f"not done after {LIMIT_S:.0f} s")


def say(console: Console, text: str) -> None:
    """Print `text` as it is."""
    console.print(text, markup=False, soft_wrap=True)


def new_picture(folder: Path | None) -> Path:
    """Create a new, empty picture file."""
    descriptor, name = tempfile.mkstemp(prefix="slots-over-time-", suffix=".png", dir=folder)
    os.close(descriptor)
    return Path(name)


def page_of(home: Path) -> str:
    """Start the cluster's web page, which `ones local down` ends, and return its address."""
    page = subprocess.Popen(  # noqa: S603 - our own
        [Path(sys.executable).with_name("ones"), "web", "--home", str(home), "-o", "jsonl"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    line = page.stdout.readline() if page.stdout else b""
    return str(json.loads(line)["url"]) if line else "not available (see above)"


def ones(*arguments: str) -> None:
    """Run the command line of this environment, to its end even if that is interrupted."""
    process = subprocess.Popen(  # noqa: S603 - our own
        [Path(sys.executable).with_name("ones"), *arguments],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise
    if code:
        sys.exit(f"ones {' '.join(arguments)}: exit code {code}")


if __name__ == "__main__":
    sys.exit(main())
