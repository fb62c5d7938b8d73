"""States of tracked objects: schedulers, gradient scalers and the script's own objects."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


def copy_to_host(state: Any) -> Any:
    """Return `state` with every tensor copied to the host, so that training can continue.

    Mappings become dicts, numpy arrays tensors, and numpy scalars Python numbers.
    """
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(state, numpy.generic):
        return state.item()  # checkpoints are read back without numpy
    if numpy is not None and isinstance(state, numpy.ndarray):
        return torch.from_numpy(state.copy())
    if isinstance(state, Mapping):
        return {key: copy_to_host(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        copies = (copy_to_host(value) for value in state)
        make = getattr(state, "_make", type(state))  # a named tuple's class takes single arguments
        return make(copies)
    return state


def plain_containers(state: Any) -> Any:
    """Return `state` with named tuples made plain, because a reader might lack their classes."""
    if isinstance(state, Mapping):
        return {key: plain_containers(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plain_containers(value) for value in state]
    if isinstance(state, tuple) and not isinstance(state, torch.Size):
        return tuple(plain_containers(value) for value in state)
    return state


class TrackedStates:
    """Tracked objects by name. An object that is tracked late gets its state at that moment."""

    def __init__(self) -> None:
        self._things: dict[str, Any] = {}
        self._waiting: dict[str, Any] = {}  # states of objects that are not tracked yet
        self._copy: dict[str, Any] = {}  # last result of `states`

    def __contains__(self, thing: Any) -> bool:
        """Return whether `thing` is tracked, under any name."""
        return any(known is thing for known in self._things.values())

    @property
    def follow_metrics(self) -> bool:
        """True if a scheduler chooses rates by a metric that the script computes."""
        return any(
            isinstance(part, ReduceLROnPlateau)
            for thing in self._things.values()
            for part in _schedulers(thing)
        )

    def most_tensors(self) -> int:
        """Return the largest number of tensors in the state of a tracked object."""
        return max((_count_tensors(_state(thing)) for thing in self._things.values()), default=0)

    def add(self, name: str, thing: Any) -> None:
        """Track `thing`; if its state has arrived already, load the state.

        The name must be the same on every worker, and in a resumed job.
        """
        self._things[name] = thing
        if name in self._waiting:
            _load(thing, self._waiting.pop(name))
        self._copy.setdefault(name, copy_to_host(_state(thing)))  # initial state

    def states(self) -> dict[str, Any]:
        """Return copies of all states on the host, by name.

        `add` inserts the initial state of a new object into the last copies, so a rollback to these
        copies resets the object.
        """
        copies: dict[str, Any] = copy_to_host(
            {name: _state(thing) for name, thing in self._things.items()}
        )
        self._copy = copies
        return copies

    def load(self, states: Mapping[str, Any]) -> None:
        """Load the result of `states`; the states of unknown objects wait until `add`."""
        for name, state in states.items():
            if name in self._things:
                _load(self._things[name], state)
            else:
                self._waiting[name] = state


def _state(thing: Any) -> Any:
    """Return the state of an object; a scheduler's state omits functions and other objects."""
    state = thing.state_dict()
    if isinstance(thing, LRScheduler) and type(thing).state_dict is LRScheduler.state_dict:
        return {key: value for key, value in state.items() if not _is_object(value)}
    return state


def _count_tensors(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return 1
    parts = state.values() if isinstance(state, Mapping) else state
    return sum(map(_count_tensors, parts)) if isinstance(state, Mapping | list | tuple) else 0


def _is_object(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(_is_object(part) for part in value)
    return callable(value) or isinstance(value, LRScheduler | torch.optim.Optimizer)


def _load(thing: Any, state: Any) -> None:
    """Load a state, and restore the types of containers, because copies have plain containers."""
    parts = [vars(part) for part in _schedulers(thing)]
    kinds = [{key: type(value) for key, value in held.items()} for held in parts]
    thing.load_state_dict(state)
    for held, kind in zip(parts, kinds, strict=True):
        for key, container in kind.items():
            if container in {Counter, OrderedDict} and type(held.get(key)) is dict:
                held[key] = container(held[key])


def _schedulers(thing: Any) -> list[LRScheduler]:
    """Return `thing` and the schedulers that it consists of; [] if `thing` is no scheduler."""
    if isinstance(thing, list | tuple):
        return [found for part in thing for found in _schedulers(part)]
    if not isinstance(thing, LRScheduler):
        return []
    return [thing, *_schedulers(list(vars(thing).values()))]
