"""Numbers that a policy is told, within what can be: users and their scripts say them.

Reports of units and epochs within what can be: users' code runs where they come from.

The gradient noise scale, as reports of workers name it.

How the steps of a worker divide into passes, as it reports it, if that can be.

What a worker takes of its host, as it reports it, if that can be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from schemas.sweeps import are_bounded, bounded_metrics, printable
from schemas.wire.agent import AgentEvent, EpochReported, StepsReported, UnitBegun, UnitEnded

MOST: Final = 2**53  # of anything that is counted; beyond, neighbours are one number
LARGEST: Final = 1e15  # of anything that is measured

Told = TypeVar("Told", bound=msgspec.Struct)


def bounded(told: Told) -> Told:
    """What a policy is told, without numbers that no array or sum of it could hold.

    Args:
        told: of a job, or of something that happened.

    Returns:
        The same object where nothing is beyond its bound. NaN is left out where a field may be, and
        0 elsewhere.
    """
    changes: dict[str, Any] = {}
    for name in told.__struct_fields__:
        value = getattr(told, name)
        kind = type(value)
        if kind is int:
            if not -MOST <= value <= MOST:
                changes[name] = MOST if value > 0 else -MOST
        elif kind is float and not -LARGEST <= value <= LARGEST:
            changes[name] = _near(told, name, value)
    return msgspec.structs.replace(told, **changes) if changes else told


def _near(told: msgspec.Struct, name: str, value: float) -> float | None:
    if math.isnan(value):
        default = dict(
            zip(told.__struct_fields__[::-1], told.__struct_defaults__[::-1], strict=False)
        )
        return None if default.get(name, 0.0) is None else 0.0
    return math.copysign(LARGEST, value)


LONGEST_S: Final = 1e8  # three years
MOST_SAMPLES: Final = 2**40
MOST_BYTES: Final = 2**50
METRICS: Final = 100  # of a unit
NAME_CHARACTERS: Final = 100  # of a metric
DIGEST_CHARACTERS: Final = 64


def believable_begin(event: UnitBegun) -> UnitBegun:
    """The report with its numbers within bounds."""
    return msgspec.structs.replace(
        event,
        samples=_within(event.samples, MOST_SAMPLES),
        waited_s=_seconds(event.waited_s),
        staged_s=_seconds(event.staged_s),
    )


def believable_end(event: UnitEnded) -> UnitEnded:
    """The report with its numbers within bounds, and no more metrics than anybody reads.

    Args:
        event: as it came. Metrics may be NaN or infinite: their trial fails for it.
    """
    return msgspec.structs.replace(
        event,
        metrics=_metrics(event.metrics),
        samples=_within(event.samples, MOST_SAMPLES),
        seconds=_seconds(event.seconds),
        scores=_metrics(event.scores),
        digest=printable(event.digest[:DIGEST_CHARACTERS]),
        size=_within(event.size, MOST_BYTES),
    )


def believable_report(event: AgentEvent) -> AgentEvent:
    """The report with no more metrics of an epoch than a script may give, and finite ones only.

    Before it is an input: those of older journals stay as they are.

    Args:
        event: as it came; it is itself where there is nothing to leave out.
    """
    if not isinstance(event, EpochReported) or are_bounded(event.metrics):
        return event
    return msgspec.structs.replace(event, metrics=bounded_metrics(event.metrics))


def _within(number: int, most: int) -> int:
    return max(0, min(number, most))


def _seconds(given: float) -> float:
    return max(0.0, min(given, LONGEST_S)) if not math.isnan(given) else 0.0


def _metrics(given: Mapping[str, float]) -> dict[str, float]:
    return {printable(n[:NAME_CHARACTERS]): v for n, v in list(given.items())[:METRICS]}


def first_noise_scale(*scales: float | None) -> float | None:
    """The first of several that can be one.

    Args:
        scales: in samples, as scripts and workers report them; None where none was measured.

    Returns:
        A number of samples above 0; None if there is none.
    """
    return next((v for v in scales if v is not None and math.isfinite(v) and v > 0), None)


MAX_STEP_S: Final = 1e7  # of a pass that anybody waits for
MOST_STEPS: Final = 2**53


class PassTimes(NamedTuple):
    """A step takes `pass_s + (passes - 1) * (pass_s - sync_s)` seconds."""

    pass_s: float | None = None  # of a step's last pass, with its reduction; None: not told
    sync_s: float | None = None  # of these, in the reduction
    local_batch: int = 0  # samples of one pass of one worker; 0: not told
    passes: int = 0  # of one worker in a step


NOT_TOLD: Final = PassTimes()


def believable_passes(report: StepsReported | EpochReported) -> PassTimes:
    """All four, or `NOT_TOLD`: one without the others says nothing."""
    told = _told(report)
    return NOT_TOLD if _trouble(told, report.global_batch) else told


def unbelievable_passes(report: StepsReported | EpochReported) -> str:
    """Why pass times that are reported are dropped, in words; empty: they are not."""
    told = _told(report)
    return "" if told == NOT_TOLD else _trouble(told, report.global_batch)


def believable_steps(steps: StepsReported) -> int:
    """Steps that its group has done with its batch; 0: not told."""
    return steps.group_steps if 0 < steps.group_steps <= MOST_STEPS else 0


def _told(report: StepsReported | EpochReported) -> PassTimes:
    return PassTimes(report.pass_s, report.sync_s, report.local_batch, report.passes)


def _trouble(told: PassTimes, global_batch: int) -> str:
    pass_s, sync_s, local, passes = told
    if pass_s is None or not 0.0 < pass_s <= MAX_STEP_S:
        return f"pass_s {_number(pass_s)} is not above 0 and at most {MAX_STEP_S:g}"
    if sync_s is None or not 0.0 <= sync_s <= pass_s:
        return f"sync_s {_number(sync_s)} is not 0 to pass_s {pass_s:g}"
    if not 1 <= local <= max(1, global_batch):
        return f"local_batch {local} is not 1 to global_batch {global_batch}"
    if not 1 <= passes <= max(1, global_batch):
        return f"passes {passes} is not 1 to global_batch {global_batch}"
    return ""


def _number(value: float | None) -> str:
    return "(none)" if value is None else f"{value:g}"


MOST_CORES: Final = 65_536.0
MOST_BYTES_PER_S: Final = 1e13


def believable_cores(steps: StepsReported) -> float | None:
    """Mean cores of a worker; None: not reported, or no number of cores."""
    return _usage_within(steps.cpu_cores, MOST_CORES)


def believable_bytes(steps: StepsReported) -> float | None:
    """Bytes per second that a worker sends; None: not reported, or no such number."""
    return _usage_within(steps.sent_bytes_per_s, MOST_BYTES_PER_S)


def unbelievable_usage(steps: StepsReported) -> str:
    """What is reported and dropped, in words; empty: nothing."""
    said = []
    if steps.cpu_cores is not None and believable_cores(steps) is None:
        said.append(f"cpu_cores {steps.cpu_cores:g} is not 0 to {MOST_CORES:g}")
    if steps.sent_bytes_per_s is not None and believable_bytes(steps) is None:
        said.append(f"sent_bytes_per_s {steps.sent_bytes_per_s:g} is not 0 to {MOST_BYTES_PER_S:g}")
    return "; ".join(said)


def _usage_within(value: float | None, most: float) -> float | None:
    return value if value is not None and math.isfinite(value) and 0.0 <= value <= most else None
