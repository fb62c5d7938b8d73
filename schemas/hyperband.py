"""The brackets of Hyperband: how many configurations, and how long they train at first."""

from __future__ import annotations


def brackets(most: int, eta: int) -> list[tuple[int, int]]:
    """Hyperband's brackets: how many trials, and their first rung in epochs.

    Li et al., JMLR '18, algorithm 1, with R = `most`: s from floor(log_eta R) down to 0,
    n = ceil((s_max + 1) eta^s / (s + 1)), r = R eta^-s.

    Args:
        most: epochs of a trial that is never stopped.
    """
    top = 0
    while eta ** (top + 1) <= most:
        top += 1
    return [(-(-(top + 1) * eta**s // (s + 1)), max(1, most // eta**s)) for s in range(top, -1, -1)]
