"""Value of the search of `ones`, and of each part of its objective.

Simulations in virtual time, paired by seed. A figure is a ratio of average completion times, its geometric
mean over the seeds; `KEY_low` and `KEY_high` are the extremes of the seeds. Compared: evolution (three
generations per request), climbing from the best candidate with as many evaluations, and no search; trades of
places; each term of the fitness switched off; the paper's policy and its literal reading; population and
generations.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before the workers import numpy

from controlplane.policy.options import LITERAL
from controlplane.sim.scenario import Scenario
from tests.bench import report
from tests.bench.evolution_cells import Bench, Pair, Ratio, Way, settings

JOBS: Final = 60
THINK_S: Final = 10.0
POPULATIONS: Final = (4, 8, 16, 32)
GENERATIONS: Final = (0, 1, 3, 10)
SEARCHED: Final = ("", "_interference", "_partial", "_types", "_all")
USUAL: Final = (16, 3)  # population, generations


def searches(here: dict[str, Way], names: Sequence[str]) -> list[Pair]:
    pairs = []
    for name in names:
        on = here[name].but(search="evolution")
        off, climb = on.but(search="greedy"), on.but(search="climb")
        pairs += [
            Pair(f"on_vs_off{name}", on, off),
            Pair(f"climb_vs_off{name}", climb, off),
            Pair(f"on_vs_climb{name}", on, climb),
        ]
    return pairs


def terms(here: dict[str, Way]) -> list[Pair]:
    plain, neighbours = here[""], here["_interference"]
    partial, types, busy = here["_partial"], here["_types"], here["_busy"]
    return [
        Pair("term_interference", neighbours.but(interference=False), neighbours),
        Pair("term_gpu_types", types.but(gpu_types=False), types),
        Pair("term_migration", partial.but(migration=False), partial),
        Pair("term_size", busy.but(size_exponent=0.0), busy),
        Pair("term_speedup", plain.but(speedup_exponent=1.0), plain),
        Pair("term_stall", plain.but(change_margin=0.0, rescale_stall_s=0.0), plain),
        Pair("term_pause", busy.but(pause_margin=0.0), busy),
        Pair("term_family", plain.knowing(knowledge="L0"), plain),
        Pair("term_stated", busy.knowing(knowledge="L3"), busy),
    ]


def paper(here: dict[str, Way]) -> list[Pair]:
    ours = here[""]
    return [
        Pair("literal_vs_ones", Way(ours.scenario, LITERAL, "ones-paper"), ours),
        Pair("paper_vs_ones", Way(ours.scenario, {}, "ones-paper"), ours),
    ]


def fed(here: dict[str, Way]) -> list[Pair]:
    literal = Way(here[""].scenario, LITERAL, "ones-paper")
    alive = literal.but(limit_floor="first", keep_least=True)
    return [Pair("literal_fed_vs_ones", alive, here[""])]


def measured(folder: Path, *, quick: bool) -> list[Pair]:
    """Evolution on and off on each measured workload, with neighbours and without.

    Workloads are in folder `workloads`, in that of the tables or beside it.

    Raises:
        SystemExit: if there are none.
    """
    pairs = []
    places = (folder / "workloads", folder.resolve().parent / "workloads")
    files = sorted(file for place in places for file in place.glob("*.csv"))
    if not files:
        sys.exit(f"no workloads/*.csv in {folder} or beside it")
    for file in files[:1] if quick else files:
        for name, kind in (("", "none"), ("_interference", "pairwise:0.25")):
            on = Way(
                Scenario(
                    physics="profiles", profiles=str(folder), workload=str(file), warm_up=0.0,
                    stall_s=1.0, first_stall_s=30.0, think_s=60.0, interference=kind,
                )
            ).but(search="evolution")  # fmt: skip
            key = f"on_vs_off_{file.stem.replace('-', '_')}{name}"
            pairs.append(Pair(key, on, on.but(search="greedy")))
    return pairs


def budgets(way: Way, *, whole: bool) -> dict[tuple[int, int], Way]:
    return {
        (population, generations): way.but(search="evolution", population=population).knowing(
            generations=generations
        )
        for population in POPULATIONS
        for generations in GENERATIONS
        if whole or population == USUAL[0] or generations == USUAL[1]
    }


class EpochMetrics:
    def __init__(self, bench: Bench, path: Path | None) -> None:
        self._bench, self._path = bench, path
        self._figures: dict[str, float] = {}

    def section(self, title: str, pairs: Sequence[Pair], seeds: Sequence[int]) -> None:
        self._bench.do([way for pair in pairs for way in (pair.first, pair.second)], seeds)
        rows: list[list[object]] = []
        for pair in pairs:
            found = self._bench.ratio(pair, seeds)
            self._keep(pair.key, found)
            rows.append(
                [
                    pair.key, f"{found.mean:.3f}", f"{found.sure_low:.3f}-{found.sure_high:.3f}",
                    f"{found.low:.3f}-{found.high:.3f}",
                    f"{found.first_s:.1f}", f"{found.second_s:.1f}", f"{found.first_moves:.1f}",
                    f"{found.second_moves:.1f}", f"{found.unfinished} of {found.jobs}",
                ]
            )  # fmt: skip
        columns = ("ratio of average JCT", "mean", "95%", "seeds", "first, s", "second, s", "re-scales",
                   "re-scales", "never end")  # fmt: skip
        report.table(f"{title}; {self._bench.elapsed_s:.0f} s so far", columns, rows)

    def curve(self, way: Way, seeds: Sequence[int], *, whole: bool) -> None:
        off, found = way.but(search="greedy"), budgets(way, whole=whole)
        self._bench.do([off, *found.values()], seeds)
        rows: list[list[object]] = []
        for population in POPULATIONS:
            row: list[object] = [population]
            for generations in GENERATIONS:
                at = found.get((population, generations))
                if at is None:
                    row.append("")
                    continue
                key = f"budget_{population}_{generations}"
                ratio = self._bench.ratio(Pair(key, at, off), seeds)
                self._keep(key, ratio)
                row.append(f"{ratio.mean:.3f}")
            rows.append(row)
        columns = ("population", *(f"{many} generations" for many in GENERATIONS))
        title = f"under interference, over no search; {len(seeds)} seeds"
        report.table(f"{title}; {self._bench.elapsed_s:.0f} s so far", columns, rows)

    def _keep(self, key: str, found: Ratio) -> None:
        self._figures |= {key: found.mean, f"{key}_low": found.low, f"{key}_high": found.high}
        self._figures |= {f"{key}_sure_low": found.sure_low, f"{key}_sure_high": found.sure_high}
        if found.unfinished:
            self._figures[f"{key}_unfinished"] = float(found.unfinished)
        self._figures["elapsed_s"] = self._bench.elapsed_s
        report.write(self._figures, self._path)


def main() -> None:
    chosen = _arguments()
    seeds = report.seeds(chosen.seeds)[: 1 if chosen.quick else None]
    here = settings(chosen.jobs or (JOBS // 2 if chosen.quick else JOBS), THINK_S)
    told = EpochMetrics(Bench(seeds, chosen.workers, chosen.results), chosen.json)
    if chosen.searches:
        for name in chosen.searches.split(","):
            at = "" if name == "plain" else f"_{name}"
            told.section(
                f"the search {at}", searches(here, [at])[: 1 if chosen.on_off else None], seeds
            )
        return
    told.section("the paper's policy over ones", paper(here), seeds)
    if chosen.paper:
        told.section("literally, but that nobody starves", fed(here), seeds)
        return
    if chosen.quick:
        told.section("the search", searches(here, [""]), seeds)
        told.section("among neighbours", searches(here, ["_interference"])[:1], seeds)
    else:
        for name in SEARCHED:
            told.section(f"the search {name}", searches(here, [name]), seeds)
        told.section("each term off, over ones", terms(here), seeds)
        told.section("literally, but that nobody starves", fed(here), seeds[:1])
        told.curve(here["_interference"], seeds if chosen.grid else seeds[:1], whole=chosen.grid)
    if chosen.profiles is not None:
        pairs = measured(chosen.profiles, quick=chosen.quick)
        told.section("measured workloads", pairs, seeds[:1])


def _arguments() -> argparse.Namespace:
    parser = report.parser(__doc__ or "", "one seed of 30 jobs and a few figures")
    parser.add_argument("--paper", action="store_true", help="only the paper's policy over ones")
    parser.add_argument("--searches", default="", help="only these settings, as plain,types,all")
    parser.add_argument(
        "--on-off", action="store_true", help="of these, evolution over greedy only"
    )
    parser.add_argument("--seeds", default="40-42", help="of workloads and searches, as in 40-42")
    parser.add_argument("--jobs", type=int, help="in each simulation; default: 60, quick: 30")
    parser.add_argument("--workers", type=int, default=2, help="simulations at a time")
    parser.add_argument("--results", type=Path, help="keep simulations here and go on from there")
    parser.add_argument("--grid", action="store_true", help="every budget, with every seed")
    parser.add_argument("--profiles", type=Path, help="folder of measured tables and workloads")
    return parser.parse_args()


if __name__ == "__main__":
    main()
