"""A state as frames of raw bytes: a header, and each tensor as it lies.

No pickle: a state comes from other workers and from files, and reading it executes nothing. Equal
states give equal bytes, so the digest of the frames says whether two trainings are equal.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import torch

from elastic.collectives.tensor_bytes import as_byte_row, as_bytes
from elastic.training_errors import ElasticError, UsageError
from schemas.state_files import Frames

FORMAT: Final = 1
MAX_HEADER: Final = 64 << 20  # bytes
_DTYPES: Final = {
    str(found).removeprefix("torch."): found
    for found in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
        torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip
_MAPPING, _LIST, _TUPLE, _TENSOR, _LARGE, _DTYPE, _SIZE = "m", "l", "t", "x", "i", "d", "s"


class StateFramesError(ElasticError):
    """Frames that are no state: cut, mixed up, or of another version."""


def to_frames(state: Mapping[str, Any]) -> list[bytes]:
    """A header and the bytes of each tensor, copied.

    Args:
        state: mappings, lists and tuples of tensors, numbers, texts, bytes and None.

    Raises:
        UsageError: if something else is in it; names the place.
    """
    tensors: list[torch.Tensor] = []
    header = _FramesHeader(FORMAT, _plain(state, tensors, "state"), [])
    frames = [as_bytes(as_byte_row(tensor)) if tensor.numel() else b"" for tensor in tensors]
    header.sizes += map(len, frames)
    return [msgspec.msgpack.encode(header), *frames]


def from_frames(frames: Frames) -> dict[str, Any]:
    """The state; its tensors are copies on the host.

    Args:
        frames: as `to_frames` gave them, from whoever.

    Raises:
        StateFramesError: if they are no state.
    """
    if not frames or len(frames[0]) > MAX_HEADER:
        raise StateFramesError("a state has a header", "send the state again")
    try:
        header = msgspec.msgpack.decode(frames[0], type=_FramesHeader)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StateFramesError(f"no header of a state: {error}", "send it again") from None
    if header.format != FORMAT:
        what = f"a state of format {header.format}, this is {FORMAT}"
        raise StateFramesError(what, "run the same version everywhere")
    if header.sizes != [len(frame) for frame in frames[1:]]:
        raise StateFramesError("a state whose tensors are cut", "send it again")
    try:
        found = _state(header.content, [bytearray(frame) for frame in frames[1:]])
    except (IndexError, KeyError, TypeError, ValueError, RuntimeError, RecursionError) as error:
        raise StateFramesError(f"no state: {error}", "send it again") from None
    if not isinstance(found, dict):
        raise StateFramesError("no state: it is no mapping", "send it again")
    return found


def digest(frames: Frames) -> str:
    """SHA-256 of a state, in hexadecimal; the same for the same state."""
    found = hashlib.sha256()
    for frame in frames:
        found.update(frame)
    return found.hexdigest()


def size(frames: Frames) -> int:
    """Bytes of a state that hops."""
    return sum(map(len, frames))


class _FramesHeader(msgspec.Struct, array_like=True):
    format: int
    content: Any
    sizes: list[int]  # of the tensors' frames, bytes


def _plain(value: Any, tensors: list[torch.Tensor], where: str) -> Any:
    """Values as msgpack keeps them; what it would not keep is a list with its kind first."""
    if value is None or isinstance(value, bool | str | bytes | float):
        return value
    if isinstance(value, torch.Tensor):
        return [_TENSOR, *_described(value, tensors, where)]
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else [_LARGE, str(value)]
    if isinstance(value, Mapping):
        pairs = [
            [_plain(k, tensors, where), _plain(v, tensors, f"{where}[{k!r}]")]
            for k, v in value.items()
        ]
        return [_MAPPING, *pairs]
    if isinstance(value, torch.Size):
        return [_SIZE, *value]
    if isinstance(value, list | tuple):
        kind = _LIST if isinstance(value, list) else _TUPLE
        return [kind, *(_plain(one, tensors, f"{where}[{at}]") for at, one in enumerate(value))]
    if isinstance(value, torch.dtype):
        return [_DTYPE, str(value).removeprefix("torch.")]
    what = f"{where} is a {type(value).__module__}.{type(value).__qualname__}"
    hint = "a state that hops is made of tensors, numbers, texts, lists, tuples and mappings"
    raise UsageError(what, hint, "model_fn")


def _described(tensor: torch.Tensor, tensors: list[torch.Tensor], where: str) -> list[Any]:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES or tensor.layout != torch.strided:
        what = f"{where} is a tensor of {name}, {tensor.layout}"
        raise UsageError(what, "dense tensors of the usual types hop", "model_fn")
    host = tensor.detach().cpu()
    dense = host.contiguous()
    tensors.append(dense.resolve_conj().resolve_neg())
    return [len(tensors) - 1, name, list(tensor.shape)]


def _state(content: Any, tensors: list[bytearray]) -> Any:
    if not isinstance(content, list):
        return content
    kind, *rest = content
    match kind:
        case "m":
            return {_state(key, tensors): _state(value, tensors) for key, value in rest}
        case "l":
            return [_state(one, tensors) for one in rest]
        case "t":
            return tuple(_state(one, tensors) for one in rest)
        case "i":
            return int(rest[0])
        case "d":
            return _DTYPES[rest[0]]
        case "s":
            return torch.Size(rest)
        case "x":
            at, name, shape = rest
            return _tensor(tensors[at], _DTYPES[name], shape)
        case _:
            raise ValueError(f"kind {kind!r}")


def _tensor(raw: bytearray, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if math.prod(shape) * dtype.itemsize != len(raw) or min(shape, default=0) < 0:
        raise ValueError(f"{len(raw)} bytes for {shape} of {dtype}")
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(shape)
