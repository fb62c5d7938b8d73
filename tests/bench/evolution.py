"""Value of the search of `ones`, and of each part of its objective.

Simulations in virtual time, paired by seed. A figure is a ratio of average completion times, its geometric
mean over the seeds; `KEY_low` and `KEY_high` are the extremes of the seeds. Compared: evolution (three
generations per request) and no search; each term of the fitness switched off; the paper's policy and its
improved reading; population and generations.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before the workers import numpy

from controlplane.sim.cluster import NodeGroup
from controlplane.sim.scenario import Scenario
from tests.bench import report
from tests.bench.simulations import Bench, Compared, Pair, Way, workloads

JOBS: Final = 60
THINK_S: Final = 10.0
POPULATIONS: Final = (4, 8, 16, 32)
GENERATIONS: Final = (0, 1, 3, 10)
SEARCHED: Final = ("", "_partial", "_types", "_all")
USUAL: Final = (16, 3)  # population, generations


def settings(jobs: int) -> dict[str, Way]:
    def nodes(slots: int, **count: int) -> tuple[NodeGroup, ...]:
        return tuple(NodeGroup(count=n, slots=slots, model=model) for model, n in count.items())

    plain = Way(Scenario(jobs=jobs, think_s=THINK_S))
    eights = (NodeGroup(count=8, slots=8),)  # on which many sizes fit beside each other
    mixed = nodes(8, v100=3, p100=3, k80=2)
    return {
        "": plain,
        "_partial": plain.knowing(nodes=eights, stall_s=0.1, first_stall_s=1.0),
        "_types": plain.knowing(nodes=nodes(4, v100=6, p100=5, k80=5)),
        "_all": plain.knowing(nodes=mixed, interference="pairwise:0.25"),
        "_busy": plain.knowing(nodes=(NodeGroup(count=4, slots=4),)),  # jobs wait
    }


def searches(here: dict[str, Way], names: Sequence[str]) -> list[Pair]:
    return [
        Pair(
            f"on_vs_off{name}", here[name].but(search="evolution"), here[name].but(search="greedy")
        )
        for name in names
    ]


def terms(here: dict[str, Way]) -> list[Pair]:
    plain, busy = here[""], here["_busy"]
    return [
        Pair("term_size", busy.but(size_exponent=0.0), busy),
        Pair("term_speedup", plain.but(speedup_exponent=1.0), plain),
        Pair("term_stall", plain.but(change_margin=0.0, rescale_stall_s=0.0), plain),
        Pair("term_pause", busy.but(pause_margin=0.0), busy),
        Pair("term_ageing", busy.but(ageing=0.0), busy),
        Pair("term_family", plain.knowing(knowledge="L0"), plain),
        Pair("term_stated", busy.knowing(knowledge="L3"), busy),
    ]


def paper(here: dict[str, Way]) -> list[Pair]:
    ours = here[""]
    return [
        Pair("literal_vs_ones", Way(ours.scenario, {}, "ones-paper"), ours),
        Pair("improved_vs_ones", Way(ours.scenario, {"preset": "improved"}, "ones-paper"), ours),
    ]


def measured(folder: Path, *, quick: bool) -> list[Pair]:
    """Evolution on and off on each measured workload, with neighbours and without."""
    pairs = []
    files = workloads(folder)
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


class Sections:
    """Simulates, prints and keeps the figures of one part after the other."""

    def __init__(self, bench: Bench, path: Path | None) -> None:
        self._bench, self._path = bench, path
        self._figures: dict[str, float] = {}

    def section(self, title: str, pairs: Sequence[Pair], seeds: Sequence[int]) -> None:
        self._bench.do([way for pair in pairs for way in (pair.first, pair.second)], seeds)
        rows: list[list[object]] = []
        for pair in pairs:
            found = self._compared(pair, seeds)
            ratio = found.ratio
            rows.append(
                [
                    pair.key, f"{ratio.mean:.3f}", f"{ratio.sure_low:.3f}-{ratio.sure_high:.3f}",
                    f"{ratio.low:.3f}-{ratio.high:.3f}",
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
        ratios = {
            (population, generations): self._compared(
                Pair(f"budget_{population}_{generations}", at, off), seeds
            ).ratio.mean
            for (population, generations), at in found.items()
        }
        rows = [
            [many, *(f"{ratios[many, n]:.3f}" if (many, n) in ratios else "" for n in GENERATIONS)]
            for many in POPULATIONS
        ]
        columns = ("population", *(f"{many} generations" for many in GENERATIONS))
        title = f"on several types, over no search; {len(seeds)} seeds"
        report.table(f"{title}; {self._bench.elapsed_s:.0f} s so far", columns, rows)

    def _compared(self, pair: Pair, seeds: Sequence[int]) -> Compared:
        found = self._bench.compared(pair, seeds)
        ratio, key = found.ratio, pair.key
        self._figures |= ratio.keys(key)
        self._figures |= {f"{key}_sure_low": ratio.sure_low, f"{key}_sure_high": ratio.sure_high}
        if found.unfinished:
            self._figures[f"{key}_unfinished"] = float(found.unfinished)
        self._figures["elapsed_s"] = self._bench.elapsed_s
        report.write(self._figures, self._path)
        return found


def main() -> None:
    named = [name.removeprefix("_") or "plain" for name in settings(JOBS)]
    chosen = report.arguments(
        __doc__,
        "one seed of 30 jobs and a few figures",
        paper=(bool, False, "only the paper's policy over ones"),
        searches=(report.some_of(named), [], f"only these settings, of {', '.join(named)}"),
        seeds=(report.seeds, "40-42", "of workloads and searches, as in 40-42"),
        jobs=(int, None, "in each simulation; default: 60, quick: 30"),
        workers=(int, 2, "simulations at a time"),
        results=(Path, None, "keep simulations here and go on from there"),
        grid=(bool, False, "every budget, with every seed"),
        profiles=(Path, None, "folder of measured tables and workloads"),
    )
    seeds = chosen.seeds[: 1 if chosen.quick else None]
    here = settings(chosen.jobs or (JOBS // 2 if chosen.quick else JOBS))
    told = Sections(Bench(seeds, chosen.workers, chosen.results), chosen.json)
    if chosen.searches:
        for name in chosen.searches:
            at = "" if name == "plain" else f"_{name}"
            told.section(f"the search {at}", searches(here, [at]), seeds)
        return
    told.section("the paper's policy over ones", paper(here), seeds)
    if chosen.paper:
        return
    if chosen.quick:
        told.section("the search", searches(here, [""]), seeds)
        told.section("on several types", searches(here, ["_types"]), seeds)
    else:
        for name in SEARCHED:
            told.section(f"the search {name}", searches(here, [name]), seeds)
        told.section("each term off, over ones", terms(here), seeds)
        told.curve(here["_types"], seeds if chosen.grid else seeds[:1], whole=chosen.grid)
    if chosen.profiles is not None:
        pairs = measured(chosen.profiles, quick=chosen.quick)
        told.section("measured workloads", pairs, seeds[:1])


if __name__ == "__main__":
    main()
