"""Unit of a sweep: one pass of a configuration over one partition, with its own random numbers.

User functions are imported by module path where units run, and are never pickled. A state is sent
as frames of raw bytes: a header, and the content of each tensor. A state comes from other workers
and files, so frames contain no pickle: reading them executes nothing. Equal states have equal
bytes, so the digests of the frames show whether two trainings are equal.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch
from torch.utils.data import DataLoader

from elastic.collectives.process_group import as_byte_row, as_bytes
from elastic.training_errors import ElasticError, UsageError
from schemas.host.state_files import Frames


@dataclass(frozen=True, slots=True)
class Unit:
    """Facts about a unit, for the `train_fn` and `eval_fn` that process the unit.

    All random numbers of a unit follow from (seed, config, epoch, partition), never from a worker
    or a time. Before user code runs, the generators of torch, Python and numpy are seeded with
    `seed`.
    """

    config: str  # name of the configuration in the sweep, such as "7"
    values: Mapping[str, Any]  # values of the configuration
    epoch: int  # 1-based
    partition: int  # 0-based; in an evaluation, the partition that was trained on last
    partitions: int
    sweep_seed: int
    device: torch.device

    @property
    def seed(self) -> int:
        """Seed of this unit, 0 <= seed < 2^63."""
        return keyed_seed(self.sweep_seed, self.config, self.epoch, self.partition)

    def loader(
        self, data: Any, batch_size: int, *, shuffle: bool = True, **options: Any
    ) -> DataLoader[Any]:
        """Return a loader over the partition, in an order that depends on the unit only.

        Args:
            batch_size: samples per step; if it divides the partition, all steps are equal.
            shuffle: if True, each unit has a different order.
        """
        generator = torch.Generator().manual_seed(self.seed)
        return DataLoader(data, batch_size, shuffle=shuffle, generator=generator, **options)


def keyed_seed(*key: int | str) -> int:
    """Return the seed for a key, the same on every machine; 0 <= seed < 2^63."""
    text = "/".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


Metrics = Mapping[str, float]
EvalFunction = Callable[[Any, Any, Unit], Metrics]


@dataclass(frozen=True, slots=True)
class UserFunctions:
    """User functions of a sweep.

    Attributes:
        input_fn: returns the data of one partition, given its number and the number of partitions.
            It is called once in each process. The number None requests the data for evaluation.
        model_fn: returns the objects to train, given the values of a configuration; see `Trained`.
        train_fn: makes one pass over a partition's data, and may return metrics.
        eval_fn: returns metrics of a trained model on the evaluation data. None skips evaluation.
    """

    input_fn: Callable[[int | None, int], Any]
    model_fn: Callable[[Mapping[str, Any]], Any]
    train_fn: Callable[[Any, Any, Unit], Metrics | None]
    eval_fn: EvalFunction | None = None


def import_functions(paths: Mapping[str, str]) -> UserFunctions:
    """Import `input_fn`, `model_fn`, `train_fn` and optionally `eval_fn` from `module:function`."""
    missing = {"input_fn", "model_fn", "train_fn"} - paths.keys()
    if missing:
        name = min(missing)
        raise UsageError(f"{name} is missing", f"{name} = 'module:function'", name)
    return UserFunctions(**{name: _function(name, path) for name, path in paths.items()})


def _function(field: str, path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    if not module or not name:
        raise UsageError(f"{field} = {path!r} is no module:function", "such as 'data:load'", field)
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError as error:
        hint = f"{module} must be importable in the sweep's workdir, with all that it imports"
        raise UsageError(f"{field} = {path!r}: {error}", hint, field) from error
    except AttributeError:
        problem = f"{field} = {path!r}: module {module} has no {name}"
        raise UsageError(problem, "name a function at its top level", field) from None
    except Exception as error:
        problem = f"{field} = {path!r}: importing {module} raised {type(error).__name__}: {error}"
        hint = "importing a module of functions must not run anything"
        raise UsageError(problem, hint, field) from error
    if not callable(found):
        raise UsageError(f"{field} = {path!r} is not a function", "name a function", field)
    return found  # type: ignore[no-any-return]


RECENT_UNITS: Final = 8  # number of units in the average speed


class UnitSpeed:
    """Speed in samples/s over recent units, including waits but not idle time between units."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_UNITS)
        self.units = 0
        self.samples = 0  # samples since the start

    def add(self, samples: int, seconds: float) -> None:
        """Record a finished unit; `seconds` is the time from its order to its end."""
        self._recent.append((samples, seconds))
        self.units, self.samples = self.units + 1, self.samples + samples

    def samples_per_s(self) -> float | None:
        """Return the speed of this worker, or None before its first unit is finished."""
        recent = list(self._recent)
        seconds = sum(took for _, took in recent)
        return sum(samples for samples, _ in recent) / seconds if seconds > 0.0 else None


FORMAT: Final = 1
MAX_HEADER: Final = 64 << 20  # limit in bytes
_DTYPES: Final = {
    str(found).removeprefix("torch."): found
    for found in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
        torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip


class StateFramesError(ElasticError):
    """The frames are not a valid state: truncated, mixed up, or of another version."""


def to_frames(state: Mapping[str, Any]) -> list[bytes]:
    """Encode a state as a header and copies of the tensors' bytes.

    Values of other types than tensors, numbers, texts, bytes, None and containers are refused.
    """
    tensors: list[torch.Tensor] = []
    header = _FramesHeader(FORMAT, _encode(state, tensors, "state"), [])
    frames = [as_bytes(as_byte_row(tensor)) if tensor.numel() else b"" for tensor in tensors]
    header.sizes += map(len, frames)
    return [msgspec.msgpack.encode(header), *frames]


def from_frames(frames: Frames) -> dict[str, Any]:
    """Decode untrusted frames, or raise StateFramesError; the tensors are copies on the host."""
    if not frames or len(frames[0]) > MAX_HEADER:
        raise StateFramesError("the state has no header", "send the state again")
    try:
        header = msgspec.msgpack.decode(frames[0], type=_FramesHeader)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StateFramesError(
            f"cannot decode the state's header: {error}", "send it again"
        ) from None
    if header.format != FORMAT:
        problem = f"the state has format {header.format}, this worker expects {FORMAT}"
        raise StateFramesError(problem, "run the same version everywhere")
    if header.sizes != [len(frame) for frame in frames[1:]]:
        raise StateFramesError("the tensors of the state are truncated", "send it again")
    try:
        found = _decode(header.content, [bytearray(frame) for frame in frames[1:]])
    except (IndexError, KeyError, TypeError, ValueError, RuntimeError, RecursionError) as error:
        raise StateFramesError(f"cannot decode the state: {error}", "send it again") from None
    if not isinstance(found, dict):
        raise StateFramesError("the state is not a mapping", "send it again")
    return found


def digest(frames: Frames) -> str:
    """Return the SHA-256 of a state in hexadecimal; equal states have equal digests."""
    found = hashlib.sha256()
    for frame in frames:
        found.update(frame)
    return found.hexdigest()


def size(frames: Frames) -> int:
    """Return the size of a state in bytes."""
    return sum(map(len, frames))


class _FramesHeader(msgspec.Struct, array_like=True):
    format: int
    content: Any
    sizes: list[int]  # sizes of the tensors' frames in bytes


def _encode(value: Any, tensors: list[torch.Tensor], where: str) -> Any:
    """Convert `value` to msgpack's types; values of other types become lists headed by a kind."""
    if value is None or isinstance(value, bool | str | bytes | float):
        return value
    if isinstance(value, torch.Tensor):
        return ["x", *_encode_tensor(value, tensors, where)]
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else ["i", str(value)]
    if isinstance(value, Mapping):
        pairs = [
            [_encode(k, tensors, where), _encode(v, tensors, f"{where}[{k!r}]")]
            for k, v in value.items()
        ]
        return ["m", *pairs]
    if isinstance(value, torch.Size):
        return ["s", *value]
    if isinstance(value, list | tuple):
        kind = "l" if isinstance(value, list) else "t"
        return [kind, *(_encode(item, tensors, f"{where}[{at}]") for at, item in enumerate(value))]
    if isinstance(value, torch.dtype):
        return ["d", str(value).removeprefix("torch.")]
    problem = f"{where} is a {type(value).__module__}.{type(value).__qualname__}"
    hint = "keep tensors, numbers, texts, lists, tuples and mappings in states"
    raise UsageError(problem, hint, "model_fn")


def _encode_tensor(tensor: torch.Tensor, tensors: list[torch.Tensor], where: str) -> list[Any]:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES or tensor.layout != torch.strided:
        problem = f"{where} is a tensor of {name}, {tensor.layout}"
        raise UsageError(problem, "use dense tensors of the usual types", "model_fn")
    host = tensor.detach().cpu()
    dense = host.contiguous()
    tensors.append(dense.resolve_conj().resolve_neg())
    return [len(tensors) - 1, name, list(tensor.shape)]


def _decode(content: Any, tensors: list[bytearray]) -> Any:
    if not isinstance(content, list):
        return content
    kind, *rest = content
    match kind:
        case "m":
            return {_decode(key, tensors): _decode(value, tensors) for key, value in rest}
        case "l":
            return [_decode(item, tensors) for item in rest]
        case "t":
            return tuple(_decode(item, tensors) for item in rest)
        case "i":
            return int(rest[0])
        case "d":
            return _DTYPES[rest[0]]
        case "s":
            return torch.Size(rest)
        case "x":
            at, name, shape = rest
            return _decode_tensor(tensors[at], _DTYPES[name], shape)
        case _:
            raise ValueError(f"kind {kind!r}")


def _decode_tensor(raw: bytearray, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if math.prod(shape) * dtype.itemsize != len(raw) or min(shape, default=0) < 0:
        raise ValueError(f"{len(raw)} bytes for {shape} of {dtype}")
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(shape)
