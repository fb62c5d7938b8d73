"""Jobs with utilities on real local clusters under `oasis`.

Nine example trainings come to four slots at random times. The value of a third does not depend on the end, a
third has a deadline with room, and a third could not finish before its value is gone, even alone. `oasis` should
reject these, promise ends to the others and keep its promises; `fifo` and `fair` accept every job.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from schemas.jobs import Utility
from tests.bench import live_speeds, report
from tests.bench.live import in_turn, names
from tests.bench.live_cluster import Ended, Run
from tests.bench.live_jobs import TRAININGS, Arrival, Example, Job, Speeds, arrivals

GAP_S: Final = 6.0  # mean, between submissions
OASIS: Final = "oasis"
OPTIONS: Final[dict[str, dict[str, Any]]] = {  # for jobs of half a minute
    OASIS: {"interval_s": 2.0, "start_s": 10.0}
}
ROOM: Final = 6.0  # times what a job takes on a slot of its own, until its deadline
START_S: Final = 30.0  # beyond that
HOPELESS: Final = 0.3  # the same, of the others
Repeat = tuple[Sequence[Arrival], Sequence[Run]]  # a run for each policy, ours first


def main() -> None:
    parser = report.parser(__doc__ or "", "three short jobs")
    parser.add_argument("--repeats", type=int, help="with other arrivals; default: 3, quick: 1")
    parser.add_argument("--policies", type=names, default="oasis,fifo,fair", help="ours first")
    parser.add_argument("--gap", type=float, default=GAP_S, help="mean seconds between jobs")
    parser.add_argument("--keep", type=Path, help="folder that keeps clusters, logs, jobs.jsonl")
    chosen = parser.parse_args()
    repeats: list[Repeat] = []
    with report.folder(chosen.keep) as base:
        examples = TRAININGS[: 1 if chosen.quick else None]
        speeds = live_speeds.at_first_batch(live_speeds.measure(base, examples, quick=True))
        submitted = jobs(examples, quick=chosen.quick)
        for repeat in range(1, (chosen.repeats or (1 if chosen.quick else 3)) + 1):
            coming = valued(arrivals(submitted, repeat, chosen.gap), submitted, speeds)
            repeats.append((coming, in_turn(chosen.policies, coming, base, repeat, OPTIONS)))
            tell(f"repeat {repeat}", *repeats[-1])
            report.write(figures(repeats), chosen.json)  # what comes later may fail
    report.table("figures", ["key", "value"], list(figures(repeats).items()))


def jobs(examples: Sequence[Example], *, quick: bool) -> list[Job]:
    kinds = [
        (example, epochs)
        for example in examples
        for epochs in (example.epochs[:1] * 3 if quick else example.epochs[:3])
    ]
    return [Job(example, epochs, seed) for seed, (example, epochs) in enumerate(kinds, start=1)]


def valued(
    coming: Sequence[Arrival], submitted: Sequence[Job], speeds: Mapping[str, Speeds]
) -> list[Arrival]:
    """The arrivals with what each job's end is worth: the same for a job in every repeat.

    Patient ones come first, one of each training: nobody can be promised or refused anything
    before somebody has measured how fast its like are.
    """
    worth = {job: _utility(place, job.alone_s(speeds, 1)) for place, job in enumerate(submitted)}
    found = [replace(arrival, utility=worth[arrival.job]) for arrival in coming]
    patient = sorted(found, key=lambda arrival: not math.isinf(worth[arrival.job].deadline_s))
    return [replace(arrival, at=when.at) for arrival, when in zip(patient, coming, strict=True)]


def _utility(place: int, alone_s: float) -> Utility:
    match (place + place // 3) % 3:
        case 0:
            return Utility(value=3.0)
        case 1:
            return Utility(value=10.0, deadline_s=START_S + ROOM * alone_s, decay=0.5)
        case _:
            return Utility(value=10.0, deadline_s=HOPELESS * alone_s, decay=2.0)


# --- what came of it


def worth(run: Run, coming: Sequence[Arrival]) -> float:
    return sum(
        arrival.utility.at(ended.jct_s)
        for ended, arrival in zip(run.jobs, coming, strict=True)
        if arrival.utility and ended.state == "succeeded"
    )


def tell(title: str, coming: Sequence[Arrival], live: Sequence[Run]) -> None:
    rows = [
        [arrival.job.name, _in_words(arrival.utility), *(_outcome(run.jobs[n]) for run in live)]
        for n, arrival in enumerate(coming)
    ]
    report.table(f"{title}: done after, s", ["", "worth", *(run.policy for run in live)], rows)
    heads = ["", "worth", "rejected", "promised", "kept", "late at most, s", "avg JCT s of done",
             "re-scales/job", "not exact", "failed"]  # fmt: skip
    report.table(title, heads, [_line(run, coming) for run in live])


def _in_words(utility: Utility | None) -> str:
    if utility is None or math.isinf(utility.deadline_s):
        return f"{utility.value if utility else 1:g} whenever"
    return f"{utility.value:g} by {utility.deadline_s:.0f} s"


def _outcome(ended: Ended) -> str:
    if ended.state != "succeeded":
        return ended.state
    promised = "" if ended.promised_s is None else f", promised {ended.promised_s:.0f}"
    return f"{ended.jct_s:.0f}{promised}"


def _line(run: Run, coming: Sequence[Arrival]) -> list[object]:
    done = [ended for ended in run.jobs if ended.state == "succeeded"]
    late = _lateness([run])
    return [
        run.policy,
        f"{worth(run, coming):.1f}",
        sum(ended.state == "rejected" for ended in run.jobs),
        len(late),
        sum(by <= 0.0 for by in late),
        f"{max(late, default=0.0):.1f}",
        f"{statistics.fmean(ended.jct_s for ended in done):.1f}" if done else "",
        f"{statistics.fmean(ended.rescales for ended in run.jobs):.1f}",
        sum(not ended.exact for ended in run.jobs),
        sum(ended.state not in {"succeeded", "rejected"} for ended in run.jobs),
    ]


def _lateness(runs: Sequence[Run]) -> list[float]:
    """Return actual minus promised ends; below 0 a promise was kept."""
    return [
        ended.jct_s - ended.promised_s
        for run in runs
        for ended in run.jobs
        if ended.promised_s is not None
    ]


def figures(repeats: Sequence[Repeat]) -> dict[str, float]:
    """Return sums of jobs and promises, mean values, and ratios of values ours / another's."""
    found: dict[str, float] = {}
    for column, policy in enumerate(run.policy for run in repeats[0][1]):
        runs = [live[column] for _, live in repeats]
        ended, late = [job for run in runs for job in run.jobs], _lateness(runs)
        found |= {
            f"worth_{policy}": statistics.fmean(
                worth(live[column], come) for come, live in repeats
            ),
            f"rejected_{policy}": sum(job.state == "rejected" for job in ended),
            f"promised_{policy}": len(late),
            f"kept_{policy}": sum(by <= 0.0 for by in late),
            f"late_most_s_{policy}": max(late, default=0.0),
            f"rescales_per_job_{policy}": statistics.fmean(job.rescales for job in ended),
            f"not_exact_{policy}": sum(not job.exact for job in ended),
            f"failed_{policy}": sum(job.state not in {"succeeded", "rejected"} for job in ended),
        }
        if column:
            found[f"worth_vs_{policy}"] = statistics.geometric_mean(
                worth(live[0], come) / worth(live[column], come) for come, live in repeats
            )
    return found


if __name__ == "__main__":
    main()
