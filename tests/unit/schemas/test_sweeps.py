"""A search that cannot be done is refused with the field and the remedy."""

from __future__ import annotations

import math

import msgspec
import pytest

from schemas.errors import SettingsError
from schemas.sweeps import (
    Asha,
    Grid,
    Hyperband,
    Parameter,
    PopulationBased,
    RandomSearch,
    Searcher,
    SearchSpec,
    Space,
    check_search,
    choice,
    integer,
    log_uniform,
    uniform,
)

LR = log_uniform(1e-4, 1e-1)


def search(
    space: Space | None = None, searcher: Searcher | None = None, epochs: int = 9
) -> SearchSpec:
    return SearchSpec(
        space={"lr": LR} if space is None else space,
        searcher=searcher or RandomSearch(4),
        epochs=epochs,
        metric="accuracy",
    )


def test_a_search_is_read_as_its_user_writes_it() -> None:
    text = {
        "space": {
            "lr": {"log_uniform": [1e-4, 0.1]},
            "model": {"choice": ["small", "large"]},
            "heads": {"integer": [1, 8], "when": {"model": ["large"]}},
        },
        "searcher": {"type": "asha", "configurations": 24},
        "epochs": 9,
        "metric": "accuracy",
    }

    spec = msgspec.convert(text, SearchSpec)

    check_search(spec)
    assert spec == search(
        {
            "lr": LR,
            "model": choice("small", "large"),
            "heads": Parameter(integer=(1, 8), when={"model": ("large",)}),
        },
        Asha(24),
    )


CYCLE = {
    "a": Parameter(choice=(1,), when={"b": (1,)}), "b": Parameter(choice=(1,), when={"a": (1,)}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "field", "what"),
    [
        (search({}), "space", "space is empty"),
        (search({"a b": LR}), "space.a b", "'a b' is not an argument name"),
        (search({"lr": Parameter()}), "space.lr", "has no values"),
        (search({"lr": Parameter(choice=(1,), uniform=(0, 1))}), "space.lr", "has choice and uniform"),
        (search({"lr": choice()}), "space.lr", "has 0 values"),
        (search({"lr": choice(1, 1)}), "space.lr", "repeats a value"),
        (search({"lr": choice(1.0, math.nan)}), "space.lr", "has nan"),
        (search({"lr": uniform(1, 0)}), "space.lr", "is not a range"),
        (search({"lr": uniform(0, math.inf)}), "space.lr", "is not a range"),
        (search({"n": integer(0, 2**70)}), "space.n", "goes beyond 2**53"),
        (search({"n": choice(2**70)}), "space.n", "a whole number beyond 2**53"),
        (search({"text": choice("a" * 2**17)}), "space", "space takes 131092 bytes"),
        (search({"lr": uniform(-1.7e308, 1.7e308)}), "space.lr", "exceeds the range of numbers"),
        (search({f"v{n}": LR for n in range(257)}), "space", "space has 257 values"),
        (search({f"v{n}": LR for n in range(11)}, RandomSearch(10_000)), "searcher", "10000 configurations of 11 values"),
        (search(searcher=Hyperband(2), epochs=10**6), "epochs", "hyperband tries 1111429 configurations in 1000000 epochs with eta 2"),
        (search({"lr": log_uniform(0, 1)}), "space.lr", "starts at 0"),
        (search({"lr": Parameter(uniform=(0, 1), when={"x": (1,)})}), "space.lr.when", "names 'x'"),
        (search(CYCLE), "space.a", "depends on itself"),
        (search(epochs=0), "epochs", "epochs = 0 is outside"),
        (search(searcher=Grid()), "space.lr", "grid cannot enumerate space.lr.log_uniform"),
        (search({"n": integer(1, 10**6)}, Grid()), "space", "1000000 configurations"),
        (search(searcher=RandomSearch(0)), "searcher.configurations", "configurations = 0"),
        (search(searcher=Asha(9, eta=1)), "searcher.eta", "eta = 1 is outside 2 to 100"),
        (search(searcher=Asha(9, min_epochs=10)), "searcher.min_epochs", "outside 1 to 9"),
        (search(searcher=PopulationBased(3)), "searcher.population", "outside 4 to"),
        (search(searcher=PopulationBased(4, resample=math.nan)), "searcher.resample", "resample = nan"),
    ],
)  # fmt: skip
def test_a_search_that_cannot_be_done_is_refused(spec: SearchSpec, field: str, what: str) -> None:
    with pytest.raises(SettingsError) as raised:
        check_search(spec)

    assert raised.value.field == field
    assert what in str(raised.value)
