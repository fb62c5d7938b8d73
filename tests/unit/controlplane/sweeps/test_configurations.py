"""Configurations are of their space, and depend on their key alone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.sweeps.configurations import changed, drawn, grid, stream
from schemas.sweeps import Parameter, Space, Value, choice, integer, log_uniform, uniform
from tests.support.sizes import examples

SPACE = {
    "lr": log_uniform(1e-4, 1e-1),
    "dropout": uniform(0.0, 0.5),
    "layers": integer(1, 8),
    "width": Parameter(log_integer=(8, 1024)),
    "model": choice("small", "large"),
    "heads": Parameter(choice=(2, 4, 8), when={"model": ("large",)}),
    "bias": Parameter(choice=(True, False), when={"heads": (4, 8)}),
}


def is_of(space: Space, values: dict[str, Value]) -> bool:
    for name, parameter in space.items():
        applies = all(values.get(one) in some for one, some in parameter.when.items())
        if applies != (name in values):
            return False
        if not applies:
            continue
        least, most = parameter.bounds
        value = values[name]
        if parameter.choice is not None:
            if value not in parameter.choice:
                return False
        elif not least <= float(value) <= most or (
            "integer" in parameter.form and type(value) is not int
        ):
            return False
    return list(values) == [name for name in space if name in values]


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**63), st.integers(0, 10_000))
def test_drawn_and_mutated_values_are_in_the_space(seed: int, number: int) -> None:
    values = drawn(SPACE, seed, number)

    assert is_of(SPACE, values)
    for _ in range(5):
        values = changed(SPACE, values, 0.25, stream(seed))
        assert is_of(SPACE, values)


def test_another_parameter_changes_no_other_value() -> None:
    larger = {"warmup": uniform(0.0, 1.0), **SPACE}

    assert {k: v for k, v in drawn(larger, 7, 3).items() if k != "warmup"} == drawn(SPACE, 7, 3)


def test_integers_are_drawn_including_both_ends() -> None:
    both = {"one": integer(1, 3), "two": Parameter(log_integer=(1, 3))}
    seen = [drawn(both, 0, number) for number in range(100)]

    assert {values["one"] for values in seen} == {1, 2, 3}
    assert {values["two"] for values in seen} == {1, 2, 3}


def test_a_grid_lists_values_that_do_not_apply_once() -> None:
    space = {
        "model": choice("small", "large"),
        "heads": Parameter(choice=(2, 4), when={"model": ("large",)}),
        "layers": integer(1, 2),
    }

    assert grid(space) == [
        {"model": "small", "layers": 1},
        {"model": "small", "layers": 2},
        {"model": "large", "heads": 2, "layers": 1},
        {"model": "large", "heads": 2, "layers": 2},
        {"model": "large", "heads": 4, "layers": 1},
        {"model": "large", "heads": 4, "layers": 2},
    ]
