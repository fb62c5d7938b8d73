"""What can be chosen: a switch for every reading of the paper, and the numbers that it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from controlplane.policy.option_checks import refuse_above, refuse_below
from controlplane.policy.search.batch_limits import ScaleDown

MOST_CANDIDATES: Final = 512  # a generation of as many for 512 slots takes 0.35 s (README)


class OnesPaperOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `ones-paper`, table `[policy.options]` of the controller's settings.

    The first value that a comment names is the literal reading; the defaults are those that gave
    the shortest completion times in simulations (see the README of this room).
    """

    seed: int = 0  # of what is drawn when a new view is met
    population: int = 0  # K; 0: as many as slots, at most `MOST_CANDIDATES`
    patience: int = 10  # generations without a better candidate before the search rests
    mutation_rate: float = 0.1  # theta

    # --- readings
    score: Literal["running", "all"] = "all"  # eq. 8 over running jobs, or a value of all jobs
    speed: Literal["mean", "model", "goodput"] = "goodput"  # X: per GPU as measured; fitted; useful
    batch: Literal["kept", "goodput"] = "goodput"  # of one slot: as it began; the best within R
    rho: Literal["candidate", "generation", "mean"] = "mean"  # draws of progress, or none
    selection: Literal["sampled", "best"] = "best"  # K rounds of Algorithm 1, or the K best
    fill: Literal["sampled", "mean"] = "sampled"  # progress behind what fills idle slots
    unstarted: Literal["zero", "model"] = "zero"  # Y before the first epoch: eq. 7, or a forecast
    stated: bool = True  # False: what users state of their jobs' length is not used
    scale_down: ScaleDown = "contended"
    resume: bool = True  # R is halved when a plan leaves a job waiting
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
        refuse_above(self, {"mutation_rate": 1.0, "population": MOST_CANDIDATES})


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
    "fill": "sampled",
    "unstarted": "zero",
    "stated": False,
    "scale_down": "literal",
    "resume": True,
    "limit_floor": "one",
    "keep_least": False,
    "gate": "all",
    "reorder": "flat",
    "charge": False,
    "incumbent": False,
    "report_interval_s": 0.0,
    "settle_s": 0.0,
}
