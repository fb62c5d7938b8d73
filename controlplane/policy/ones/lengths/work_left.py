"""What is said of one job: how much it has left, and within which bounds."""

from __future__ import annotations

from typing import Final, NamedTuple

SHARES: Final = (0.05, 0.1, 0.9, 0.95)  # of the quantiles that bound the 90% and 80% intervals
WIDE, NARROW = 0.9, 0.8  # of probability, inside them


class WorkLeft(NamedTuple):
    """Samples that are to come."""

    mean: float
    quantiles: tuple[float, ...] = ()  # with a probability of each of `SHARES` it is less
    informed: bool = True  # by relatives or by itself; else it is only as old as it is

    def within(self, left: float) -> tuple[bool, bool]:
        """Whether so much lies in the 90% interval, and in the 80% interval."""
        low, lower, upper, high = self.quantiles
        return low <= left <= high, lower <= left <= upper

    def at_least(self, least: float) -> WorkLeft:
        """The same, where so much is certain to come."""
        bounded = tuple(max(least, quantile) for quantile in self.quantiles)
        return self._replace(mean=max(least, self.mean), quantiles=bounded)

    def at_most(self, most: float) -> WorkLeft:
        """The same, where no more can come."""
        bounded = tuple(min(most, quantile) for quantile in self.quantiles)
        return self._replace(mean=min(most, self.mean), quantiles=bounded)


def exactly(left: float) -> WorkLeft:
    """What a rule says."""
    return WorkLeft(left, (left,) * len(SHARES))
