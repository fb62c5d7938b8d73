"""What a job will get under a policy that needs something which it lacks, for its user."""

from __future__ import annotations

import math

from controlplane.policy.registry import Need


def job_notes(
    policy: str,
    needs: tuple[Need, ...],
    *,
    utility_stated: bool,
    epochs: int = 0,
    train_loss: float | None = None,
) -> tuple[str, ...]:
    """One sentence for each need of the policy that a job does not meet.

    Args:
        needs: of jobs, as the registry has them.
        utility_stated: whether the user said what the job's end is worth.
        train_loss: that it reported last; None: none yet.

    Returns:
        In the order of `needs`; empty if it lacks nothing.
    """
    lacking = {
        "utility": None if utility_stated else _no_utility(policy),
        "losses": _no_losses(policy, epochs, train_loss),
    }
    return tuple(note for need in needs if (note := lacking[need]) is not None)


def _no_utility(policy: str) -> str:
    return (
        f"no utility stated: {policy} accepts it, promises it no end, and gives it what promised "
        "jobs leave; "
        "`utility` in the job file says what its end is worth"
    )


def _no_losses(policy: str, epochs: int, train_loss: float | None) -> str | None:
    """Nobody can say before a job runs whether it will report losses."""
    if train_loss is None and not epochs:
        until = "it has at least a fair share until it reports some"
        return f"{policy} shares slots by training losses: {until}"
    if train_loss is not None and math.isfinite(train_loss):
        return None
    many = f"{epochs} epoch{'s' * (epochs != 1)}"
    what = f"no loss in {many}" if train_loss is None else f"its loss is {train_loss}"
    return (
        f"{what}: under {policy}, which shares slots by training losses, it has a fair share; "
        "`agent.report(loss=...)` tells one"
    )
