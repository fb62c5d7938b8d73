"""Data of a partition, which one worker reads into a file that all workers of the node map.

The result of `input_fn` is staged if it consists of tensors, arrays, numbers, texts, and tuples,
lists, dicts and `TensorDataset`s of them. Otherwise each process reads its own data.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, TensorDataset

from elastic.training_errors import ElasticError

# `torch.save` writes tensors by types, functions and empty OrderedDicts.
_PLAIN_KINDS: Final = (TensorDataset, OrderedDict, torch.dtype)


class DataDiffersError(ElasticError):
    """`input_fn` returned a different number of samples than in an earlier call on this node."""

    def __init__(self, part: str, found: int, staged: int) -> None:
        super().__init__(
            f"input_fn returned {found} samples of {part}, but {staged} in an earlier call",
            "return the same data for the same partition in each call",
            "input_fn",
        )


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
                return _stage(path, read())
        if "data" in staged:
            return staged["data"]
        found, samples = read(), staged["samples"]
        if count_samples(found) != samples:
            raise DataDiffersError(name.replace("-", " "), count_samples(found), samples)
        return found


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


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a file in this context; the kernel releases the lock if the process is killed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# --- the file


def _stage(path: Path, found: Any) -> Any:
    """Stage the data and return the mapped copy, so that all workers compute the same."""
    samples = count_samples(found)
    try:
        try:
            _write(path, {"samples": samples, "data": found})
        except _NotStagedError:
            _write(path, {"samples": samples})
    except (OSError, RuntimeError) as error:
        # torch raises RuntimeError while it handles the error of a full disk
        cause = error if isinstance(error, OSError) else error.__context__ or error
        text = f"cannot stage {path.name} for the node's other workers: {cause}"
        sys.stderr.write(f"[ones] {text}; each worker reads its own data\n")
        return found
    staged = _map_file(path) or {}
    return staged.get("data", found)


def _write(path: Path, content: dict[str, Any]) -> None:
    fresh = path.with_suffix(".new")
    try:
        with fresh.open("wb") as file:
            torch.save(
                content,
                file,
                pickle_module=_PlainPickle,
                pickle_protocol=pickle.DEFAULT_PROTOCOL,  # torch's own writes bytes as a call
            )
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)


def _map_file(path: Path) -> dict[str, Any] | None:
    """Return the content of a file, with tensors that are mapped, or None if it is not valid."""
    if not path.exists():
        return None
    try:
        # the file is as private as the script that would read the data instead
        content: dict[str, Any] = torch.load(path, mmap=True, weights_only=False)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):
        return None
    return content


def _array(tensor: torch.Tensor) -> Any:
    return tensor.numpy()


class _PlainPickler(pickle.Pickler):
    """Pickler of plain data; it raises _NotStagedError for other objects."""

    def reducer_override(self, value: Any) -> Any:
        """Return how `value` is pickled; not called for Python's numbers, texts and containers."""
        kind = type(value)
        if kind is torch.Tensor:
            if value.layout is not torch.strided or value.device.type != "cpu":
                raise _NotStagedError
            if value.requires_grad or value.is_quantized:
                raise _NotStagedError
            whole = value.untyped_storage().nbytes() == value.nbytes
            return NotImplemented if whole else value.clone().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        if (numpy := sys.modules.get("numpy")) is not None and kind is numpy.ndarray:
            mappable = value.flags.c_contiguous and value.flags.writeable
            try:
                return _array, (torch.from_numpy(value if mappable else value.copy()),)
            except (TypeError, ValueError):  # torch has no such numbers
                raise _NotStagedError from None
        if kind in _PLAIN_KINDS or isinstance(value, type | types.FunctionType):
            return NotImplemented
        raise _NotStagedError


class _PlainPickle:
    """The module that `torch.save` gets as `pickle_module`."""

    Pickler = _PlainPickler
