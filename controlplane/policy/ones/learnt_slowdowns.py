"""How much longer steps take on GPU types and beside neighbours, as all families together say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from controlplane.policy.search.observed_families import Colocation, FamilyHistories, FamilyHistory
from controlplane.prediction.array_types import FloatArray
from controlplane.prediction.speed_model import PRIOR_SCALING, Scaling

LEAST_SCALING: Final = 0.7  # that is believed of who was never on two slots: else nobody tries
ALIKE: Final = 0.05  # logarithm: slow-downs below this are taken for noise


class LearntSlowdowns:
    """What families were seen to lose; what one was never seen at is as for the others.

    Args:
        families: what was measured; its priors are kept up to date.
    """

    def __init__(self, families: FamilyHistories) -> None:
        self._families = families
        self._agreed_on = -1  # editions of families, in all
        self._log_slowdowns: FloatArray | None = None
        self._log_slowdowns_of: tuple[int, tuple[str, ...]] | None = None
        self._believed: dict[str, float] = {}  # of GPU types, when models were last fitted to it

    def by_type(self, types: Sequence[str], families: Sequence[str]) -> FloatArray | None:
        """How much longer a step takes on each GPU type than on the fastest; None if nowhere.

        Args:
            families: shape (J,), of jobs.

        Returns:
            Shape (J, types), factors; what a family was never seen on is as for the others.
        """
        if len(types) < 2:  # noqa: PLR2004 - one is like itself
            return None
        self._agree()
        rows = {
            name: np.array(self._families.of(name).costs(types)) for name in dict.fromkeys(families)
        }
        found = np.array([rows[name] - rows[name].min() for name in families])
        return np.exp(found) if np.abs(found).max(initial=0.0) > ALIKE else None

    def by_neighbour(self, families: Sequence[str]) -> FloatArray | None:
        """Slow-downs by neighbours as in `InterferenceModel`, (2 F, 2 F); None: nobody does.

        Args:
            families: F of them, which give the classes their numbers.
        """
        self._agree()
        if not self._families.priors.colocations:
            return None
        key = (self._agreed_on, tuple(families))
        if key != self._log_slowdowns_of:
            self._log_slowdowns_of, self._log_slowdowns = key, self._slow_downs(families)
        return self._log_slowdowns

    def _slow_downs(self, families: Sequence[str]) -> FloatArray | None:
        found = np.zeros((2 * len(families), 2 * len(families)))
        known = [self._families.of(name).parts.colocations for name in families]
        for one, mine in enumerate(known):
            for other, name in enumerate(families):
                for own in (False, True):
                    for its in (False, True):
                        common = self._families.priors.colocations.get((own, "", its), 0.0)
                        cost = mine.get((own, name, its), common)
                        found[2 * one + own, 2 * other + its] = cost
        return found if found.max(initial=0.0) > ALIKE else None

    def _agree(self) -> None:
        """Means over families, for those that have not been there."""
        families = self._families.all()
        editions = sum(family.edition for family in families)
        if editions == self._agreed_on:
            return
        self._agreed_on = editions
        gpu_types: dict[str, list[float]] = {}
        colocation: dict[Colocation, list[float]] = {}
        for family in families:
            if len(family.parts.gpu_types) > 1:
                middle = sum(family.parts.gpu_types.values()) / len(family.parts.gpu_types)
                for gpu_type, cost in family.parts.gpu_types.items():
                    gpu_types.setdefault(gpu_type, []).append(cost - middle)
            for (own, _, its), cost in family.parts.colocations.items():
                colocation.setdefault((own, "", its), []).append(cost)
        means = {gpu_type: sum(found) / len(found) for gpu_type, found in gpu_types.items()}
        if _differ(means, self._believed):  # what is the fastest type may be another one now
            self._believed = means
            for family in families:
                family.model = None
        self._believe_scaling(families)
        self._families.priors.gpu_types = means
        self._families.priors.colocations = {
            one: sum(found) / len(found) for one, found in colocation.items()
        }

    def _believe_scaling(self, families: Sequence[FamilyHistory]) -> None:
        """What those that were on several slots gained is expected of those that never were."""
        known = [family.scaling() for family in families]
        to_two = _with_prior(PRIOR_SCALING.to_two, [found for found, _ in known])
        beyond = _with_prior(PRIOR_SCALING.beyond, [found for _, found in known])
        mean, former = Scaling(max(to_two, LEAST_SCALING), beyond), self._families.priors.scaling
        if max(abs(mean.to_two - former.to_two), abs(mean.beyond - former.beyond)) <= ALIKE:
            return
        self._families.priors.scaling = mean
        for family in families:
            if family.model is not None and family.model.near is None:
                family.model = None


def _differ(one: dict[str, float], other: dict[str, float]) -> bool:
    return one.keys() != other.keys() or any(abs(one[k] - other[k]) > ALIKE for k in one)


def _with_prior(prior: float, seen: Sequence[float | None]) -> float:
    """The mean of what families measured; the prior counts as one of them."""
    measured = [found for found in seen if found is not None]
    return (prior + sum(measured)) / (1 + len(measured))
