"""Losses of the same jobs on real local clusters, under `slaq` and under `fair`.

Nine example trainings come to four slots at random times. The loss of a job is normalised: 1 from its submission
to the end of its first epoch, 0 at its lowest loss under any of the policies; its area is the integral over the
seconds from submission to end. Also shown: completion times, changes of slots, and whether every sample was
trained on exactly once.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from tests.bench import report
from tests.bench.live import GAP, KEEP, REPEATS, in_turn, names, repeats
from tests.bench.live_cluster import MEASURES, Run, job_figures
from tests.bench.live_jobs import arrivals, jobs

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
Measured = Mapping[str, Sequence[float]]  # by measure, of each policy
SHOWN: Final = ("avg JCT s", "p90", "queue", "makespan", "all slots taken", "re-scales/job",
                "not exact", "failed")  # fmt: skip


def main() -> None:
    chosen = report.arguments(
        __doc__,
        "three short jobs",
        repeats=REPEATS,
        policies=(names, "slaq,fair", "ours first"),
        gap=(float, None, f"{GAP}; default: 20, quick: 5"),
        keep=KEEP,
    )
    gap_s = chosen.gap or (QUICK_GAP_S if chosen.quick else GAP_S)
    submitted = jobs(lambda example: example.epochs[1 : 2 if chosen.quick else None])
    runs: list[Repeat] = []
    with report.folder(chosen.keep) as base:
        for repeat in repeats(chosen):
            coming = arrivals(submitted, repeat, gap_s)
            runs.append(in_turn(chosen.policies, coming, base, repeat, {}))
            tell(f"repeat {repeat}", runs[-1])
            report.write(figures(runs), chosen.json)  # what comes later may fail
    report.table("figures", ["key", "value"], list(figures(runs).items()))


def measured(live: Repeat) -> Measured:
    columns = falls(live)
    return {
        "loss_area": [statistics.fmean(fall.area_s for fall in column) for column in columns],
        "t90": [statistics.fmean(fall.most_s for fall in column) for column in columns],
        "jct": [run.average_s for run in live],
    }


def tell(title: str, live: Repeat) -> None:
    found = measured(live)
    heads = ["", "area under loss, s", f"to {MOST:.0%} of its fall, s", *SHOWN]
    rows = [
        [run.policy, f"{area_s:.1f}", f"{most_s:.1f}", *(MEASURES[name](run) for name in SHOWN)]
        for run, area_s, most_s in zip(live, found["loss_area"], found["t90"], strict=True)
    ]
    report.table(title, heads, rows)


def figures(runs: Sequence[Repeat]) -> dict[str, float]:
    """Return means over all repeats in seconds, and geometric means of ratios ours / another's."""
    found: dict[str, float] = {}
    repeats_measured = [measured(repeat) for repeat in runs]
    for column, policy in enumerate(run.policy for run in runs[0]):
        for kind in repeats_measured[0]:
            ours, theirs = ([one[kind][at] for one in repeats_measured] for at in (0, column))
            found[f"{kind}_s_{policy}"] = statistics.fmean(theirs)
            found |= report.ratios(f"{kind}_vs_{policy}", ours, theirs) if column else {}
        found |= job_figures(policy, [job for repeat in runs for job in repeat[column].jobs])
    return found


if __name__ == "__main__":
    main()
