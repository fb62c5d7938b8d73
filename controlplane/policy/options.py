"""Options of the policies that search or have many options, and the checks that options share.

The comment at a default says where it comes from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from controlplane.policy.placement.free_slots import Moves
from controlplane.policy.placement.placers import PlacerName
from controlplane.policy.placement.rounds import Starts
from controlplane.policy.search.batch_limits import ScaleDown
from schemas.errors import SettingsError

MIN_ROUND_S: Final = 0.1  # shortest interval between rounds


def refuse_below(options: Any, least: Mapping[str, float]) -> None:
    """Refuse numbers that are below their minimum or not finite.

    Raises:
        SettingsError: with the name of the first such option.
    """
    for name, low in least.items():
        value = getattr(options, name)
        if not math.isfinite(value):
            refuse(name, f"{value} is not finite", "give a number")
        if value < low:
            refuse(name, f"{value} is below {low}", "raise it")


def refuse_above(options: Any, most: Mapping[str, float]) -> None:
    """Refuse numbers that are above their maximum.

    Raises:
        SettingsError: with the name of the first such option.
    """
    for name, high in most.items():
        value = getattr(options, name)
        if value > high:
            refuse(name, f"{value} is above {high}", "lower it")


def refuse(name: str, what: str, remedy: str) -> None:
    """Refuse the value of an option.

    Raises:
        SettingsError: always.
    """
    field = f"policy.options.{name}"
    raise SettingsError(f"{field}: {what}", remedy, field)


Search = Literal["auto", "evolution", "climb", "greedy"]
LengthModelName = Literal["residual", "beta", "mixture"]  # see ones/job_lengths


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
    growth_steps: int = 10  # that a job trains with a batch before it may double
    batch_caps: bool = True  # stay below a batch that lost on its slots, for a while
    place_trials: bool = True  # leave a place that loses to a closer one of as many slots
    batches_per_doubling: int = 6  # that are tried between a job's first batch and its limit
    size_exponent: float = 0.55  # how much short jobs are preferred
    speedup_exponent: float = 0.8  # how much a further slot is worth
    ageing: float = 0.0  # exponent of the response ratio in a job's weight; 0: it may starve
    max_stretch: float = 0.0  # times a job's fair-share time, that it may take; 0: any
    patience_s: float = 300.0  # added to every remaining time; at most a quarter of their mean
    growth: float = 2.0  # times the largest size a family has run, in one change
    passes: bool = True  # what a worker takes in several passes is modelled as that
    noise_scale_prior: float = 4.0  # times the job's first batch, if it reports none
    length_model: LengthModelName = "residual"  # of work that no rule states
    gain_correction: bool = True  # learn what comes of speed-ups that are promised for new sizes
    share_lengths: bool = True  # expect of a new family what all jobs took; else its own past alone
    forecast_starts: bool = True  # say when waiting jobs are expected to start
    interference: bool = True  # learn who slows down whom on one node, and keep them apart
    gpu_types: bool = True  # learn how fast each type of GPU is
    migration: bool = True  # move small jobs away where others need whole nodes
    swaps: bool = True  # where GPU types differ, let jobs trade places; else nobody ever does

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
        "rescale_stall_s": 0.0,
        "start_stall_s": 0.0,
        "change_margin": 0.0,
        "batch_margin": 0.0,
        "pause_margin": 0.0,
        "batches_per_doubling": 1,
        "size_exponent": 0.0,
        "speedup_exponent": 0.05,
        "patience_s": 0.0,
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


MAX_CANDIDATES: Final = 512  # a generation of as many for 512 slots takes 0.35 s (README)


class OnesPaperOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `ones-paper`, table `[policy.options]` of the controller's settings.

    The first value that a comment names is the literal reading; the defaults are those that gave
    the shortest completion times in simulations (see the README of this room).
    """

    seed: int = 0  # of what is drawn when a new view is met
    population: int = 0  # K; 0: as many as slots, at most `MAX_CANDIDATES`
    patience: int = 10  # generations without a better candidate before the search rests
    mutation_rate: float = 0.1  # theta

    # --- readings
    score: Literal["running", "all"] = "all"  # eq. 8 over running jobs, or a value of all jobs
    speed: Literal["mean", "model", "goodput"] = "goodput"  # X: per GPU as measured; fitted; useful
    batch: Literal["kept", "goodput"] = "goodput"  # of one slot: as it began; the best within R
    rho: Literal["candidate", "generation", "mean"] = "mean"  # draws of progress, or none
    selection: Literal["sampled", "best"] = "best"  # K rounds of Algorithm 1, or the K best
    stated: bool = True  # False: what users state of their jobs' length is not used
    scale_down: ScaleDown = "contended"
    limit_floor: Literal["one", "first"] = "first"  # how far R may fall
    keep_least: bool = True  # False: scaling down may take a job's last slot
    gate: Literal["all", "job", "off"] = "job"  # who must finish an epoch before who changes
    reorder: Literal["flat", "aligned"] = "aligned"
    charge: bool = True  # False: changes are taken to cost nothing
    incumbent: bool = True  # False: the schedule in force may be lost from the population

    # --- numbers
    warmup_steps: int = 10  # on one slot before R counts; the paper says "a few"
    report_interval_s: float = 30.0  # a longer epoch counts in pieces of this; 0: it does not
    settle_s: float = 3.0  # after a change, before the next one of the same job
    jump: float = 2.0  # times the batch that a job has, or had last, in one change
    sample: int = 500  # points of finished jobs' logs that the progress model is fitted to
    prior_epochs: float = 10.0  # that a job is taken to last before any has finished
    noise_scale_prior: float = 4.0  # times the job's first batch, if it reports none
    size_exponent: float = 0.55  # score "all": how much short jobs are preferred
    speedup_exponent: float = 0.8  # score "all": how much a further slot is worth
    patience_s: float = 300.0  # score "all": added to remaining times, at most 1/4 of their mean
    rescale_stall_s: float = 1.0  # what a change costs a running job
    start_stall_s: float = 10.0  # what a start costs, until one was measured
    change_margin: float = 0.1  # of its value, that a change must be worth beyond its stall
    batch_margin: float = 0.1  # of its speed, that a new batch on as many slots must bring

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        refuse_below(self, LEAST)
        refuse_above(self, {"mutation_rate": 1.0, "population": MAX_CANDIDATES})


LEAST: Final[Mapping[str, float]] = {
    "seed": 0,
    "population": 0,
    "patience": 0,
    "mutation_rate": 0.0,
    "warmup_steps": 0,
    "report_interval_s": 0.0,
    "settle_s": 0.0,
    "jump": 1.0,
    "sample": 10,
    "prior_epochs": 1.0,
    "noise_scale_prior": 0.01,
    "size_exponent": 0.0,
    "speedup_exponent": 0.05,
    "patience_s": 0.0,
    "rescale_stall_s": 0.0,
    "start_stall_s": 0.0,
    "change_margin": 0.0,
    "batch_margin": 0.0,
}

LITERAL: Final[Mapping[str, Any]] = {  # every switch to what the paper's words say
    "score": "running",
    "speed": "mean",
    "batch": "kept",
    "rho": "candidate",
    "selection": "sampled",
    "stated": False,
    "scale_down": "literal",
    "limit_floor": "one",
    "keep_least": False,
    "gate": "all",
    "reorder": "flat",
    "charge": False,
    "incumbent": False,
    "report_interval_s": 0.0,
    "settle_s": 0.0,
}


class SlaqOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `slaq`, table `[policy.options]` of the controller's settings."""

    interval_s: float = 10.0  # T: scheduling epoch, the horizon of predicted gains; paper: 3 to 30
    target: Literal["loss", "quality"] = "loss"  # lower losses, or reach `quality` sooner
    quality: float = 0.9  # share of the predicted loss reduction that has value
    normalise: Literal["drop", "range"] = "drop"
    # drop: by the largest reduction between reports, as in the paper; range: by the predicted
    # total reduction
    history: int = 40  # latest reports that a curve is fitted to
    decay: float = 0.85  # weight of a report relative to the next one; paper: exponential
    worst_fit: float = 0.25
    # Residual, as a share of the total loss reduction, above which no curve fits (losses that are
    # not convex, for example): the job then has its fair share.
    efficiency_floor: float = 0.0  # minimum speed-up per slot; 0: off
    newcomers: float = 2.0  # fair shares for a job with too few losses for a curve
    margin: float = 0.25  # relative extra gain that moves a slot: every move costs steps
    quantum_s: float = 120.0  # turns if not all jobs fit; 0: the oldest run to the end
    most: int | None = None  # maximum slots of one job
    placer: PlacerName = "consolidate"

    def __post_init__(self) -> None:
        """Check the ranges."""
        least = {
            "interval_s": 0.5,
            "quality": 0.01,
            "history": 3,
            "decay": 0.1,
            "worst_fit": 0.001,
            "efficiency_floor": 0.0,
            "newcomers": 1.0,
            "margin": 0.0,
            "quantum_s": 0.0,
        }
        refuse_below(self, least)
        most = {
            "interval_s": 3600.0,
            "quality": 0.999,
            "history": 1000,
            "decay": 1.0,
            "efficiency_floor": 1.0,
        }
        refuse_above(self, most)
        if self.most is not None:
            refuse_below(self, {"most": 1})


MIN_PRICE: Final = 1e-12  # smallest U and L, value per slot second


class OasisOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `oasis`, table `[policy.options]` of the controller's settings."""

    interval_s: float = 30.0  # one time slot of the paper: sizes are planned per interval
    horizon: int = 240  # planned intervals
    u: float | None = None  # U, value per slot second; None: estimated from the jobs seen
    l: float | None = None  # noqa: E741 - L, as U
    window: int = 200  # latest jobs that U and L are estimated from
    margin: float = 0.1  # share of the remaining time added to a promise, at least one interval
    start_s: float = 20.0  # planned duration of a start, or of a start after a pause
    measured_at_once: int = 16  # slots of the cluster per job that may run to be measured
    placer: PlacerName = "consolidate"

    def __post_init__(self) -> None:
        """Check the ranges."""
        refuse_below(
            self,
            {
                "interval_s": MIN_ROUND_S,
                "horizon": 2,
                "window": 2,
                "margin": 0.0,
                "start_s": 0.0,
                "measured_at_once": 1,
            },
        )
        refuse_above(self, {"horizon": 5000, "window": 100_000, "margin": 10.0})
        for name in ("u", "l"):
            value = getattr(self, name)
            if value is not None and not MIN_PRICE <= value < float("inf"):
                refuse(name, f"{value} is not a price", "give a value per slot second above 0")
        if self.u is not None and self.l is not None and self.u < self.l:
            refuse("u", f"{self.u} is below l, {self.l}", "raise the first or lower the second")


class HarmonyOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `harmony`, table `[policy.options]` of the controller's settings."""

    slowdowns: Literal["learnt", "oracle"] = "learnt"  # "oracle": simulation only
    prior: float = 0.3  # prior: share of its speed that a job loses by a neighbour
    ridge: float = 0.5  # weight of the prior, in measurements
    spread: float = 0.1  # prior: share that a job loses by being on several nodes
    migrations: Literal["none", "free", "swap"] = "swap"  # swap: also exchanges
    backfill: bool = True  # start small jobs before a large one that waits, without delaying it
    settle_s: float = 60.0  # minimum time in a place before a move
    margin: float = 0.05  # minimum gain of a move, in the sum of normalised speeds
    stall_s: float = 5.0  # assumed cost of a move; a pause costs the last start

    def __post_init__(self) -> None:
        """Check the ranges."""
        least = {
            "prior": 0.0, "ridge": 1e-3, "spread": 0.0, "settle_s": 0.0, "margin": 0.0,
            "stall_s": 0.0,
        }  # fmt: skip
        refuse_below(self, least)
        refuse_above(self, {"prior": 0.95, "spread": 0.95, "ridge": 1e3, "settle_s": 1e6})


RESTART_S: Final = 30.0  # delta of the paper: a new size starts from a checkpoint
ELASTIC_S: Final = 1.0  # stall of an elastic change


class GoodputOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `goodput`, table `[policy.options]` of the controller's settings."""

    interval_s: float = 60.0  # between rounds, as in the paper; 0: at every request
    age_share: float = 0.5  # longest round, as a share of the jobs' mean age; 0: `interval_s`
    starts: Starts = "at-once"  # arrivals between rounds: on idle slots, or in the next round
    share_family: bool = False  # also learn speeds from the family; Pollux does not
    power: float = -1.0  # p of the power mean of speed-ups: lower is fairer
    growth: float = 2.0  # maximum growth, relative to the most slots that the job ever had
    reallocation_s: float | None = None  # delta: cost of a re-allocation; None: by `moves`
    batch_margin: float = 0.05  # minimum gain in goodput of a new batch on the same slots
    batches_per_doubling: int = 2  # grid between a job's first batch and its limit
    noise_scale_prior: float = 4.0  # multiple of the first batch, until a job reports one
    placer: PlacerName = "consolidate"
    moves: Moves = "elastic"

    def __post_init__(self) -> None:
        """Check the ranges."""
        if 0.0 < self.interval_s < MIN_ROUND_S:
            refuse("interval_s", f"{self.interval_s} is too short", f"give 0, or {MIN_ROUND_S}")
        refuse_below(
            self,
            {
                "interval_s": 0.0,
                "power": -10.0,
                "age_share": 0.0,
                "growth": 1.0,
                "batch_margin": 0.0,
                "batches_per_doubling": 1,
                "noise_scale_prior": 0.01,
            },
        )
        refuse_above(self, {"power": 1.0, "age_share": 10.0})
        if self.reallocation_s is not None:
            refuse_below(self, {"reallocation_s": 0.0})

    @property
    def change_s(self) -> float:
        """Assumed seconds of a re-allocation: as given, else by the way jobs change."""
        if self.reallocation_s is not None:
            return self.reallocation_s
        return ELASTIC_S if self.moves == "elastic" else RESTART_S


class OptimusOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `optimus`, table `[policy.options]` of the controller's settings."""

    interval_s: float = 600.0  # between rounds, as in the paper; 0: at every request
    age_share: float = 1.0  # longest round, as a share of the jobs' mean age; 0: `interval_s`
    starts: Starts = "at-once"  # arrivals between rounds: on idle slots, or in the next round
    remaining: Literal["fit", "oracle"] = "fit"  # source of remaining steps and of their duration
    moves: Moves = "restart"  # a new size starts from the checkpoint, as in the paper
    placer: PlacerName = "emptiest"
    most: int | None = None  # maximum slots of one job
    convergence: float = 0.01  # share of the loss; an epoch that reduces it by less is the last

    def __post_init__(self) -> None:
        """Check the ranges."""
        if 0.0 < self.interval_s < MIN_ROUND_S:
            refuse("interval_s", f"{self.interval_s} is too short", f"give 0, or {MIN_ROUND_S}")
        refuse_below(self, {"interval_s": 0.0, "age_share": 0.0, "convergence": 1e-6})
        refuse_above(self, {"age_share": 10.0, "convergence": 0.5})
        if self.most is not None:
            refuse_below(self, {"most": 1})
