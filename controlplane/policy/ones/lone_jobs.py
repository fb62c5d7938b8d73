"""Jobs of which nobody can say how long they last: no relatives, no stated end.

Then what a job has got so far is all there is to go by, and lengths are told apart less: long ones
are only those that have run long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from controlplane.policy.api import JobView
from controlplane.policy.ones.options import OnesOptions
from schemas.ids import Seconds


def is_lone(job: JobView, options: OnesOptions) -> bool:
    """Whether nothing tells how long `job` lasts but itself.

    Args:
        options: whether lengths are shared, and whether lone jobs are looked at in their own way.
    """
    return options.lone_jobs and not options.share_lengths and job.stop_samples is None


def lone_remaining_s(
    job: JobView, one_s: float, options: OnesOptions, now: Seconds, *, known: bool
) -> float:
    """T1 of a lone job: what was guessed, but at least `lone_least_s`.

    Args:
        one_s: seconds on one slot, as guessed from what is done; nan: nobody can say.
        now: seconds on the controller's clock.
        known: whether its speed was measured; else what it got so far counts.

    Returns:
        Seconds on one slot.
    """
    guess = one_s if known and math.isfinite(one_s) else job.served(now)
    return max(guess, options.lone_least_s)


def for_jobs(jobs: Iterable[JobView], options: OnesOptions) -> OnesOptions:
    """The options, with the exponents of lone jobs if all of them are lone."""
    if options.share_lengths or not all(is_lone(job, options) for job in jobs):
        return options
    return msgspec.structs.replace(
        options,
        size_exponent=options.lone_size_exponent,
        speedup_exponent=options.lone_speedup_exponent,
    )
