"""What a scheduling policy sees and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from schemas.ids import JobId, NodeId, Seconds, SlotId


class SlotView(msgspec.Struct, frozen=True, kw_only=True):
    """One slot that may be used now or that is in use."""

    slot: SlotId
    node: NodeId
    kind: str  # "gpu" or "cpu"
    usable: bool  # its node is up and no process is still leaving it


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """One active job as a policy may see it: reports so far, never a simulator's truth."""

    job: JobId
    submitted_at: Seconds
    batch_size: int  # global, as submitted, samples per step
    batch_limit: int  # largest global batch the user allows, samples per step
    local_limit: int  # largest batch of one slot, samples per step
    least: int  # slots
    most: int
    wanted: int
    running_on: Mapping[SlotId, int] = {}  # slot -> local batch; empty while it waits
    ready_at: Seconds = Seconds(0.0)  # not to be started before
    epoch: int = 0  # finished
    samples_done: int = 0  # Y_processed
    samples_per_s: float = 0.0  # X_j


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable picture of the cluster at one moment."""

    version: int  # of the core's state
    slots: tuple[SlotView, ...]
    jobs: Mapping[JobId, JobView]


class Reason(msgspec.Struct, frozen=True):
    """Why a plan treats a job as it does: a stable code, words, and the numbers behind them."""

    code: str
    text: str
    numbers: dict[str, float] = {}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Local batch sizes b_j^i for every job that should run (ONES eq. 1).

    A job that is absent should wait. `reasons` has an entry for every job that changes or waits.
    """

    based_on: int
    local_batch: dict[JobId, dict[SlotId, int]] = {}
    reasons: dict[JobId, Reason] = {}
    wake_at: Seconds | None = None  # ask again then, even if nothing happens


class Policy(Protocol):
    """Chooses who runs where, and with which batch size."""

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Read out a complete plan for `view`; changes nothing."""
        ...
