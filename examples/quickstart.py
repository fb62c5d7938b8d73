"""Brings up a cluster on this host and trains the three examples, which arrive one after another.

The scheduler starts each on one slot, grows it, makes room for the next and fills what is left.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from controlplane.cli.timeline import all_slots, allocations_from, png, terminal
from controlplane.client import BlockingClient
from controlplane.client.jobfile import load_job
from schemas.jobs import ENDED
from schemas.messages.client import JobDetail, JobSummary, NodeInfo

EXAMPLES = ("digits", "language", "embedding")
COLOURS = ("cyan", "magenta", "yellow")
PLAIN_EVERY_S = 5.0
LIMIT_S = 900.0
ARRIVALS_S = (0.0, 9.0, 15.0)
WIDE = 110  # columns of a screen that has room for everything
PAYS = 1.1  # times the speed on one slot, from which growth is called one that pays
LOOK = (
    "Three trainings on real data arrive at 0, 9 and 15 s. Look at `slots` and `batch`: who is "
    "alone grows, who comes later is made room for, and whoever is left takes what is free. "
    "Nobody stops for it: `loss` falls through every change."
)


def main() -> int:
    """Do what the README's first page promises; 0 when all three examples succeeded."""
    parser = argparse.ArgumentParser(prog="bin/quickstart", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    parser.add_argument("--dir", type=Path, help="folder of the cluster; default: a new one")
    parser.add_argument("--picture", type=Path, help="file to draw into; default: a new one")
    chosen = parser.parse_args()
    home = (chosen.dir or Path(tempfile.mkdtemp(prefix="ones-"))).resolve()
    console = Console() if sys.stdout.isatty() else Console(width=120)
    ones("local", "up", "--dir", str(home))
    console.print(f"\n{LOOK}\n", highlight=False)
    try:
        with BlockingClient(home) as client:
            began = time.monotonic()
            jobs = follow(client, console)
            summarise(jobs, console, time.monotonic() - began)
            explain(client, jobs, console)
            draw(client, console, chosen.picture or new_picture(chosen.dir))
            details = [client.job(job.job) for job in jobs]
            for sentence in growth(details, os.cpu_count() or 1, kind(client)):
                console.print(sentence, highlight=False, soft_wrap=True)
            failed = [job for job in jobs if job.state != "succeeded"]
            for job in failed:
                console.print(f"[red]{job.job}[/] {job.state}: {job.reason}")
                for line in list(client.tail(job.job, follow=False))[-10:]:
                    console.print(f"  {line}", markup=False)
    finally:
        if not chosen.keep:
            ones("local", "down", "--dir", str(home))
            if chosen.dir is None:
                shutil.rmtree(home)
    if chosen.keep:
        console.print(f"\nThe cluster is still up. Look around:\n  export ONES_HOME={home}")
        console.print(f"  bin/ones ps --all; bin/ones show {jobs[0].job}; bin/ones events")
        console.print(f"  bin/ones local down --dir {home}")
    return 1 if failed else 0


def follow(client: BlockingClient, console: Console) -> list[JobSummary]:
    """Show all jobs until the last one has ended."""
    told = -PLAIN_EVERY_S
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for jobs, nodes, seconds in states(client):
            if console.is_terminal:
                live.update(picture(jobs, nodes, seconds, console.width), refresh=True)
            elif seconds - told >= PLAIN_EVERY_S:
                told = seconds
                told_now = "  |  ".join(line(job) for job in jobs)
                console.print(f"{seconds:5.0f} s  {told_now}", soft_wrap=True)
    return jobs


def states(client: BlockingClient) -> Iterator[tuple[list[JobSummary], list[NodeInfo], float]]:
    """The cluster, a few times a second, until every job has come and ended."""
    began = time.monotonic()
    coming = list(zip(ARRIVALS_S, EXAMPLES, strict=True))
    while (seconds := time.monotonic() - began) < LIMIT_S:
        while coming and coming[0][0] <= seconds:
            _, name = coming.pop(0)
            client.submit(load_job(Path(__file__).parent / name / "job.toml"))
        jobs = list(client.jobs(ended=True))
        yield jobs, list(client.nodes()), seconds
        if not coming and all(job.state in ENDED for job in jobs):
            return
        time.sleep(0.3)
    sys.exit(f"not done after {LIMIT_S:.0f} s; look at `ones ps` and `ones logs`")


def picture(jobs: list[JobSummary], nodes: list[NodeInfo], seconds: float, width: int) -> Group:
    """Jobs with their progress, and who is on which slot; a narrow screen has fewer columns."""
    wide = width >= WIDE
    table = Table(box=SIMPLE_HEAD, title=f"{seconds:.0f} s", title_justify="left")
    for name in columns(wide=wide):
        left = name in {"job", "state", "metrics"}
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "metrics")
    for job, colour in zip(jobs, COLOURS, strict=False):
        done = job.progress or 0.0
        bar = ProgressBar(total=1.0, completed=done, width=20 if wide else 10, style="grey35")
        cells: dict[str, Text | ProgressBar | str] = {
            "job": Text(job.job, style=colour),
            "state": job.state,
            "progress": bar,
            "epoch": str(job.epoch),
            "slots": str(job.slots or ""),
            "batch": str(job.global_batch or ""),
            "lr": f"{job.lr:.3g}" if job.lr is not None else "",
            "samples/s": f"{job.samples_per_s:.0f}" if job.samples_per_s else "",
            "loss": f"{job.train_loss:.3f}" if job.train_loss is not None else "",
            "metrics": metrics(job, 1),
        }
        table.add_row(*(cells[name] for name in columns(wide=wide)))
    strips = [slots(node, jobs) for node in nodes]
    return Group(table, *strips)


def columns(*, wide: bool) -> tuple[str, ...]:
    """What is shown of a job while it trains."""
    if not wide:
        return ("job", "state", "progress", "slots", "batch", "samples/s", "loss")
    first = ("job", "state", "progress", "epoch", "slots", "batch", "lr")
    return (*first, "samples/s", "loss", "metrics")


def slots(node: NodeInfo, jobs: list[JobSummary]) -> Text:
    """The slots of a node, coloured by job."""
    strip = Text(f" {node.node} ")
    for job, colour in zip(jobs, COLOURS, strict=False):
        if job.job in node.jobs:
            strip.append("█" * job.slots * 2 + " ", style=colour)
    strip.append("░" * node.free * 2, style="grey35")
    return strip


def summarise(jobs: list[JobSummary], console: Console, seconds: float) -> None:
    """What was achieved."""
    table = Table(box=SIMPLE_HEAD, title=f"all done in {seconds:.0f} s", title_justify="left")
    for name in ("job", "state", "epochs", "re-scales", "ran", "loss", "metrics"):
        table.add_column(name, no_wrap=name in {"job", "state"})
    for job in jobs:
        table.add_row(
            job.job,
            job.state,
            str(job.epoch),
            str(job.rescales),
            f"{job.running_s:.0f} s",
            f"{job.train_loss:.3f}" if job.train_loss is not None else "",
            metrics(job, 9 if console.width >= WIDE else 1),
        )
    console.print(table)


def explain(client: BlockingClient, jobs: list[JobSummary], console: Console) -> None:
    """Every decision about every job: the start of `ones explain`."""
    table = Table(box=SIMPLE_HEAD, title="why (`ones explain JOB`)", title_justify="left")
    for name in ("s", "job", "slots", "batch", "decision"):
        right = name in {"s", "slots", "batch"}
        table.add_column(name, justify="right" if right else "left", no_wrap=name == "job")
    told = [(d, job.job) for job in jobs for d in client.explain(job.job).decisions]
    began = min(job.submitted_at for job in jobs)
    for decision, job in sorted(told, key=lambda entry: entry[0].time):
        table.add_row(
            f"{decision.time - began:.0f}",
            job,
            str(len(decision.to.slots)),
            str(decision.to.batch or ""),
            decision.why,
        )
    console.print(table)


def growth(details: list[JobDetail], cores: int, device: str) -> list[str]:
    """Whether more slots made the jobs faster, as whole epochs were measured; and if not, why."""
    found = []
    for detail in details:
        speeds = defaultdict(list)
        for epoch in detail.epochs:
            if epoch.whole and epoch.slots:
                speeds[epoch.slots].append(epoch.samples_per_s)
        medians = {slots: median(measured) for slots, measured in sorted(speeds.items())}
        if len(medians) > 1:
            least, best = min(medians), max(medians, key=lambda slots: medians[slots])
            found.append((detail.summary.job, least, best, medians[least], medians[best]))
    paid = [one for one in found if one[4] >= PAYS * one[3]]
    lines = [
        f"{job} was {after / before:.2f} x as fast on {best} slots as on {least}: "
        f"{after:.0f} samples/s after {before:.0f}"
        for job, least, best, before, after in paid
    ]
    if paid:
        return lines
    what = "no epoch was measured on two sizes" if not found else "no job was faster on more slots"
    if device != "cpu":
        return [f"{what}: these models are too small for several GPUs to pay"]
    busy = f"its {cores} core{'s' * (cores != 1)} have to do the work of all slots"
    return [f"{what} on this host: {busy}, and whatever else runs here; look again when it is idle"]


def kind(client: BlockingClient) -> str:
    """What the slots are."""
    return next((node.kind for node in client.nodes()), "cpu")


def new_picture(folder: Path | None) -> Path:
    """A file that nobody else has."""
    descriptor, name = tempfile.mkstemp(prefix="slots-over-time-", suffix=".png", dir=folder)
    os.close(descriptor)
    return Path(name)


def draw(client: BlockingClient, console: Console, picture: Path) -> None:
    """Who had which slot when: on the terminal, and as a picture."""
    events = list(client.events())
    allocations, slots = allocations_from(events, until=events[-1].time), all_slots(events)
    console.print(terminal(allocations, slots, min(console.width, 110)))
    png(allocations, slots, picture, "slots over time")
    console.print(f"\nthe same as a picture: {picture}", highlight=False, soft_wrap=True)


def line(job: JobSummary) -> str:
    """One job in a log."""
    part = f"{job.progress:.0%}" if job.progress is not None else f"epoch {job.epoch}"
    loss = f" loss {job.train_loss:.3f}" if job.train_loss is not None else ""
    batch = f" slots {job.slots} batch {job.global_batch}" if job.global_batch else ""
    return f"{job.job} {job.state} {part}{batch}{loss}"


def metrics(job: JobSummary, most: int) -> str:
    """What the script reported last; where not all has room, the last of it."""
    told = [f"{name} {value:.3f}" for name, value in job.metrics.items()]
    return ", ".join(told[-most:])


def ones(*arguments: str) -> None:
    """Run the command line of this environment."""
    subprocess.run([Path(sys.executable).with_name("ones"), *arguments], check=True)  # noqa: S603


if __name__ == "__main__":
    sys.exit(main())
