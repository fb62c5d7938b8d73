"""What is searched and how, in the words of the field; the same in Python and in TOML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from schemas import sweeps as spec
from schemas.sweeps import MAX_CONFIGURATIONS, Parameter, Value

MOST_BY_DEFAULT: Final = 64  # configurations, where the user gives no number
When = Mapping[str, Iterable[Value]] | None


# --- values


def Choice(*values: Value, when: When = None) -> Parameter:  # noqa: N802 - reads as a type
    """One of `values`, each as likely.

    Args:
        values: texts, numbers or truth values.
        when: only where these values of the configuration are among those given.
    """
    return Parameter(choice=values, when=_conditions(when))


def Uniform(least: float, most: float, when: When = None) -> Parameter:  # noqa: N802
    """A number between these.

    Args:
        least: included.
        most: included.
    """
    return Parameter(uniform=(least, most), when=_conditions(when))


def LogUniform(least: float, most: float, when: When = None) -> Parameter:  # noqa: N802
    """A number between these, each order of magnitude as likely.

    Args:
        least: above 0.
        most: included.
    """
    return Parameter(log_uniform=(least, most), when=_conditions(when))


def Integer(least: int, most: int, when: When = None) -> Parameter:  # noqa: N802
    """A whole number.

    Args:
        least: included.
        most: included.
    """
    return Parameter(integer=(least, most), when=_conditions(when))


def LogInteger(least: int, most: int, when: When = None) -> Parameter:  # noqa: N802
    """A whole number, small ones as often as large ones.

    Args:
        least: above 0, included.
        most: included.
    """
    return Parameter(log_integer=(least, most), when=_conditions(when))


def as_parameter(value: Parameter | list[Value] | tuple[Value, ...] | Value) -> Parameter:
    """A value of the space in its full form: a list is a choice, a single value is fixed."""
    if isinstance(value, Parameter):
        return value
    return Parameter(choice=tuple(value) if isinstance(value, list | tuple) else (value,))


def _conditions(when: When) -> dict[str, tuple[Value, ...]]:
    return {name: tuple(values) for name, values in (when or {}).items()}


# --- searchers


class _Searcher(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """What all have."""

    max_epochs: int  # that a configuration trains at most

    def spec(self) -> spec.Searcher:
        """As the controller takes it."""
        raise NotImplementedError


class Grid(_Searcher, frozen=True, tag="grid"):
    """Every combination of choices and whole numbers, each to the last epoch."""

    def spec(self) -> spec.Searcher:
        """As the controller takes it."""
        return spec.Grid()


class RandomSearch(_Searcher, frozen=True, tag="random"):
    """Configurations drawn by chance, each to the last epoch."""

    configurations: int

    def spec(self) -> spec.Searcher:
        """As the controller takes it."""
        return spec.RandomSearch(self.configurations)


class SuccessiveHalving(_Searcher, frozen=True, tag="successive_halving"):
    """Rungs that wait for all (Jamieson and Talwalkar, AISTATS '16): the best 1 / eta go on."""

    configurations: int | None = None  # default: `eta` of them come to the last epoch; at most 64
    min_epochs: int = 1
    eta: int = 3

    def spec(self) -> spec.Searcher:
        """As the controller takes it."""
        many = _enough(self.configurations, self.min_epochs, self.max_epochs, self.eta)
        return spec.SuccessiveHalving(many, self.min_epochs, self.eta)


class Hyperband(_Searcher, frozen=True, tag="hyperband"):
    """Brackets of successive halving from many short to few long (Li et al., JMLR '18)."""

    eta: int = 3

    def spec(self) -> spec.Searcher:
        """As the controller takes it."""
        return spec.Hyperband(self.eta)


class ASHA(_Searcher, frozen=True, tag="asha"):
    """Rungs that do not wait for all (Li et al., MLSys '20): promoted once among the best."""

    configurations: int | None = None  # default: `eta` of them come to the last epoch; at most 64
    min_epochs: int = 1
    eta: int = 3
    promotes: spec.Promotes = "in_order"  # the same winner on any slots; or `on_arrival`, as there

    def spec(self) -> spec.Searcher:
        """As the controller takes it."""
        many = _enough(self.configurations, self.min_epochs, self.max_epochs, self.eta)
        return spec.Asha(many, self.min_epochs, self.eta, self.promotes)


class MedianStopping(_Searcher, frozen=True, tag="median"):
    """Who is worse than the median of the others stops (Golovin et al., KDD '17)."""

    configurations: int
    grace_epochs: int = 1
    min_others: int = 3  # that have come as far

    def spec(self) -> spec.Searcher:
        """As the controller takes it."""
        return spec.MedianStopping(self.configurations, self.grace_epochs, self.min_others)


class PBT(_Searcher, frozen=True, tag="pbt"):
    """The worst quarter goes on as changed copies of the best (Jaderberg et al., 2017)."""

    population: int
    interval_epochs: int = 1
    resample: float = 0.25  # how often a value is drawn anew instead of perturbed

    def spec(self) -> spec.Searcher:
        """As the controller takes it."""
        return spec.PopulationBased(self.population, self.interval_epochs, self.resample)


Searcher = Grid | RandomSearch | SuccessiveHalving | Hyperband | ASHA | MedianStopping | PBT
BY_TYPE: Final[dict[str, type[_Searcher]]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (Grid, RandomSearch, SuccessiveHalving, Hyperband, ASHA, MedianStopping, PBT)
}


def as_stated(search: spec.SearchSpec) -> Searcher:
    """The searcher as its user stated it."""
    fields = msgspec.to_builtins(search.searcher)
    fields["max_epochs"] = search.epochs
    return msgspec.convert(fields, Searcher)  # type: ignore[no-any-return]


def _enough(stated: int | None, least: int, most: int, eta: int) -> int:
    if stated is not None:
        return stated
    many, at = eta, least
    while 1 <= at < most and eta > 1 and many < MAX_CONFIGURATIONS:
        at, many = at * eta, many * eta
    return max(1, min(many, MOST_BY_DEFAULT))
