"""KEY=VALUE of a command line, over a job file."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.client.spec_overrides import with_option, with_overrides
from schemas.errors import BadFieldError

TABLE: dict[str, Any] = {
    "name": "digits",
    "script": "train.py",
    "batch_size": 64,
    "args": ["--width", "64"],
    "stop": {"epochs": 3},
    "env": {"MODE": "slow"},
}


@pytest.mark.parametrize(
    ("assignment", "changed"),
    [
        ("lr=0.1", {"lr": 0.1}),
        ("batch_size=128", {"batch_size": 128}),
        ("record_samples=true", {"record_samples": True}),
        ("slots=[1, 4]", {"slots": [1, 4]}),
        ("name=7", {"name": "7"}),
        ('script="other.py"', {"script": "other.py"}),
        ("stop={ samples = 9 }", {"stop": {"samples": 9}}),
        ("stop.epochs=5", {"stop": {"epochs": 5}}),
        ("stop.samples=5", {"stop": {"samples": 5}}),
        ("env.MODE=2", {"env": {"MODE": "2"}}),
        ("env.OMP_NUM_THREADS=2", {"env": {"MODE": "slow", "OMP_NUM_THREADS": "2"}}),
        ("args.width=8", {"args": ["--width", "8"]}),
        ("args.depth=2", {"args": ["--width", "64", "--depth", "2"]}),
        ("env.EQUATION=a=b", {"env": {"MODE": "slow", "EQUATION": "a=b"}}),
    ],
)
def test_an_assignment_replaces_one_value_and_leaves_the_others(
    assignment: str, changed: dict[str, Any]
) -> None:
    before = {key: dict(v) if isinstance(v, dict) else v for key, v in TABLE.items()}

    assert with_overrides(TABLE, [assignment]) == {**TABLE, **changed}
    assert before == TABLE


@pytest.mark.parametrize(
    ("args", "name", "text", "after"),
    [
        (["--width=64", "data"], "width", "8", ["--width=8", "data"]),
        (["--learning-rate", "1"], "learning_rate", "2", ["--learning-rate", "2"]),
        (["--shift", "-3"], "shift", "-4", ["--shift", "-4"]),
        (["--amp", "--width", "1"], "amp", "true", ["--amp", "--width", "1"]),
        (["--amp", "--width", "1"], "amp", "false", ["--width", "1"]),
        (["--amp", "--width", "1"], "amp", "bf16", ["--amp", "bf16", "--width", "1"]),
        (["--amp", "false"], "amp", "true", ["--amp", "true"]),
        ([], "amp", "true", ["--amp"]),
        ([], "amp", "false", []),
        (["--widths", "1"], "width", "2", ["--widths", "1", "--width", "2"]),
    ],
)
def test_an_option_of_the_script_is_replaced_in_place_or_added(
    args: list[str], name: str, text: str, after: list[str]
) -> None:
    assert with_option(args, name, text) == after


@pytest.mark.parametrize(
    ("assignment", "field", "hint"),
    [
        ("lr", "set", "write KEY=VALUE"),
        ("learning=1", "learning", "one of args, batch_size"),
        ("batchsize=1", "batchsize", "did you mean batch_size?"),
        ("lr.x=1", "lr.x", "write KEY=VALUE"),
        ("env.=1", "env.", "write KEY=VALUE"),
        ("stop.epoch=1", "stop", "did you mean epochs?"),
        ("stop.zebra=1", "stop", "one of at_least, consecutive, epochs"),
    ],
)
def test_an_invalid_assignment_is_refused_with_a_hint(
    assignment: str, field: str, hint: str
) -> None:
    with pytest.raises(BadFieldError) as refused:
        with_overrides(TABLE, [assignment])

    assert refused.value.field == field
    assert refused.value.hint.startswith(hint)
