"""Tables and drawings of simulations in the documentation, made anew.

A page has places `<!-- figures: NAME -->` ... `<!-- end -->`; what is between them is replaced. Averages are
means over seeds with 95% intervals (bootstrap of the seeds), ratios are paired by job (bootstrap of seeds, then
of jobs) with Wilcoxon's signed-rank test. Finished simulations are kept in the file `--results`, so that the
same command goes on after Ctrl-C, as long as the code is the same.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before the workers import numpy

import msgspec
import numpy as np

from controlplane.sim.analysis import plots
from controlplane.sim.analysis.comparison import compare, mean_interval, means
from controlplane.sim.analysis.summary import summary
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.results import SimulationResult
from controlplane.sim.scenario import Scenario
from tests.bench import evolution, report
from tests.bench.simulations import Bench, Pair, Way, workloads

DOCS: Final = Path(__file__).parents[2] / "docs"
SIZES: Final = (64, 32, 16)  # GPUs, on nodes of 4
THINK_S: Final = 10.0
PUBLISHED: Final = {"round_s": 60.0, "stall_s": 30.0, "warm_up": 0.0, "generations": 0}
NATIVE: Final = {
    "stall_s": 1.0,
    "first_stall_s": 30.0,
    "prepare_s": 1.0,
    "warm_up": 0.0,
    "generations": 0,
}


class Variant(NamedTuple):
    """A policy with options, under the name that the tables give it."""

    name: str
    policy: str
    options: Mapping[str, str] = {}


FEW: Final = [
    Variant("`ones`", "ones"),
    Variant("`goodput`", "goodput"),
    Variant("`drl`", "drl"),
    Variant("`drl`, shortest first", "drl", {"model": "shortest-first"}),
    Variant("`tiresias`", "tiresias"),
    Variant("`optimus`", "optimus"),
    Variant("`srtf`", "srtf"),
    Variant("`fifo`", "fifo"),
]
OTHERS: Final = ("pollux", "gittins", "fair", "slaq", "oasis", "harmony", "harmony-drl")
ALL: Final = [
    *FEW,
    *(Variant(f"`{name}`", name) for name in OTHERS),
    Variant("`ones-paper`", "ones-paper"),
    Variant("`ones-paper`, improved", "ones-paper", {"preset": "improved"}),
]  # fmt: skip


def table2(slots: int, jobs: int) -> Scenario:
    return Scenario(nodes=(NodeGroup(count=slots // 4, slots=4),), jobs=jobs, think_s=THINK_S)


def rows(columns: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def against(ours: Sequence[SimulationResult], theirs: Sequence[SimulationResult]) -> list[str]:
    if theirs is ours:
        return ["", ""]
    pair = compare(ours, theirs)
    text = f"{pair.ratio:.3f} ({pair.ratio_ci.low:.3f}-{pair.ratio_ci.high:.3f})"
    return [text, f"{pair.two_sided_p:.0e}"]


COLUMNS: Final = {
    "p50": "p50_jct_s", "p99": "p99_jct_s", "queue": "avg_queue_s", "makespan": "makespan_s",
    "rho": "ftf_mean", "worst": "ftf_worst", "busy": "utilisation", "re-scales": "rescales_per_job",
}  # fmt: skip


def line(
    name: str, results: Sequence[SimulationResult], ours: Sequence[SimulationResult]
) -> list[str]:
    mean, sums = means(results), [summary(result) for result in results]
    averages = [float(each["avg_jct_s"]) for each in sums if each["avg_jct_s"] is not None]
    average = "never ends"
    if averages:
        sure = mean_interval(averages)
        average = f"{number(mean['avg_jct_s'])} ({number(sure.low)}-{number(sure.high)})"
    if unfinished := sum(int(each["unfinished"]) for each in sums):
        average += f", {unfinished} jobs never end"
    return [
        name,
        average,
        *(number(mean[key]) for key in COLUMNS.values()),
        *against(ours, results),
    ]


def side_by_side(bench: Bench, variants: Sequence[Variant], scenario: Scenario) -> str:
    ways = [Way(scenario, variant.options, variant.policy) for variant in variants]
    bench.do(ways)
    results = [[bench.result(way, seed) for seed in bench.seeds] for way in ways]
    head = ["policy", "average JCT, s (95%)", *COLUMNS, "`ones` over it (95%)", "p"]
    pairs = zip(variants, results, strict=True)
    return rows(head, [line(variant.name, many, results[0]) for variant, many in pairs])


def sizes(bench: Bench, variants: Sequence[Variant], jobs: int) -> str:
    parts = [(slots, side_by_side(bench, variants, table2(slots, jobs))) for slots in SIZES]
    return "\n\n".join(f"**{slots} GPUs**\n\n{part}" for slots, part in parts)


def four_hundred(bench: Bench, _: Path | None) -> str:
    text = sizes(bench, FEW, 400)
    drawn = [
        msgspec.structs.replace(bench.result(way, seed), policy=variant.name.strip("`"))
        for variant in FEW
        if not variant.options
        for slots in SIZES
        for way in [Way(table2(slots, 400), variant.options, variant.policy)]
        for seed in bench.seeds
    ]
    with tempfile.TemporaryDirectory() as folder:
        for file in plots.draw(drawn, Path(folder), "ones"):
            if (DOCS / "figures" / file.name).exists():  # shown in a page
                shutil.copyfile(file, DOCS / "figures" / file.name)
    return text


def every_policy(bench: Bench, _: Path | None) -> str:
    return sizes(bench, ALL, 60)


def terms(bench: Bench, _: Path | None) -> str:
    here = evolution.settings(60)
    pairs: list[Pair] = evolution.searches(here, evolution.SEARCHED)
    pairs += [*evolution.terms(here), *evolution.paper(here)]
    bench.do([way for pair in pairs for way in (pair.first, pair.second)])
    cells = []
    for pair in pairs:
        found = bench.compared(pair)
        ratio = found.ratio
        moves = f"{found.first_moves:.1f}, {found.second_moves:.1f}"
        cells.append([
            f"`{pair.key}`", f"{'at least ' * bool(found.unfinished)}{ratio.mean:.3f}",
            f"{ratio.sure_low:.3f}-{ratio.sure_high:.3f}", f"{ratio.low:.3f}-{ratio.high:.3f}",
            number(found.first_s), number(found.second_s), moves,
        ])  # fmt: skip
    head = ["figure", "mean", "95%", "seeds", "first, s", "second, s", "re-scales per job"]
    return rows(head, cells)


def measured(bench: Bench, folder: Path | None) -> str:
    if folder is None:
        raise SystemExit("name the measured tables with --profiles")
    files = workloads(folder, ("1", "2", "3", "6"))

    def ways(policy: str, **setting: object) -> list[Way]:
        physics = {"physics": "profiles", "profiles": str(folder)}
        return [
            Way(Scenario(**{**physics, "workload": str(file), **setting}), {}, policy)  # type: ignore[arg-type]  # any
            for file in files
        ]

    wanted = {
        f"`ones`, {level}, {information} reports": ways("ones", **PUBLISHED, knowledge=level, information=information)
        for level in ("L2", "L3", "L0")
        for information in ("perfect", "honest")
    } | {
        f"`ones`, L2, native setting, {information} reports": ways("ones", **NATIVE, information=information)
        for information in ("perfect", "honest")
    } | {
        f"`{policy}`, perfect reports": ways(policy, **PUBLISHED, information="perfect")
        for policy in ("goodput",)
    }  # fmt: skip
    bench.do([way for group in wanted.values() for way in group], bench.seeds[:1])
    theirs = {
        name: published(folder.resolve().parent / "results" / f"{name}.json", files)
        for name in ("pollux", "optimus", "tiresias")
    }
    reference = [fmean(times) for times in theirs["pollux"]]
    cells = []
    for name, group in wanted.items():
        sums = [summary(bench.result(way, bench.seeds[0])) for way in group]
        averages = [float(each["avg_jct_s"]) for each in sums]
        further = [number(fmean(float(each[key]) for each in sums))
                   for key in ("p99_jct_s", "makespan_s", "rescales_per_job")]  # fmt: skip
        cells.append([name, *measured_cells(averages, reference), *further])
    for name, each in theirs.items():
        tail = fmean(float(np.quantile(times, 0.99)) for times in each)
        averages = [fmean(times) for times in each]
        cells.append(
            [
                f"published {name.title()}",
                *measured_cells(averages, reference),
                number(tail),
                "-",
                "-",
            ]
        )
    head = ["policy", *(file.stem.rpartition("-")[2] for file in files), "mean, s", "over published Pollux", "p99",
            "makespan", "re-scales per job"]  # fmt: skip
    return rows(head, cells)


def measured_cells(averages: Sequence[float], reference: Sequence[float]) -> list[str]:
    mean = fmean(averages)
    return [*map(number, averages), number(mean), f"{mean / fmean(reference):.3f}"]


def published(file: Path, of: Iterable[Path]) -> list[list[float]]:
    """Return the published completion times of each workload, seconds."""
    times = msgspec.json.decode(file.read_bytes(), type=_Published).jcts
    return [list(times[workload.stem].values()) for workload in of]


class _Published(msgspec.Struct):
    jcts: dict[str, dict[str, float]]


def shared(bench: Bench, _: Path | None) -> str:
    """Return completion times with and without fair share, by kind of job and by project."""
    scenario = Scenario(
        nodes=(NodeGroup(count=8, slots=4),), jobs=400, think_s=THINK_S, projects=3, rigid=0.3
    )
    policies = ("ones", "tiresias", "fifo")
    ways = {
        (policy, fair): Way(msgspec.structs.replace(scenario, fair_share=fair), {}, policy)
        for policy in policies
        for fair in (False, True)
    }
    bench.do(list(ways.values()))
    cells = []
    for (policy, fair), way in ways.items():
        sums = [summary(bench.result(way, seed)) for seed in bench.seeds]
        former = [summary(bench.result(ways[policy, False], seed)) for seed in bench.seeds]
        ratios = [
            one["avg_jct_s"] / other["avg_jct_s"] for one, other in zip(sums, former, strict=True)
        ]
        sure = mean_interval(ratios)
        price = f"{fmean(ratios):.2f} ({sure.low:.2f}-{sure.high:.2f})" if fair else ""
        groups = [("per_kind", kind) for kind in ("elastic", "torchrun")]
        groups += [("per_project", f"project-{number}") for number in (1, 2, 3)]
        each = [
            f"{_mean_of(sums, by, name, 'avg_jct_s')}, {_mean_of(sums, by, name, 'p99_jct_s')}"
            for by, name in groups
        ]
        cells.append([
            f"`{policy}`", "on" if fair else "off", number(fmean(s["avg_jct_s"] for s in sums)), price,
            number(fmean(s["p99_jct_s"] for s in sums)), *each,
            _mean_of(sums, "per_kind", "torchrun", "longest_wait_s"),
        ])  # fmt: skip
    head = ["policy", "fair share", "all", "over off (95%)", "p99", "elastic, p99", "programs, p99",
            "project-1, p99", "project-2, p99", "project-3, p99", "longest wait of a program"]  # fmt: skip
    return rows(head, cells)


def _mean_of(sums: Sequence[Mapping[str, Any]], by: str, name: str, figure: str) -> str:
    return number(fmean(float(each[by][name][figure]) for each in sums))


def of_bench(name: str, *words: str) -> Callable[[Bench, Path | None], str]:
    """Return the maker of the tables that a benchmark prints with these arguments."""

    def make(bench: Bench, _: Path | None) -> str:
        seeds = f"{bench.seeds[0]}-{bench.seeds[-1]}"
        report.printed.clear()
        arguments, sys.argv = sys.argv, [name, "--seeds", seeds, *words]
        try:
            importlib.import_module(f"tests.bench.{name}").main()
        finally:
            sys.argv = arguments
        return "\n\n".join(
            f"**{t.title.partition(';')[0]}**\n\n{rows(t.columns, t.rows)}" for t in report.printed
        )

    return make


class Place(NamedTuple):
    page: str
    seeds: str
    make: Callable[[Bench, Path | None], str]


PLACES: Final = {
    "measured": Place("simulator/fidelity.md", "0", measured),
    "table2": Place("simulator/table2.md", "30-33", four_hundred),
    "policies": Place("policies/comparison.md", "110-113", every_policy),
    "terms": Place("evolution.md", "40-43", terms),
    "shared": Place("sharing/costs.md", "30-33", shared),
    "robustness": Place(
        "simulator/robustness.md",
        "36-38",
        of_bench("robustness", "--jobs", "60", "--gpus", "64,16"),
    ),
}


def main() -> None:
    chosen = report.arguments(
        __doc__,
        "only checks that the pages have the places",
        names=(report.some_of(PLACES), list(PLACES), f"of {', '.join(PLACES)}; default: all"),
        seeds=(str, "", "instead of those of the page, as in 30-33"),
        profiles=(Path, None, "folder of measured tables, for `measured`"),
        results=(Path, Path("figures.jsonl"), "keep simulations here and go on from there"),
        workers=(int, os.cpu_count() or 1, "simulations at a time"),
    )
    for name in chosen.names:
        place = PLACES[name]
        page = DOCS / place.page
        replaced(page.read_text(encoding="utf-8"), name, "")  # fails now rather than in an hour
        if chosen.quick:
            continue
        seeds = report.seeds(chosen.seeds or place.seeds)
        made = place.make(Bench(seeds, chosen.workers, chosen.results), chosen.profiles)
        page.write_text(replaced(page.read_text(encoding="utf-8"), name, made), encoding="utf-8")
        report.now(f"{page.name}: {name} is written")


def replaced(text: str, name: str, table: str) -> str:
    """Return the text of a page with another table at a place.

    Raises:
        SystemExit: if there is no such place.
    """
    head, mark, rest = text.partition(f"<!-- figures: {name} -->\n")
    _, end, tail = rest.partition("<!-- end -->")
    if not mark or not end:
        raise SystemExit(f"no place <!-- figures: {name} --> ... <!-- end --> in the page")
    return f"{head}{mark}{table}\n{end}{tail}"


if __name__ == "__main__":
    main()
