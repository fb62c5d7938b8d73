"""Reasons to wait that every policy gives in the same words."""

from __future__ import annotations

from controlplane.policy.api import Reason
from schemas.ids import Seconds


def backs_off(until: Seconds, now: Seconds) -> Reason:
    """It failed or was lost a moment ago.

    Args:
        until: when it may be tried again, seconds.
        now: seconds on the controller's clock.
    """
    wait_s = until - now
    return Reason("backing_off", f"waits {wait_s:.0f} s before its next try", {"wait_s": wait_s})


def too_large(needs: int, slots: int) -> Reason:
    """The cluster is too small for it, or not there at all.

    Args:
        needs: slots at least.
    """
    numbers = {"needs": float(needs), "slots": float(slots)}
    if not slots:
        return Reason("no_slots", "no node has joined, or all are lost", numbers)
    return Reason("too_large", f"needs {needs} slots, the cluster has {slots}", numbers)
