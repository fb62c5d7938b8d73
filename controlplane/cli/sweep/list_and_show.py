"""ls, show and best: what sweeps there are, and how one stands."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from controlplane.cli.common_options import COMMON, Common, JobName
from controlplane.cli.exit_codes import Exit
from controlplane.cli.job_lines import one_line
from controlplane.cli.output import (
    byte_count,
    even,
    plain,
    print_data,
    print_json,
    print_table,
    span,
)
from controlplane.cli.sweep.trial_columns import summary_lines
from controlplane.cli.terminal import terminal_console, width_of
from controlplane.client import BlockingClient
from controlplane.client.sweeps.sweep import short
from controlplane.client.sweeps.tables import best_of, epoch_rows, ranked, trial_row
from schemas.errors import BadFieldError, RemoteError
from schemas.messages.client import SweepDetail, TrialInfo

DAMAGED = "journal"  # code of the error
OVER = frozenset({"done", "stopped", "failed", "deleted", "graduated"})
PLAIN_WIDTH = 200  # where no terminal says how wide it is
ORDER_HELP = "best first, or in the order in which they were added"


def ls(
    *,
    all_: Annotated[bool, Parameter(name=["--all", "-a"], help="ended ones too")] = False,
    common: Common = COMMON,
) -> int:
    """List sweeps, oldest first, one line each."""
    with BlockingClient(common.home) as client:
        found = list(_sweeps(client, ended=all_))
    rows = [_line_of(detail) for detail in found]
    if common.output in {"json", "jsonl"}:
        print_data(rows, common.output)
    elif common.output == "quiet":
        sys.stdout.writelines(f"{row['job']}\n" for row in rows)
    elif rows:
        columns = ("job", "state", "slots", "trials", "ended", "units", "left", "best", "reason")
        print_table(columns, [[_shown(row[name]) for name in columns] for row in rows])
    if not rows:
        which = "no sweep yet" if all_ else "no sweep waits or runs; -a lists ended ones"
        sys.stderr.write(f"ones: {which}\n")
    return Exit.OK


def _sweeps(client: BlockingClient, *, ended: bool) -> Iterator[SweepDetail]:
    """Each sweep; those that the controller cannot read are named on standard error."""
    for job in client.jobs(ended=ended):
        try:
            yield client.sweep(job.job)
        except BadFieldError:  # an ordinary job
            continue
        except RemoteError as error:
            if error.remote_code != DAMAGED:
                raise
            sys.stderr.write(f"ones: {job.job} is left out: {error.message}\n")


def show(
    job: JobName,
    *,
    by: Annotated[Literal["best", "number"], Parameter(help=ORDER_HELP)] = "best",
    trial: Annotated[int | None, Parameter(help="only this one, with all its epochs")] = None,
    common: Common = COMMON,
) -> int:
    """Show the trials of sweep JOB: values, state, epoch, partition, metric, slot."""
    with BlockingClient(common.home) as client:
        detail = client.sweep(job)
    if trial is not None:
        return _show_trial(detail, trial, common)
    if common.output == "json":
        flat = plain(detail)
        best = best_of(detail)
        place = None if best is None else best.epoch
        print_json({**flat.pop("summary"), "best_epoch": place, **flat})
        return Exit.OK
    trials = ranked(detail) if by == "best" else list(detail.trials)
    if common.output == "jsonl":
        print_data(even([trial_row(one) for one in trials]), common.output)
    elif common.output == "quiet":
        sys.stdout.writelines(f"{one.number}\n" for one in trials)
    else:
        sys.stdout.writelines(f"{line}\n" for line in summary_lines(detail, time.time()))
        if detail.units_done:
            sys.stdout.write(f"{_hops(detail)}\n")
        if trials:
            _print_trials(detail, trials)
    return Exit.OK


def best(job: JobName, *, common: Common = COMMON) -> int:
    """Say which trial of sweep JOB is best, with which values and which metrics."""
    with BlockingClient(common.home) as client:
        detail = client.sweep(job)
    found = best_of(detail)
    if found is None:
        what = f"no trial of {job} has a score yet"
        raise BadFieldError(what, "wait for the end of the first epoch", "job")
    at = found.epoch - found.trial.first_epoch
    shown = found.trial.metrics[at : at + 1] if at >= 0 else ()  # of very many the latest are known
    metrics = shown[0] if shown else {detail.spec.search.metric: found.score}
    if common.output in {"json", "jsonl"}:
        row = {
            "job": job,
            "trial": found.trial.number,
            "metric": detail.spec.search.metric,
            "score": found.score,
            "epoch": found.epoch,
            "values": found.trial.values,
            "metrics": metrics,
        }
        print_data(row, common.output)
    elif common.output == "quiet":
        sys.stdout.write(f"{found.trial.number}\n")
    else:
        line = f"{detail.spec.search.metric} {found.score:.6g} after epoch {found.epoch}"
        sys.stdout.write(f"trial {found.trial.number}: {line}\n")
        for name, value in found.trial.values.items():
            sys.stdout.write(f"  {name:15s} {one_line(str(value))}\n")
        others = {
            name: value for name, value in metrics.items() if name != detail.spec.search.metric
        }
        for name, number in others.items():
            sys.stdout.write(f"  {name:15s} {number:.6g}\n")
    return Exit.OK


def _print_trials(detail: SweepDetail, trials: Sequence[TrialInfo]) -> None:

    from controlplane.cli.sweep.trial_table import trial_table  # noqa: PLC0415

    sys.stdout.write("\n")
    sys.stdout.flush()
    console = terminal_console(width_of(sys.stdout) or PLAIN_WIDTH)
    console.print(trial_table(detail, trials, console.width))


def _show_trial(detail: SweepDetail, number: int, common: Common) -> int:
    job = detail.summary.job
    if not 0 <= number < len(detail.trials):
        hint = f"0 to {len(detail.trials) - 1}" if detail.trials else "there are none yet"
        raise BadFieldError(f"{job} has no trial {number}", hint, "trial")
    trial = detail.trials[number]
    if common.output in {"json", "jsonl"}:
        print_data(trial, common.output)
        return Exit.OK
    values = ", ".join(f"{name} {short(value)}" for name, value in trial.values.items())
    why = one_line(trial.why and f" ({trial.why})")
    sys.stdout.write(f"trial {number} of {job}: {trial.state}{why}\n  {one_line(values)}\n")
    if trial.parent is not None:
        sys.stdout.write(f"  goes on from trial {trial.parent} after {trial.began_at} epochs\n")
    rows = epoch_rows(detail, (number,))
    names = list(dict.fromkeys(name for metrics in trial.metrics for name in metrics))
    if rows:
        sys.stdout.flush()
        print_table(
            ("epoch", *names),
            [[row["epoch"], *(_shown(row.get(n)) for n in names)] for row in rows],
        )
    return Exit.OK


def _line_of(detail: SweepDetail) -> dict[str, Any]:
    job = detail.summary
    return {
        "job": job.job,
        "name": job.name,
        "user": job.user,
        "state": job.state,
        "reason": job.reason,
        "slots": job.slots,
        "trials": detail.trials_in_all,
        "ended": sum(one.state in OVER for one in detail.trials),
        "units": detail.units_done,
        "left": detail.units_left,
        "metric": detail.spec.search.metric,
        "best": detail.best_score,
        "best_trial": detail.best,
    }


def _hops(detail: SweepDetail) -> str:
    share = detail.waited_s / (detail.waited_s + detail.trained_s) if detail.trained_s else 0.0
    trained = f"{span(detail.trained_s)} of training"
    return f"hops: {byte_count(detail.hopped_bytes)}, {share:.1%} of the time; {trained}"


def _shown(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
