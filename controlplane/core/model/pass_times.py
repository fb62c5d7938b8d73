"""How the steps of a worker divide into passes, as it reports it, if that can be."""

from __future__ import annotations

from typing import Final, NamedTuple

from schemas.messages.agent import EpochReported, StepsReported

LONGEST_S: Final = 1e7  # of a pass that anybody waits for
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
    if pass_s is None or not 0.0 < pass_s <= LONGEST_S:
        return f"pass_s {_number(pass_s)} is not above 0 and at most {LONGEST_S:g}"
    if sync_s is None or not 0.0 <= sync_s <= pass_s:
        return f"sync_s {_number(sync_s)} is not 0 to pass_s {pass_s:g}"
    if not 1 <= local <= max(1, global_batch):
        return f"local_batch {local} is not 1 to global_batch {global_batch}"
    if not 1 <= passes <= max(1, global_batch):
        return f"passes {passes} is not 1 to global_batch {global_batch}"
    return ""


def _number(value: float | None) -> str:
    return "(none)" if value is None else f"{value:g}"
