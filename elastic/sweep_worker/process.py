"""Worker that trains units of a sweep (passes of trials over partitions), one after the other.

The main thread trains. Other threads connect to the agent, serve states, and fetch the next state.

A sweep worker replies to the orders of its job's group at once, even while a unit runs. Workers of
a sweep share nothing and never connect to each other, so each is a member as soon as it receives
the order. The replies are decided without thread, clock or socket:

    order                      stage     reply
    JOIN (to rank 0)           PREPARE   StoreOpened: the others could connect
    START, JOIN, RECOVER       SWITCH    GroupFormed if it is a member; else it leaves
    RECOVER                    PREPARE   Quiesced: no operation of the group ever runs
    SUSPEND                    SWITCH    Suspended, from rank 0; all leave
    any                        SETTLED   a member of the settled group stays

A worker that leaves finishes its current unit first.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from elastic.collectives.backends import slot_device, use_device
from elastic.collectives.background import Background
from elastic.hooks import hold_device, warm_up
from elastic.metrics import UsageMeter, cpu_seconds
from elastic.reporting import AgentConnection, identity
from elastic.sweep_worker.staged_data import DataDiffersError, StagedData, count_samples
from elastic.sweep_worker.state_store import (
    DiskFullError,
    FoundState,
    StateLostError,
    StateStore,
)
from elastic.sweep_worker.unit import StateFramesError, Unit, UnitSpeed, import_functions, size
from elastic.sweep_worker.unit_runner import UnitFailedError, UnitResult, UnitRunner
from elastic.training_errors import UsageError
from schemas.ids import Rank, Version, WorkerId, worker_id
from schemas.sweeps import SweepSpec
from schemas.transport.state_transfer import StateServer
from schemas.wire.agent import (
    JOIN,
    PREPARE,
    RECOVER,
    SETTLED,
    START,
    SUSPEND,
    GroupFormed,
    Quiesced,
    ScriptReport,
    SlotAwaited,
    StepsReported,
    StoreOpened,
    Suspended,
    SweepWorkerReady,
    UnitEnded,
    UnitFailed,
    UnitStarted,
    WorkerReady,
)
from schemas.wire.sweeps import UnitOrder, UnitTask
from schemas.wire.worker import Assignment, GroupOrder, SlotGranted, ToWorker

MAX_REASON_CHARACTERS: Final = 2000  # limit of the reason in a report
TRIAL, STATE, DATA, DISK = "trial", "state", "data", "disk"  # causes of a failure


def fault_of(error: Exception) -> tuple[str, str]:
    """Return the cause of a failed unit and a one-line reason. The default cause is the trial."""
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


Reply = tuple[type[ScriptReport], dict[str, Any]]  # type and fields of a report


class SweepWorkerOrders:
    """State machine for group orders and units; it keeps the latest order and the waiting unit."""

    def __init__(self, own_id: WorkerId, start_version: Version, rank: Rank) -> None:
        self._own_id = own_id
        self._start_version = start_version
        self._latest = (0, 0)  # version, stage
        self._attempt = 0  # latest accepted attempt
        self._waiting: UnitOrder | None = None
        self.port = 0  # port that is reported as the port of the group's store
        self.samples_done = 0
        self.rank = rank
        self.size = 1  # number of members of the current group
        self.batch = 1  # global batch of the current group
        self.group = Version(0)  # version of the current group; 0: none yet
        self.leaving = False

    def receive(self, order: GroupOrder) -> tuple[Reply, ...]:
        """Process an order and return the replies; an order that is not newer has none."""
        if (order.version, order.stage) <= self._latest:
            return ()
        self._latest = (order.version, order.stage)
        member = order.group.member(self._own_id)
        if order.stage == PREPARE:
            return self._prepare(order)
        if order.stage >= SETTLED:
            self.leaving = self.leaving and member is None
            return ()
        if order.kind == SUSPEND:
            self.leaving = True
            if self.rank:
                return ()
            done = {"epoch": 0, "step": 0, "samples_done": self.samples_done}
            return ((Suspended, {"group": order.version, **done}),)
        self.leaving = member is None
        if member is None:
            return ()
        self.rank, self.size, self.group = member.rank, len(order.group.members), order.version
        self.batch = order.group.global_batch
        return ((GroupFormed, {"group": order.version, "epoch": 0, "step": 0}),)

    def _prepare(self, order: GroupOrder) -> tuple[Reply, ...]:
        if order.kind == RECOVER:
            quiesced = {"step": 0, "epoch": 0, "has_full_state": True, "port": self.port}
            return ((Quiesced, {"group": order.version, **quiesced}),)
        members = order.group.members
        first = members[0].worker if members else None
        if (
            order.kind in {START, JOIN}
            and first == self._own_id
            and order.version != self._start_version
        ):
            return ((StoreOpened, {"group": order.version, "port": self.port}),)
        return ()

    def assign(self, unit: UnitOrder) -> bool:
        """Accept a unit if its attempt is new; return whether it is. So no attempt runs twice."""
        if unit.worker != self._own_id or unit.attempt <= self._attempt:
            return False
        self._attempt, self._waiting = unit.attempt, unit
        return True

    def pop(self) -> UnitOrder | None:
        """Remove and return the unit that waits to run, or None."""
        unit, self._waiting = self._waiting, None
        return unit


FUNCTION_FIELDS: Final = ("input_fn", "model_fn", "train_fn", "eval_fn")
DATA_FOLDER: Final = "data"  # folder of staged data below the states


def run_sweep_worker(assignment: Assignment, folder: Path, sweep: SweepSpec) -> None:
    """Run a worker of a sweep until it is no longer a member of any group."""
    with contextlib.closing(SweepWorker(assignment, folder, sweep)) as worker:
        worker.run()


class SweepWorker:
    """Process of a sweep worker."""

    def __init__(self, assignment: Assignment, folder: Path, sweep: SweepSpec) -> None:
        """Connect to the agent."""
        self._assignment = assignment
        self._sweep = sweep
        own_id = worker_id(assignment.job, assignment.version, assignment.rank)
        self._orders = SweepWorkerOrders(own_id, assignment.version, assignment.rank)
        self._changed = threading.Condition()
        self._granted = threading.Event()
        if assignment.granted:
            self._granted.set()
        self._states = Path(assignment.states)
        self._store = StateStore(assignment.job, self._states)
        self._speed, self._usage = UnitSpeed(), UsageMeter()
        self._server: StateServer | None = None
        self._runner: UnitRunner  # set when the functions are imported
        self._connection = AgentConnection(assignment, folder, self._on_message)

    def run(self) -> None:
        """Import the functions, report ready, and train the units that arrive."""
        hold_device(self._await_slot)
        given = {name: getattr(self._sweep, name) for name in FUNCTION_FIELDS}
        functions = import_functions({name: path for name, path in given.items() if path})
        self._serve()
        self._await_slot()
        device = slot_device()
        _warm_up(device)
        staged = StagedData(self._states / DATA_FOLDER)
        self._runner = UnitRunner(functions, self._sweep.partitions, device, staged)
        self._connection.report(
            WorkerReady,
            epoch_samples=1,  # placeholder: the number is not known yet
            resumed_epoch=0,
            parameters=0,
            store_port=self._orders.port,
        )
        self._connection.report(
            SweepWorkerReady, address=self._server.address if self._server else ""
        )
        self._connection.set_telemetry(self._steps)
        while (unit := self._next()) is not None:
            self._make_attempt(unit)

    def close(self) -> None:
        """Disconnect from the agent and from other nodes."""
        self._connection.close()
        if self._server is not None:
            self._server.close()

    def _serve(self) -> None:
        address = self._assignment.address
        try:
            self._server = StateServer(address, self._store.key_of, self._store.find)
            self._orders.port = self._server.port
        except OSError as error:
            text = f"cannot listen on {address}: {error.strerror}"
            sys.stderr.write(f"[ones] {text}; other nodes read states from the agent's disk\n")

    def _await_slot(self) -> None:
        if not self._granted.is_set():
            self._connection.report(SlotAwaited)
        self._granted.wait()

    def _next(self) -> UnitOrder | None:
        with self._changed:
            while True:
                if (unit := self._orders.pop()) is not None:
                    return unit
                if self._orders.leaving:
                    return None
                self._changed.wait()

    # --- attempts at units

    def _make_attempt(self, order: UnitOrder) -> None:
        """Train a unit and report the result; the worker continues after a failure."""
        try:
            self._run_attempt(order)
        except Exception as error:  # noqa: BLE001 - the worker continues after any error
            fault, why = fault_of(error)
            _log(order, f"failed: {why}")
            if isinstance(error, UnitFailedError):
                traceback.print_exception(error.__cause__)
        else:
            return
        gc.collect()  # frees tensors that the error's stack frames refer to
        if self._runner.device.type != "cpu":
            torch.accelerator.empty_cache()
        self._connection.report(UnitFailed, attempt=order.attempt, reason=why, fault=fault)

    def _run_attempt(self, order: UnitOrder) -> None:
        began = time.monotonic()
        wait = Background(partial(self._state_of, order), "state") if order.state else None
        data = self._runner.data(order.partition)
        if order.evaluate and self._sweep.eval_fn:
            self._runner.data(None)
        staged_s, samples = time.monotonic() - began, count_samples(data)
        state = wait.result() if wait else None
        waited_s = wait.seconds if wait else 0.0
        _log(order, f"{samples} samples")
        begun = {"samples": samples, "waited_s": waited_s, "staged_s": staged_s}
        self._connection.report(UnitStarted, attempt=order.attempt, **begun)
        started = time.monotonic()
        while (result := self._train(order, state)) is None:
            state = self._state_of(order)
        seconds = time.monotonic() - started
        self._store.put(order, result)
        self._speed.add(samples, time.monotonic() - began)
        self._connection.report(
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
        """Run the user's functions on `state`; return None if the state is damaged."""
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

    # --- the connection's thread

    def _on_message(self, message: ToWorker) -> None:
        match message:
            case SlotGranted():
                self._granted.set()
            case UnitTask(unit=unit, states_key=key):
                self._store.key = key
                with self._changed:
                    self._orders.assign(unit)
                    self._changed.notify_all()
            case GroupOrder():
                self._orders.samples_done = self._speed.samples
                with self._changed:
                    for kind, fields in self._orders.receive(message):
                        self._connection.report(kind, **fields)
                    self._changed.notify_all()

    def _steps(self) -> Iterator[StepsReported]:
        """Yield telemetry of the whole group on rank 0; other ranks yield nothing."""
        orders, speed = self._orders, self._speed.samples_per_s()
        if orders.rank or not orders.group or speed is None:
            return
        usage = self._usage.usage(cpu_seconds(), time.monotonic())
        yield StepsReported(
            **identity(self._assignment),
            group=orders.group,
            epoch=1,
            step=self._speed.units,
            samples_done=self._speed.samples,
            samples_per_s=speed * orders.size,  # as if the others were as fast
            train_loss=None,
            global_batch=orders.batch,
            lr=0.0,
            cpu_cores=None if usage is None else usage.cpu_cores,
        )


def _warm_up(device: torch.device) -> None:
    """Run a backward pass and an optimizer step, because the first ones in a process are slow."""
    use_device(device)
    warm_up(device)
    weight = torch.nn.Parameter(torch.ones(8, device=device))
    weight.grad = torch.ones_like(weight)
    torch.optim.Adam([weight]).step()
