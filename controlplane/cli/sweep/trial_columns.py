"""Trials as lines of a table, for `show` and `top`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from controlplane.cli.job_lines import one_line
from controlplane.cli.output import span
from controlplane.client.sweeps.sweep import short
from controlplane.client.sweeps.tables import best_epoch, best_of
from schemas.messages.client import SweepDetail, TrialInfo

BLOCKS: Final = "▁▂▃▄▅▆▇█"
CURVE: Final = 12  # columns of a learning curve
ALWAYS: Final = ("trial", "state", "epoch")
TRAINING: Final = "training"

Cells = dict[str, str]


def trial_cells(detail: SweepDetail, trials: Sequence[TrialInfo]) -> list[Cells]:
    """A row for each trial; columns that nobody fills are left out.

    Args:
        trials: in the order of the table.
    """
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
    through = partitions - trial.left if trial.left else 0
    part = f" +{through}/{partitions}" if through else ""
    return {
        "trial": f"{trial.number}" if trial.parent is None else f"{trial.number} of {trial.parent}",
        **{name: short(trial.values[name]) if name in trial.values else ""
           for name in detail.spec.search.space},
        "state": trial.state,
        "epoch": f"{trial.epochs}/{trial.granted}{part}",
        "partition": where,
        "slot": trial.slot or "",
        metric: "" if last is None else f"{last:.4g}",
        "best": "" if found is None else f"{found.score:.4g} @{found.epoch}",
        "curve": "".join(map(scale, curve[-CURVE:])),
        "why": trial.why,
    }  # fmt: skip


def _scale(detail: SweepDetail) -> Callable[[float], str]:
    """Blocks between the worst and the best score of the sweep."""
    metric = detail.spec.search.metric
    scores = [
        value
        for trial in detail.trials
        for one in trial.metrics
        if (value := one.get(metric)) is not None and math.isfinite(value)
    ]
    low, high = min(scores, default=0.0), max(scores, default=1.0)
    if detail.spec.search.mode == "min":  # what is good is high
        low, high = high, low

    def block(value: float) -> str:
        if not math.isfinite(value):
            return "!"
        share = (value - low) / (high - low) if high != low else 1.0
        return BLOCKS[min(len(BLOCKS) - 1, int(share * len(BLOCKS)))]

    return block


def summary_lines(detail: SweepDetail, now: float) -> list[str]:
    """How a sweep stands, in a few lines.

    Args:
        now: seconds since the epoch.
    """
    job, search = detail.summary, detail.spec.search
    best = best_of(detail)
    kind = type(search.searcher).__struct_config__.tag
    slots = f"{job.slots} slot{'s' * (job.slots != 1)}"
    parts = f"{detail.spec.partitions} partitions, {slots}"
    lines = [f"{job.job}  {job.state}  {kind}, {counted(detail)}, {parts}"]
    if job.reason and not (best is not None and job.reason.startswith("best: ")):
        lines.append(job.reason)
    if best is not None:
        values = ", ".join(f"{name} {short(value)}" for name, value in best.trial.values.items())
        after = f"after {best.epoch} epoch{'s' * (best.epoch != 1)}"
        lines.append(
            f"best: trial {best.trial.number}, {search.metric} {best.score:.4g} {after} ({values})"
        )
    lines.append(units_line(detail, now))
    return [one_line(line) for line in lines]


def counted(detail: SweepDetail) -> str:
    """How many trials there are in each state."""
    states: dict[str, int] = {}
    for trial in detail.trials:
        states[trial.state] = states.get(trial.state, 0) + 1
    parts = ", ".join(f"{many} {state}" for state, many in states.items())
    return f"{detail.trials_in_all} trials ({parts})" if parts else "no trials yet"


def units_line(detail: SweepDetail, now: float) -> str:
    """What is done and left, and how long that takes.

    Args:
        now: seconds since the epoch.
    """
    said = [f"units: {detail.units_done} done, {detail.units_left} left"]
    if detail.units_again:
        said.append(f"{detail.units_again} done again")
    if detail.unit_s is not None:
        said.append(f"{detail.unit_s:.3g} s each")
    left = time_left(detail, now)
    if left is not None:
        said.append(f"about {span(left)} left")
    return ", ".join(said)


def time_left(detail: SweepDetail, now: float) -> float | None:
    """Seconds that it needs with the slots that it has; None: nobody knows.

    Args:
        now: seconds since the epoch.
    """
    if not detail.units_left:
        return None
    if detail.expected_end is not None:
        return max(0.0, detail.expected_end - now)
    if detail.unit_s is None or not detail.summary.slots:
        return None
    return detail.units_left * detail.unit_s / detail.summary.slots
