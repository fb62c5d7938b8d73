"""What families that ran on two slots gained is expected of those that never did."""

from __future__ import annotations

import numpy as np
import pytest

from controlplane.policy.ones.learnt_slowdowns import LearntSlowdowns
from controlplane.policy.search.observed_families import FamilyHistories, FamilyHistory

BATCH = 32


def seen(families: FamilyHistories, name: str, *steps: float) -> FamilyHistory:
    """A family that was measured on 1, 2, ... slots, with the same batch on each."""
    family = families.of(name)
    for slots, step_s in enumerate(steps, 1):
        family.add(1, slots, BATCH, step_s)
    family.speed_model(BATCH)
    return family


def speed_up(family: FamilyHistory) -> float:
    """On two slots, with twice the batch."""
    step = family.speed_model(BATCH).step_s(np.ones(2), np.array([1, 2]), np.full(2, float(BATCH)))
    return float(2.0 * step[0] / step[1])


def agreed(families: FamilyHistories) -> None:
    LearntSlowdowns(families).by_neighbour(["f"])


def test_a_family_says_how_it_scales_once_it_was_on_one_slot_and_on_two() -> None:
    families = FamilyHistories()

    assert seen(families, "f", 0.1).scaling() is None
    assert seen(families, "g", 0.1, 0.1).scaling() == pytest.approx(1.0, abs=0.02)
    assert seen(families, "h", 0.1, 0.2).scaling() == pytest.approx(0.0, abs=0.02)
    assert seen(families, "i", 0.1, 0.4).scaling() == 0.0


def test_without_any_that_was_on_two_slots_the_prior_holds() -> None:
    families = FamilyHistories()
    new = seen(families, "f", 0.1)

    agreed(families)

    assert speed_up(new) == pytest.approx(2.0**0.9)


def test_a_new_family_still_tries_where_another_gained_nothing() -> None:
    families = FamilyHistories()
    new = seen(families, "f", 0.1)
    seen(families, "g", 0.1, 0.2)

    agreed(families)

    assert speed_up(new) == pytest.approx(2.0**0.7)


def test_a_new_family_is_believed_to_gain_as_much_as_others_did() -> None:
    families = FamilyHistories()
    new = seen(families, "f", 0.1)
    seen(families, "g", 0.1, 0.2 / 2.0**0.6)

    agreed(families)

    assert speed_up(new) == pytest.approx(2.0**0.75, rel=0.02)


def test_a_family_that_was_on_two_slots_itself_is_not_told_by_others() -> None:
    families = FamilyHistories()
    own = seen(families, "f", 0.1, 0.1)
    before = speed_up(own)
    for number in range(5):
        seen(families, f"g{number}", 0.1, 0.2)

    agreed(families)

    assert speed_up(own) == before
