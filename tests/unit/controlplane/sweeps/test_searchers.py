"""Who is tried with what, who goes on, and who is stopped."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.sweeps.configurations import changed, drawn, grid, stream
from controlplane.sweeps.search import epochs_of_new, expected_epochs, next_decisions
from controlplane.sweeps.trials import Add, Decision, Grant, Stop, Trial, best, with_score
from schemas.sweeps import (
    Asha,
    Grid,
    Hyperband,
    MedianStopping,
    Parameter,
    PopulationBased,
    RandomSearch,
    Searcher,
    SearchSpec,
    Space,
    SuccessiveHalving,
    Value,
    brackets,
    choice,
    integer,
    log_uniform,
    uniform,
)
from tests.support.sizes import examples
from tests.support.sweeps import played, search, settled

SPACE = {"lr": log_uniform(1e-4, 1e-1), "layers": integer(1, 4), "kind": choice("a", "b")}
GRID = {"layers": integer(1, 4), "kind": choice("a", "b")}


def by_chance(seed: int, failing: float = 0.0) -> dict[tuple[int, int], float]:
    rng = stream(seed)
    return {
        (trial, epoch): math.nan if rng.random() < failing else rng.random()
        for trial in range(200)
        for epoch in range(1, 30)
    }


def searchers() -> st.SearchStrategy[Searcher]:
    many, eta = st.integers(1, 12), st.integers(2, 4)
    return st.one_of(
        st.builds(Grid), st.builds(RandomSearch, configurations=many),
        st.builds(SuccessiveHalving, configurations=many, min_epochs=st.integers(1, 4), eta=eta),
        st.builds(Hyperband, eta=eta),
        st.builds(
            Asha, configurations=many, min_epochs=st.integers(1, 4), eta=eta,
            promotes=st.sampled_from(["in_order", "on_arrival"]),
        ),
        st.builds(MedianStopping, configurations=many, grace_epochs=st.integers(1, 3)),
        st.builds(
            PopulationBased, population=st.integers(4, 12), interval_epochs=st.integers(1, 3),
        ),
    )  # fmt: skip


@settings(max_examples=examples(100), deadline=None)
@given(searchers(), st.integers(4, 9), st.integers(0, 99), st.sampled_from([0.0, 0.1, 1.0]))
def test_every_search_ends_and_trains_no_trial_beyond_the_last_epoch(
    searcher: Searcher, epochs: int, seed: int, failing: float
) -> None:
    scores = by_chance(seed, failing)
    spec = search(searcher, epochs, GRID if isinstance(searcher, Grid) else SPACE, seed)

    trials = played(spec, lambda trial, epoch: scores[trial.number, epoch], stream(seed))

    assert all(trial.ended for trial in trials)
    assert all(trial.epochs <= trial.granted <= epochs for trial in trials)
    if not failing:
        assert any(trial.epochs == epochs for trial in trials), "somebody is trained to the end"


@settings(max_examples=examples(60), deadline=None)
@given(
    searchers().filter(
        lambda one: (
            not isinstance(one, MedianStopping) and getattr(one, "promotes", "") != "on_arrival"
        )
    ),
    st.integers(0, 99),
    st.integers(0, 99),
)
def test_waiting_searchers_give_the_same_trials_in_any_order(
    searcher: Searcher, seed: int, order: int
) -> None:
    scores = by_chance(seed, failing=0.05)
    spec = search(searcher, 6, GRID if isinstance(searcher, Grid) else SPACE, seed)

    def score(trial: Trial, epoch: int) -> float:
        return scores[trial.number, epoch]

    assert played(spec, score, stream(order)) == played(spec, score, stream(order + 1))


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 40), st.integers(2, 4), st.integers(0, 99))
def test_successive_halving_keeps_exactly_one_in_eta_of_every_rung_in_any_order(
    many: int, eta: int, seed: int
) -> None:
    scores = by_chance(seed)
    spec = search(SuccessiveHalving(many, eta=eta), epochs=eta**2)

    trials = played(spec, lambda trial, epoch: scores[trial.number, epoch], stream(seed))

    second = max(1, many // eta)
    third = max(1, second // eta)
    came = Counter(trial.epochs for trial in trials)
    assert came == Counter({1: many - second}) + Counter({eta: second - third}) + Counter(
        {eta**2: third}
    )
    stayed = sorted((scores[number, 1] for number in range(many)), reverse=True)[:second]
    assert sorted(trial.scores[0] for trial in trials if trial.epochs > 1) == sorted(stayed)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(2, 20), st.integers(2, 4), st.integers(0, 99))
def test_asha_promotes_only_trials_among_the_best_so_far(many: int, eta: int, seed: int) -> None:
    scores, order = by_chance(seed), stream(seed)
    spec = search(Asha(many, eta=eta, promotes="on_arrival"), epochs=eta**2)
    trials, _ = settled(spec, [])
    while training := [trial for trial in trials if not trial.ended and not trial.waits]:
        one = training[order.randrange(len(training))]
        trials[one.number] = with_score(one, scores[one.number, one.epochs + 1], spec.epochs)
        before = list(trials)
        trials, said = settled(spec, trials)
        for grant in (one for one in said if isinstance(one, Grant)):
            level = before[grant.trial].granted
            here = sorted((t.scores[level - 1] for t in before if t.epochs >= level), reverse=True)
            nobody_trains = all(t.ended or t.waits for t in before)
            places = max(len(here) // eta, nobody_trains)
            assert before[grant.trial].scores[level - 1] in here[:places]


def test_hyperband_has_the_brackets_of_its_paper_and_none_beyond_the_last_epoch() -> None:
    assert brackets(81, 3) == [(81, 1), (34, 3), (15, 9), (8, 27), (5, 81)]
    for most in (1, 2, 10, 80):
        assert all(many >= 1 and 1 <= least <= most for many, least in brackets(most, 3))


def seen(granted: int, *trials: float | tuple[float, ...] | Trial | None) -> list[Trial]:
    """Trials with these scores; None: without one yet."""
    return [
        one
        if isinstance(one, Trial)
        else Trial(n, {"lr": 0.1}, granted, scores=one if isinstance(one, tuple) else (one,) * (one is not None))
        for n, one in enumerate(trials)
    ]  # fmt: skip


ASHA, HALVING = search(Asha(6, eta=2), epochs=4), search(SuccessiveHalving(3, eta=3), epochs=9)
MEDIAN = search(MedianStopping(4, grace_epochs=2))
BELOW = "best score is below the median of 3 other trials after 2 epochs"
FAILED = Trial(2, {"lr": 0.1}, granted=1, ended="failed")
STOPPED = [Trial(n, {"lr": 0.1}, granted=1, scores=(0.4,), ended="stopped") for n in (1, 2)]
HALF, HUGE = [(0.5, 0.7)] * 3, [(1.7e308, 1.7e308)] * 3


@pytest.mark.parametrize(
    ("spec", "trials", "paused", "decisions"),
    [
        pytest.param(ASHA, seen(1, 0.1, 0.2, None, 0.9, 0.8, None), (), [Grant(1, 2)],
                     id="asha promotes before all trials arrived, but in order: 3 waits for 2"),
        pytest.param(ASHA, seen(1, 0.1, 0.2, 0.3, 0.9, 0.8, None), (), [Grant(n, 2) for n in (1, 2, 3, 4)],
                     id="asha promotes those that waited, too"),
        pytest.param(ASHA, seen(1, 0.1, 0.2, None, 0.9, 0.8, None), {2}, [Grant(n, 2) for n in (1, 3, 4)],
                     id="asha waits for no trial that is paused"),
        pytest.param(ASHA, seen(1, 0.1, 0.2, FAILED, 0.9, 0.8, None), (), [Grant(n, 2) for n in (1, 3, 4)],
                     id="asha waits for no trial that failed"),
        pytest.param(search(Grid(), epochs=5, space=GRID), [], (),
                     [Add({"layers": n, "kind": kind}, epochs=5) for n in (1, 2, 3, 4) for kind in "ab"],
                     id="a grid tries every combination to the end"),
        pytest.param(MEDIAN, seen(9, *HALF, (0.2,)), (), [], id="no trial stops in its grace epochs"),
        pytest.param(MEDIAN, seen(9, *HALF, (0.2, 0.59)), (), [Stop(3, BELOW)],
                     id="a trial below the median of the others stops"),
        pytest.param(MEDIAN, seen(9, *HUGE, (0.1, 0.1)), (), [Stop(3, BELOW)],
                     id="a trial below a median of huge scores stops"),
        pytest.param(HALVING, [*seen(3, 0.5), *STOPPED, Trial(3, {"lr": 0.2}, granted=1, scores=(0.9,))], (),
                     [Stop(3, "not among the best 1 of 4 after 1 epoch")],
                     id="a late trial is promoted only if a place is left"),
    ],
)  # fmt: skip
def test_a_search_decides_about_its_trials(
    spec: SearchSpec, trials: list[Trial], paused: Collection[int], decisions: list[Decision]
) -> None:
    assert next_decisions(spec, trials, paused) == decisions


def test_changed_copies_of_the_best_replace_the_worst_of_a_population() -> None:
    spec = search(PopulationBased(4, interval_epochs=2, resample=0.0), epochs=6)
    trials = [
        Trial(n, {"lr": 0.01}, granted=2, scores=(0.0, score))
        for n, score in enumerate((0.3, 0.9, 0.1, 0.5))
    ]

    add, stop, *grants = next_decisions(spec, trials)

    assert isinstance(add, Add)
    assert (add.epochs, add.parent) == (4, 1)
    assert add.values["lr"] in (pytest.approx(0.008), pytest.approx(0.012))
    assert stop == Stop(
        2, "among the worst 1 of 4 after 2 epochs; replaced by a changed copy of trial 1"
    )
    assert grants == [Grant(0, 4), Grant(1, 4), Grant(3, 4)]

    slowest = Trial(3, {"lr": 0.01}, granted=2, scores=(0.1,))
    assert next_decisions(spec, [*trials[:3], slowest]) == [], "a population waits for its slowest"


def test_a_trial_without_a_finite_score_fails_alone() -> None:
    spec = search(SuccessiveHalving(3, eta=3), epochs=3)
    trials, _ = settled(spec, [])
    for number, score in enumerate((math.nan, 0.1, math.inf)):
        trials[number] = with_score(trials[number], score, spec.epochs)

    after, _ = settled(spec, trials)

    assert [trial.ended for trial in after] == ["failed", "", "failed"]
    assert after[1].granted == 3


def test_the_best_is_the_highest_score_at_its_earliest_epoch() -> None:
    trials = [
        Trial(0, {}, 3, scores=(0.5, 0.9, 0.9)),
        Trial(1, {}, 3, scores=(0.9, 0.1)),
        Trial(2, {}, 5, scores=(0.9,), parent=0, start_epochs=3),
    ]

    assert best(trials) == (1, 1)
    assert best([]) is None


@pytest.mark.parametrize(
    ("searcher", "begun", "granted"),
    [
        (SuccessiveHalving(9), 0, 1), (SuccessiveHalving(9), 1, 3), (SuccessiveHalving(9), 3, 9),
        (SuccessiveHalving(9), 9, 9), (Asha(9), 2, 3), (Hyperband(), 0, 9),
        (PopulationBased(4, interval_epochs=2), 0, 2),
        (PopulationBased(4, interval_epochs=2), 8, 9), (RandomSearch(2), 4, 9),
    ],
)  # fmt: skip
def test_an_added_trial_trains_to_the_next_rung(
    searcher: Searcher, begun: int, granted: int
) -> None:
    assert epochs_of_new(search(searcher, epochs=9), begun) == granted


def score_by_number(trial: Trial, epoch: int) -> float:
    return trial.number + 0.01 * epoch


@pytest.mark.parametrize("searcher", [SuccessiveHalving(11, eta=2), Hyperband(eta=3)])
def test_the_epochs_of_rungs_that_wait_for_all_are_known(searcher: Searcher) -> None:
    spec = search(searcher, 9)

    trials = played(spec, score_by_number, stream(3))

    assert sum(len(trial.scores) for trial in trials) == expected_epochs(spec)


def test_the_expected_epochs_of_other_searchers_are_a_lower_bound() -> None:
    asha = search(Asha(24, eta=3), 9)

    trials = played(asha, score_by_number, stream(3))

    assert expected_epochs(asha) <= sum(len(trial.scores) for trial in trials)
    assert expected_epochs(search(PopulationBased(4), 6)) == 24
    assert expected_epochs(search(RandomSearch(4), 6)) == 0


FORMS = {
    "lr": log_uniform(1e-4, 1e-1),
    "dropout": uniform(0.0, 0.5),
    "layers": integer(1, 8),
    "width": Parameter(log_integer=(8, 1024)),
    "model": choice("small", "large"),
    "heads": Parameter(choice=(2, 4, 8), when={"model": ("large",)}),
    "bias": Parameter(choice=(True, False), when={"heads": (4, 8)}),
}


def is_of(space: Space, values: dict[str, Value]) -> bool:
    for name, parameter in space.items():
        applies = all(values.get(one) in some for one, some in parameter.when.items())
        if applies != (name in values):
            return False
        if not applies:
            continue
        least, most = parameter.bounds
        value = values[name]
        if parameter.choice is not None:
            if value not in parameter.choice:
                return False
        elif not least <= float(value) <= most or (
            "integer" in parameter.form and type(value) is not int
        ):
            return False
    return list(values) == [name for name in space if name in values]


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**63), st.integers(0, 10_000))
def test_drawn_and_mutated_values_are_in_the_space(seed: int, number: int) -> None:
    values = drawn(FORMS, seed, number)

    assert is_of(FORMS, values)
    for _ in range(5):
        values = changed(FORMS, values, 0.25, stream(seed))
        assert is_of(FORMS, values)


def test_another_parameter_changes_no_other_value() -> None:
    larger = {"warmup": uniform(0.0, 1.0), **FORMS}

    assert {k: v for k, v in drawn(larger, 7, 3).items() if k != "warmup"} == drawn(FORMS, 7, 3)


def test_integers_are_drawn_including_both_ends() -> None:
    both = {"one": integer(1, 3), "two": Parameter(log_integer=(1, 3))}
    seen = [drawn(both, 0, number) for number in range(100)]

    assert {values["one"] for values in seen} == {1, 2, 3}
    assert {values["two"] for values in seen} == {1, 2, 3}


def test_a_grid_lists_values_that_do_not_apply_once() -> None:
    space = {
        "model": choice("small", "large"),
        "heads": Parameter(choice=(2, 4), when={"model": ("large",)}),
        "layers": integer(1, 2),
    }

    assert grid(space) == [
        {"model": "small", "layers": 1}, {"model": "small", "layers": 2},
        {"model": "large", "heads": 2, "layers": 1}, {"model": "large", "heads": 2, "layers": 2},
        {"model": "large", "heads": 4, "layers": 1}, {"model": "large", "heads": 4, "layers": 2},
    ]  # fmt: skip
