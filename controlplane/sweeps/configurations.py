"""Functions that draw, list and mutate configurations of a search space."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from random import Random
from typing import Final

from schemas.sweeps import Parameter, Space, Value, Values

# Factors of a mutation in population based training (Jaderberg et al. 2017, section 4).
SHRINK_FACTOR: Final = 0.8
GROW_FACTOR: Final = 1.2


def stream(*key: str | int) -> Random:
    """Return a random stream that is equal for equal keys, on every machine."""
    return Random("/".join(map(str, key)))  # noqa: S311 - nothing here is a secret


def drawn(space: Space, seed: int, number: int) -> dict[str, Value]:
    """Return configuration `number` (from 0) of a random search.

    Each value has its own random stream, so a new parameter does not change the other values.
    """
    return _applicable(space, lambda name: _draw(space[name], stream(seed, number, name)))


def grid(space: Space) -> list[dict[str, Value]]:
    """Return each combination of values that apply once; the last parameter changes fastest."""
    names = list(space)
    found: dict[tuple[tuple[str, Value], ...], dict[str, Value]] = {}
    for values in product(*(_listed(space[name]) for name in names)):
        given = dict(zip(names, values, strict=True))
        one = _applicable(space, given.__getitem__)
        found.setdefault(tuple(one.items()), one)
    return list(found.values())


def changed(space: Space, values: Values, resample: float, rng: Random) -> dict[str, Value]:
    """Return `values`, with each value either redrawn (probability `resample`) or mutated."""

    def near(name: str) -> Value:
        parameter = space[name]
        if name not in values or rng.random() < resample:
            return _draw(parameter, rng)
        return _mutated(parameter, values[name], rng)

    return _applicable(space, near)


def _applicable(space: Space, value_of: Callable[[str], Value]) -> dict[str, Value]:
    """Return the values of parameters with satisfied conditions, in the order of the space."""
    found: dict[str, Value] = {}
    for name in conditions_first(space):
        conditions = space[name].when.items()
        if all(other in found and found[other] in allowed for other, allowed in conditions):
            found[name] = value_of(name)
    return {name: found[name] for name in space if name in found}


def conditions_first(space: Mapping[str, Parameter]) -> Iterator[str]:
    """Yield all parameter names, each after the names to which its conditions refer."""
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
        case "log_integer":  # [k, k + 1) becomes k, so that both ends have the full probability
            drawn_log = rng.uniform(math.log(least), math.log(most + 1))
            return int(_within(int(math.exp(drawn_log)), least, most))
        case "choice":
            return _listed(parameter)[rng.randint(0, int(most))]
        case _:
            return rng.randint(int(least), int(most))


def _listed(parameter: Parameter) -> Sequence[Value]:
    least, most = parameter.bounds
    return parameter.choice or range(int(least), int(most) + 1)


def _mutated(parameter: Parameter, value: Value, rng: Random) -> Value:
    """Return a value that is a fifth larger or smaller, or the next or previous choice."""
    up = rng.randrange(2) == 1
    least, most = parameter.bounds
    if parameter.choice is not None:
        at = parameter.choice.index(value) + (1 if up else -1)
        return parameter.choice[int(_within(at, least, most))]
    number = float(value)
    moved = number * (GROW_FACTOR if up else SHRINK_FACTOR)
    if parameter.form in {"uniform", "log_uniform"}:
        return _within(moved, least, most)
    step = max(1, abs(round(moved - number)))
    return int(_within(number + (step if up else -step), least, most))


def _within(number: float, least: float, most: float) -> float:
    return max(least, min(number, most))
