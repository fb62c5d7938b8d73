"""Bounds for numbers in worker reports, which user code controls.

A report must not crash the controller or a policy, and must not overflow their sums. `clamp_*`
moves a number to the nearest bound. `plausible_*` discards a number outside its bounds, and
`*_problem` describes why numbers are discarded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from schemas.epochs import EpochFacts, StepTimes
from schemas.sweeps import MAX_METRIC, printable
from schemas.wire.agent import StepsReported, UnitEnded, UnitStarted

MAX_COUNT: Final = 2**53  # largest count; larger integers lose precision as floats
MAX_MEASURE: Final = 1e15  # largest measurement

MAX_UNIT_S: Final = 1e8  # three years
MAX_UNIT_SAMPLES: Final = 2**40
MAX_STATE_BYTES: Final = 2**50
MAX_UNIT_METRICS: Final = 100
DIGEST_CHARACTERS: Final = 64

MAX_PASS_S: Final = 1e7
MAX_CORES: Final = 65_536.0
MAX_BYTES_PER_S: Final = 1e13

Struct = TypeVar("Struct", bound=msgspec.Struct)


def clamp_numbers(struct: Struct) -> Struct:
    """Return `struct` with its numbers limited to `MAX_COUNT` and `MAX_MEASURE`.

    Step times are limited, too. NaN becomes None if None is the field's default, and 0 otherwise.
    If all numbers are within bounds, `struct` itself is returned.
    """
    changes: dict[str, Any] = {}
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        kind = type(value)
        if kind is int:
            if not -MAX_COUNT <= value <= MAX_COUNT:
                changes[name] = MAX_COUNT if value > 0 else -MAX_COUNT
        elif kind is float and not -MAX_MEASURE <= value <= MAX_MEASURE:
            changes[name] = _clamp_float(struct, name, value)
        elif kind is StepTimes and (times := clamp_numbers(value)) is not value:
            changes[name] = times
    return msgspec.structs.replace(struct, **changes) if changes else struct


def _clamp_float(struct: msgspec.Struct, name: str, value: float) -> float | None:
    if math.isnan(value):
        default = dict(
            zip(struct.__struct_fields__[::-1], struct.__struct_defaults__[::-1], strict=False)
        )
        return None if default.get(name, 0.0) is None else 0.0
    return math.copysign(MAX_MEASURE, value)


# --- units of sweeps


def clamp_unit_started(event: UnitStarted) -> UnitStarted:
    """Return the report with its numbers within bounds."""
    return msgspec.structs.replace(
        event,
        samples=_clamp_int(event.samples, MAX_UNIT_SAMPLES),
        waited_s=_clamp_seconds(event.waited_s),
        staged_s=_clamp_seconds(event.staged_s),
    )


def clamp_unit_ended(event: UnitEnded) -> UnitEnded:
    """Return the report with its numbers within bounds and without excess metrics.

    A metric may still be NaN or infinite. Such a metric makes its trial fail.
    """
    return msgspec.structs.replace(
        event,
        metrics=_limit_metrics(event.metrics),
        samples=_clamp_int(event.samples, MAX_UNIT_SAMPLES),
        seconds=_clamp_seconds(event.seconds),
        scores=_limit_metrics(event.scores),
        digest=printable(event.digest[:DIGEST_CHARACTERS]),
        size=_clamp_int(event.size, MAX_STATE_BYTES),
    )


def _clamp_int(number: int, limit: int) -> int:
    return max(0, min(number, limit))


def _clamp_seconds(value: float) -> float:
    return 0.0 if math.isnan(value) else max(0.0, min(value, MAX_UNIT_S))


def _limit_metrics(given: Mapping[str, float]) -> dict[str, float]:
    return {printable(n[:MAX_METRIC]): v for n, v in list(given.items())[:MAX_UNIT_METRICS]}


# --- epochs and steps


def first_valid_noise_scale(*scales: float | None) -> float | None:
    """Return the first valid gradient noise scale, in samples, or None if there is none."""
    return next((v for v in scales if v is not None and 0.0 < v < math.inf), None)


def plausible_times(report: StepsReported | EpochFacts) -> StepTimes | None:
    """Return the reported step times, or None if they are missing or implausible."""
    return None if times_problem(report) else report.step_times


def times_problem(report: StepsReported | EpochFacts) -> str:
    """Return the reason for discarding the reported step times, or "" to keep them."""
    times, limit = report.step_times, max(1, report.global_batch)
    if times is None:
        return ""
    if not 0.0 < times.pass_s <= MAX_PASS_S:
        return f"pass_s {times.pass_s:g} is not above 0 and at most {MAX_PASS_S:g}"
    if not 0.0 <= times.sync_s <= times.pass_s:
        return f"sync_s {times.sync_s:g} is not 0 to pass_s {times.pass_s:g}"
    if not 1 <= times.local_batch <= limit:
        return f"local_batch {times.local_batch} is not 1 to global_batch {report.global_batch}"
    if not 1 <= times.passes <= limit:
        return f"passes {times.passes} is not 1 to global_batch {report.global_batch}"
    return ""


def plausible_steps(steps: StepsReported) -> int:
    """Return the steps that the group has done with its batch, or 0 if missing or implausible."""
    return steps.group_steps if 0 < steps.group_steps <= MAX_COUNT else 0


def plausible_cores(steps: StepsReported) -> float | None:
    """Return the mean number of cores that a worker uses, or None if missing or implausible."""
    return _plausible(steps.cpu_cores, MAX_CORES)


def plausible_bytes(steps: StepsReported) -> float | None:
    """Return the bytes per second that a worker sends, or None if missing or implausible."""
    return _plausible(steps.sent_bytes_per_s, MAX_BYTES_PER_S)


def usage_problem(steps: StepsReported) -> str:
    """Return a text about the usage numbers that are discarded, or "" if none is discarded."""
    found = []
    if steps.cpu_cores is not None and plausible_cores(steps) is None:
        found.append(f"cpu_cores {steps.cpu_cores:g} is not 0 to {MAX_CORES:g}")
    if steps.sent_bytes_per_s is not None and plausible_bytes(steps) is None:
        found.append(f"sent_bytes_per_s {steps.sent_bytes_per_s:g} is not 0 to {MAX_BYTES_PER_S:g}")
    return "; ".join(found)


def _plausible(value: float | None, limit: float) -> float | None:
    return value if value is not None and 0.0 <= value <= limit else None
