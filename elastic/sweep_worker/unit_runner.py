"""Execution of units in one process, which keeps the data while states arrive and leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from elastic.state.random_state import seed_generators
from elastic.sweep_worker.staged_data import StagedData, count_samples
from elastic.sweep_worker.unit import (
    EvalFunction,
    Unit,
    UserFunctions,
    digest,
    from_frames,
    keyed_seed,
    to_frames,
)
from elastic.training_errors import ElasticError, UsageError
from schemas.host.state_files import Frames

RETURN_FORMS = (
    "return the model, (model, optimizer), (model, optimizer, scheduler) or "
    "Trained(model=..., optimizer=..., scheduler=..., scaler=...)"
)


class Trained:
    """Result of `model_fn`: named objects with `state_dict` and `load_state_dict`.

    `train_fn` uses the objects as attributes: `trained.model`, `trained.optimizer`. State outside
    of these objects is not sent to the next worker.
    """

    def __init__(self, **objects: Any) -> None:
        """Store the objects by name, without those that are None.

        Raises:
            UsageError: if `model` is not a module, or an object has no state.
        """
        self._objects = {name: entry for name, entry in objects.items() if entry is not None}
        if not isinstance(self._objects.get("model"), nn.Module):
            raise UsageError("model_fn returned no model", RETURN_FORMS, "model_fn")
        for name, entry in self._objects.items():
            if not (hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict")):
                problem = f"model_fn: {name} ({type(entry).__name__}) has no state_dict"
                hint = "return objects with a state_dict, which travels with the trial"
                raise UsageError(problem, hint, "model_fn")

    def __getattr__(self, name: str) -> Any:
        """Return the object with this name."""
        objects = self.__dict__.get("_objects", {})
        if name in objects:
            return objects[name]
        raise AttributeError(f"model_fn returned no {name!r}, only {', '.join(objects)}")

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the objects."""
        return iter(self._objects)

    def state(self) -> dict[str, Any]:
        """Return the states of all objects by name."""
        return {name: entry.state_dict() for name, entry in self._objects.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state`, which must be of objects with the same names."""
        if state.keys() != self._objects.keys():
            problem = (
                f"model_fn returned {', '.join(self._objects)}, the received state has "
                f"{', '.join(state)}"
            )
            hint = "return the same objects for the same configuration"
            raise UsageError(problem, hint, "model_fn")
        for name, entry in self._objects.items():
            entry.load_state_dict(state[name])

    def to(self, device: torch.device) -> None:
        """Move the modules to `device`; optimizers refer to the same parameters afterwards."""
        for entry in self._objects.values():
            if isinstance(entry, nn.Module):
                entry.to(device)


def as_trained(built: Any) -> Trained:
    """Convert the result of `model_fn`: a model, a tuple, a mapping, or a `Trained`."""
    if isinstance(built, Trained):
        return built
    if isinstance(built, nn.Module):
        return Trained(model=built)
    if isinstance(built, Mapping):
        return Trained(**built)
    if isinstance(built, tuple) and 1 <= len(built) <= 3:  # noqa: PLR2004 - see FORMS
        return Trained(**dict(zip(("model", "optimizer", "scheduler"), built, strict=False)))
    raise UsageError(f"model_fn returned a {type(built).__name__}", RETURN_FORMS, "model_fn")


MAX_METRICS: Final = 100
MAX_NAME: Final = 100  # characters


class UnitFailedError(ElasticError):
    """A user function raised an error."""

    code = "unit_failed"

    def __init__(self, where: str, error: BaseException) -> None:
        self.where = where
        super().__init__(
            f"{where} raised {type(error).__name__}: {error}",
            "this configuration ends; the others continue",
            where,
        )


@dataclass(frozen=True, slots=True)
class UnitResult:
    """Result of a unit."""

    frames: list[bytes]  # copy of the state after the unit
    digest: str  # SHA-256 of the frames
    metrics: dict[str, float]  # means over the partition's samples
    samples: int  # number of samples over which the metrics are computed
    scores: dict[str, float]  # metrics of the evaluation; empty without an evaluation


class UnitRunner:
    """Executor that runs one unit after the other and keeps each partition's data in memory.

    `staged` shares the data with other processes of the node; if None, this process reads its own.
    """

    def __init__(
        self,
        functions: UserFunctions,
        partitions: int,
        device: torch.device,
        staged: StagedData | None = None,
    ) -> None:
        self._staged = staged
        self._functions = functions
        self._partitions = partitions
        self.device = device  # device of the slot
        self._data: dict[int | None, Any] = {}

    def data(self, partition: int | None) -> Any:
        """Return the data of `partition` (from 0), or the evaluation data if it is None.

        The data are read at the first call.
        """
        if partition not in self._data:
            read = partial(self._read, partition)
            self._data[partition] = self._staged.get(partition, read) if self._staged else read()
        return self._data[partition]

    def _read(self, partition: int | None) -> Any:
        seed_generators(keyed_seed("input", "all" if partition is None else partition))
        found = _call("input_fn", self._functions.input_fn, partition, self._partitions)
        if found is None or (isinstance(found, Sized) and not len(found)):
            part = "the evaluation" if partition is None else f"partition {partition}"
            problem = f"input_fn returned no data for {part} of {self._partitions}"
            hint = "return data for each partition, or lower the number of partitions"
            raise UsageError(problem, hint, "input_fn")
        return found

    def begin(self, config: str, values: Mapping[str, Any], seed: int) -> list[bytes]:
        """Return the state of a configuration before its first unit."""
        return to_frames(self._build(config, values, seed).state())

    def run(self, unit: Unit, state: Frames, *, evaluate: bool = False) -> UnitResult:
        """Train over the unit's partition from `state`; if `evaluate` is set, evaluate afterwards.

        Errors of user functions are raised as UnitFailedError.
        """
        data = self.data(unit.partition)
        trained = self._build(unit.config, unit.values, unit.sweep_seed)
        trained.load(from_frames(state))
        seed_generators(unit.seed)
        metrics = _call("train_fn", self._functions.train_fn, trained, data, unit)
        frames = to_frames(trained.state())
        eval_fn = self._functions.eval_fn
        scores = self._scores(eval_fn, trained, unit) if evaluate and eval_fn else {}
        samples = count_samples(data)
        return UnitResult(
            frames, digest(frames), _check_metrics("train_fn", metrics), samples, scores
        )

    def _build(self, config: str, values: Mapping[str, Any], seed: int) -> Trained:
        seed_generators(keyed_seed(seed, config))
        trained = as_trained(_call("model_fn", self._functions.model_fn, dict(values)))
        trained.to(self.device)
        return trained

    def _scores(self, eval_fn: EvalFunction, trained: Trained, unit: Unit) -> dict[str, float]:
        """Evaluate the model. The unit's state was copied before, so this cannot change it."""
        data = self.data(None)
        seed_generators(keyed_seed(unit.seed, "evaluation"))
        training = trained.model.training
        trained.model.eval()
        try:
            with torch.no_grad():
                found = _call("eval_fn", eval_fn, trained, data, unit)
        finally:
            trained.model.train(training)
        return _check_metrics("eval_fn", found)


def _call(where: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        raise UnitFailedError(where, error) from error


def _check_metrics(where: str, metrics: Any) -> dict[str, float]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        problem = f"{where} returned a {type(metrics).__name__}"
        raise UsageError(problem, "return numbers by name, such as {'loss': 0.5}", where)
    if len(metrics) > MAX_METRICS:
        problem = f"{where} returned {len(metrics)} metrics"
        raise UsageError(problem, f"return {MAX_METRICS} at most", where)
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if not (isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable()):
            problem = f"{where} returned a metric named {str(name)[:MAX_NAME]!r}"
            raise UsageError(problem, f"name it with 1 to {MAX_NAME} printable characters", where)
        try:
            found[name] = float(value)
        except (TypeError, ValueError) as error:
            problem = f"{where} returned {name} = {value!r}"
            raise UsageError(problem, "return numbers", where) from error
    return found
