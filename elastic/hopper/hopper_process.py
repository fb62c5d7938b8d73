"""A worker of a sweep: trains one unit after the other, of whichever configuration it is given.

The main thread trains. Others talk with the agent, hand out states, and bring the next one here.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import torch

from elastic.collectives.device_backends import slot_device, use_device
from elastic.hooks.backward_passes import warm_up
from elastic.hooks.delayed_device_use import hold_device
from elastic.hopper.hopper_orders import HopperOrders
from elastic.hopper.staged_data import StagedData
from elastic.hopper.state_store import StateStore
from elastic.hopper.unit_attempt import UnitAttempts
from elastic.hopper.unit_runner import UnitRunner
from elastic.hopper.unit_speed import UnitSpeed
from elastic.hopper.user_functions import import_functions
from elastic.metrics.resource_usage import UsageMeter, cpu_seconds
from elastic.reporting.agent_channel import Channel
from schemas.ids import worker_id
from schemas.link import StateServer
from schemas.messages.agent import (
    HopperOpened,
    ScriptReport,
    SlotAwaited,
    StepsReported,
    WorkerReady,
)
from schemas.messages.hopping import UnitOrder, UnitTask
from schemas.messages.worker import Assignment, GroupOrder, SlotGranted, ToWorker
from schemas.sweeps import SweepSpec

FUNCTIONS: Final = ("input_fn", "model_fn", "train_fn", "eval_fn")
DATA: Final = "data"  # folder of staged data, among the states


def run_hopper(assignment: Assignment, folder: Path, sweep: SweepSpec) -> None:
    """Be a worker of a sweep until it is in no group any more.

    Raises:
        UsageError: if a function of the user cannot be imported; names the field and the remedy.
    """
    hopper = Hopper(assignment, folder, sweep)
    try:
        hopper.run()
    finally:
        hopper.close()


class Hopper:
    """One worker of a sweep."""

    def __init__(self, assignment: Assignment, folder: Path, sweep: SweepSpec) -> None:
        """Begin to listen to the agent."""
        self._assignment = assignment
        self._sweep = sweep
        me = worker_id(assignment.job, assignment.version, assignment.rank)
        self._orders = HopperOrders(me, assignment.version, assignment.rank)
        self._changed = threading.Condition()
        self._granted = threading.Event()
        if assignment.granted:
            self._granted.set()
        self._states = Path(assignment.states)
        self._store = StateStore(assignment.job, self._states)
        self._speed, self._usage = UnitSpeed(), UsageMeter()
        self._server: StateServer | None = None
        self._channel = Channel(assignment, folder, self._hear)

    def run(self) -> None:
        """Import, get ready, and train what comes."""
        hold_device(self._await_slot)
        given = {name: getattr(self._sweep, name) for name in FUNCTIONS}
        functions = import_functions({name: path for name, path in given.items() if path})
        self._serve()
        self._await_slot()
        device = slot_device()
        _warm_up(device)
        staged = StagedData(self._states / DATA)
        runner = UnitRunner(functions, self._sweep.partitions, device, staged)
        attempts = UnitAttempts(self._sweep, runner, self._store, self._report, self._speed)
        self._report(
            WorkerReady,
            epoch_samples=1,  # not known yet
            resumed_epoch=0,
            parameters=0,
            store_port=self._orders.port,
        )
        self._report(HopperOpened, address=self._server.address if self._server else "")
        self._channel.tell_steps(self._steps)
        while (unit := self._next()) is not None:
            attempts.make(unit)

    def close(self) -> None:
        """Let go of the agent and of other nodes."""
        self._channel.close()
        if self._server is not None:
            self._server.close()

    def _serve(self) -> None:
        address = self._assignment.address
        try:
            self._server = StateServer(address, self._store.find)
            self._orders.port = self._server.port
        except OSError as error:
            text = f"cannot listen on {address}: {error.strerror}"
            sys.stderr.write(f"[ones] {text}; other nodes take states from the agent's disk\n")

    def _await_slot(self) -> None:
        if not self._granted.is_set():
            self._report(SlotAwaited)
        self._granted.wait()

    def _next(self) -> UnitOrder | None:
        """Wait for the next unit; None: this worker leaves."""
        with self._changed:
            while True:
                if (unit := self._orders.take()) is not None:
                    return unit
                if self._orders.leaving:
                    return None
                self._changed.wait()

    # --- the channel's thread

    def _hear(self, message: ToWorker) -> None:
        match message:
            case SlotGranted():
                self._granted.set()
            case UnitTask(unit=unit):
                with self._changed:
                    self._orders.assign(unit)
                    self._changed.notify_all()
            case GroupOrder():
                self._orders.samples_done = self._speed.samples
                with self._changed:
                    for kind, fields in self._orders.receive(message):
                        self._report(kind, **fields)
                    self._changed.notify_all()

    def _steps(self) -> StepsReported | None:
        """Rank 0 speaks for all: hoppers share nothing, so a group is as fast as their sum."""
        orders, speed = self._orders, self._speed.samples_per_s()
        if orders.rank or not orders.group or speed is None:
            return None
        usage = self._usage.usage(cpu_seconds(), time.monotonic())
        return StepsReported(
            job=self._assignment.job,
            version=self._assignment.version,
            rank=self._assignment.rank,
            group=orders.group,
            epoch=1,
            step=self._speed.units,
            samples_done=self._speed.samples,
            samples_per_s=speed * orders.size,
            train_loss=None,
            global_batch=orders.batch,
            lr=0.0,
            cpu_cores=None if usage is None else usage.cpu_cores,
        )

    def _report(self, kind: type[ScriptReport], **fields: Any) -> None:
        a = self._assignment
        self._channel.report(
            lambda index: kind(job=a.job, version=a.version, rank=a.rank, index=index, **fields)
        )


def _warm_up(device: torch.device) -> None:
    """The first backward pass and the first optimizer of a process are slow: before it is ready."""
    use_device(device)
    warm_up(device)
    weight = torch.nn.Parameter(torch.ones(8, device=device))
    weight.grad = torch.ones_like(weight)
    torch.optim.Adam([weight]).step()
