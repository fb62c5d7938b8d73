"""Losses of the same jobs on real local clusters, under `slaq` and under `fair`.

Nine example trainings come to four slots at random times. The loss of a job is normalised: 1 from its submission
to the end of its first epoch, 0 at its lowest loss under any of the policies; its area is the integral over the
seconds from submission to end. Also shown: completion times, changes of slots, and whether every sample was
trained on exactly once.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.bench import report
from tests.bench.live import in_turn, names
from tests.bench.live_cluster import Run
from tests.bench.live_jobs import TRAININGS, Job, arrivals

LEAST: Final = 3  # epochs; a loss that was seen once or twice is no curve
MOST: Final = 0.9  # of a job's fall of loss
Losses = Sequence[tuple[float, float]]  # seconds after the job's submission, loss


class Fall(NamedTuple):
    area_s: float  # normalised loss times seconds, from its submission to its end
    most_s: float  # from its submission until `MOST` of the fall was seen


def falls(live: Sequence[Run]) -> list[list[Fall]]:
    """Of each run's jobs with a curve, in order of arrival.

    A loss is normalised: 1 until the job's first epoch has ended, 0 at the lowest loss that the
    job came to in any of the runs.
    """
    found: list[list[Fall]] = [[] for _ in live]
    for each in zip(*(run.jobs for run in live), strict=True):
        if min(len(ended.losses) for ended in each) >= LEAST:
            lowest = min(loss for ended in each for _, loss in ended.losses)
            for column, ended in zip(found, each, strict=True):
                column.append(fall(ended.losses, lowest, ended.jct_s))
    return found


def fall(losses: Losses, lowest: float, end_s: float) -> Fall:
    top = losses[0][1] - lowest

    def share(loss: float) -> float:
        return min(max((loss - lowest) / top, 0.0), 1.0) if top > 0.0 else 0.0

    steps = [(0.0, 1.0), *((at, share(loss)) for at, loss in losses), (end_s, 0.0)]
    area_s = sum(height * (until - at) for (at, height), (until, _) in itertools.pairwise(steps))
    # Where a job of one of the runs stayed above that, its end stands for it.
    most_s = next((at for at, height in steps[1:] if height <= 1.0 - MOST), end_s)
    return Fall(area_s, most_s)


GAP_S: Final = 20.0  # mean, between submissions: slots for all jobs at most times, as in the paper
QUICK_GAP_S: Final = 5.0
Repeat = Sequence[Run]  # one for each policy, ours first


def main() -> None:
    parser = report.parser(__doc__ or "", "three short jobs")
    parser.add_argument("--repeats", type=int, help="with other arrivals; default: 3, quick: 1")
    parser.add_argument("--policies", type=names, default="slaq,fair", help="ours first")
    parser.add_argument(
        "--gap", type=float, help="mean seconds between jobs; default: 20, quick: 5"
    )
    parser.add_argument("--keep", type=Path, help="folder that keeps clusters, logs, jobs.jsonl")
    chosen = parser.parse_args()
    gap_s = chosen.gap or (QUICK_GAP_S if chosen.quick else GAP_S)
    runs: list[Repeat] = []
    with report.folder(chosen.keep) as base:
        for repeat in range(1, (chosen.repeats or (1 if chosen.quick else 3)) + 1):
            coming = arrivals(jobs(quick=chosen.quick), repeat, gap_s)
            runs.append(in_turn(chosen.policies, coming, base, repeat, {}))
            report.table(f"repeat {repeat}", HEADS, lines(runs[-1]))
            report.write(figures(runs), chosen.json)  # what comes later may fail
    report.table("figures", ["key", "value"], list(figures(runs).items()))


def jobs(*, quick: bool) -> list[Job]:
    kinds = [
        (example, epochs)
        for example in TRAININGS
        for epochs in (example.epochs[1:2] if quick else example.epochs[1:])
    ]
    return [Job(example, epochs, seed) for seed, (example, epochs) in enumerate(kinds, start=1)]


HEADS: Final = [
    "", "area under loss, s", f"to {MOST:.0%} of its fall, s", "avg JCT s", "p90", "queue",
    "makespan", "all slots taken", "re-scales/job", "not exact", "failed",
]  # fmt: skip


def lines(live: Repeat) -> list[list[object]]:
    return [
        [
            run.policy, *(f"{of(live)[place]:.1f}" for of in (areas_s, mosts_s)),
            f"{run.average_s:.1f}", f"{run.p90_s:.1f}",
            f"{statistics.fmean(e.queued_s for e in run.jobs):.1f}", f"{run.makespan_s:.1f}",
            f"{run.full:.0%}", f"{statistics.fmean(e.rescales for e in run.jobs):.1f}",
            sum(not e.exact for e in run.jobs), sum(e.state != "succeeded" for e in run.jobs),
        ]
        for place, run in enumerate(live)
    ]  # fmt: skip


def areas_s(live: Repeat) -> list[float]:
    return [statistics.fmean(fall.area_s for fall in column) for column in falls(live)]


def mosts_s(live: Repeat) -> list[float]:
    return [statistics.fmean(fall.most_s for fall in column) for column in falls(live)]


def averages_s(live: Repeat) -> list[float]:
    return [run.average_s for run in live]


def figures(runs: Sequence[Repeat]) -> dict[str, float]:
    """Return means over all repeats in seconds, and geometric means of ratios ours / another's."""
    found: dict[str, float] = {}
    kinds: dict[str, Callable[[Repeat], list[float]]] = {
        "loss_area": areas_s,
        "t90": mosts_s,
        "jct": averages_s,
    }
    for column, policy in enumerate(run.policy for run in runs[0]):
        ended = [job for repeat in runs for job in repeat[column].jobs]
        for kind, of in kinds.items():
            found[f"{kind}_s_{policy}"] = statistics.fmean(of(repeat)[column] for repeat in runs)
        found |= {
            f"rescales_per_job_{policy}": statistics.fmean(job.rescales for job in ended),
            f"not_exact_{policy}": sum(not job.exact for job in ended),
            f"failed_{policy}": sum(job.state != "succeeded" for job in ended),
        }
        for kind, of in kinds.items() if column else ():
            ratios = [of(repeat)[0] / of(repeat)[column] for repeat in runs]
            found[f"{kind}_vs_{policy}"] = statistics.geometric_mean(ratios)
            found |= {f"{kind}_vs_{policy}_{n}": ratio for n, ratio in enumerate(ratios, start=1)}
    return found


if __name__ == "__main__":
    main()
