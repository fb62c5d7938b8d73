"""What a policy said beforehand on a real cluster, and what came: speeds of changes, starts of jobs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from schemas.ids import JobId
from schemas.wire.client import Decision, Explanation, JobDetail
from tests.bench import report

WAITING: Final = "queued"
HEADS: Final = ["", "how many", "off by, median", "at worst", "came / promised"]


@dataclass(frozen=True)
class Promise:
    """A speed-up that a change was expected to bring, and the one that its first epoch had."""

    kind: str  # of job
    promised: float
    came: float
    first: bool  # growth of its kind

    @property
    def off_by(self) -> float:
        """The larger over the smaller one."""
        return math.exp(abs(math.log(self.came / self.promised)))


def promises(told: Sequence[tuple[str, Explanation]]) -> list[Promise]:
    """All that a whole epoch was held against, in the order of the decisions.

    Args:
        told: the kind of each job, and every decision about it.
    """
    decisions = sorted(
        ((one.time, kind, one) for kind, each in told for one in each.decisions),
        key=lambda found: found[0],
    )
    found: list[Promise] = []
    grown: set[str] = set()
    for _, kind, one in decisions:
        numbers = one.numbers
        before, then = numbers.get("speed_now"), numbers.get("speed_then")
        came = numbers.get("speed_realised")
        grows = bool(one.before.slots) and len(one.to.slots) > len(one.before.slots)
        if before and then and came:
            first = grows and kind not in grown
            found.append(Promise(kind, then / before, came / before, first))
            grown |= {kind} if grows else set()
    return found


@dataclass(frozen=True)
class Start:
    """The first forecast of a job's first start; seconds since the epoch."""

    told_at: float
    at: float
    earliest: float
    latest: float


def start_told(told: Explanation) -> Start | None:
    """What is said now of a job that waits; None: nothing.

    Args:
        told: of a job; of one that waits the last entry says why.
    """
    last: Decision | None = told.decisions[-1] if told.decisions else None
    if last is None or last.outcome != "waits" or "start_s" not in last.numbers:
        return None
    after = (last.numbers[name] for name in ("start_s", "start_earliest_s", "start_latest_s"))
    return Start(last.time, *(last.time + seconds for seconds in after))


def began(detail: JobDetail) -> float | None:
    """When a job left the queue for the first time; None: never."""
    left = (change.time for change in detail.history if change.from_state == WAITING)
    return next(left, None)


def promise_figures(found: Sequence[Promise]) -> dict[str, float]:
    """Print how right promised speed-ups were.

    Returns:
        `promises`; `promise_off_median` and `promise_off_most`: the larger over the smaller one of
        what was promised and what came; `promise_bias`: what came over it, geometric mean.
    """
    rows = []
    for name, some in (
        ("all changes", found),
        *((f"first growth, {one.kind} ({one.promised:.2f}, came {one.came:.2f})", [one])
          for one in found if one.first),
    ):  # fmt: skip
        if some:
            off = [one.off_by for one in some]
            rows.append([name, len(some), statistics.median(off), max(off), _bias(some)])
    report.table("promised speed-ups, held against the first whole epoch", HEADS, rows)
    if not found:
        return {"promises": 0.0}
    off = [one.off_by for one in found]
    return {
        "promises": float(len(found)),
        "promise_off_median": statistics.median(off),
        "promise_off_most": max(off),
        "promise_bias": _bias(found),
    }


def _bias(some: Sequence[Promise]) -> float:
    return statistics.geometric_mean(one.came / one.promised for one in some)


def start_figures(
    told: Mapping[JobId, Start], starts: Mapping[JobId, float | None]
) -> dict[str, float]:
    """Print how right the first forecasts of starts were, as `ones sim` counts them.

    Args:
        told: what was said first of jobs that waited.
        starts: when jobs began, see `began`.

    Returns:
        `start_forecasts`: of jobs that waited on after they were told, and started.
        `start_wait_s_mean`: how long these waited from then on.
        `start_error_median`: of |expected - real| / real, of the waits from the forecast on.
        `start_error_s_median`, `start_error_s_most`: the same in seconds. `start_coverage`: share
        of starts within the interval that was told, which is meant for 80%.
    """
    came = [(said, starts[job]) for job, said in told.items()]
    held = [(said, at) for said, at in came if at is not None and at > said.told_at]
    if not held:
        return {"start_forecasts": 0.0}
    seconds = [abs(said.at - at) for said, at in held]
    figures = {
        "start_forecasts": float(len(held)),
        "start_wait_s_mean": statistics.fmean(at - said.told_at for said, at in held),
        "start_error_median": statistics.median(
            abs(said.at - at) / (at - said.told_at) for said, at in held
        ),
        "start_error_s_median": statistics.median(seconds),
        "start_error_s_most": max(seconds),
        "start_coverage": statistics.fmean(said.earliest <= at <= said.latest for said, at in held),
    }
    report.table("first forecasts of starts", ["", ""], list(figures.items()))
    return figures
