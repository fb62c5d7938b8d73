"""What can be chosen about the search; every default says where it comes from."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from schemas.errors import SettingsError

Search = Literal["auto", "evolution", "climb", "greedy"]
GrowthBy = Literal["steps", "epochs"]
ScaleDown = Literal["off", "literal", "contended", "composed"]  # see search/batch_limits

LengthModelName = Literal["residual", "beta", "mixture"]  # see lengths/length_models


class OnesOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `ones`, table `[policy.options]` of the controller's settings."""

    seed: int = 0
    # auto: evolution where GPU types differ, else greedy; climb: the best one alone; greedy: none
    search: Search = "auto"
    population: int = 16  # K; the paper takes as many as GPUs, 16 give the same result
    patience: int = 10  # generations without a better candidate before the search rests
    mutation_rate: float = 0.1  # theta: share of a candidate's jobs that lose their slots
    warmup_steps: int = 10  # on one slot before a job may grow; the paper says "a few"
    first_slots: int = 1  # that a job may have before; the paper starts all jobs on one
    report_interval_s: float = 30.0  # a longer epoch counts in pieces of this
    settle_s: float = (
        3.0  # after a change, before the next one of the same job, however short epochs
    )
    rescale_stall_s: float = 1.0  # what a change costs a running job
    start_stall_s: float = 10.0  # what a start costs, until some were measured
    change_margin: float = 0.1  # of its value, that a change must be worth beyond its stall
    pause_margin: float = 1.5  # of a job's worth on one slot, that stopping it costs beyond that
    batch_margin: float = 0.03  # of its goodput, that a new batch on the same slots must bring
    rebatch: bool = True  # on the same slots at any time; else at plans, once a gate is open
    growth_by: GrowthBy = "steps"  # what lets a batch double: steps with the last one, or epochs
    growth_steps: int = 10  # that a job trains with a batch before it may double
    limit_values: bool = False  # sizes are worth what R allows now, not what it will allow soon
    batch_caps: bool = True  # stay below a batch that lost on its slots, for a while
    place_trials: bool = True  # leave a place that loses to a closer one of as many slots
    batches_per_doubling: int = 6  # that are tried between a job's first batch and its limit
    size_exponent: float = 0.55  # how much short jobs are preferred
    speedup_exponent: float = 0.8  # how much a further slot is worth
    lone_jobs: bool = False  # where no length is shared or stated, go by the next four
    lone_size_exponent: float = 0.2  # instead of `size_exponent`
    lone_speedup_exponent: float = 0.4  # instead of `speedup_exponent`
    lone_residual: float = 3.0  # times what is done, that is left
    lone_least_s: float = 1200.0  # on one slot, that is left at least
    ageing: float = 0.0  # exponent of the response ratio in a job's weight; 0: it may starve
    max_stretch: float = 0.0  # times a job's fair-share time, that it may take; 0: any
    patience_s: float = 300.0  # added to every remaining time; at most a quarter of their mean
    growth: float = 2.0  # times the largest size a family has run, in one change
    passes: bool = True  # what a worker takes in several passes is modelled as that
    sync_times: bool = False  # computing and reductions are fitted apart, where workers tell both
    smooth_noise: bool = False  # noise scales once more, though workers smooth what they measure
    noise_trust: float = 1.0  # then: epochs of measurement that weigh as much as the prior
    noise_scale_prior: float = 4.0  # times the job's first batch, if it reports none
    length_model: LengthModelName = "residual"  # of work that no rule states
    gain_correction: bool = True  # learn what comes of speed-ups that are promised for new sizes
    share_lengths: bool = True  # expect of a new family what all jobs took; else its own past alone
    forecast_starts: bool = True  # say when waiting jobs are expected to start
    interference: bool = True  # learn who slows down whom on one node, and keep them apart
    gpu_types: bool = True  # learn how fast each type of GPU is
    migration: bool = True  # move small jobs away where others need whole nodes
    swaps: bool = True  # where GPU types differ, let jobs trade places; else nobody ever does
    scale_down: ScaleDown = "off"

    @property
    def grows_by_steps(self) -> bool:
        """Whether steps alone move R; readings of scale-down need the epochs of the paper."""
        return self.growth_by == "steps" and self.scale_down == "off"

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        _check(self)


def _check(options: OnesOptions) -> None:
    low = {
        "population": 2,
        "patience": 0,
        "warmup_steps": 0,
        "growth_steps": 0,
        "first_slots": 1,
        "report_interval_s": 0.1,
        "settle_s": 0.0,
        "ageing": 0.0,
        "max_stretch": 0.0,
        "noise_trust": 0.0,
        "rescale_stall_s": 0.0,
        "start_stall_s": 0.0,
        "change_margin": 0.0,
        "batch_margin": 0.0,
        "pause_margin": 0.0,
        "batches_per_doubling": 1,
        "size_exponent": 0.0,
        "speedup_exponent": 0.05,
        "patience_s": 0.0,
        "lone_size_exponent": 0.0,
        "lone_speedup_exponent": 0.05,
        "lone_residual": 0.0,
        "lone_least_s": 0.0,
        "growth": 1.0,
        "noise_scale_prior": 0.01,
        "seed": 0,
        "mutation_rate": 0.0,
    }
    for name, least in low.items():
        value = getattr(options, name)
        field = f"policy.options.{name}"
        if not math.isfinite(value):
            raise SettingsError(f"{field}: {value} is not finite", "give a number", field)
        if value < least:
            raise SettingsError(f"{field}: {value} is below {least}", "raise it", field)
    if 0.0 < options.max_stretch < 1.0:
        field = "policy.options.max_stretch"
        what = f"{field}: {options.max_stretch} is below 1: not all can be faster than their share"
        raise SettingsError(what, "give 1 or more, or 0 for no limit", field)
    if options.mutation_rate > 1:
        what = f"policy.options.mutation_rate: {options.mutation_rate} is above 1"
        raise SettingsError(what, "lower it", "policy.options.mutation_rate")
