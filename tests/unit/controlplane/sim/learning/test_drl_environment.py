"""The scheduler that `drl` imitates before reinforcement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from controlplane.policy.learned.drl import DecisionRound, JobTable
from controlplane.sim.learning.drl_environment import teacher_action


def sizes_after(
    have: Sequence[int], *, least: int = 1, room: int = 8, age_s: Sequence[float] = ()
) -> list[int]:
    """Sizes after a round in which one of the jobs, each of up to 8 slots, changes."""
    many = len(have)
    table = JobTable(
        have=np.array(have, dtype=np.int64),
        least=np.full(many, least, dtype=np.int64),
        cap=np.full(many, 8, dtype=np.int64),
        wanted=np.ones(many, dtype=np.int64),
        batch=np.full(many, 8, dtype=np.int64),
        coefficients=np.tile([0.0, 1.0, 0.0, 0.0], (many, 1)),
        steps_left=np.ones(many),
        known=np.ones(many, dtype=np.bool_),
        age_s=np.array(age_s or [0.0] * many),
        still_s=np.zeros(many),
        room=room,
    )
    sizes: list[int] = (
        DecisionRound(table, one_job=True, preempt=False).run(teacher_action).tolist()
    )
    return sizes


@pytest.mark.parametrize(
    ("have", "age_s", "sizes"),
    [
        ([0, 0], (1.0, 2.0), [0, 4]),
        ([4, 0], (9.0, 1.0), [4, 4]),
        ([8, 0], (9.0, 1.0), [7, 0]),
        ([4, 3], (9.0, 1.0), [4, 4]),
        ([4, 4], (9.0, 1.0), [4, 4]),
    ],
    ids=["the first to come starts with its share", "the next with the other one",
         "a job above its share shrinks for one that waits", "the smallest job grows",
         "nothing is left to give"],
)  # fmt: skip
def test_shares_are_equal_and_the_first_to_come_starts_first(
    have: list[int], age_s: tuple[float, ...], sizes: list[int]
) -> None:
    assert sizes_after(have, age_s=age_s) == sizes
