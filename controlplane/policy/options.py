"""Options of the policies that search or have many options, and the checks that options share.

The comment at a default explains its meaning and, where known, its source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Literal, get_args, get_type_hints

import msgspec

from controlplane.policy.placement.free_slots import Moves
from controlplane.policy.placement.placers import PlacerName
from controlplane.policy.placement.sizes import Starts
from schemas.errors import SettingsError

MIN_ROUND_S: Final = 0.1  # shortest interval between rounds


@dataclass(frozen=True, slots=True)
class Within:
    """Range of a numeric option, both ends included; metadata of the option's type."""

    least: float
    most: float = math.inf


NotNegative = Annotated[float, Within(0.0)]
Count = Annotated[int, Within(1)]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a policy, table `[policy.options]` of the controller's settings."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # options by the value of `preset`

    def __post_init__(self) -> None:
        """Refuse numbers that are not finite or not within their range.

        Raises:
            SettingsError: names the first such option.
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
    """Raise a `SettingsError` for the value of an option."""
    field = f"policy.options.{name}"
    raise SettingsError(f"{field}: {what}", remedy, field)


Search = Literal["auto", "evolution", "greedy"]


class OnesOptions(Options, frozen=True):
    """Options of policy `ones`, table `[policy.options]` of the controller's settings."""

    # auto: evolution if GPU types differ, otherwise greedy
    search: Search = "auto"
    # K, the number of candidates; the paper uses one per GPU, 16 give the same result.
    population: Annotated[int, Within(2)] = 16
    # The search rests after this many generations without a better candidate.
    patience: Annotated[int, Within(0)] = 10
    # Steps on the first slot before a job can grow; the paper says "a few".
    warmup_steps: Annotated[int, Within(0)] = 10
    # A longer epoch is treated as several pieces of this length.
    report_interval_s: Annotated[float, Within(0.1)] = 30.0
    rescale_stall_s: NotNegative = 1.0  # assumed stall of a running job at a change
    start_stall_s: NotNegative = 10.0  # assumed stall of a start, until some starts were measured
    change_margin: NotNegative = 0.1  # minimum benefit beyond the stall, a share of a job's value
    # Extra cost of stopping a job beyond the stall, in multiples of its worth on one slot.
    pause_margin: NotNegative = 1.5
    size_exponent: NotNegative = 0.55  # strength of the preference for short jobs
    speedup_exponent: Annotated[float, Within(0.05)] = 0.8  # value: speed-up to this power
    # Where jobs queue, how far long waits count instead of short lengths; 0: jobs can starve
    ageing: Annotated[float, Within(0.0, 1.0)] = 0.5
    max_stretch: NotNegative = 0.0  # limit of a job's time over its fair-share time; 0: no limit
    # Assumed noise scale of a job that reports none, in multiples of its first batch.
    noise_scale_prior: Annotated[float, Within(0.01)] = 4.0
    share_family: bool = True  # predict new families from all jobs; False: from their own past

    def __post_init__(self) -> None:
        """Check the ranges; `max_stretch` must be 0 or a limit that all jobs can keep."""
        super().__post_init__()
        if 0.0 < self.max_stretch < 1.0:
            what = f"{self.max_stretch} is below 1: not all can be faster than their share"
            refuse("max_stretch", what, "give 1 or more, or 0 for no limit")


MAX_CANDIDATES: Final = 512  # with this many for 512 slots, a generation takes 0.35 s (README)


ScaleDown = Literal["literal", "contended", "authors", "off"]  # see ones_paper

IMPROVED: Final[Mapping[str, Any]] = {  # readings with shorter completion times in simulations
    "score": "all",
    "speed": "goodput",
    "batch": "goodput",
    "rho": "mean",
    "selection": "best",
    "scale_down": "contended",
    "limit_floor": "first",
    "gate": "job",
    "reorder": "aligned",
    "charge": True,
    "report_interval_s": 30.0,
    "settle_s": 3.0,
}


class OnesPaperOptions(Options, frozen=True):
    """Options of policy `ones-paper`, table `[policy.options]` of the controller's settings.

    The defaults are the literal reading of the paper. `preset = "improved"` sets the options that
    are not given to `IMPROVED`.
    """

    PRESETS: ClassVar = {"improved": IMPROVED}

    preset: Literal["paper", "improved"] = "paper"
    seed: Annotated[int, Within(0)] = 0  # seed of the draws made for each new view
    # K, the number of candidates; 0: one per slot, at most `MAX_CANDIDATES`
    population: Annotated[int, Within(0, MAX_CANDIDATES)] = 0
    # the search rests after this many generations without a better candidate
    patience: Annotated[int, Within(0)] = 10
    mutation_rate: Annotated[float, Within(0.0, 1.0)] = 0.1  # theta: jobs that lose slots

    # --- readings of the paper
    score: Literal["running", "all"] = "running"  # sum of eq. 8 over running jobs, or values of all
    speed: Literal["mean", "model", "goodput"] = "mean"  # X: mean per GPU; fitted; goodput
    batch: Literal["kept", "goodput"] = "kept"  # local batch: as at the start; the best within R
    rho: Literal["drawn", "mean"] = "drawn"  # progress
    selection: Literal["sampled", "best"] = "sampled"  # K rounds of Algorithm 1, or the K best
    scale_down: ScaleDown = "literal"
    limit_floor: Literal["one", "first"] = "one"  # minimum of R: one sample, first batch
    gate: Literal["all", "job", "off"] = "all"  # epoch needed first: of all jobs, the job, none
    reorder: Literal["flat", "aligned"] = "flat"
    charge: bool = False  # False: changes are assumed to be free

    # --- numbers
    # steps on the least slots before R applies; the paper says "a few"
    warmup_steps: Annotated[int, Within(0)] = 10
    report_interval_s: NotNegative = 0.0  # longer epochs are split into such pieces; 0: no split
    settle_s: NotNegative = 0.0  # minimum time between two changes of the same job
    rescale_stall_s: NotNegative = 1.0  # assumed stall of a running job at a change
    start_stall_s: NotNegative = 10.0  # assumed stall of a start, until a start was measured
    change_margin: NotNegative = 0.1  # minimum benefit beyond the stall, share of a job's value


class SlaqOptions(Options, frozen=True):
    """Options of policy `slaq`, table `[policy.options]` of the controller's settings."""

    # T: length of a scheduling epoch, horizon of predicted gains; paper: 3 to 30
    interval_s: Annotated[float, Within(0.5, 3600.0)] = 10.0
    target: Literal["loss", "quality"] = "loss"  # reduce losses, or reach `quality` sooner
    # share of the predicted loss reduction that is worth reaching
    quality: Annotated[float, Within(0.01, 0.999)] = 0.9
    # drop: divide by the largest reduction between reports, as in the paper; range: divide by the
    # predicted total reduction
    normalise: Literal["drop", "range"] = "drop"
    history: Annotated[int, Within(3, 1000)] = 40  # latest reports used to fit a curve
    # weight of a report relative to the next report; paper: exponential
    decay: Annotated[float, Within(0.1, 1.0)] = 0.85
    # If the residual exceeds this share of the total loss reduction, no curve fits (for example,
    # to losses that are not convex), and the job gets its fair share.
    worst_fit: Annotated[float, Within(0.001)] = 0.25
    efficiency_floor: Annotated[float, Within(0.0, 1.0)] = 0.0  # minimum speed-up per slot; 0: off
    # slots of a job with too few losses for a curve, in multiples of its fair share
    newcomers: Annotated[float, Within(1.0)] = 2.0
    # A slot moves if its gain exceeds the loss by this share, because every move costs steps.
    margin: NotNegative = 0.25
    quantum_s: NotNegative = 120.0  # length of turns if not all jobs fit; 0: no turns
    most: Count | None = None  # maximum slots of one job
    placer: PlacerName = "consolidate"


MIN_PRICE: Final = 1e-12  # smallest U and L, value per slot second


class OasisOptions(Options, frozen=True):
    """Options of policy `oasis`, table `[policy.options]` of the controller's settings."""

    # length of one time slot of the paper: sizes are planned per interval
    interval_s: Annotated[float, Within(MIN_ROUND_S)] = 30.0
    horizon: Annotated[int, Within(2, 5000)] = 240  # number of planned intervals
    u: float | None = None  # U, value per slot second; None: estimated from the jobs seen
    l: float | None = None  # noqa: E741 - L, as U
    window: Annotated[int, Within(2, 100_000)] = 200  # latest jobs used to estimate U and L
    # added to a promised end: this share of the remaining time, at least one interval
    margin: Annotated[float, Within(0.0, 10.0)] = 0.1
    start_stall_s: NotNegative = 20.0  # planned duration of a start, or of a start after a pause
    measured_at_once: Count = 16  # cluster slots per job that can be measured at the same time
    placer: PlacerName = "consolidate"

    def __post_init__(self) -> None:
        """Check the ranges, and that `l` does not exceed `u`."""
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
    # before measurements: share of its speed that a job loses to a neighbour
    prior: Annotated[float, Within(0.0, 0.95)] = 0.3
    ridge: Annotated[float, Within(1e-3, 1e3)] = 0.5  # weight of the prior, in measurements
    # before measurements: share of its speed that a job loses on several nodes
    spread: Annotated[float, Within(0.0, 0.95)] = 0.1
    migrations: Literal["none", "free", "swap"] = "swap"  # swap: free moves and exchanges
    backfill: bool = True  # start small jobs before a large waiting job if that does not delay it
    settle_s: Annotated[float, Within(0.0, 1e6)] = 60.0  # minimum time between moves
    margin: NotNegative = 0.05  # minimum gain of a move, in the sum of normalised speeds
    # assumed stall of a running job at a move; a pause costs as much as the last start
    rescale_stall_s: NotNegative = 5.0


RESTART_S: Final = 30.0  # delta of the paper: a new size starts from a checkpoint
ELASTIC_S: Final = 1.0  # stall of a change without a restart


def _check_interval(interval_s: float) -> None:
    if 0.0 < interval_s < MIN_ROUND_S:
        refuse("interval_s", f"{interval_s} is too short", f"give 0, or {MIN_ROUND_S}")


class GoodputOptions(Options, frozen=True):
    """Options of policy `goodput`, table `[policy.options]` of the controller's settings."""

    interval_s: NotNegative = 60.0  # length of a round, as in the paper; 0: decide at every request
    # maximum length of a round, as a share of the jobs' mean age; 0: `interval_s`
    age_share: Annotated[float, Within(0.0, 10.0)] = 0.5
    starts: Starts = "at-once"  # jobs that arrive between rounds: start on idle slots, or wait
    share_family: bool = False  # also learn a job's speed from its family; Pollux does not
    power: Annotated[
        float, Within(-10.0, 1.0)
    ] = -1.0  # p of the power mean of speed-ups: lower is fairer
    # maximum growth, relative to the most slots that the job ever had
    growth: Annotated[float, Within(1.0)] = 2.0
    # delta: assumed stall of a running job at a change; None: by `moves`
    rescale_stall_s: NotNegative | None = None
    batch_margin: NotNegative = 0.05  # minimum gain in goodput of a new batch on the same slots
    batches_per_doubling: Count = 2  # batches tried per doubling, from the first batch to the limit
    # noise scale in multiples of the first batch, until a job reports one
    noise_scale_prior: Annotated[float, Within(0.01)] = 4.0
    placer: PlacerName = "consolidate"
    moves: Moves = "elastic"

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check_interval(self.interval_s)
        super().__post_init__()

    @property
    def change_s(self) -> float:
        """Assumed stall at a change: `rescale_stall_s`, or a default for `moves`."""
        if self.rescale_stall_s is not None:
            return self.rescale_stall_s
        return ELASTIC_S if self.moves == "elastic" else RESTART_S


class PolluxOptions(Options, frozen=True):
    """Options of policy `pollux`, table `[policy.options]` of the controller's settings."""

    interval_s: NotNegative = 60.0  # length of a round, as in the paper; 0: at every request
    generations: Count = 100  # of the search in a round, as in the paper
    seed: Annotated[int, Within(0)] = 0  # seed of the draws made in each round
    power: Annotated[
        float, Within(-10.0, 1.0)
    ] = -1.0  # p of the power mean of speed-ups: lower is fairer
    # maximum growth, relative to the most slots on which the job was measured
    growth: Annotated[float, Within(1.0)] = 2.0
    rescale_stall_s: NotNegative = RESTART_S  # delta: assumed cost of a re-allocation
    # minimum gain in goodput of a new batch on the same slots; the published simulator has 0
    batch_margin: NotNegative = 0.05
    # noise scale in multiples of the first batch, until a job reports one
    noise_scale_prior: Annotated[float, Within(0.01)] = 4.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check_interval(self.interval_s)
        super().__post_init__()


class OptimusOptions(Options, frozen=True):
    """Options of policy `optimus`, table `[policy.options]` of the controller's settings."""

    interval_s: NotNegative = 600.0  # length of a round, as in the paper; 0: at every request
    # maximum length of a round, as a share of the jobs' mean age; 0: `interval_s`
    age_share: Annotated[float, Within(0.0, 10.0)] = 1.0
    starts: Starts = "at-once"  # jobs that arrive between rounds: start on idle slots, or wait
    remaining: Literal["fit", "oracle"] = "fit"  # source of remaining steps and of their duration
    moves: Moves = "restart"  # a new size starts from the checkpoint, as in the paper
    placer: PlacerName = "emptiest"
    most: Count | None = None  # maximum slots of one job
    # an epoch that reduces the loss by less than this share is the last one
    convergence: Annotated[float, Within(1e-6, 0.5)] = 0.01

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check_interval(self.interval_s)
        super().__post_init__()
