"""Guard of a policy from outside this package: it names errors, and refuses impossible plans.

The policy gets a copy of each view, as it does in a process of its own, so it cannot change what
others read.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controlplane.policy.api import (
    Budget,
    ClusterView,
    JobView,
    Plan,
    Policy,
    PolicyEvent,
    Reason,
    SearchStats,
)
from schemas.errors import OnesError, one_line_error
from schemas.ids import JobId, Seconds, SlotId

if TYPE_CHECKING:
    from numpy.random import Generator

REMEDY: Final = "correct the policy; docs/policies/own.md says what a plan may contain"
VIEW: Final = msgspec.msgpack.Decoder(ClusterView)
PLAN: Final = msgspec.msgpack.Decoder(Plan)
STATS: Final = msgspec.msgpack.Decoder(SearchStats)


class PolicyError(OnesError):
    """A policy from outside this package failed, or returned something impossible."""

    code = "policy"


def cause_in_words(error: BaseException) -> str:
    """Return the class and text of an error, and the file and line that raised it."""
    name, line = type(error).__name__, one_line_error(error)
    told = line if line.startswith(name) else f"{name}: {line}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{told} ({PurePath(frames[-1].filename).name}:{frames[-1].lineno})" if frames else told


class GuardedPolicy(Policy):
    """Wrapper that checks every result of `policy` before anything else sees it.

    Jobs that cannot be changed now, because they are changing or wait for their next attempt, are
    not `movable` in the views of the policy, and keep their slots whatever its plans say.

    Raises:
        PolicyError: in each method, if the policy fails or its result is impossible.
    """

    def __init__(self, policy: Any, name: str) -> None:
        self._policy = policy
        self._name = name

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Pass the event to the policy."""
        self._call("observe", event, now)

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """Let the policy search."""
        return self._call_with_view("improve", _shown(view, now), budget, rng, now) is True

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the policy's plan; jobs that cannot be changed now stay as they are."""
        shown = _shown(view, now)
        plan = self._plan("plan", shown, now)
        stay = {name: job.running_on for name, job in shown.jobs.items() if not job.movable}
        placed = {name: slots for name, slots in plan.local_batch.items() if name not in stay}
        if problem := _problem(placed, stay, shown):
            raise self._error(f"`plan` is impossible: {problem}")
        kept = {name: slots for name, slots in stay.items() if slots}
        reasons = {
            name: self._waits(job, now)
            for name, job in view.jobs.items()
            if not placed.get(name) and name not in kept
        }
        return msgspec.structs.replace(
            plan,
            local_batch={**placed, **kept},
            reasons={**reasons, **plan.reasons},
            wake_at=_earliest(plan, view, now),
        )

    def batches(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the policy's new batches."""
        shown = _shown(view, now)
        plan = self._plan("batches", shown, now)
        movable = {
            name: placed
            for name, placed in plan.local_batch.items()
            if name not in shown.jobs or shown.jobs[name].movable
        }
        stay = {name: job.running_on for name, job in shown.jobs.items() if name not in movable}
        if problem := _problem(movable, stay, shown):
            raise self._error(f"`batches` is impossible: {problem}")
        return msgspec.structs.replace(plan, local_batch=movable)

    def stats(self) -> SearchStats:
        """Return the policy's statistics."""
        stats: SearchStats = self._valid("stats", self._call("stats"), STATS)
        return stats

    def _plan(self, method: str, shown: ClusterView, now: Seconds) -> Plan:
        plan: Plan = self._valid(method, self._call_with_view(method, shown, now), PLAN)
        if plan.based_on != shown.version:
            problem = f"is based on version {plan.based_on}, not {shown.version} (`view.version`)"
            raise self._error(f"`{method}` {problem}")
        if plan.wake_at is not None and math.isnan(plan.wake_at):
            raise self._error(f"`{method}` is impossible: wake_at is {plan.wake_at}")
        return plan

    def _waits(self, job: JobView, now: Seconds) -> Reason:
        wait_s = job.ready_at - now
        if not job.running_on and wait_s > 0.0:
            text = f"waits {wait_s:.0f} s before the next attempt"
            return Reason("backing_off", text, {"wait_s": wait_s})
        return Reason("waits", f"{self._name} gives it no slots")

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._policy, method)(*arguments)
        except (Exception, SystemExit) as error:
            raise self._error(f"`{method}` raised {cause_in_words(error)}") from error

    def _call_with_view(self, method: str, shown: ClusterView, *arguments: Any) -> Any:
        """Call a method with a copy of a view. Refuse a policy that changes the copy."""
        given = VIEW.decode(msgspec.msgpack.encode(shown))
        before = msgspec.msgpack.encode(given)
        result = self._call(method, given, *arguments)
        try:
            unchanged = msgspec.msgpack.encode(given) == before
        except Exception:  # noqa: BLE001 - it can contain anything now
            unchanged = False
        if not unchanged:
            raise self._error(f"`{method}` changed its view")
        return result

    def _valid(self, method: str, result: Any, kind: msgspec.msgpack.Decoder[Any]) -> Any:
        """Return a copy of a result, in which every value has its type."""
        wanted = kind.type.__name__
        if type(result) is not kind.type:
            raise self._error(f"`{method}` returned {type(result).__name__}, not a {wanted}")
        try:
            return kind.decode(msgspec.msgpack.encode(result))
        except Exception as error:
            problem = f"`{method}` returned a {wanted} with a wrong value: {error}"
            raise self._error(problem) from error

    def _error(self, problem: str) -> PolicyError:
        return PolicyError(f"policy {self._name}: {problem}", REMEDY)


def _shown(view: ClusterView, now: Seconds) -> ClusterView:
    """Return the view in which jobs that have to wait for their next attempt are not movable."""
    late = {name for name, job in view.jobs.items() if job.movable and _next_at(job) > now}
    if not late:
        return view
    jobs = {
        name: msgspec.structs.replace(job, movable=False) if name in late else job
        for name, job in view.jobs.items()
    }
    return msgspec.structs.replace(view, jobs=jobs)


def _next_at(job: JobView) -> Seconds:
    return job.retry_at if job.running_on else job.ready_at


def _earliest(plan: Plan, view: ClusterView, now: Seconds) -> Seconds | None:
    """Return when to ask again: as the plan says, or when a job's next attempt is possible.

    Times that are past are ignored, as otherwise the policy would be asked again and again.
    """
    attempts = [_next_at(job) for job in view.jobs.values() if job.movable]
    times = [*attempts, *([] if plan.wake_at is None else [plan.wake_at])]
    return min((at for at in times if at > now), default=None)


Placed = Mapping[JobId, Mapping[SlotId, int]]


def _problem(placed: Placed, stay: Placed, view: ClusterView) -> str:
    """Return why no cluster can carry out a plan, or "".

    Args:
        placed: slots and local batches of each job that the plan decides about.
        stay: the same of the jobs that keep what they have.
    """
    slots = {slot.slot: slot for slot in view.slots}
    owners = {slot: name for name, on in stay.items() for slot in on}
    held = {slot for job in view.jobs.values() for slot in job.running_on}
    for name, on in placed.items():
        job = view.jobs.get(name)
        if job is None:
            return f"job {name} is not in the view"
        for slot in on:
            if slot not in slots:
                return f"job {name} gets slot {slot}, which is not in the view"
            if slot in owners:
                firm = " (not movable)" if owners[slot] in stay else ""
                return f"jobs {owners[slot]}{firm} and {name} both get slot {slot}"
            if not (slots[slot].usable or slots[slot].leaving or slot in held):
                return f"job {name} gets slot {slot}, which is neither usable nor leaving"
            owners[slot] = name
        if on and on != job.running_on and (problem := _out_of_bounds(job, on)):
            return f"job {name} gets {problem}"
    return ""


def _out_of_bounds(job: JobView, on: Mapping[SlotId, int]) -> str:
    if not job.least <= len(on) <= job.most:
        return f"{len(on)} slots, not {job.least} to {job.most}"
    for slot, batch in on.items():
        if not 1 <= batch <= job.local_limit:
            return f"a batch of {batch} on slot {slot}, not 1 to {job.local_limit}"
    total = sum(on.values())
    return (
        f"a batch of {total}, over its limit {job.batch_limit}" if total > job.batch_limit else ""
    )
