"""Policies from outside the package: one that works, and one for each way to misbehave."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, ClassVar

import msgspec
import numpy as np

from controlplane.policy.api import ClusterView, ImmediatePolicy, Plan
from controlplane.policy.baselines.tiresias import Tiresias
from controlplane.policy.placement.slot_partition import split
from schemas.ids import JobId, Seconds, SlotId

Placed = dict[JobId, dict[SlotId, int]]
HOST_GIB = (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30) + 1
ELSEWHERE = SlotId("nowhere/0")


class Steady(ImmediatePolicy):
    """Gives every waiting job one slot, in order of arrival."""

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        free = [slot.slot for slot in view.slots if slot.usable]
        placed = {name: job.running_on for name, job in view.jobs.items() if job.running_on}
        for name, job in view.jobs.items():
            if job.movable and not job.running_on and free:
                placed[name] = split(job.batch_size, [free.pop(0)])
        return Plan(based_on=view.version, local_batch=placed)


class SteadyOptions(msgspec.Struct, frozen=True):
    share: float = 0.5


class WithOptions(Steady):
    Options = SteadyOptions
    gangs = True
    needs = ("losses",)

    def __init__(self, options: SteadyOptions) -> None:
        self.share = options.share


class LikeTiresias(Tiresias):
    """Inherits everything."""


class Observes(Steady):
    def observe(self, event: object, now: Seconds) -> None:
        raise ValueError("boom")


class Improves(Steady):
    def improve(self, *_: object) -> bool:
        raise ValueError("boom")


class Rebatches(Steady):
    epochs = False

    def batches(self, view: ClusterView, now: Seconds) -> Plan:
        return Plan(based_on=view.version, local_batch={name: {ELSEWHERE: 1} for name in view.jobs})


class Raises(Steady):
    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        raise ValueError("boom")


class Leaves(Steady):
    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        sys.exit(0)


class EndsItsProcess(Steady):
    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        os._exit(0)


class Hangs(Steady):
    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        while True:
            time.sleep(600.0)


class Allocates(Steady):
    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        self.kept = [np.empty(1 << 27) for _ in range(HOST_GIB)]  # pages that nothing touches
        return super().plan(view, now)


class Prints(Steady):
    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        sys.stdout.write("printed by a policy\n")
        os.write(1, b"written by a policy\n")
        return super().plan(view, now)


class Mutates(Steady):
    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        plan = super().plan(view, now)
        view.jobs.clear()  # type: ignore[attr-defined] # a mapping, in truth a dict
        return plan


class NoPlan(Steady):
    def plan(self, view: ClusterView, now: Seconds) -> Any:
        return {"a": 1}


class NoStatistics(Steady):
    searches = True

    def stats(self) -> Any:
        return None


class Old(Steady):
    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        return Plan(based_on=view.version - 1)


class Restless(Steady):
    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        return msgspec.structs.replace(super().plan(view, now), wake_at=float("nan"))


class Gives(Steady):
    """Gives each job in the view the slots and batches of `what`."""

    def what(self, view: ClusterView) -> Any:
        raise NotImplementedError

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        what = self.what(view)
        placed = {name: what for name, job in view.jobs.items() if job.movable}
        return Plan(based_on=view.version, local_batch=placed)


class UnknownSlot(Gives):
    def what(self, view: ClusterView) -> Any:
        return {ELSEWHERE: 8}


class SameSlot(Gives):
    def what(self, view: ClusterView) -> Any:
        return {view.slots[0].slot: 8}


class NegativeBatch(Gives):
    def what(self, view: ClusterView) -> Any:
        return {view.slots[0].slot: -8}


class NanBatch(Gives):
    def what(self, view: ClusterView) -> Any:
        return {view.slots[0].slot: float("nan")}


class HugeBatch(Gives):
    def what(self, view: ClusterView) -> Any:
        return {view.slots[0].slot: 10**7}


class ManySlots(Gives):
    def what(self, view: ClusterView) -> Any:
        return {slot.slot: 8 for slot in view.slots}


class WrongType(Gives):
    def what(self, view: ClusterView) -> Any:
        return [view.slots[0].slot]


class UnknownJob(Steady):
    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        return Plan(based_on=view.version, local_batch={JobId("z-9"): {view.slots[0].slot: 8}})


# --- no policies


class Incomplete(ImmediatePolicy):
    """Has no plan."""


class WrongAttribute(Steady):
    gangs: ClassVar[Any] = "yes"


class WrongOptions(Steady):
    Options: ClassVar[Any] = dict


class CannotBeMade(Steady):
    def __init__(self) -> None:
        raise RuntimeError("no model")


def function() -> None:
    """No class."""
