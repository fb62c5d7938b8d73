"""Why a job is where it is: which node's score won, and what is expected there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from controlplane.policy.harmony_drl.gang_placement import Choice
from controlplane.policy.planning.slot_partition import slots_in_words
from schemas.ids import NodeId

NOTHING: Final = 0.005  # share of a job's speed: less is not worth a word


@dataclass(frozen=True, slots=True)
class Explained:
    """Why a job is where it is."""

    words: str
    numbers: dict[str, float] = field(default_factory=dict)


def explain(choices: Sequence[Choice], nodes: Sequence[NodeId]) -> Explained:
    """The nodes that won, what is expected there, and by how much they won."""
    first, last = choices[0], choices[-1]
    names = list(dict.fromkeys(nodes[choice.node] for choice in choices))
    own = float(last.among.own[last.place])
    costs = math.fsum(float((one.among.costs - one.among.own)[one.place]) for one in choices)
    numbers = {"own_loss": own, "neighbours_loss": costs, "score": first.score}
    words = f"{' and '.join(names)} scored best: {_expected(own, costs)}"
    others = np.delete(first.among.scores, first.place)
    if len(others):
        at = int(np.argmax(others))
        node = int(np.delete(first.among.nodes, first.place)[at])
        numbers["next_score"] = float(others[at])
        words += f"; next is {nodes[node]} ({first.score:.2f} against {others[at]:.2f})"
    return Explained(words, numbers)


def waits(needs: int, free: int, ahead: int) -> tuple[str, dict[str, float]]:
    """Why a job waits.

    Args:
        free: slots, before anybody was started.
    """
    behind = f" behind {ahead} job{'s' * (ahead != 1)}" if ahead else ""
    text = f"for {slots_in_words(needs)}{behind}, {free} were free"
    return text, {"needs": float(needs), "free": float(free), "ahead": float(ahead)}


def _expected(own: float, neighbours: float) -> str:
    mine = f"it keeps {100.0 * (1.0 - own):.0f}% of its speed"
    if neighbours < NOTHING:
        return f"{mine} and costs nobody any"
    return f"{mine} and costs its neighbours {100.0 * neighbours:.0f}% of one job's"
