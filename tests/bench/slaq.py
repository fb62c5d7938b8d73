"""SLAQ: speed and error of curve fits, time of decisions, and completion times.

Fits: recorded loss curves of real trainings, each predicted ten iterations ahead from every third report on,
compared with the last known loss and with scipy's `curve_fit` of the same two forms and weights. Decisions:
complete ones, with every curve fitted anew, on 16,384 slots. Shares: 160 jobs that replay the curves on 640
cores, 15 s apart, compared with `fair`.
"""

from __future__ import annotations

import json
import random
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from scipy.optimize import OptimizeWarning, curve_fit

from controlplane.policy.api import EpochSeen, JobView
from controlplane.policy.placement.slot_partition import split
from controlplane.policy.registry import make
from controlplane.prediction import FloatArray
from controlplane.prediction.convergence_curves import (
    DECAY,
    MAX_REPORTS,
    ConvergenceCurves,
    Form,
    fit_curves,
)
from controlplane.sim.analysis.summary import loss_figures
from controlplane.sim.models.curves import shipped_curves
from controlplane.sim.results import SimulationResult
from controlplane.sim.run import simulate
from controlplane.sim.scenario import SLAQ, Scenario
from schemas.ids import JobId, NodeId, Seconds, slot_id
from tests.bench import report
from tests.support.builders import cluster_view, job_view, slot_view

AHEAD: Final = 10  # iterations
EVERY: Final = 3  # moments of a curve that are predicted from
LEAST: Final = 5  # losses before the first of them
SLOTS: Final = 16_384
PER_NODE: Final = 32
FAMILIES: Final = 40
ROUNDS: Final = 3  # of a decision; the median counts
BATCH: Final = 512
EPOCH: Final = 1000  # samples


# --- fits


@dataclass(frozen=True)
class Windows:
    families: tuple[str, ...]
    places: FloatArray  # iterations, shape (W, 40); not a number where there is none
    losses: FloatArray  # the same
    ahead: FloatArray  # iteration that is predicted, shape (W,)
    truth: FloatArray  # its loss, shape (W,)

    @property
    def last(self) -> FloatArray:
        return self.losses[:, -1]

    def some(self, chosen: Sequence[int]) -> Windows:
        rows = np.array(chosen)
        families = tuple(self.families[row] for row in chosen)
        return Windows(
            families, self.places[rows], self.losses[rows], self.ahead[rows], self.truth[rows]
        )


def windows() -> Windows:
    found: list[tuple[str, FloatArray, FloatArray, float, float]] = []
    for curve in shipped_curves().curves:
        losses = np.array(curve.losses)
        for now in range(LEAST, len(losses) - AHEAD, EVERY):
            begin = max(0, now - MAX_REPORTS)
            rows = np.full((2, MAX_REPORTS), np.nan)
            rows[:, begin - now :] = np.arange(begin, now), losses[begin:now]
            then = now - 1 + AHEAD
            found.append((curve.family, rows[0], rows[1], float(then), float(losses[then])))
    families, places, losses, ahead, truth = zip(*found, strict=True)
    return Windows(families, np.array(places), np.array(losses), np.array(ahead), np.array(truth))


def predicted(curves: ConvergenceCurves, known: Windows) -> FloatArray:
    said = curves.at(known.ahead)
    return np.where(curves.forms == Form.NONE, known.last, said)


def sublinear(k: FloatArray, a: float, b: float, c: float, d: float) -> FloatArray:
    """The paper's form for first-order methods."""
    return 1.0 / (a * k * k + b * k + c) + d


def exponential(k: FloatArray, mu: float, b: float, c: float) -> FloatArray:
    """The paper's form for linear and superlinear convergence."""
    return mu ** (k - b) + c


def by_curve_fit(places: FloatArray, losses: FloatArray, ahead: float) -> float:
    seen = np.isfinite(losses)
    k, loss = places[seen] - places[seen][0], losses[seen]
    sigma = DECAY ** (-np.arange(len(k))[::-1] / 2.0)
    low, height = float(loss.min()), max(float(np.ptp(loss)), 1e-9)
    forms = (
        (sublinear, (1e-3, 0.1 / height, 1.0 / height, low), ([0, 0, 1e-12, -np.inf], np.inf)),
        (exponential, (0.9, 0.0, low), ([1e-6, -np.inf, -np.inf], [1.0 - 1e-9, np.inf, np.inf])),
    )
    best, said = np.inf, float(loss[-1])
    for form, start, bounds in forms:
        try:
            found, _ = curve_fit(form, k, loss, p0=start, sigma=sigma, bounds=bounds)
        except RuntimeError:  # it did not converge
            continue
        error = float(np.sum(((form(k, *found) - loss) / sigma) ** 2))
        if error < best:
            best, said = error, float(form(np.array([ahead - places[seen][0]]), *found)[0])
    return said


def errors(said: FloatArray, known: Windows) -> FloatArray:
    return np.abs(said - known.truth) / np.maximum(np.abs(known.truth), 1e-12)


def fits(many: int) -> dict[str, float]:
    known = windows()
    fit_curves(known.places[:64], known.losses[:64])  # whatever is done once
    began = time.process_time()
    curves = fit_curves(known.places, known.losses)
    each_s = (time.process_time() - began) / len(known.truth)
    ours, kept = errors(predicted(curves, known), known), errors(known.last, known)
    chosen = random.Random(5).sample(range(len(known.truth)), many)  # noqa: S311 - no secret
    few = known.some(chosen)
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", (OptimizeWarning, RuntimeWarning))
        theirs = np.array(list(map(by_curve_fit, few.places, few.losses, few.ahead)))
    their_s = (time.process_time() - began) / many
    rows: list[list[object]] = [
        [
            family, float(ours[mine].mean()), float(np.median(ours[mine])),
            float(kept[mine].mean()), int(mine.sum()),
        ]
        for family in sorted(set(known.families))
        for mine in [np.array([name == family for name in known.families])]
    ]  # fmt: skip
    rows.append(["all", float(ours.mean()), float(np.median(ours)), float(kept.mean()), len(ours)])
    columns = ("family", "error, mean", "median", "last loss kept, mean", "predictions")
    report.table("relative error of the loss ten iterations ahead", columns, rows)
    scipys = errors(theirs, few)
    rows = [
        ["all at once", each_s * 1e3, float(ours[chosen].mean()), float(np.median(ours[chosen]))],
        ["curve_fit", their_s * 1e3, float(scipys.mean()), float(np.median(scipys))],
    ]
    columns = ("fit", "ms of a core per job", "error ten ahead, mean", "median")
    report.table(f"the same {many} of these moments", columns, rows)
    return {
        "fit_vs_curve_fit": their_s / each_s,
        "fit_ms": each_s * 1e3,
        "error10_mean": float(ours.mean()),
        "error10_vs_keep_last": float(ours.mean() / kept.mean()),
        "error10_vs_curve_fit": float(ours[chosen].mean() / scipys.mean()),
    }


# --- decisions


def decision_s(jobs: int, slots: int) -> tuple[float, float]:
    rng = random.Random(1)  # noqa: S311 - a workload, no secret
    nodes = [NodeId(f"n{place // PER_NODE}") for place in range(slots)]
    names = [slot_id(node, place % PER_NODE) for place, node in enumerate(nodes)]
    share = slots // jobs
    shown: dict[JobId, JobView] = {}
    policy = make("slaq")
    for number in range(jobs):
        job, family = JobId(f"j-{number}"), f"f{number % FAMILIES}"
        own = names[number * share : (number + 1) * share]
        shown[job] = job_view(
            job, number, slots=(1, BATCH), batch_size=BATCH, batch_limit=BATCH, local_limit=BATCH,
            family=family, running_on=split(BATCH, own), samples_done=MAX_REPORTS * EPOCH,
            epoch=MAX_REPORTS,
        )  # fmt: skip
        a, b, rate = rng.uniform(0.01, 1.0), rng.uniform(0.001, 1.0), rng.uniform(10.0, 1000.0)
        for epoch in range(1, MAX_REPORTS + 1):
            policy.observe(
                EpochSeen(
                    job=job, family=family, slots=share, nodes=1, global_batch=BATCH,
                    samples_per_s=rate * share, whole=True, epoch=epoch, samples_done=epoch * EPOCH,
                    train_loss=rng.gauss(1.0, 0.01) / (a * epoch + b),
                ),
                Seconds(10.0 * epoch),
            )  # fmt: skip
    view = cluster_view(*(slot_view(slot, usable=False) for slot in names), *shown.values())
    took = []
    for _ in range(2):
        began = time.process_time()
        policy.plan(view, Seconds(1000.0))
        took.append(time.process_time() - began)
    return took[0], took[1]


def decisions(*, quick: bool) -> dict[str, float]:
    """Measure the paper's figure 6: 1,000 to 4,000 jobs on 16,384 slots."""
    figures: dict[str, float] = {}
    rows: list[list[object]] = []
    for jobs in report.counted("number of jobs", (1000, 2000, 4000), 3):
        runs = [decision_s(jobs, SLOTS) for _ in range(1 if quick else ROUNDS)]
        whole, again = (statistics.median(column) for column in zip(*runs, strict=True))
        figures[f"decision_s_{jobs}x{SLOTS}"] = whole
        rows.append([f"{jobs} jobs", whole, again])
    columns = (f"{SLOTS} slots", "every curve fitted anew, s", "none, s")
    report.table("a decision of `slaq`, seconds of a core", columns, rows)
    return figures


# --- shares


def simulations(
    seeds: Sequence[int], scenario: Scenario, options: dict[str, Any]
) -> dict[str, float]:
    rows: list[list[object]] = []
    ratios: dict[str, list[float]] = {}
    for seed in report.counted("seed", seeds, len(seeds)):
        base, ours = (
            measures(simulate(policy, scenario, seed, chosen))
            for policy, chosen in (("fair", {}), ("slaq", options))
        )
        for name, found in (("fair", base), ("slaq", ours)):
            rows.append([f"{name}, seed {seed}", *found.values()])
        for key, value in ours.items():
            ratios.setdefault(key, []).append(value / base[key])
    means = {key: statistics.geometric_mean(each) for key, each in ratios.items()}
    rows.append(["slaq / fair", *means.values()])
    report.table(f"{scenario.jobs} jobs on {scenario.slots} cores", ("", *means), rows)
    return {
        "loss_vs_fair": means["mean loss"],
        "loss_area_vs_fair": means["loss area s"],
        "t90_vs_fair": means["to 90% s"],
        "t95_vs_fair": means["to 95% s"],
        "jct_vs_fair": means["avg JCT s"],
        "jct_p99_vs_fair": means["p99 JCT s"],
    }


def measures(result: SimulationResult) -> dict[str, float]:
    figures = loss_figures(result)
    jcts = [job.jct_s for job in result.jobs if job.jct_s is not None]
    return {
        "mean loss": figures["mean_loss"],
        "loss area s": figures["loss_area_s"],
        "to 90% s": figures["t90_s"],
        "to 95% s": figures["t95_s"],
        "avg JCT s": float(np.mean(jcts)),
        "p99 JCT s": float(np.quantile(jcts, 0.99)),
        "re-scales per job": sum(job.rescales for job in result.jobs) / len(result.jobs),
        "cores of the high": figures["cores_high"],
        "cores of the low": figures["cores_low"],
    }


def main() -> None:
    chosen = report.arguments(
        __doc__,
        "fewer fits, one seed of 24 jobs",
        seeds=(report.seeds, "30-32", "of simulations, as in 30-32"),
        scaling=(float, 1.0, "exponent of speed over cores"),
        options=(json.loads, {}, "of slaq, as JSON"),
    )
    report.now("fits")
    figures = fits(20 if chosen.quick else 200)
    figures |= decisions(quick=chosen.quick)
    scenario = replace(SLAQ, scaling=chosen.scaling)
    if chosen.quick:
        scenario = replace(scenario, jobs=24)
    seeds = chosen.seeds[: 1 if chosen.quick else None]
    figures |= simulations(seeds, scenario, chosen.options)
    report.write(figures, chosen.json)


if __name__ == "__main__":
    main()
