"""Attempt at a unit: its data, its state, the user's functions, its reports."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from functools import partial
from typing import Final

import torch

from elastic.reporting import Report
from elastic.sweep_worker.staged_data import DataDiffersError, count_samples
from elastic.sweep_worker.state_store import (
    DiskFullError,
    FoundState,
    StateLostError,
    StateStore,
    StateWait,
)
from elastic.sweep_worker.unit import StateFramesError, Unit, UnitSpeed, size
from elastic.sweep_worker.unit_runner import UnitFailedError, UnitResult, UnitRunner
from elastic.training_errors import UsageError
from schemas.sweeps import SweepSpec
from schemas.wire.agent import UnitEnded, UnitFailed, UnitStarted
from schemas.wire.sweeps import UnitOrder

MAX_REASON_CHARACTERS: Final = 2000  # limit of a report
TRIAL, STATE, DATA, DISK = "trial", "state", "data", "disk"  # causes of a failure


class UnitAttempts:
    """Executor of attempts at units, each of which ends in a report."""

    def __init__(
        self,
        sweep: SweepSpec,
        runner: UnitRunner,
        store: StateStore,
        report: Report,
        speed: UnitSpeed,
    ) -> None:
        self._sweep = sweep
        self._runner = runner
        self._store = store
        self._report = report
        self._speed = speed

    def make(self, order: UnitOrder) -> None:
        """Train a unit and report the result; after a failure the worker continues."""
        try:
            self._run_attempt(order)
        except Exception as error:  # noqa: BLE001 - the worker continues after any error
            fault, why = fault_of(error)
            _log(order, f"failed: {why}")
            if isinstance(error, UnitFailedError):
                traceback.print_exception(error.__cause__)
        else:
            return
        gc.collect()  # an error's frames hold tensors
        if self._runner.device.type != "cpu":
            torch.accelerator.empty_cache()
        self._report(UnitFailed, attempt=order.attempt, reason=why, fault=fault)

    def _run_attempt(self, order: UnitOrder) -> None:
        began = time.monotonic()
        wait = None if order.state is None else StateWait(partial(self._state_of, order))
        data = self._runner.data(order.partition)
        if order.evaluate and self._sweep.eval_fn:
            self._runner.data(None)
        staged_s, samples = time.monotonic() - began, count_samples(data)
        state = wait.state() if wait else None
        waited_s = wait.seconds if wait else 0.0
        _log(order, f"{samples} samples")
        begun = {"samples": samples, "waited_s": waited_s, "staged_s": staged_s}
        self._report(UnitStarted, attempt=order.attempt, **begun)
        started = time.monotonic()
        while (result := self._train(order, state)) is None:
            state = self._state_of(order)
        seconds = time.monotonic() - started
        self._store.put(order, result)
        self._speed.add(samples, time.monotonic() - began)
        self._report(
            UnitEnded,
            attempt=order.attempt,
            metrics=result.metrics,
            samples=result.samples,
            seconds=seconds,
            scores=result.scores,
            digest=result.digest,
            size=size(result.frames),
        )

    def _state_of(self, order: UnitOrder) -> FoundState:
        assert order.state is not None  # noqa: S101 - the caller checked
        return self._store.get(order.state, order.sources)

    def _train(self, order: UnitOrder, state: FoundState | None) -> UnitResult | None:
        """Run the user's functions; None if the state turned out to be damaged."""
        seed, name = self._sweep.search.seed, str(order.trial)
        unit = Unit(
            config=name,
            values=order.values,
            epoch=order.epoch,
            partition=order.partition,
            partitions=self._sweep.partitions,
            sweep_seed=seed,
            device=self._runner.device,
        )
        if state is None:
            begin = self._runner.begin(name, order.values, seed)
            return self._runner.run(unit, begin, evaluate=order.evaluate)
        try:
            result = self._runner.run(unit, state.frames, evaluate=order.evaluate)
        except Exception:
            if state.is_valid():
                raise
            return None
        return result if state.is_valid() else None


def fault_of(error: Exception) -> tuple[str, str]:
    """Return the cause of a failed unit and a one-line reason; unknown errors blame the trial."""
    match error:
        case StateLostError() | StateFramesError():
            fault = STATE
        case DiskFullError():
            fault = DISK
        case DataDiffersError():
            fault = DATA
        case UnitFailedError() | UsageError():
            fault = DATA if error.field == "input_fn" else TRIAL
        case OSError():
            fault = DISK
            error = DiskFullError(f"cannot use the node's folder of states: {error}")
        case _:
            fault = TRIAL
    text = str(error) or type(error).__name__
    if "out of memory" in text.lower() or isinstance(error.__cause__, MemoryError):
        text += "; use a smaller batch or model"
    line = " ".join(text.split())
    return fault, "".join(c if c.isprintable() else " " for c in line)[:MAX_REASON_CHARACTERS]


def _log(order: UnitOrder, text: str) -> None:
    place = f"epoch {order.epoch}, partition {order.partition}, attempt {order.attempt}"
    sys.stderr.write(f"[ones] trial {order.trial}, {place}: {text}\n")
