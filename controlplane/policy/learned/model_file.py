"""File format of trained models: arrays, and a card that describes the model and its training."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np

from controlplane.prediction import FloatArray
from schemas.errors import SettingsError

FORMAT: Final = 1
CARD: Final = "card.json"  # member of the archive; arrays are NAME.npy
FIELD: Final = "policy.options.model"
MAX_BYTES: Final = 16 << 20  # limit of a file, and of its unpacked contents
MEMBER_TIME: Final = (1980, 1, 1, 0, 0, 0)  # of all members, so that equal models have equal bytes

Shapes = Mapping[str, tuple[int, ...]]
Count = Annotated[int, msgspec.Meta(ge=1)]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a model and of its training."""

    format: int = FORMAT
    policy: str  # name in the registry
    features: int  # version of the meaning of the inputs; a new version needs a new training
    shapes: dict[str, tuple[Count, ...]]  # shapes of the arrays
    slots: tuple[Count, Count]  # slots of the smallest and the largest cluster of the training
    cluster: str  # description of these clusters and their jobs
    families: tuple[str, ...] = ()  # families of jobs, by class number
    command: str  # command of the training
    seed: int
    date: str  # ISO 8601, day only
    figures: dict[str, float]  # cost and results of the training


@dataclass(frozen=True, slots=True)
class LearnedModel:
    """Arrays of a model, and the card that describes them."""

    card: ModelCard
    arrays: Mapping[str, FloatArray]


def encode_model(card: ModelCard, arrays: Mapping[str, FloatArray]) -> bytes:
    """Return the bytes of a model's file; equal models have equal bytes.

    The file is an `.npz` that numpy can read, in single precision and without pickled objects. It
    also contains the card, with the shapes of the arrays.
    """
    written = {name: np.ascontiguousarray(value, np.float32) for name, value in arrays.items()}
    shapes = {name: value.shape for name, value in written.items()}
    card = msgspec.structs.replace(card, shapes=shapes)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        text = msgspec.json.format(msgspec.json.encode(card))
        file.writestr(_member(CARD), text)
        for name, value in written.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, value, allow_pickle=False)
            file.writestr(_member(f"{name}.npy"), member.getvalue())
    return buffer.getvalue()


def read_model(
    file: str | None, shipped: str, *, policy: str, features: int, shapes: Shapes
) -> LearnedModel:
    """Return the checked model in `file`, or in the package's file `shipped` if `file` is None.

    Raises:
        SettingsError: if the model cannot be used. It names the option, the file and the problem.
    """
    path = resources.files(__package__).joinpath(shipped) if file is None else Path(file)
    try:
        with path.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _refusal(file or shipped, f"{reason}", policy) from None
    return decode_model(data, file or shipped, policy=policy, features=features, shapes=shapes)


def decode_model(
    data: bytes, name: str, *, policy: str, features: int, shapes: Shapes
) -> LearnedModel:
    """Return a model from the bytes of its file; `name` appears in errors.

    Raises:
        SettingsError: if the bytes are no complete model, or a model of another version, policy
            or shape, or if some numbers of the model are not finite.
    """
    if len(data) > MAX_BYTES:
        raise _refusal(name, f"larger than {MAX_BYTES >> 20} MiB", policy)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            if sum(member.file_size for member in file.infolist()) > MAX_BYTES:
                raise _refusal(name, f"larger than {MAX_BYTES >> 20} MiB", policy)
            card = _card(file.read(CARD), name, policy, features)
            missing = [key for key in shapes if f"{key}.npy" not in file.namelist()]
            if missing:
                raise _refusal(name, f"{missing[0]} is missing", policy)
            arrays = {key: _array(file, key) for key in shapes}
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, OSError):
        raise _refusal(name, "not a complete model file", policy) from None
    except NotImplementedError:  # unknown compression
        raise _refusal(name, "its compression is not supported", policy) from None
    for key, value in arrays.items():
        if value.shape != shapes[key]:
            problem = f"{key} has shape {value.shape}, not {tuple(shapes[key])}"
            raise _refusal(name, problem, policy)
        if not np.isfinite(value).all():
            raise _refusal(name, f"{key} has values that are not finite", policy)
    return LearnedModel(card, arrays)


def _card(text: bytes, name: str, policy: str, features: int) -> ModelCard:
    """Return the card after checking its format, policy and version."""
    try:
        head = msgspec.json.decode(text)
        made_for = (head["format"], head["policy"], head["features"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        raise _refusal(name, "its card cannot be read", policy) from None
    if made_for[0] != FORMAT:
        raise _refusal(name, f"format {made_for[0]}, this version reads {FORMAT}", policy)
    if made_for[1] != policy:
        raise _refusal(name, f"a model of policy {made_for[1]!r}, not of {policy!r}", policy)
    if made_for[2] != features:
        problem = (
            f"trained on version {made_for[2]} of what the policy sees, this one has {features}"
        )
        raise _refusal(name, problem, policy)
    try:
        return msgspec.convert(head, ModelCard)
    except msgspec.ValidationError as error:
        raise _refusal(name, f"its card cannot be read: {error}", policy) from None


def _array(file: zipfile.ZipFile, key: str) -> FloatArray:
    member = io.BytesIO(file.read(f"{key}.npy"))
    array = np.lib.format.read_array(member, allow_pickle=False)
    return array.astype(np.float64)


def _member(name: str) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name, MEMBER_TIME)
    member.compress_type = zipfile.ZIP_DEFLATED
    return member


def _refusal(name: str, problem: str, policy: str) -> SettingsError:
    remedy = f"leave it out for the model that ships, or: ones sim train {policy} --out FILE"
    return SettingsError(f"{FIELD}: {name}: {problem}", remedy, FIELD)


Layer = tuple[FloatArray, FloatArray]  # weights, shape (in, out), and biases, shape (out,)


@dataclass(frozen=True, slots=True)
class DenseNet:
    """Dense layers with tanh between them, and no activation after the last layer."""

    layers: tuple[Layer, ...]

    def __call__(self, inputs: FloatArray) -> FloatArray:
        """Return the outputs, shape (N, out), for inputs of shape (N, in)."""
        values = inputs
        for place, (weight, bias) in enumerate(self.layers):
            values = values @ weight + bias
            if place + 1 < len(self.layers):
                values = np.tanh(values)
        return values


def dense_net(name: str, arrays: Mapping[str, FloatArray]) -> DenseNet:
    """Return the network `name` of a model, from arrays that are named as in torch.

    Layer k has `name.k.weight`, shape (out, in), and `name.k.bias`, shape (out,), from k = 0 on.
    """
    layers: list[Layer] = []
    while f"{name}.{len(layers)}.weight" in arrays:
        at = f"{name}.{len(layers)}"
        layers.append((arrays[f"{at}.weight"].T.copy(), arrays[f"{at}.bias"]))
    return DenseNet(tuple(layers))


def dense_shapes(name: str, widths: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network's arrays; `widths` has input, hidden and output layers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for place, (before, after) in enumerate(pairwise(widths)):
        shapes[f"{name}.{place}.weight"] = (after, before)
        shapes[f"{name}.{place}.bias"] = (after,)
    return shapes


def softmax(logits: FloatArray) -> FloatArray:
    """Return the probabilities of logits, shape (A,), of which at least one must be finite."""
    odds: FloatArray = np.exp(logits - logits.max())
    odds /= odds.sum()
    return odds
