"""Search spaces and searchers in the terms of the literature, alike in Python and TOML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, get_args

import msgspec

from schemas import sweeps as spec
from schemas.sweeps import MAX_CONFIGURATIONS, Parameter, Value

MAX_DEFAULT_CONFIGURATIONS: Final = 64  # configurations
When = Mapping[str, Iterable[Value]] | None


# --- values


def Choice(*values: Value, when: When = None) -> Parameter:  # noqa: N802 - reads as a type
    """One of `values`, with equal probability.

    Args:
        values: strings, numbers or booleans.
        when: allowed values of other parameters; this parameter exists only where they match.
    """
    return Parameter(choice=values, when=_conditions(when))


def Uniform(least: float, most: float, when: When = None) -> Parameter:  # noqa: N802
    """Number between `least` and `most`, both included."""
    return Parameter(uniform=(least, most), when=_conditions(when))


def LogUniform(least: float, most: float, when: When = None) -> Parameter:  # noqa: N802
    """Number between `least` and `most`, uniform in its logarithm.

    Args:
        least: above 0, included.
        most: included.
    """
    return Parameter(log_uniform=(least, most), when=_conditions(when))


def Integer(least: int, most: int, when: When = None) -> Parameter:  # noqa: N802
    """Integer between `least` and `most`, both included."""
    return Parameter(integer=(least, most), when=_conditions(when))


def LogInteger(least: int, most: int, when: When = None) -> Parameter:  # noqa: N802
    """Integer between `least` and `most`, uniform in its logarithm.

    Args:
        least: above 0, included.
        most: included.
    """
    return Parameter(log_integer=(least, most), when=_conditions(when))


def as_parameter(value: Parameter | list[Value] | tuple[Value, ...] | Value) -> Parameter:
    """Return the full form of a value in a space: a list is a choice, a single value is fixed."""
    if isinstance(value, Parameter):
        return value
    return Parameter(choice=tuple(value) if isinstance(value, list | tuple) else (value,))


def _conditions(when: When) -> dict[str, tuple[Value, ...]]:
    return {name: tuple(values) for name, values in (when or {}).items()}


# --- searchers


class _Searcher(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """Base of the searchers."""

    max_epochs: int  # of each configuration

    def spec(self) -> spec.Searcher:
        """Return the searcher in the controller's form."""
        fields = msgspec.structs.asdict(self)
        most = fields.pop("max_epochs")
        if "eta" in fields and fields.get("configurations", most) is None:
            least, eta = fields["min_epochs"], fields["eta"]
            fields["configurations"] = _default_configurations(least, most, eta)
        return SPECS[str(self.__struct_config__.tag)](**fields)


class Grid(_Searcher, frozen=True, tag="grid"):
    """Every combination of choices and integers, each trained to the last epoch."""


class RandomSearch(_Searcher, frozen=True, tag="random"):
    """Randomly drawn configurations, each trained to the last epoch."""

    configurations: int


class SuccessiveHalving(_Searcher, frozen=True, tag="successive_halving"):
    """Synchronous rungs (Jamieson and Talwalkar, AISTATS '16): the best 1 / eta continue."""

    configurations: int | None = None  # default: `eta` of them come to the last epoch; at most 64
    min_epochs: int = 1
    eta: int = 3


class Hyperband(_Searcher, frozen=True, tag="hyperband"):
    """Brackets of successive halving, from many short to few long (Li et al., JMLR '18)."""

    eta: int = 3


class ASHA(_Searcher, frozen=True, tag="asha"):
    """Asynchronous rungs (Li et al., MLSys '20): a trial is promoted once it is among the best."""

    configurations: int | None = None  # default: `eta` of them come to the last epoch; at most 64
    min_epochs: int = 1
    eta: int = 3
    promotes: spec.Promotes = "in_order"  # same winner on any slots; `on_arrival`: as in the paper


class MedianStopping(_Searcher, frozen=True, tag="median"):
    """Stops trials worse than the median of the others (Golovin et al., KDD '17)."""

    configurations: int
    grace_epochs: int = 1
    min_others: int = 3  # trials that have trained as many epochs


class PBT(_Searcher, frozen=True, tag="pbt"):
    """Replaces the worst quarter by perturbed copies of the best (Jaderberg et al., 2017)."""

    population: int
    interval_epochs: int = 1
    resample: float = 0.25  # probability of drawing a new value instead of perturbing it


Searcher = Grid | RandomSearch | SuccessiveHalving | Hyperband | ASHA | MedianStopping | PBT
SPECS: Final[dict[str, Callable[..., spec.Searcher]]] = {
    str(kind.__struct_config__.tag): kind for kind in get_args(spec.Searcher)
}
BY_TYPE: Final[dict[str, type[_Searcher]]] = {
    str(kind.__struct_config__.tag): kind for kind in get_args(Searcher)
}


def stated_searcher(search: spec.SearchSpec) -> Searcher:
    """Return the searcher in the form in which a user states it."""
    fields = msgspec.to_builtins(search.searcher)
    fields["max_epochs"] = search.epochs
    return msgspec.convert(fields, Searcher)  # type: ignore[no-any-return]


def _default_configurations(least: int, most: int, eta: int) -> int:
    count, at = eta, least
    while 1 <= at < most and eta > 1 and count < MAX_CONFIGURATIONS:
        at, count = at * eta, count * eta
    return max(1, min(count, MAX_DEFAULT_CONFIGURATIONS))
