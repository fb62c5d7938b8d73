"""Policies by name, their options, and notes for jobs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from controlplane.policy.baselines.fifo import Fifo
from controlplane.policy.min_slots import MinSlotsPolicy
from controlplane.policy.ones.policy import Ones
from controlplane.policy.options import OnesOptions
from controlplane.policy.registry import POLICIES, check_options, entry, job_notes, make
from schemas.errors import SettingsError

NAN, INF = math.nan, math.inf


def test_a_policy_is_made_by_name_with_its_options() -> None:
    fifo, ones = make("fifo"), make("ones", {"population": 4, "ageing": 0.5})

    assert isinstance(fifo, MinSlotsPolicy)
    assert isinstance(ones, MinSlotsPolicy)
    assert type(fifo.policy) is Fifo
    assert type(ones.policy) is Ones
    assert ones.policy.options == OnesOptions(population=4, ageing=0.5)


def test_only_a_policy_that_searches_has_its_own_process() -> None:
    assert {name for name in POLICIES if entry(name).searches} == {
        "drl", "ones", "ones-paper", "optimus", "goodput", "pollux", "slaq", "oasis", "harmony",
        "harmony-drl",
    }  # fmt: skip


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    known = r"unknown policy 'lifo'; did you mean fifo\? choose one of drl, fair, fifo, g"
    with pytest.raises(SettingsError, match=known) as refused:
        make("lifo")
    assert refused.value.field == "policy"


@pytest.mark.parametrize(
    ("policy", "options", "problem"),
    [
        ("fifo", {"speed": 1}, ": .*unknown field `speed`; known: placer"),
        ("fifo", {"placer": "dense"}, ": .*'dense' .*; choose one of roomiest, con"),
        ("ones", {"speed": 1}, ": .*unknown field `speed`; known: search, population"),
        ("ones", {"population": "many"}, r": .*\$\.population"),
        ("ones", {"search": "up"}, r": .*\$\.search"),
        ("ones", {"population": 1}, ".population: 1 is below 2; raise it"),
        ("ones", {"ageing": 1.5}, ".ageing: 1.5 is above 1.0; lower it"),
        ("ones", {"size_exponent": NAN}, ".size_exponent: nan is not finite"),
        ("ones", {"change_margin": INF}, ".change_margin: inf is not finite"),
        ("ones-paper", {"mutation_rate": 1.5}, ".mutation_rate: 1.5 is above 1.0; lower it"),
        ("ones-paper", {"population": 513}, ".population: 513 is above 512; lower it"),
        ("ones-paper", {"seed": -1}, ".seed: -1 is below 0; raise it"),
        ("ones-paper", {"scale_down": "up"}, r": .*\$\.scale_down"),
        ("ones-paper", {"preset": "best"}, r": .*\$\.preset"),
        ("ones-paper", {"preset": ["improved"]}, r": .*\$\.preset"),
        ("fair", {"quantum_s": -1.0}, ".quantum_s: -1.0 is below 0.0; raise it"),
        ("gittins", {"quantum": 0}, ".quantum: 0.0 is below 1.0; raise it"),
        ("gittins", {"history": 0}, ".history: 0 is below 1; raise it"),
        ("gittins", {"least_history": 0}, ".least_history: 0 is below 1; raise it"),
        ("tiresias", {"limits": []}, ".limits: empty; give at least one"),
        ("tiresias", {"limits": [0.0]}, r".limits: \[0.0\] are not all above 0; give slot seconds"),
        ("tiresias", {"limits": [INF]}, ".limits: .* are not all above 0"),
        ("tiresias", {"limits": [5.0, 5.0]}, r".limits: \[5.0, 5.0\] do not rise; give them in"),
        ("tiresias", {"promote_after": -1.0}, ".promote_after: -1.0 is below 0.0; raise it"),
        ("tiresias", {"placer": "anywhere"}, r": .*\$\.placer"),
        ("goodput", {"power": 2.0}, ".power: 2.0 is above 1.0; lower it"),
        ("goodput", {"growth": 0.5}, ".growth: 0.5 is below 1.0; raise it"),
        ("goodput", {"batches_per_doubling": 0}, ".batches_per_doubling: 0 is below 1; raise it"),
        ("goodput", {"rescale_stall_s": NAN}, ".rescale_stall_s: nan is not finite; give a number"),
        ("goodput", {"interval_s": 0.05}, ".interval_s: 0.05 is too short; give 0, or 0.1"),
        ("optimus", {"remaining": "oracle"}, " of optimus: no cluster has an oracle"),
        ("optimus", {"interval_s": -1.0}, ".interval_s: -1.0 is below 0.0; raise it"),
        ("optimus", {"interval_s": 0.05}, ".interval_s: 0.05 is too short; give 0, or 0.1"),
        ("optimus", {"most": 0}, ".most: 0 is below 1; raise it"),
        ("optimus", {"convergence": 0.9}, ".convergence: 0.9 is above 0.5; lower it"),
        ("drl", {"interval_s": 0.01}, ".interval_s: 0.01 is below 0.1; raise it"),
        ("drl", {"most": 0}, ".most: 0 is below 1; raise it"),
        ("oasis", {"interval_s": 0.0}, ".interval_s: 0.0 is below 0.1"),
        ("oasis", {"horizon": 1}, ".horizon: 1 is below 2; raise it"),
        ("oasis", {"horizon": 100_000}, ".horizon: 100000 is above 5000; lower it"),
        ("oasis", {"u": -1.0}, ".u: -1.0 is not a price; give a value per slot second above 0"),
        ("oasis", {"l": NAN}, ".l: nan is not a price"),
        (
            "oasis",
            {"u": 1.0, "l": 2.0},
            ".u: 1.0 is below l, 2.0; raise the first or lower the sec",
        ),
        ("oasis", {"margin": -0.1}, ".margin: -0.1 is below 0.0"),
        ("slaq", {"interval_s": 0.0}, ".interval_s: 0.0 is below 0.5; raise it"),
        ("slaq", {"interval_s": NAN}, ".interval_s: nan is not finite"),
        ("slaq", {"quality": 1.0}, ".quality: 1.0 is above 0.999; lower it"),
        ("slaq", {"decay": 1.5}, ".decay: 1.5 is above 1.0; lower it"),
        ("slaq", {"history": 2}, ".history: 2 is below 3; raise it"),
        ("slaq", {"margin": -0.1}, ".margin: -0.1 is below 0.0; raise it"),
        ("slaq", {"efficiency_floor": 2.0}, ".efficiency_floor: 2.0 is above 1.0; lower it"),
        ("slaq", {"most": 0}, ".most: 0 is below 1; raise it"),
        ("slaq", {"normalise": "largest"}, r": .*\$\.normalise"),
        ("harmony", {"prior": 1.0}, ".prior: 1.0 is above 0.95; lower it"),
        ("harmony", {"ridge": 0.0}, ".ridge: 0.0 is below 0.001; raise it"),
        ("harmony", {"rescale_stall_s": NAN}, ".rescale_stall_s: nan is not finite; give a number"),
        ("harmony", {"slowdowns": "oracle"}, " of harmony: no cluster has an oracle"),
    ],
)
def test_an_invalid_option_is_refused_by_its_name(
    policy: str, options: dict[str, Any], problem: str
) -> None:
    where = f" of {policy}" if problem.startswith(":") else ""
    with pytest.raises(SettingsError, match=f"policy.options{where}{problem}") as refused:
        make(policy, options)
    option = f".{next(iter(options))}" if problem.startswith(".") else ""
    assert refused.value.field == f"policy.options{option}"


def test_options_of_a_policy_that_needs_an_oracle_are_checked_without_one() -> None:
    assert check_options("srtf", {}).placer == "consolidate"


# --- notes for jobs

NO_UTILITY = (
    "no utility stated: oasis accepts it, promises it no end, and gives it what promised jobs leave; "
    "`utility` in the job file says what its end is worth"
)


def test_notes_name_unmet_needs_in_their_order() -> None:
    both = job_notes("oasis", ("losses", "utility"), utility_stated=False)

    assert job_notes("fifo", POLICIES["fifo"].needs, utility_stated=False) == ()
    assert job_notes("oasis", ("utility",), utility_stated=False) == (NO_UTILITY,)
    assert job_notes("oasis", ("utility",), utility_stated=True) == ()
    assert [note.split()[0] for note in both] == ["oasis", "no"]


@pytest.mark.parametrize(
    ("epochs", "train_loss", "begins"),
    [
        (
            0,
            None,
            "slaq shares slots by training losses: it has at least a fair share until it rep",
        ),
        (1, None, "no loss in 1 epoch: under slaq"),
        (7, None, "no loss in 7 epochs: under slaq"),
        (3, NAN, "its loss is nan: under slaq"),
        (0, INF, "its loss is inf: under slaq"),
        (0, 0.0, None),
        (3, 0.0, None),
    ],
)
def test_a_job_without_a_finite_loss_gets_a_note(
    epochs: int, train_loss: float | None, begins: str | None
) -> None:
    notes = job_notes(
        "slaq", ("losses",), utility_stated=False, epochs=epochs, train_loss=train_loss
    )

    assert [note for note in notes if "fair share" in note] == list(notes)
    assert [note.startswith(begins or "") for note in notes] == [True] * (begins is not None)
