"""The heuristic that the network imitates before it learns by itself."""

from __future__ import annotations

from typing import Final

import numpy as np

from controlplane.policy.drl.actor import ACTIONS
from controlplane.policy.drl.decision_round import FEWER, MORE, Moment
from controlplane.prediction.array_types import BoolArray, FloatArray

SHORT_FIRST: Final = 0.55  # a slot is worth its relative gain over the rest to this power
PATIENCE_S: Final = 60.0  # added to the rest


def teacher_action(moment: Moment) -> int:
    """Shortest expected job first; free slots where they help short jobs; room for who waits.

    DL2 warms up on whatever scheduler a cluster had. Here: of those that wait, the job with the
    shortest rest starts, on its least slots and up to an equal share of the cluster if more are
    free. If none fits, the running job to which a slot matters least gives one back. If nobody
    waits, the job to which another slot matters most grows, to twice its size at most. What a slot
    matters is the share of a step that it saves, over the rest to the power of 0.55. One action is
    one step of that.

    Returns:
        Index of a legal action.
    """
    table, sizes = moment.table, moment.sizes
    legal = moment.legal[:-1].reshape(-1, ACTIONS)
    end = len(moment.legal) - 1
    begun = np.flatnonzero(sizes != table.have)
    waits = sizes == 0
    now = np.maximum(sizes, table.least)
    step_s = table.step_s(now)
    rest_s = step_s * table.steps_left
    worth = (rest_s + PATIENCE_S) ** -SHORT_FIRST
    gain = (1.0 - table.step_s(now + 1) / step_s) * worth
    if begun.size:
        row = int(begun[0])
        grows_on = sizes[row] > table.have[row] and legal[row, MORE] and gain[row] > 0.0
        return row * ACTIONS + MORE if grows_on and sizes[row] < _enough(moment, row) else end
    starts = legal[:, MORE] & waits
    if starts.any():
        return _first(starts, rest_s, MORE)
    if waits.any():
        shrinks = legal[:, FEWER] & (sizes > table.least)
        loss = (table.step_s(np.maximum(now - 1, 1)) / step_s - 1.0) * worth
        return _first(shrinks, loss, FEWER) if shrinks.any() else end
    grows = legal[:, MORE] & ~waits & (gain > 0.0)
    return _first(grows, -gain, MORE) if grows.any() else end


def _enough(moment: Moment, row: int) -> int:
    """Slots up to which a job is brought in one round."""
    have = int(moment.table.have[row])
    return 2 * have if have else moment.table.room // max(1, len(moment.sizes))


def _first(rows: BoolArray, least: FloatArray, what: int) -> int:
    """The action on the row where `least` is the smallest."""
    return int(np.where(rows, least, np.inf).argmin()) * ACTIONS + what
