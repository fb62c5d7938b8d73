"""Configurations drawn from a space, listed, or changed a little.

Chance that depends on its key alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from random import Random
from typing import TYPE_CHECKING

from schemas.sweeps import Parameter, Space, Value, Values

if TYPE_CHECKING:
    from random import Random


def stream(*key: str | int) -> Random:
    """Draws that are the same for the same key, on every machine."""
    return Random("/".join(map(str, key)))  # noqa: S311 - nothing here is a secret


LESS, MORE = 0.8, 1.2  # factors of population based training (Jaderberg et al. 2017, section 4)


def drawn(space: Space, seed: int, number: int) -> dict[str, Value]:
    """Configuration `number` of a random search.

    Each value has a stream of its own, (seed, number, name): another value of the space
    changes none of the others.

    Args:
        number: from 0.
    """
    return _where_they_apply(space, lambda name: _draw(space[name], stream(seed, number, name)))


def grid(space: Space) -> list[dict[str, Value]]:
    """Every combination, the last value changing fastest.

    Those that would differ only in values that do not apply are listed once.
    """
    names = list(space)
    found: dict[tuple[tuple[str, Value], ...], dict[str, Value]] = {}
    for values in product(*(_listed(space[name]) for name in names)):
        given = dict(zip(names, values, strict=True))
        one = _where_they_apply(space, given.__getitem__)
        found.setdefault(tuple(one.items()), one)
    return list(found.values())


def changed(space: Space, values: Values, resample: float, rng: Random) -> dict[str, Value]:
    """A configuration near `values`: each value drawn anew or moved a little.

    Args:
        resample: how often a value is drawn anew, 0 to 1.
    """

    def near(name: str) -> Value:
        parameter = space[name]
        if name not in values or rng.random() < resample:
            return _draw(parameter, rng)
        return _moved(parameter, values[name], rng)

    return _where_they_apply(space, near)


def _where_they_apply(space: Space, value_of: Callable[[str], Value]) -> dict[str, Value]:
    """Values in the order of the space, without those whose condition does not hold."""
    found: dict[str, Value] = {}
    for name in conditions_first(space):
        conditions = space[name].when.items()
        if all(other in found and found[other] in allowed for other, allowed in conditions):
            found[name] = value_of(name)
    return {name: found[name] for name in space if name in found}


def conditions_first(space: Mapping[str, Parameter]) -> Iterator[str]:
    """All names, each after those that it depends on."""
    ready: set[str] = set()
    while len(ready) < len(space):
        for name, parameter in space.items():
            if name not in ready and parameter.when.keys() <= ready:
                ready.add(name)
                yield name


def _draw(parameter: Parameter, rng: Random) -> Value:
    least, most = parameter.bounds
    match parameter.form:
        case "uniform":
            return rng.uniform(least, most)
        case "log_uniform":
            return _within(math.exp(rng.uniform(math.log(least), math.log(most))), least, most)
        case "log_integer":  # [k, k + 1) for each k: both ends get the share that is theirs
            drawn_log = rng.uniform(math.log(least), math.log(most + 1))
            return int(_within(int(math.exp(drawn_log)), least, most))
        case "choice":
            return _listed(parameter)[rng.randint(0, int(most))]
        case _:
            return rng.randint(int(least), int(most))


def _listed(parameter: Parameter) -> Sequence[Value]:
    least, most = parameter.bounds
    return parameter.choice or range(int(least), int(most) + 1)


def _moved(parameter: Parameter, value: Value, rng: Random) -> Value:
    """A fifth more or less; of choices the one before or after."""
    up = rng.randrange(2) == 1
    least, most = parameter.bounds
    if parameter.choice is not None:
        at = parameter.choice.index(value) + (1 if up else -1)
        return parameter.choice[int(_within(at, least, most))]
    number = float(value)
    moved = number * (MORE if up else LESS)
    if parameter.form in {"uniform", "log_uniform"}:
        return _within(moved, least, most)
    step = max(1, abs(round(moved - number)))
    return int(_within(number + (step if up else -step), least, most))


def _within(number: float, least: float, most: float) -> float:
    return max(least, min(number, most))
