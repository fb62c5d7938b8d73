"""A few random changes and losses; `bin/soak` does many."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.random_changes import carried_through, plan


@pytest.mark.slow
def test_random_changes_lose_no_sample_and_no_digit(tmp_path: Path) -> None:
    outcome = carried_through(plan(7, 90, 8), tmp_path)

    assert (outcome.changes, outcome.lost, outcome.repeated, outcome.unequal) == (8, 0, 0, 0)
    assert outcome.apart < 1e-9
    assert min(outcome.deaths, outcome.resumed) > 0
