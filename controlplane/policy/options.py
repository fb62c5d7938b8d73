"""Options of the policies that search or have many options, and the checks that options share.

The comment at a default says where it comes from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final, Literal, get_args, get_type_hints

import msgspec

from controlplane.policy.placement.free_slots import Moves
from controlplane.policy.placement.placers import PlacerName
from controlplane.policy.placement.sizes import Starts
from schemas.errors import SettingsError

MIN_ROUND_S: Final = 0.1  # shortest interval between rounds


@dataclass(frozen=True, slots=True)
class Within:
    """Range of a number, both ends included; metadata of an option's type."""

    least: float
    most: float = math.inf


NotNegative = Annotated[float, Within(0.0)]
Count = Annotated[int, Within(1)]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a policy, table `[policy.options]` of the controller's settings."""

    def __post_init__(self) -> None:
        """Refuse numbers that are not finite or not within their range.

        Raises:
            SettingsError: with the name of the first such option.
        """
        for name, within in _ranges(type(self)).items():
            value = getattr(self, name)
            if value is None:
                continue
            if not math.isfinite(value):
                refuse(name, f"{value} is not finite", "give a number")
            if value < within.least:
                refuse(name, f"{value} is below {within.least}", "raise it")
            if value > within.most:
                refuse(name, f"{value} is above {within.most}", "lower it")


@cache
def _ranges(options: type[Options]) -> dict[str, Within]:
    hints = get_type_hints(options, include_extras=True)
    return {
        name: extra
        for name, hint in hints.items()
        for kind in (hint, *get_args(hint))  # a number, or None
        for extra in getattr(kind, "__metadata__", ())
        if isinstance(extra, Within)
    }


def refuse(name: str, what: str, remedy: str) -> None:
    """Refuse the value of an option.

    Raises:
        SettingsError: always.
    """
    field = f"policy.options.{name}"
    raise SettingsError(f"{field}: {what}", remedy, field)


Search = Literal["auto", "evolution", "climb", "greedy"]
LengthModelName = Literal["residual", "beta", "mixture"]  # see ones/job_lengths


class OnesOptions(Options, frozen=True):
    """Options of policy `ones`, table `[policy.options]` of the controller's settings."""

    seed: Annotated[int, Within(0)] = 0
    # auto: evolution where GPU types differ, else greedy; climb: the best one alone; greedy: none
    search: Search = "auto"
    # K; the paper takes as many as GPUs, 16 give the same result.
    population: Annotated[int, Within(2)] = 16
    # Generations without a better candidate before the search rests.
    patience: Annotated[int, Within(0)] = 10
    # Theta: share of a candidate's jobs that lose their slots.
    mutation_rate: Annotated[float, Within(0.0, 1.0)] = 0.1
    # On one slot before a job may grow; the paper says "a few".
    warmup_steps: Annotated[int, Within(0)] = 10
    first_slots: Count = 1  # that a job may have before; the paper starts all jobs on one
    # A longer epoch counts in pieces of this.
    report_interval_s: Annotated[float, Within(0.1)] = 30.0
    # After a change, before the next one of the same job, however short epochs.
    settle_s: NotNegative = 3.0
    rescale_stall_s: NotNegative = 1.0  # what a change costs a running job
    start_stall_s: NotNegative = 10.0  # what a start costs, until some were measured
    change_margin: NotNegative = 0.1  # of its value, that a change must be worth beyond its stall
    # Of a job's worth on one slot, that stopping it costs beyond that.
    pause_margin: NotNegative = 1.5
    # Of its goodput, that a new batch on the same slots must bring.
    batch_margin: NotNegative = 0.03
    rebatch: bool = True  # on the same slots at any time; else at plans, once a gate is open
    # That a job trains with a batch before it may double.
    growth_steps: Annotated[int, Within(0)] = 10
    batch_caps: bool = True  # stay below a batch that lost on its slots, for a while
    place_trials: bool = True  # leave a place that loses to a closer one of as many slots
    batches_per_doubling: Count = 6  # that are tried between a job's first batch and its limit
    size_exponent: NotNegative = 0.55  # how much short jobs are preferred
    speedup_exponent: Annotated[float, Within(0.05)] = 0.8  # how much a further slot is worth
    ageing: NotNegative = 0.0  # exponent of the response ratio in a job's weight; 0: it may starve
    max_stretch: NotNegative = 0.0  # times a job's fair-share time, that it may take; 0: any
    # Added to every remaining time; at most a quarter of their mean.
    patience_s: NotNegative = 300.0
    # Times the largest size a family has run, in one change.
    growth: Annotated[float, Within(1.0)] = 2.0
    passes: bool = True  # what a worker takes in several passes is modelled as that
    # Times the job's first batch, if it reports none.
    noise_scale_prior: Annotated[float, Within(0.01)] = 4.0
    length_model: LengthModelName = "residual"  # of work that no rule states
    gain_correction: bool = True  # learn what comes of speed-ups that are promised for new sizes
    share_lengths: bool = True  # expect of a new family what all jobs took; else its own past alone
    forecast_starts: bool = True  # say when waiting jobs are expected to start
    interference: bool = True  # learn who slows down whom on one node, and keep them apart
    gpu_types: bool = True  # learn how fast each type of GPU is
    migration: bool = True  # move small jobs away where others need whole nodes
    swaps: bool = True  # where GPU types differ, let jobs trade places; else nobody ever does

    def __post_init__(self) -> None:
        """Check the ranges; no limit of the stretch, or one that all jobs can keep."""
        super().__post_init__()
        if 0.0 < self.max_stretch < 1.0:
            what = f"{self.max_stretch} is below 1: not all can be faster than their share"
            refuse("max_stretch", what, "give 1 or more, or 0 for no limit")


MAX_CANDIDATES: Final = 512  # a generation of as many for 512 slots takes 0.35 s (README)


ScaleDown = Literal["literal", "contended", "composed", "authors", "off"]  # see ones_paper


class OnesPaperOptions(Options, frozen=True):
    """Options of policy `ones-paper`, table `[policy.options]` of the controller's settings.

    The first value that a comment names is the literal reading; the defaults are those that gave
    the shortest completion times in simulations (see the README of this room).
    """

    seed: Annotated[int, Within(0)] = 0  # of what is drawn when a new view is met
    # K; 0: as many as slots, at most `MAX_CANDIDATES`
    population: Annotated[int, Within(0, MAX_CANDIDATES)] = 0
    # generations without a better candidate before the search rests
    patience: Annotated[int, Within(0)] = 10
    mutation_rate: Annotated[float, Within(0.0, 1.0)] = 0.1  # theta

    # --- readings
    score: Literal["running", "all"] = "all"  # eq. 8 over running jobs, or a value of all jobs
    speed: Literal["mean", "model", "goodput"] = "goodput"  # X: per GPU as measured; fitted; useful
    batch: Literal["kept", "goodput"] = "goodput"  # of one slot: as it began; the best within R
    rho: Literal["candidate", "generation", "mean"] = "mean"  # draws of progress, or none
    selection: Literal["sampled", "best"] = "best"  # K rounds of Algorithm 1, or the K best
    scale_down: ScaleDown = "contended"
    limit_floor: Literal["one", "first"] = "first"  # how far R may fall
    keep_least: bool = True  # False: scaling down may take a job's last slot
    gate: Literal["all", "job", "off"] = "job"  # who must finish an epoch before who changes
    reorder: Literal["flat", "aligned"] = "aligned"
    charge: bool = True  # False: changes are taken to cost nothing

    # --- numbers
    # on one slot before R counts; the paper says "a few"
    warmup_steps: Annotated[int, Within(0)] = 10
    report_interval_s: NotNegative = 30.0  # a longer epoch counts in pieces of this; 0: it does not
    settle_s: NotNegative = 3.0  # after a change, before the next one of the same job
    rescale_stall_s: NotNegative = 1.0  # what a change costs a running job
    start_stall_s: NotNegative = 10.0  # what a start costs, until one was measured
    change_margin: NotNegative = 0.1  # of its value, that a change must be worth beyond its stall


LITERAL: Final[Mapping[str, Any]] = {  # every switch to what the paper's words say
    "score": "running",
    "speed": "mean",
    "batch": "kept",
    "rho": "candidate",
    "selection": "sampled",
    "scale_down": "literal",
    "limit_floor": "one",
    "keep_least": False,
    "gate": "all",
    "reorder": "flat",
    "charge": False,
    "report_interval_s": 0.0,
    "settle_s": 0.0,
}


class SlaqOptions(Options, frozen=True):
    """Options of policy `slaq`, table `[policy.options]` of the controller's settings."""

    # T: scheduling epoch, the horizon of predicted gains; paper: 3 to 30
    interval_s: Annotated[float, Within(0.5, 3600.0)] = 10.0
    target: Literal["loss", "quality"] = "loss"  # lower losses, or reach `quality` sooner
    # share of the predicted loss reduction that has value
    quality: Annotated[float, Within(0.01, 0.999)] = 0.9
    normalise: Literal["drop", "range"] = "drop"
    # drop: by the largest reduction between reports, as in the paper; range: by the predicted
    # total reduction
    history: Annotated[int, Within(3, 1000)] = 40  # latest reports that a curve is fitted to
    # weight of a report relative to the next one; paper: exponential
    decay: Annotated[float, Within(0.1, 1.0)] = 0.85
    worst_fit: Annotated[float, Within(0.001)] = 0.25
    # Residual, as a share of the total loss reduction, above which no curve fits (losses that are
    # not convex, for example): the job then has its fair share.
    efficiency_floor: Annotated[float, Within(0.0, 1.0)] = 0.0  # minimum speed-up per slot; 0: off
    # fair shares for a job with too few losses for a curve
    newcomers: Annotated[float, Within(1.0)] = 2.0
    margin: NotNegative = 0.25  # relative extra gain that moves a slot: every move costs steps
    quantum_s: NotNegative = 120.0  # turns if not all jobs fit; 0: the oldest run to the end
    most: Count | None = None  # maximum slots of one job
    placer: PlacerName = "consolidate"


MIN_PRICE: Final = 1e-12  # smallest U and L, value per slot second


class OasisOptions(Options, frozen=True):
    """Options of policy `oasis`, table `[policy.options]` of the controller's settings."""

    # one time slot of the paper: sizes are planned per interval
    interval_s: Annotated[float, Within(MIN_ROUND_S)] = 30.0
    horizon: Annotated[int, Within(2, 5000)] = 240  # planned intervals
    u: float | None = None  # U, value per slot second; None: estimated from the jobs seen
    l: float | None = None  # noqa: E741 - L, as U
    window: Annotated[int, Within(2, 100_000)] = 200  # latest jobs that U and L are estimated from
    # share of the remaining time added to a promise, at least one interval
    margin: Annotated[float, Within(0.0, 10.0)] = 0.1
    start_s: NotNegative = 20.0  # planned duration of a start, or of a start after a pause
    measured_at_once: Count = 16  # slots of the cluster per job that may run to be measured
    placer: PlacerName = "consolidate"

    def __post_init__(self) -> None:
        """Check the ranges, and the order of the prices."""
        super().__post_init__()
        for name in ("u", "l"):
            value = getattr(self, name)
            if value is not None and not MIN_PRICE <= value < math.inf:
                refuse(name, f"{value} is not a price", "give a value per slot second above 0")
        if self.u is not None and self.l is not None and self.u < self.l:
            refuse("u", f"{self.u} is below l, {self.l}", "raise the first or lower the second")


class HarmonyOptions(Options, frozen=True):
    """Options of policy `harmony`, table `[policy.options]` of the controller's settings."""

    slowdowns: Literal["learnt", "oracle"] = "learnt"  # "oracle": simulation only
    # prior: share of its speed that a job loses by a neighbour
    prior: Annotated[float, Within(0.0, 0.95)] = 0.3
    ridge: Annotated[float, Within(1e-3, 1e3)] = 0.5  # weight of the prior, in measurements
    # prior: share that a job loses by being on several nodes
    spread: Annotated[float, Within(0.0, 0.95)] = 0.1
    migrations: Literal["none", "free", "swap"] = "swap"  # swap: also exchanges
    backfill: bool = True  # start small jobs before a large one that waits, without delaying it
    settle_s: Annotated[float, Within(0.0, 1e6)] = 60.0  # minimum time in a place before a move
    margin: NotNegative = 0.05  # minimum gain of a move, in the sum of normalised speeds
    stall_s: NotNegative = 5.0  # assumed cost of a move; a pause costs the last start


RESTART_S: Final = 30.0  # delta of the paper: a new size starts from a checkpoint
ELASTIC_S: Final = 1.0  # stall of an elastic change


def _check_interval(interval_s: float) -> None:
    if 0.0 < interval_s < MIN_ROUND_S:
        refuse("interval_s", f"{interval_s} is too short", f"give 0, or {MIN_ROUND_S}")


class GoodputOptions(Options, frozen=True):
    """Options of policy `goodput`, table `[policy.options]` of the controller's settings."""

    interval_s: NotNegative = 60.0  # between rounds, as in the paper; 0: at every request
    # longest round, as a share of the jobs' mean age; 0: `interval_s`
    age_share: Annotated[float, Within(0.0, 10.0)] = 0.5
    starts: Starts = "at-once"  # arrivals between rounds: on idle slots, or in the next round
    share_family: bool = False  # also learn speeds from the family; Pollux does not
    power: Annotated[
        float, Within(-10.0, 1.0)
    ] = -1.0  # p of the power mean of speed-ups: lower is fairer
    # maximum growth, relative to the most slots that the job ever had
    growth: Annotated[float, Within(1.0)] = 2.0
    reallocation_s: NotNegative | None = None  # delta: cost of a re-allocation; None: by `moves`
    batch_margin: NotNegative = 0.05  # minimum gain in goodput of a new batch on the same slots
    batches_per_doubling: Count = 2  # grid between a job's first batch and its limit
    # multiple of the first batch, until a job reports one
    noise_scale_prior: Annotated[float, Within(0.01)] = 4.0
    placer: PlacerName = "consolidate"
    moves: Moves = "elastic"

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check_interval(self.interval_s)
        super().__post_init__()

    @property
    def change_s(self) -> float:
        """Assumed seconds of a re-allocation: as given, else by the way jobs change."""
        if self.reallocation_s is not None:
            return self.reallocation_s
        return ELASTIC_S if self.moves == "elastic" else RESTART_S


class OptimusOptions(Options, frozen=True):
    """Options of policy `optimus`, table `[policy.options]` of the controller's settings."""

    interval_s: NotNegative = 600.0  # between rounds, as in the paper; 0: at every request
    # longest round, as a share of the jobs' mean age; 0: `interval_s`
    age_share: Annotated[float, Within(0.0, 10.0)] = 1.0
    starts: Starts = "at-once"  # arrivals between rounds: on idle slots, or in the next round
    remaining: Literal["fit", "oracle"] = "fit"  # source of remaining steps and of their duration
    moves: Moves = "restart"  # a new size starts from the checkpoint, as in the paper
    placer: PlacerName = "emptiest"
    most: Count | None = None  # maximum slots of one job
    # share of the loss; an epoch that reduces it by less is the last
    convergence: Annotated[float, Within(1e-6, 0.5)] = 0.01

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check_interval(self.interval_s)
        super().__post_init__()
