"""`ones sweep ls`, `show`, `best` and `top`: sweeps and their trials as tables."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from cyclopts import Parameter
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from controlplane.cli import output
from controlplane.cli.job_list import cut, one_line
from controlplane.cli.terminal import terminal_console, width_of
from controlplane.client import BlockingClient
from controlplane.client.formats import byte_count, span
from controlplane.client.sweeps.runs import best_epoch, best_of, epoch_rows, ranked, trial_row
from controlplane.client.sweeps.sweep import format_value, format_values
from schemas.errors import BadFieldError, RemoteError
from schemas.jobs import ENDED
from schemas.wire.client import SweepDetail, TrialInfo

BLOCKS: Final = "▁▂▃▄▅▆▇█"
CURVE: Final = 12  # columns of a learning curve
ALWAYS: Final = ("trial", "state", "epoch")
TRAINING: Final = "training"

Cells = dict[str, str]


def trial_cells(detail: SweepDetail, trials: Sequence[TrialInfo]) -> list[Cells]:
    """Return a row of cells for each trial; columns without any text are omitted."""
    scale = _scale(detail)
    rows = [
        {name: one_line(cell) for name, cell in _cells(detail, trial, scale).items()}
        for trial in trials
    ]
    filled = {name for row in rows for name, cell in row.items() if cell or name in ALWAYS}
    return [{name: cell for name, cell in row.items() if name in filled} for row in rows]


def _cells(detail: SweepDetail, trial: TrialInfo, scale: Callable[[float], str]) -> Cells:
    metric, partitions = detail.spec.search.metric, detail.spec.partitions
    found = best_epoch(trial)
    last = trial.metrics[-1].get(metric) if trial.metrics else None
    curve = [value for one in trial.metrics if (value := one.get(metric)) is not None]
    where = "" if trial.partition is None else f"{trial.partition}"
    through = partitions - trial.partitions_left if trial.partitions_left else 0
    part = f" +{through}/{partitions}" if through else ""
    return {
        "trial": f"{trial.number}" if trial.parent is None else f"{trial.number} of {trial.parent}",
        **{name: format_value(trial.values[name]) if name in trial.values else ""
           for name in detail.spec.search.space},
        "state": trial.state,
        "epoch": f"{trial.epochs}/{trial.granted}{part}",
        "partition": where,
        "slot": trial.slot or "",
        metric: "" if last is None else f"{last:.4g}",
        "best": "" if found is None else f"{found.score:.4g} @{found.epoch}",
        "curve": "".join(map(scale, curve[-CURVE:])),
        REASON: trial.reason,
    }  # fmt: skip


def _scale(detail: SweepDetail) -> Callable[[float], str]:
    """Return a function that draws a score as a block; the sweep's best score is the highest."""
    metric = detail.spec.search.metric
    scores = [
        value
        for trial in detail.trials
        for one in trial.metrics
        if (value := one.get(metric)) is not None and math.isfinite(value)
    ]
    low, high = min(scores, default=0.0), max(scores, default=1.0)
    if detail.spec.search.mode == "min":  # the best score is the highest block
        low, high = high, low

    def block(value: float) -> str:
        if not math.isfinite(value):
            return "!"
        share = (value - low) / (high - low) if high != low else 1.0
        return BLOCKS[min(len(BLOCKS) - 1, int(share * len(BLOCKS)))]

    return block


def summary_lines(detail: SweepDetail, now: float) -> list[str]:
    """Return a few lines about the state of a sweep."""
    job, search = detail.summary, detail.spec.search
    best = best_of(detail)
    kind = type(search.searcher).__struct_config__.tag
    slots = f"{job.slots} slot{'s' * (job.slots != 1)}"
    parts = f"{detail.spec.partitions} partitions, {slots}"
    lines = [f"{job.job}  {job.state}  {kind}, {count_by_state(detail)}, {parts}"]
    if job.reason and not (best is not None and job.reason.startswith("best: ")):
        lines.append(job.reason)
    if best is not None:
        values = format_values(best.trial.values)
        after = f"after {best.epoch} epoch{'s' * (best.epoch != 1)}"
        what = f"best: trial {best.trial.number}, {search.metric} {best.score:.4g}"
        lines.append(f"{what} {after} ({values})")
    lines.append(units_line(detail, now))
    return [one_line(line) for line in lines]


def count_by_state(detail: SweepDetail) -> str:
    """Describe the number of trials in each state."""
    states = Counter(trial.state for trial in detail.trials)
    parts = ", ".join(f"{count} {state}" for state, count in states.items())
    return f"{detail.trials_total} trials ({parts})" if parts else "no trials yet"


def units_line(detail: SweepDetail, now: float) -> str:
    """Describe the finished units, the remaining units and the remaining time."""
    text = [f"units: {detail.units_done} done, {detail.units_left} left"]
    if detail.units_repeated:
        text.append(f"{detail.units_repeated} repeated")
    if detail.unit_s is not None:
        text.append(f"{detail.unit_s:.3g} s each")
    left = time_left(detail, now)
    if left is not None:
        text.append(f"about {span(left)} left")
    return ", ".join(text)


def time_left(detail: SweepDetail, now: float) -> float | None:
    """Return the remaining seconds if the slots stay the same, or None if unknown."""
    if not detail.units_left:
        return None
    if detail.expected_end is not None:
        return max(0.0, detail.expected_end - now)
    if detail.unit_s is None or not detail.summary.slots:
        return None
    return detail.units_left * detail.unit_s / detail.summary.slots


GAP: Final = 2
REASON: Final = "reason"
MIN_REASON_WIDTH: Final = 20  # columns; a narrower reason is useless
OMIT_ORDER: Final = (REASON, "partition", "curve", "slot", "best")  # the first is omitted first
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
    """Return a table with a line for each trial, without columns that do not fit into `width`."""
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
        drawn = {**cells, REASON: cut(cells.get(REASON, ""), why)}
        table.add_row(*(_styled(name, drawn[name]) for name in columns), style=style)
    return table


def _styled(name: str, cell: str) -> Text:
    style = TRIAL_STYLES.get(cell, "") if name == "state" else "cyan" if name == "curve" else ""
    return Text(cell, style=style)


def _fitting(rows: Sequence[Mapping[str, str]], width: int) -> tuple[list[str], int]:
    """Return the columns that fit into `width`, and the width that is left for the reason."""
    if not rows:
        return [], 0
    wide = {name: max(cell_len(name), *(cell_len(row[name]) for row in rows)) for name in rows[0]}
    longest = wide.get(REASON, 0)
    wide[REASON] = min(longest, MIN_REASON_WIDTH)
    kept = output.fitting({name: wide[name] for name in rows[0]}, width, OMIT_ORDER, GAP)
    left = width - sum(wide[one] + GAP for one in kept if one != REASON)
    return kept, min(longest, max(left, 1))


DAMAGED = "journal"  # error code of a sweep that the controller cannot read
ENDED_STATES = frozenset({"done", "stopped", "failed", "deleted", "graduated"})
ORDER_HELP = "order: best first, or in order of addition"


def ls(
    *,
    all_: Annotated[bool, Parameter(name=["--all", "-a"], help="include ended sweeps")] = False,
    common: output.Common = output.COMMON,
) -> None:
    """List sweeps, oldest first, one line each."""
    with BlockingClient(common.home) as client:
        found = list(_sweeps(client, ended=all_))
    rows = [_line_of(detail) for detail in found]
    columns = ("job", "state", "slots", "trials", "ended", "units", "left", "best", "reason")
    if rows or common.in_json:
        cells = [[_shown(row[name]) for name in columns] for row in rows]
        output.say_table(common, rows, (row["job"] for row in rows), columns, cells)
    if not rows:
        which = "no sweep yet" if all_ else "no sweep waits or runs; -a includes ended sweeps"
        sys.stderr.write(f"ones: {which}\n")


def _sweeps(client: BlockingClient, *, ended: bool) -> Iterator[SweepDetail]:
    """Yield each sweep; for a sweep that the controller cannot read, print a line to stderr."""
    for job in client.jobs(ended=ended):
        try:
            yield client.sweep(job.job)
        except BadFieldError:  # an ordinary job
            continue
        except RemoteError as error:
            if error.remote_code != DAMAGED:
                raise
            sys.stderr.write(f"ones: omitting {job.job}: {error.message}\n")


def show(
    job: output.JobName,
    *,
    by: Annotated[Literal["best", "number"], Parameter(help=ORDER_HELP)] = "best",
    trial: Annotated[int | None, Parameter(help="only this trial, with all its epochs")] = None,
    common: output.Common = output.COMMON,
) -> None:
    """Show the trials of sweep JOB: values, state, epoch, partition, metric, slot."""
    with BlockingClient(common.home) as client:
        detail = client.sweep(job)
    if trial is not None:
        _show_trial(detail, trial, common)
        return
    trials = ranked(detail) if by == "best" else list(detail.trials)
    best, flat = best_of(detail), output.plain(detail)
    document = {**flat.pop("summary"), "best_epoch": best and best.epoch, **flat}
    lines = summary_lines(detail, time.time()) + [_hops(detail)] * bool(detail.units_done)
    rows, quiet = (
        output.with_all_keys([*map(trial_row, trials)]),
        (str(one.number) for one in trials),
    )
    output.say(common, document, *lines, rows=rows, quiet=quiet)
    if trials and common.output == "table":
        _print_trials(detail, trials)


def best(job: output.JobName, *, common: output.Common = output.COMMON) -> None:
    """Show the best trial of sweep JOB, its values and its metrics."""
    with BlockingClient(common.home) as client:
        detail = client.sweep(job)
    found = best_of(detail)
    if found is None:
        problem = f"no trial of {job} has a score yet"
        raise BadFieldError(problem, "wait for the end of the first epoch", "job")
    metric, values = detail.spec.search.metric, found.trial.values
    at = found.epoch - found.trial.first_epoch
    shown = found.trial.metrics[at : at + 1] if at >= 0 else ()  # only late epochs are kept
    metrics = shown[0] if shown else {metric: found.score}
    row = {
        "job": job,
        "trial": found.trial.number,
        "metric": metric,
        "score": found.score,
        "epoch": found.epoch,
        "values": values,
        "metrics": metrics,
    }
    lines = [
        f"trial {found.trial.number}: {metric} {found.score:.6g} after epoch {found.epoch}",
        *(f"  {name:15s} {one_line(str(value))}" for name, value in values.items()),
        *(f"  {name:15s} {value:.6g}" for name, value in metrics.items() if name != metric),
    ]
    output.say(common, row, *lines, quiet=[str(found.trial.number)])


def _print_trials(detail: SweepDetail, trials: Sequence[TrialInfo]) -> None:

    sys.stdout.write("\n")
    sys.stdout.flush()
    console = terminal_console(width_of(sys.stdout) or output.DEFAULT_WIDTH)
    console.print(trial_table(detail, trials, console.width))


def _show_trial(detail: SweepDetail, number: int, common: output.Common) -> None:
    job = detail.summary.job
    if not 0 <= number < len(detail.trials):
        hint = f"0 to {len(detail.trials) - 1}" if detail.trials else "there are no trials yet"
        raise BadFieldError(f"{job} has no trial {number}", hint, "trial")
    trial = detail.trials[number]
    if common.in_json:
        output.print_data(trial, common.output)
        return
    values = format_values(trial.values)
    why = one_line(trial.reason and f" ({trial.reason})")
    sys.stdout.write(f"trial {number} of {job}: {trial.state}{why}\n  {one_line(values)}\n")
    if trial.parent is not None:
        sys.stdout.write(
            f"  continues from trial {trial.parent} after {trial.start_epochs} epochs\n"
        )
    rows = epoch_rows(detail, (number,))
    names = list(dict.fromkeys(name for metrics in trial.metrics for name in metrics))
    if rows:
        sys.stdout.flush()
        output.print_table(
            ("epoch", *names),
            [[row["epoch"], *(_shown(row.get(n)) for n in names)] for row in rows],
        )


def _line_of(detail: SweepDetail) -> dict[str, Any]:
    job = detail.summary
    return {
        "job": job.job,
        "name": job.name,
        "user": job.user,
        "state": job.state,
        "reason": job.reason,
        "slots": job.slots,
        "trials": detail.trials_total,
        "ended": sum(one.state in ENDED_STATES for one in detail.trials),
        "units": detail.units_done,
        "left": detail.units_left,
        "metric": detail.spec.search.metric,
        "best": detail.best_score,
        "best_trial": detail.best,
    }


def _hops(detail: SweepDetail) -> str:
    share = detail.waited_s / (detail.waited_s + detail.trained_s) if detail.trained_s else 0.0
    trained = f"{span(detail.trained_s)} of training"
    return f"hops: {byte_count(detail.moved_bytes)}, {share:.1%} of the time; {trained}"


def _shown(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


EDGE: Final = 4  # lines of the table that are not trials


def top(
    job: output.JobName,
    *,
    once: Annotated[bool, Parameter(help="print once instead of continuously")] = False,
    common: output.Common = output.COMMON,
) -> None:
    """Show sweep JOB while it trains, every second until it ends or Ctrl-C."""
    live = common.output == "table" and not once and sys.stdout.isatty()
    try:
        with BlockingClient(common.home, output.ABSENT_AFTER_S if live else None) as client:
            if common.in_json:
                detail = client.sweep(job)
                rows = output.with_all_keys([trial_row(one) for one in in_order(detail)])
                output.print_data({"sweep": detail.summary, "trials": rows}, common.output)
            elif live:
                console = terminal_console()
                follow(lambda: client.sweep(job), console, time.sleep, time.time)
            else:
                console = terminal_console(width_of(sys.stdout) or output.DEFAULT_WIDTH)
                console.print(dashboard(client.sweep(job), console.width, time.time()))
    except KeyboardInterrupt:
        if not live:
            raise


def follow(
    read: Callable[[], SweepDetail],
    console: Console,
    pause: Callable[[float], None],
    clock: Callable[[], float],
) -> None:
    """Redraw a sweep every second until it has ended, also while the controller does not reply."""
    with Live(console=console, auto_refresh=False) as live:
        for detail, note in output.readings(read, pause):
            most = max(console.height - len(summary_lines(detail, 0.0)) - EDGE - 2, 1)
            drawn = dashboard(detail, console.width, clock(), note, most)
            live.update(drawn, refresh=True)
            if detail.summary.state in ENDED:
                return


def dashboard(
    detail: SweepDetail, width: int, now: float, note: str = "", most: int | None = None
) -> Group:
    """Return the state of a sweep, a bar of its units, and at most `most` trials (None: all).

    Training trials come first. `note` is appended to the first line.
    """
    first, *others = summary_lines(detail, now)
    head = Text(first, no_wrap=True, overflow="ellipsis")
    if note:
        head.append(f"   {note}", style="bold red")
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in others]
    trials = in_order(detail)
    shown = trials if most is None or len(trials) <= most else trials[: max(1, most - 1)]
    rest = Text(f"and {len(trials) - len(shown)} more" if len(shown) < len(trials) else "")
    table = trial_table(detail, shown, width)
    return Group(head, *lines, _bar(detail, width), table, *([rest] if rest else []))


def _bar(detail: SweepDetail, width: int) -> Table:
    everything = detail.units_done + detail.units_left
    share = detail.units_done / everything if everything else 0.0
    spent = detail.waited_s + detail.trained_s
    waits = f", {detail.waited_s / spent:.1%} of the time" if spent else ""
    hopped = f"{byte_count(detail.moved_bytes)} hopped{waits}" if detail.moved_bytes else ""
    row = Table.grid(padding=(0, GAP))
    bar = ProgressBar(1.0, share, max(10, min(60, width // 3)), style="grey35")
    row.add_row(bar, f"{share:.0%}", hopped)
    return row


def in_order(detail: SweepDetail) -> list[TrialInfo]:
    """Return the trials sorted by score, but training ones first."""
    return sorted(ranked(detail), key=lambda trial: trial.state != TRAINING)
