"""How time passes in a simulation, and how its policy is asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimOptions:
    """How time passes; all times are virtual seconds."""

    instant_changes: bool  # slots change hands in no time, and stalls follow
    whole_seconds: bool  # epochs end at whole seconds
    telemetry_s: float  # between reports of a job's steps, at most; 0: none
    round_s: float  # between plans; 0: whenever something happens
    stall_s: float | None = None  # of every change, instead of what jobs need
    first_stall_s: float | None = None  # of every start
    prepare_s: float | None = None  # of a newcomer beside a group that trains
    share_families: bool = True  # jobs of one application are one family; else each is its own
    record_allocations: bool = False  # write down who had which slot when
    noise: float = 0.0  # deviation of the logarithm of measured speeds and noise scales
    noise_scale_error: float = 1.0  # all noise scales of a job are off by up to this factor
    noise_scale_alone: bool = True  # one worker in one pass tells one, which a live one cannot
    seed: int = 0  # of these errors


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """When a policy is asked, and how much it may think; all times are virtual seconds."""

    round_s: float  # between plans; 0: whenever something happens
    latency_s: float  # from a question to its answer
    generations: int  # that a searching policy evolves at each question; 0: it does not search
    think_s: float  # at least, between questions that only the end of an epoch raised
    asks_after_epochs: bool  # whether the end of an epoch raises a question at all
    seed: int  # of the search
    rebatches: bool = False  # it is also asked for batches alone, when a job tells something new
