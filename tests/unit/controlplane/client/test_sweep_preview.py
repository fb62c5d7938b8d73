"""Previews of sweeps, computed with the searchers that would run."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.client import ASHA, PBT, Choice, Grid, Hyperband, RandomSearch, SuccessiveHalving
from controlplane.client.sweeps.preview import Preview, Range, SlotHours, preview
from tests.support.client_examples import sweep


def previewed(searcher: Any, slots: tuple[int, int] = (1, 4), **changes: Any) -> Preview:
    return preview(sweep(searcher=searcher, **changes).sweep_spec(), slots, 3600.0, 10)


def test_a_grid_is_counted_to_the_last_unit() -> None:
    space = {"width": Choice(1, 2, 3), "depth": Choice(1, 2)}

    assert previewed(Grid(2), space=space) == Preview(
        configurations=6,
        trials=Range(6, 6, 6),
        epochs=Range(12, 12, 12),
        units=Range(48, 48, 48),
        units_to_the_end=48,
        unit_s=3600.0,
        slots=(SlotHours(1, 48.0, 1.0), SlotHours(2, 24.0, 1.0), SlotHours(4, 12.0, 1.0)),
        state_bytes=10,
        hop_bytes=420.0,  # the first unit of each begins with a new model
        useful_slots=4,
    )


@pytest.mark.parametrize(
    ("searcher", "configurations", "trials", "epochs"),
    [
        (SuccessiveHalving(9), 27, 27, 27 + 9 * 2 + 3 * 6),  # rungs at 1, 3 and 9
        (Hyperband(9), 17, 17, 9 + 3 * 2 + 6 + 5 * 3 + 6 + 3 * 9),  # 9 of 1, 5 of 3, 3 of 9
        (PBT(4, population=8), 8, 8 + 3 * 2, 32),  # two copies at each of three intervals
    ],
)
def test_synchronous_searchers_train_a_fixed_number_of_epochs(
    searcher: Any, configurations: int, trials: int, epochs: int
) -> None:
    found = previewed(searcher)

    assert found.configurations == configurations
    assert found.trials == Range(trials, trials, trials)
    assert found.epochs == Range(epochs, epochs, epochs)


def test_asynchronous_searchers_have_a_range() -> None:
    found = previewed(ASHA(9))

    assert 27 + 9 * 2 + 3 * 6 <= found.epochs.least < found.epochs.mean < found.epochs.most
    assert found.epochs.most < 27 * 9 / 2


def test_more_slots_than_configurations_stay_idle() -> None:
    found = previewed(RandomSearch(2, 3), slots=(2, 16))

    assert found.useful_slots == 3
    assert [one.slots for one in found.slots] == [2, 4, 8, 16]
    assert [one.hours for one in found.slots] == [12.0, 8.0, 8.0, 8.0]
    assert found.slots[-1].busy == 24 / (16 * 8)


def test_a_large_search_is_previewed() -> None:
    found = previewed(ASHA(81, configurations=4_000))

    assert found.configurations == 4_000
    assert 4_000 < found.epochs.mean < 24_000
