"""Data of a partition, which one worker reads into a file that all workers of the node map.

The result of `input_fn` is staged if it consists of tensors, arrays, numbers, texts, and tuples,
lists, mappings and `TensorDataset`s of them. Otherwise each process reads its own data.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch.utils.data import DataLoader, TensorDataset

from elastic.training_errors import ElasticError

MAGIC: Final = b"ONESdt\x00\x01"
PREFIX: Final = struct.Struct(">8sQ")  # magic, size in bytes of the header that follows
ALIGNED: Final = 64  # alignment of tensors, bytes
_PLAIN_TYPES: Final = (type(None), bool, int, float, str, bytes)
_NUMBERS: Final = "biufc"  # kinds of numpy types that can be mapped


class DataDiffersError(ElasticError):
    """`input_fn` returned a different number of samples than in an earlier call on this node."""

    def __init__(self, part: str, found: int, staged: int) -> None:
        super().__init__(
            f"input_fn returned {found} samples of {part}, but {staged} in an earlier call",
            "return the same data for the same partition in each call",
            "input_fn",
        )


class _Header(msgspec.Struct, array_like=True):
    content: Any
    blocks: list[tuple[int, int]]  # per tensor: offset after the header, size; both in bytes
    samples: int


@dataclass(frozen=True, slots=True)
class _Block:
    owner: object  # object that owns the memory of `content`
    content: memoryview | bytes


class _NotStagedError(Exception):
    """The data contain an object that cannot be staged."""


class StagedData:
    """Staged data of one job on one node. `folder` is created when it is first used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, partition: int | None, read: Callable[[], Any]) -> Any:
        """Return the data of `partition` (from 0), or the evaluation data if it is None.

        Only one worker of the node calls `read` at a time. The other workers then map the result.
        If the number of samples differs from an earlier call, it raises DataDiffersError.
        """
        name = "evaluation" if partition is None else f"partition-{partition}"
        path = self._folder / f"{name}.data"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(self._folder / f"{name}.lock"):
            staged = _map_file(path)
            if staged is None:
                return self._stage(path, read())
        data, samples = staged
        if data is not _NOT_STAGED:
            return data
        found = read()
        if count_samples(found) != samples:
            raise DataDiffersError(name.replace("-", " "), count_samples(found), samples)
        return found

    @staticmethod
    def _stage(path: Path, found: Any) -> Any:
        """Stage the data and return the mapped copy, so that all workers compute the same."""
        try:
            _write(path, *_encode_data(found, count_samples(found)))
        except OSError as error:
            text = f"cannot stage {path.name} for the node's other workers: {error.strerror}"
            sys.stderr.write(f"[ones] {text}; each worker reads its own data\n")
            return found
        staged = _map_file(path)
        return found if staged is None or staged[0] is _NOT_STAGED else staged[0]


def count_samples(data: Any) -> int:
    """Return the number of samples in a user's data, at least 1.

    The items of a tuple or mapping are columns, and the first column is counted. The items of a
    list are samples. Data without a length are one sample.
    """
    if isinstance(data, Mapping) and data:
        return count_samples(next(iter(data.values())))
    if isinstance(data, tuple) and data and isinstance(data[0], Sized):
        return count_samples(data[0])
    rows: Any = data.dataset if isinstance(data, DataLoader) else data
    try:
        return max(1, len(rows))
    except TypeError:
        return 1


_NOT_STAGED: Final = object()  # marks data that each process has to read for itself


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a file in this context; the kernel releases the lock if the process is killed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# --- data as bytes


def _encode_data(data: Any, samples: int) -> tuple[_Header, list[_Block]]:
    blocks: list[_Block] = []
    try:
        content = _encode(data, blocks)
    except _NotStagedError:
        return _Header(["o"], [], samples), []
    places, place = [], 0
    for block in blocks:
        place += -place % ALIGNED
        places.append((place, len(block.content)))
        place += len(block.content)
    return _Header(content, places, samples), blocks


def _encode(value: Any, blocks: list[_Block]) -> Any:
    """Convert `value` to msgpack's types; values of other types become lists headed by a kind."""
    kind = type(value)
    if kind in _PLAIN_TYPES:
        if kind is int and not -(2**63) <= value < 2**64:
            raise _NotStagedError
        return value
    if kind is torch.Tensor:
        return ["x", *_block(value, blocks)]
    if kind is TensorDataset:
        return ["d", *(_encode(item, blocks) for item in value.tensors)]
    if kind is tuple or kind is list:
        return ["t" if kind is tuple else "l", *(_encode(item, blocks) for item in value)]
    if kind is dict:
        pairs = [[_encode(k, blocks), _encode(v, blocks)] for k, v in value.items()]
        return ["m", *pairs]
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray and value.dtype.kind in _NUMBERS:
        if not (value.dtype.isnative and value.flags.c_contiguous):
            raise _NotStagedError
        blocks.append(_Block(value, memoryview(value).cast("B") if value.size else b""))
        return ["a", len(blocks) - 1, value.dtype.str, list(value.shape)]
    raise _NotStagedError


def _block(tensor: torch.Tensor, blocks: list[_Block]) -> list[Any]:
    """Store a tensor's bytes in the order of its strides, because some results depend on it."""
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not plain or tensor.requires_grad or tensor.is_quantized:
        raise _NotStagedError
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    if tensor.is_contiguous() or not tensor.permute(order).is_contiguous():
        order = list(range(tensor.dim()))
    laid = tensor.permute(order).contiguous().resolve_conj().resolve_neg()
    blocks.append(_Block(laid, _bytes_of(laid)))
    name = str(tensor.dtype).removeprefix("torch.")
    return [len(blocks) - 1, name, list(laid.shape), order]


def _write(path: Path, header: _Header, blocks: list[_Block]) -> None:
    encoded = msgspec.msgpack.encode(header)
    fresh = path.with_suffix(".new")
    start = _content_offset(len(encoded))
    try:
        with fresh.open("wb") as file:
            file.write(PREFIX.pack(MAGIC, len(encoded)) + encoded)
            for (place, _), block in zip(header.blocks, blocks, strict=True):
                file.seek(start + place)
                file.write(block.content)
            file.truncate(max(file.tell(), start))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


def _bytes_of(tensor: torch.Tensor) -> memoryview | bytes:
    size = tensor.numel() * tensor.element_size()
    if not size:
        return b""
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def _content_offset(header: int) -> int:
    return (PREFIX.size + header + ALIGNED - 1) // ALIGNED * ALIGNED


# --- bytes as data


def _map_file(path: Path) -> tuple[Any, int] | None:
    """Return the data in a file and their number of samples, or None if the file is not valid.

    The data are `_NOT_STAGED` if each process has to read its own.
    """
    try:
        with path.open("rb") as file:
            magic, length = PREFIX.unpack(file.read(PREFIX.size))
            if magic != MAGIC:
                return None
            header = msgspec.msgpack.decode(file.read(length), type=_Header)
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, struct.error, ValueError, msgspec.MsgspecError):
        return None
    if header.content == ["o"]:
        return _NOT_STAGED, header.samples
    view = memoryview(content)[_content_offset(length) :]
    blocks = [view[place : place + size] for place, size in header.blocks]
    return _decode(header.content, blocks), header.samples


def _decode(content: Any, blocks: Sequence[memoryview]) -> Any:
    if not isinstance(content, list):
        return content
    kind, *rest = content
    match kind:
        case "x":
            at, name, shape, order = rest
            inverse = sorted(range(len(order)), key=order.__getitem__)
            return _tensor(blocks[at], getattr(torch, name)).view(shape).permute(inverse)
        case "a":
            import numpy as np  # noqa: PLC0415 - only where the data had arrays

            at, name, shape = rest
            return np.ndarray(shape, dtype=np.dtype(name), buffer=blocks[at])
        case "d":
            return TensorDataset(*(_decode(item, blocks) for item in rest))
        case "t":
            return tuple(_decode(item, blocks) for item in rest)
        case "l":
            return [_decode(item, blocks) for item in rest]
        case _:
            return {_decode(key, blocks): _decode(value, blocks) for key, value in rest}


def _tensor(block: memoryview, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(block, dtype=dtype) if block else torch.empty(0, dtype=dtype)
