"""Files of trained models."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from controlplane.policy.learned.model_file import (
    LearnedModel,
    ModelCard,
    decode_model,
    dense_net,
    dense_shapes,
    encode_model,
    read_model,
)
from schemas.errors import SettingsError

SHAPES = dense_shapes("net", (3, 2, 1))
ARRAYS = {name: np.full(shape, 0.5) for name, shape in SHAPES.items()}
CARD = ModelCard(
    policy="drl",
    features=4,
    shapes={name: tuple(shape) for name, shape in SHAPES.items()},
    slots=(16, 64),
    cluster="table2",
    command="ones sim train drl --out drl.npz --seed 3",
    seed=3,
    date="2026-01-31",
    figures={"cpu_s": 1.5},
)


def decoded(data: bytes) -> LearnedModel:
    return decode_model(data, "m.npz", policy="drl", features=4, shapes=SHAPES)


def encoded(arrays: dict[str, Any] | None = None, **changes: Any) -> bytes:
    return encode_model(msgspec.structs.replace(CARD, **changes), arrays or ARRAYS)


def test_a_model_survives_a_round_trip_with_equal_bytes() -> None:
    found = decoded(encoded())

    assert found.card == CARD
    assert {name: value.tolist() for name, value in found.arrays.items()} == {
        name: value.tolist() for name, value in ARRAYS.items()
    }
    assert encoded() == encoded()
    with np.load(io.BytesIO(encoded()), allow_pickle=False) as file:
        assert file["net.1.bias"].tolist() == [0.5]


def test_a_truncated_file_is_refused() -> None:
    data = encoded()
    for many in range(0, len(data), 7):
        with pytest.raises(
            SettingsError, match=r"^policy\.options\.model: m\.npz: not a complete model"
        ):
            decoded(data[:many])


def test_a_flipped_byte_is_refused_or_changes_nothing() -> None:
    data, whole = encoded(), decoded(encoded())
    for at in range(0, len(data), 11):
        try:
            found = decoded(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        except SettingsError:
            continue
        assert found.arrays.keys() == whole.arrays.keys()
        assert all((found.arrays[name] == whole.arrays[name]).all() for name in SHAPES)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (encoded(format=2), "format 2, this version reads 1"),
        (encoded(policy="harmony-drl"), "a model of policy 'harmony-drl', not of 'drl'"),
        (encoded(features=3), "trained on version 3 of what the policy sees, this one has 4"),
        (encoded(ARRAYS | {"net.0.bias": np.zeros(5)}), r"net.0.bias has shape \(5,\), not \(2,\)"),
        (encoded({"net.0.weight": np.zeros((2, 3))}), "net.0.bias is missing"),
        (
            encoded(ARRAYS | {"net.0.bias": np.array([0.0, np.nan])}),
            "net.0.bias has values that are no",
        ),
        (encoded(ARRAYS | {"net.1.bias": np.array([np.inf])}), "net.1.bias has values that are no"),
        (encoded(slots=(0, 64)), r"its card cannot be read: .*slots"),
        (b"", "not a complete model file"),
        (b"PK" + bytes(100), "not a complete model file"),
    ],
)
def test_an_unsuitable_model_is_refused_with_the_problem(data: bytes, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem) as refused:
        decoded(data)

    assert refused.value.field == "policy.options.model"
    assert refused.value.hint == (
        "leave it out for the model that ships, or: ones sim train drl --out FILE"
    )
    assert "\n" not in str(refused.value)


def zipped(card: bytes, array: Any = None) -> bytes:
    """A file with this card, and the same array under every name."""
    buffer, member = io.BytesIO(), io.BytesIO()
    np.save(member, array, allow_pickle=True)
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("card.json", card)
        for name in SHAPES if array is not None else ():
            file.writestr(f"{name}.npy", member.getvalue())
    return buffer.getvalue()


@pytest.mark.parametrize(
    "card", [b"", b"{", b"\xff\xfe", b'{"format": "\xff"}', b"[]", b"{}", b"[" * 100_000]
)
def test_an_invalid_card_is_refused(card: bytes) -> None:
    with pytest.raises(SettingsError, match=r"m\.npz: its card cannot be read; leave it out"):
        decoded(zipped(card))


def test_false_shapes_and_pickled_objects_are_refused() -> None:
    card = msgspec.json.encode(CARD)

    with pytest.raises(SettingsError, match=r"net.0.weight has shape \(1,\), not \(2, 3\)"):
        decoded(zipped(card, np.zeros(1)))
    with pytest.raises(SettingsError, match="not a complete model file"):
        decoded(zipped(card, np.array([object()], dtype=object)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    file = str(tmp_path / "none.npz")
    with pytest.raises(SettingsError, match=r"none\.npz: No such file or directory; leave it out"):
        read_model(file, "drl.npz", policy="drl", features=4, shapes=SHAPES)


def test_a_network_has_tanh_between_its_layers() -> None:
    arrays = {
        "net.0.weight": np.array([[1.0, 0.0, -1.0], [0.5, 0.5, 0.5]]),
        "net.0.bias": np.array([0.0, 1.0]),
        "net.1.weight": np.array([[2.0, -3.0]]),
        "net.1.bias": np.array([0.25]),
    }
    found = dense_net("net", arrays)(np.array([[3.0, 2.0, 1.0], [0.0, 0.0, 0.0]]))

    assert found.tolist() == [
        [2.0 * np.tanh(2.0) - 3.0 * np.tanh(4.0) + 0.25],
        [-3.0 * np.tanh(1.0) + 0.25],
    ]
