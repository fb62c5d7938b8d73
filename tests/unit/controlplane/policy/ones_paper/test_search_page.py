"""The worked example of docs/search.md: its tables are computed by the code that they explain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pytest

from controlplane.core.model.job import noise_limit
from controlplane.policy.ones_paper.candidates import (
    counts_of,
    filled,
    mean_draw,
    mutated,
    refreshed,
    reordered,
    scorer_for,
    selected,
    swapped,
    within_limits,
)
from controlplane.policy.ones_paper.job_estimates import after_epoch
from controlplane.policy.ones_paper.problem import Genes
from controlplane.policy.options import OnesPaperOptions
from controlplane.policy.search.observed_jobs import LimitBounds, resumed
from tests.support.documented import ROOT
from tests.unit.controlplane.policy.ones_paper.problems import a_problem, genes

PAGE = ROOT / "docs" / "search.md"
LETTERS = "-ABC"  # of job 1, 2 and 3; an idle slot
LOCAL = 32  # batch of one slot
RATES = [[100.0, 190.0, 270.0], [50.0, 90.0], [80.0]]  # X on 1, 2, ... slots, samples/s
LEFT = [19_000.0, 4_500.0, 8_000.0]  # Y, samples
PROBLEM = a_problem(
    present=[1, 1, 1, 2], most=[3, 2, 1], rates=RATES, left=LEFT, new=[3],
    served_s=[300.0, 50.0, 0.0], local=LOCAL,
)  # fmt: skip
Y = PROBLEM.exact[None, :]
BY_EQ_8 = OnesPaperOptions()
BY_VALUE = OnesPaperOptions(score="all")


def written(schedule: Sequence[int]) -> str:
    """A schedule as the page writes it."""
    return " ".join(LETTERS[job + 1] for job in schedule)


def markdown(rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def on_page(rows: Iterable[Sequence[str]]) -> bool:
    return markdown(rows) in PAGE.read_text(encoding="utf-8")


def candidates() -> Mapping[str, Genes]:
    """The candidates of the page in their order."""
    refresh = refreshed(PROBLEM.present[None, :], PROBLEM, Y)
    other = genes([1, 2, 3, 1])
    raw = swapped(refresh, other, np.array([[False, True, True, False]]))
    first, second = (filled(within_limits(one[None, :], PROBLEM), PROBLEM, Y) for one in raw)
    struck = np.array([[False, False, True]])
    mutant = mutated(refresh, PROBLEM, struck, Y)
    return {
        "refreshed": refresh, "another one": other, "first child": first, "second child": second,
        "mutant": mutant,
    }  # fmt: skip


def scores(options: OnesPaperOptions) -> list[float]:
    scorer = scorer_for(PROBLEM, options)
    found = np.concatenate(list(candidates().values()))
    return [float(x) for x in (scorer.matrix(found) @ scorer.weights(mean_draw(PROBLEM)))[:, 0]]


def costs(counts: Sequence[int]) -> list[str]:
    """T c of each job in seconds, or - for a job that waits."""
    return [
        f"{left / rates[many - 1] * many:.0f}" if many else "-"
        for left, rates, many in zip(LEFT, RATES, counts, strict=True)
    ]


def test_the_page_has_the_jobs_and_the_costs_of_a_further_slot() -> None:
    ran = [f"{PROBLEM.served_s[0]:.0f} s", f"{PROBLEM.served_s[1]:.0f} s", "new"]
    most = ["1 to 3", "1 to 2", "1"]
    jobs = [
        (letter, f"{left:,.0f}", ", ".join(f"{rate:.0f}" for rate in rates), slots, time)
        for letter, left, rates, slots, time in zip("ABC", LEFT, RATES, most, ran, strict=True)
    ]
    text = PAGE.read_text(encoding="utf-8")

    assert on_page(jobs), markdown(jobs)
    assert f"(3 / 270 - 2 / 190) x 19,000 = {(3 / 270 - 2 / 190) * 19_000:.1f}" in text
    assert f"(2 / 90 - 1 / 50) x 4,500 = {(2 / 90 - 1 / 50) * 4_500:.0f}" in text
    assert f"1 / 50 x 4,500 = {4_500 / 50:.0f} and C 1 / 80 x 8,000 = {8_000 / 80:.0f}" in text


def test_the_operators_make_the_candidates_of_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    straight = np.array([[False, True, True, False]])
    found = candidates()

    raw = swapped(found["refreshed"], found["another one"], straight)
    within = within_limits(raw, PROBLEM)

    for before, limited, name in zip(raw, within, ("first child", "second child"), strict=True):
        cells = (name, *(f"`{written(one)}`" for one in (before, limited, found[name][0])))
        assert on_page([cells]), cells
    assert f"`{written(found['refreshed'][0])}`, the refreshed schedule" in text
    assert f"becomes `{written(found['mutant'][0])}`" in text
    best = reordered(found["second child"], "flat")[0]
    assert f"`{written(found['second child'][0])}` becomes `{written(best)}`" in text


def test_the_scores_of_the_page_are_those_of_the_code() -> None:
    by_eq_8, by_value = scores(BY_EQ_8), scores(BY_VALUE)
    counts = counts_of(np.concatenate(list(candidates().values())), 3).tolist()
    rows = [
        (name, f"`{written(one[0])}`", *costs(many), f"{-cost:.0f}", f"{value:.3f}")
        for (name, one), many, cost, value in zip(
            candidates().items(), counts, by_eq_8, by_value, strict=True
        )
    ]

    assert on_page(rows), markdown(rows)
    assert max(range(5), key=by_eq_8.__getitem__) == list(candidates()).index("mutant")
    assert max(range(5), key=by_value.__getitem__) == list(candidates()).index("second child")
    everything = np.concatenate(list(candidates().values()))
    chosen, _ = selected(scorer_for(PROBLEM, BY_EQ_8), everything, 2, np.random.default_rng(0))
    assert [list(candidates())[row] for row in chosen] == ["mutant", "first child"]


def test_the_weights_of_the_page_are_those_of_the_code() -> None:
    scorer = scorer_for(PROBLEM, BY_VALUE)
    weights = scorer.weights(mean_draw(PROBLEM))[:, 0]
    rows = [
        (letter, f"{left / rates[0]:.0f} s", f"{weight:.4f}",
         *(f"{weight * part:.3f}" if part else "" for part in row))
        for letter, left, rates, weight, row in zip(
            "ABC", LEFT, RATES, weights, scorer.parts[:, 1:4, 0], strict=True)
    ]  # fmt: skip

    assert on_page(rows), markdown(rows)


@pytest.mark.parametrize(
    ("job", "limit", "ran_s"), [("A", 96, 300.0), ("B", 64, 50.0), ("C", 32, 30.0)]
)
def test_the_batch_limits_of_the_page_are_those_of_the_code(
    job: str, limit: int, ran_s: float
) -> None:
    bounds = LimitBounds(first=LOCAL, least=1, most=1024)
    after = after_epoch(limit, bounds, "literal", ran_s=ran_s, arrivals_per_s=0.01, contended=True)

    row = (job, str(limit), f"{ran_s:.0f} s", f"{0.01 * ran_s:g}", str(after))
    assert on_page([row]), row
    text = PAGE.read_text(encoding="utf-8")
    assert f"from 64 to {resumed(64, bounds)}" in text
    assert f"with phi = 500 at most {noise_limit(LOCAL, 500.0)}" in text
