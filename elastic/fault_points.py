"""Named fault points: a test sets in the job's environment which worker fails at which point.

Example: `ELASTIC_FAULTS="reduce:rank=1:step=40=kill; handover.send:version=3=stall 2.5"`. When a
worker reaches a point, the first fault with satisfied conditions is executed. Each fault is
executed once per process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Final

VARIABLE: Final = "ELASTIC_FAULTS"
POINTS: Final = frozenset(
    {
        "load",  # before the model is built
        "ready",  # before the worker reports that it is ready
        "build",  # in the thread that builds the group
        "built",  # in the same thread, when the group is built
        "announce",  # when the boundary is agreed
        "boundary",  # before the switch
        "swapped",  # after the switch
        "handover.send",  # in the thread that sends the state
        "handover.receive",  # in the thread that receives the state
        "handed_over",  # a newcomer has the full state
        "reduce",  # before a step's reduction
        "reduced",  # after the reduction, before its result is read
        "carry",  # before the reduction of carried rows
        "carried",  # after the reduction of carried rows
        "reduce.later",  # before a later reduction of a step, with several optimizers
        "reduced.later",  # after a later reduction
        "collect",  # before a collective of the script; its step is the next to finish
        "collected",  # after it, before its result is used
        "step",  # after the optimizer's step
        "report",  # before the epoch's summary is broadcast
        "agreed",  # after the broadcast, before the worker records its last samples
        "restore",  # in a broadcast of the whole state, after its large tensors
        "quiesce",  # before the worker reports that it has quiesced
        "recover",  # before the survivors' group is built
        "recovered",  # after this worker has entered the survivors' group
        "suspend",  # before the checkpoint of a suspended job
        "suspended",  # after the checkpoint, before the others leave
    }
)


@dataclass(frozen=True, slots=True)
class Fault:
    """An action at a fault point, and the conditions for the action."""

    point: str
    action: str  # kill, stop, fail, stall SECONDS, corrupt
    rank: int | None = None
    step: int | None = None
    version: int | None = None

    def matches(self, point: str, rank: int | None, step: int | None, version: int | None) -> bool:
        """Return whether this fault applies. A fault with a step also applies to later steps."""
        return (
            self.point == point
            and self.rank in {None, rank}
            and (self.step is None or (step is not None and step >= self.step))
            and self.version in {None, version}
        )


class InjectedError(Exception):
    """Raised by the action `fail`."""


def parse(text: str) -> list[Fault]:
    """Return the faults in `text`; the module describes the format."""
    faults = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        place, _, action = part.rpartition("=")
        point, *conditions = place.split(":")
        numbers = dict(condition.split("=") for condition in conditions)
        if point not in POINTS or not action or set(numbers) - {"rank", "step", "version"}:
            raise ValueError(f"{VARIABLE}: cannot read {part!r}")
        faults.append(Fault(point, action, **{key: int(value) for key, value in numbers.items()}))
    return faults


_plan: list[Fault] | None = None
_lock = threading.Lock()


def reach(
    point: str, *, rank: int | None = None, step: int | None = None, version: int | None = None
) -> bool:
    """Execute the first fault that applies at `point`; its action `fail` raises InjectedError.

    Returns True if the caller has to corrupt the data that it sends next. `step` is 1-based.
    """
    global _plan  # noqa: PLW0603 - one list of faults per process
    if _plan is None:
        _plan = parse(os.environ.get(VARIABLE, ""))
    if not _plan:
        return False
    with _lock:
        found = next((fault for fault in _plan if fault.matches(point, rank, step, version)), None)
        if found is None:
            return False
        _plan.remove(found)
    return _execute(found)


def _execute(fault: Fault) -> bool:
    action, _, seconds = fault.action.partition(" ")
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "stall":
            time.sleep(float(seconds))
        case "fail":
            raise InjectedError(f"fault at {fault.point}")
        case "corrupt":
            return True
        case _:
            raise ValueError(f"{VARIABLE}: no action {fault.action!r}")
    return False
