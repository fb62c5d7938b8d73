"""What families that ran on two slots gained is expected of those that never did."""

from __future__ import annotations

import numpy as np
import pytest

from controlplane.policy.ones.slowdowns import LearnedSlowdowns
from controlplane.policy.search.observed_families import FamilyHistories, FamilyRecord

BATCH = 32


def seen(families: FamilyHistories, name: str, *steps: float) -> FamilyRecord:
    """A family that was measured on 1, 2, ... slots, with the same batch on each."""
    family = families.of(name)
    for slots, step_s in enumerate(steps, 1):
        family.add(1, slots, BATCH, step_s)
    family.speed_model(BATCH)
    return family


def speed_up(family: FamilyRecord, few: int = 1, many: int = 2) -> float:
    """On so many slots, with as many times the batch."""
    sizes = np.array([few, many])
    step = family.speed_model(BATCH).step_s(np.ones(2), sizes, np.full(2, float(BATCH)))
    return float(many / few * step[0] / step[1])


def agreed(families: FamilyHistories) -> None:
    LearnedSlowdowns(families).by_neighbour(["f"])


def test_a_family_says_how_it_scales_once_it_was_on_several_slots() -> None:
    families = FamilyHistories()

    assert seen(families, "f", 0.1).scaling() == (None, None)
    assert seen(families, "g", 0.1, 0.1).scaling() == (pytest.approx(1.0, abs=0.02), None)
    assert seen(families, "h", 0.1, 0.2).scaling() == (pytest.approx(0.0, abs=0.02), None)
    assert seen(families, "i", 0.1, 0.4).scaling() == (0.0, None)
    even, less = seen(families, "j", 0.1, 0.1, 0.1, 0.1 * 2**0.5).scaling()
    assert even == pytest.approx(1.0, abs=0.05)
    assert less == pytest.approx(0.5, abs=0.05)


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


def test_beyond_two_slots_half_is_lost_until_some_family_was_there() -> None:
    families = FamilyHistories()
    new = seen(families, "f", 0.1)
    agreed(families)
    assert speed_up(new, 2, 4) == pytest.approx(2.0**0.5)

    seen(families, "g", 0.1, 0.1, 0.1, 0.1)
    agreed(families)

    assert speed_up(new, 2, 4) == pytest.approx(2.0**0.75, rel=0.02)
