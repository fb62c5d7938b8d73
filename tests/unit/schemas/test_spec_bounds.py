"""Any value of a job file can be encoded, or is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.jobs import SWEEP_SCRIPT, JobSpec, Utility, problems
from schemas.sweeps import (
    Asha,
    Hyperband,
    MedianStopping,
    Parameter,
    PopulationBased,
    RandomSearch,
    SearchSpec,
    SuccessiveHalving,
    SweepSpec,
    choice,
)
from tests.support.sizes import examples

NO_TEXT: Final = "\udc80"  # as JSON may escape it, and no UTF-8 can say it
INTEGERS: Final = (2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**70, -1, -(2**70))
NUMBERS: Final = (*INTEGERS, 1e300, 5e-324, math.nan, math.inf, -math.inf)
TEXTS: Final = ("", "x", "\0", "\x1b[2J", NO_TEXT, "x" * 5000, "x" * (1 << 20), "größe")
VALUES: Final = (*NUMBERS, *TEXTS)

ORDINARY: Final[dict[str, Any]] = {
    "name": "digits", "script": "train.py", "args": ["a"], "workdir": ".", "batch_size": 32,
    "max_batch_size": 64, "max_local_batch": 64, "lr": 0.1, "slots": [1, 4], "slots_wanted": 2,
    "family": "f", "python": "python", "priority": 1.0, "retries": 1, "seed": 1,
    "stop": {"metric": "m", "at_least": 0.5, "consecutive": 2, "epochs": 9, "plateau": None},
    "utility": {"value": 1.0, "deadline_s": 9.0, "decay": 0.1}, "env": {"A": "1"},
}  # fmt: skip
SWEEP: Final[dict[str, Any]] = {
    "name": "s", "script": SWEEP_SCRIPT, "batch_size": 2, "max_batch_size": "keep", "slots": [1, 2],
    "sweep": msgspec.to_builtins(SweepSpec(
        search=SearchSpec(
            space={"a": choice(1, 2), "b": Parameter(uniform=(0.0, 1.0), when={"a": (1,)}),
                   "c": Parameter(integer=(1, 9)), "d": Parameter(log_uniform=(0.1, 1.0))},
            searcher=RandomSearch(2), epochs=3, metric="m",
        ),
        input_fn="a:b", model_fn="a:b", train_fn="a:b", eval_fn="a:b", partitions=2,
        graduate_batch=8,
    )),
}  # fmt: skip
SEARCHERS: Final = (
    RandomSearch(9), SuccessiveHalving(9), Hyperband(), Asha(9), MedianStopping(9),
    PopulationBased(9),
)  # fmt: skip


def places(table: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value that is no table of others."""
    pairs = table.items() if isinstance(table, dict) else enumerate(table)
    for key, value in pairs:
        if isinstance(value, dict | list | tuple):
            yield from places(value, (*path, key))
        else:
            yield (*path, key)


def put(table: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The same, but for one value; on the path of a key's own, the key."""
    changed = dict(table) if isinstance(table, dict) else list(table)
    key, rest = path[0], path[1:]
    changed[key] = put(table[key], rest, value) if rest else value
    return changed


def spec_of(table: Any) -> JobSpec | None:
    try:
        return msgspec.convert(table, JobSpec)
    except (msgspec.ValidationError, UnicodeEncodeError):
        return None  # the wrong type: the codec says so


def numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, int | float):
        yield value
    elif not isinstance(value, str | None):
        for one in value:
            yield from numbers_in(one)


def assert_harmless_or_refused(table: Any) -> None:
    spec = spec_of(table)
    if spec is None or problems(spec):
        return
    whole = msgspec.msgpack.decode(msgspec.msgpack.encode(spec))
    for number in numbers_in(whole):
        if isinstance(number, int):
            assert -(2**63) <= number < 2**63
        else:
            assert math.isfinite(number) or spec.stated_utility == Utility(value=1.0, decay=0.1)
    assert msgspec.convert(whole, JobSpec) == spec


def test_ordinary_values_have_no_problems() -> None:
    for table in (ORDINARY, SWEEP):
        spec = spec_of(table)
        assert spec is not None
        assert problems(spec) == ()


@pytest.mark.parametrize("path", [*places(ORDINARY)], ids=lambda path: ".".join(map(str, path)))
def test_any_value_of_a_job_travels_or_is_refused(path: tuple[Any, ...]) -> None:
    for value in VALUES:
        assert_harmless_or_refused(put(ORDINARY, path, value))


@pytest.mark.parametrize("path", [*places(SWEEP)], ids=lambda path: ".".join(map(str, path)))
def test_any_value_of_a_sweep_travels_or_is_refused(path: tuple[Any, ...]) -> None:
    for value in VALUES:
        assert_harmless_or_refused(put(SWEEP, path, value))


@pytest.mark.parametrize("searcher", SEARCHERS, ids=lambda searcher: type(searcher).__name__)
def test_any_number_of_a_searcher_travels_or_is_refused(searcher: msgspec.Struct) -> None:
    where = ("sweep", "search", "searcher")
    table = put(SWEEP, where, msgspec.to_builtins(searcher))
    for path in places(msgspec.to_builtins(searcher)):
        for value in NUMBERS:
            assert_harmless_or_refused(put(table, (*where, *path), value))


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([*places(ORDINARY)]), st.sampled_from(VALUES)), min_size=2)
)
def test_any_values_together_travel_or_are_refused(changes: list[tuple[Any, Any]]) -> None:
    table: Any = ORDINARY
    for path, value in changes:
        table = put(table, path, value)

    assert_harmless_or_refused(table)
