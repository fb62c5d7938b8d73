"""Jobs with utilities on real local clusters under `oasis`.

Nine example trainings come to four slots at random times. The value of a third does not depend on the end, a
third has a deadline with room, and a third could not finish before its value is gone, even alone. `oasis` should
reject these, promise ends to the others and keep its promises; `fifo` and `fair` accept every job.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from schemas.jobs import Utility
from tests.bench import live_speeds, report
from tests.bench.live import GAP, KEEP, REPEATS, in_turn, names, repeats
from tests.bench.live_cluster import MEASURES, Ended, Run, failed, job_figures
from tests.bench.live_jobs import TRAININGS, Arrival, Job, Speeds, arrivals, jobs

GAP_S: Final = 6.0  # mean, between submissions
OASIS: Final = "oasis"
OPTIONS: Final[dict[str, dict[str, Any]]] = {  # for jobs of half a minute
    OASIS: {"interval_s": 2.0, "start_s": 10.0}
}
ROOM: Final = 6.0  # times what a job takes on a slot of its own, until its deadline
START_S: Final = 30.0  # beyond that
HOPELESS: Final = 0.3  # the same, of the others
SHOWN: Final = ("re-scales/job", "not exact")
Repeat = tuple[Sequence[Arrival], Sequence[Run]]  # a run for each policy, ours first


def main() -> None:
    chosen = report.arguments(
        __doc__,
        "three short jobs",
        repeats=REPEATS,
        policies=(names, "oasis,fifo,fair", "ours first"),
        gap=(float, GAP_S, GAP),
        keep=KEEP,
    )
    done: list[Repeat] = []
    with report.folder(chosen.keep) as base:
        examples = TRAININGS[: 1 if chosen.quick else None]
        speeds = live_speeds.at_first_batch(live_speeds.measure(base, examples, quick=True))
        kinds = {one: one.epochs[:1] * 3 if chosen.quick else one.epochs[:3] for one in examples}
        submitted = jobs(lambda example: kinds.get(example, ()))
        for repeat in repeats(chosen):
            coming = valued(arrivals(submitted, repeat, chosen.gap), submitted, speeds)
            done.append((coming, in_turn(chosen.policies, coming, base, repeat, OPTIONS)))
            tell(f"repeat {repeat}", *done[-1])
            report.write(figures(done), chosen.json)  # what comes later may fail
    report.table("figures", ["key", "value"], list(figures(done).items()))


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


def late_s(every: Iterable[Ended]) -> list[float]:
    """Return actual minus promised ends; below 0 a promise was kept."""
    return [ended.jct_s - ended.promised_s for ended in every if ended.promised_s is not None]


def promise_figures(ended: Sequence[Ended]) -> dict[str, float]:
    late = late_s(ended)
    return {
        "rejected": sum(job.state == "rejected" for job in ended),
        "promised": len(late),
        "kept": sum(by <= 0.0 for by in late),
        "late_most_s": max(late, default=0.0),
    }


def tell(title: str, coming: Sequence[Arrival], live: Sequence[Run]) -> None:
    rows: list[list[object]] = [
        [arrival.job.name, _in_words(arrival.utility), *(_outcome(run.jobs[n]) for run in live)]
        for n, arrival in enumerate(coming)
    ]
    report.table(f"{title}: done after, s", ["", "worth", *(run.policy for run in live)], rows)
    heads = ["", "worth", "rejected", "promised", "kept", "late at most, s", "avg JCT s of done",
             *SHOWN, "failed"]  # fmt: skip
    rows = []
    for run in live:
        *counts, most = promise_figures(run.jobs).values()
        done = [ended.jct_s for ended in run.jobs if ended.state == "succeeded"]
        rows.append(
            [run.policy, f"{worth(run, coming):.1f}", *counts, f"{most:.1f}",
             f"{statistics.fmean(done):.1f}" if done else "",
             *(MEASURES[name](run) for name in SHOWN), failed(run.jobs) - counts[0]]
        )  # fmt: skip
    report.table(title, heads, rows)


def _in_words(utility: Utility | None) -> str:
    if utility is None or math.isinf(utility.deadline_s):
        return f"{utility.value if utility else 1:g} whenever"
    return f"{utility.value:g} by {utility.deadline_s:.0f} s"


def _outcome(ended: Ended) -> str:
    if ended.state != "succeeded":
        return ended.state
    promised = "" if ended.promised_s is None else f", promised {ended.promised_s:.0f}"
    return f"{ended.jct_s:.0f}{promised}"


def figures(done: Sequence[Repeat]) -> dict[str, float]:
    """Return sums of jobs and promises, mean values, and ratios of values ours / another's."""
    found: dict[str, float] = {}
    for column, policy in enumerate(run.policy for run in done[0][1]):
        ours, theirs = ([worth(live[at], come) for come, live in done] for at in (0, column))
        ended = [job for _, live in done for job in live[column].jobs]
        found[f"worth_{policy}"] = statistics.fmean(theirs)
        found |= {f"{name}_{policy}": value for name, value in promise_figures(ended).items()}
        found |= job_figures(policy, ended)
        found[f"failed_{policy}"] -= found[f"rejected_{policy}"]
        if column:
            found[f"worth_vs_{policy}"] = report.ratios("worth", ours, theirs)["worth"]
    return found


if __name__ == "__main__":
    main()
