"""Many simulations in parallel processes: each result is kept as it comes."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from controlplane.sim.analysis import result_files
from controlplane.sim.results import SimulationResult
from schemas.errors import OnesError

SHOWN: Final = 5  # failures in a message
RAISED: Final = b"!"  # begins what a worker sends that could not simulate its cell
DONE: Final = b"="  # begins the result that it sends else


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation of an experiment."""

    policy: str
    options: dict[str, Any]  # of the policy
    scenario: Any  # a frozen struct that msgspec can write: trace, model, cluster, costs
    seed: int

    def __str__(self) -> str:
        """How a person finds it in the list of what was asked for."""
        given = ", ".join(f"{name}={value}" for name, value in self.options.items())
        label = f"{self.policy}({given})" if given else self.policy
        return f"{label} with seed {self.seed} [{cell_key(self)[:8]}]"


Simulate = Callable[[Cell], SimulationResult]  # of a module: a worker has to import it
OnProgress = Callable[["Progress"], None]


@dataclass(frozen=True, slots=True)
class Progress:
    """How an experiment stands; reported at its start and whenever a cell is over."""

    done: int  # of these, some were there before
    failed: int
    total: int
    cell: Cell | None = None  # that is over; None: at the start
    result: SimulationResult | None = None  # of this cell; None: it failed


@dataclass(frozen=True, slots=True)
class Failure:
    """A cell without a result, and why."""

    cell: Cell
    why: str


class StoppedError(OnesError):
    """The user ended an experiment with Ctrl-C."""

    code: ClassVar[str] = "stopped"


class CellsFailedError(OnesError):
    """Some cells came to nothing; `results` has all others."""

    code: ClassVar[str] = "cells_failed"

    def __init__(
        self, failures: Sequence[Failure], results: Sequence[SimulationResult], path: Path | None
    ) -> None:
        """Say why, for the first few, and how to go on.

        Args:
            failures: at least one.
            path: of the file that keeps those; None: nothing does.
        """
        reasons = "; ".join(f"{failure.cell}: {failure.why}" for failure in failures[:SHOWN])
        more = f"; and {len(failures) - SHOWN} more" if len(failures) > SHOWN else ""
        kept = f"the {len(results)} others are kept"
        again = f" in {path}: run the same command again for these only" if path else ""
        super().__init__(f"{len(failures)} failed: {reasons}{more}", kept + again)
        self.failures = tuple(failures)
        self.results = tuple(results)


def cell_key(cell: Cell) -> str:
    """The same for equal cells, on every machine.

    Args:
        cell: its scenario is something that msgspec can write.

    Returns:
        32 hexadecimal digits.
    """
    return hashlib.sha256(msgspec.json.encode(cell, order="deterministic")).hexdigest()[:32]


def grid(
    policies: Iterable[tuple[str, dict[str, Any]]], scenarios: Sequence[Any], seeds: Sequence[int]
) -> list[Cell]:
    """Every policy in every scenario with every seed; policies side by side.

    Args:
        scenarios: frozen structs that msgspec can write.
    """
    chosen = list(policies)
    return [
        Cell(policy=policy, options=options, scenario=scenario, seed=seed)
        for scenario in scenarios
        for seed in seeds
        for policy, options in chosen
    ]


def run(
    cells: Sequence[Cell],
    simulate: Simulate,
    path: Path | None = None,
    workers: int = 1,
    on_progress: OnProgress | None = None,
) -> list[SimulationResult]:
    """Simulate all cells, each in a process of its own.

    Args:
        cells: equal ones are simulated once.
        path: of the file where results go as they come; what it has of these cells is not
            simulated again. None: nothing is kept.
        workers: processes at a time, at least 1.

    Returns:
        The result of each cell, in their order.

    Raises:
        StoppedError: at Ctrl-C; the workers are gone, the file has what was done.
        CellsFailedError: when all others are done, if workers died or raised.
        ResultsError: if the file cannot be read or written.
    """
    if workers < 1:
        raise ValueError("workers must be at least 1")
    wanted = {cell_key(cell): cell for cell in cells}
    known = []
    if path is not None:
        result_files.create(path)
        known = result_files.load(path)
    experiment = _Experiment(
        cells=wanted,
        found={result.cell: result for result in known if result.cell in wanted},
        path=path,
        on_progress=on_progress or (lambda _: None),
    )
    try:
        experiment.run(simulate, workers)
    except KeyboardInterrupt:
        raise StoppedError(*_how_to_resume(experiment)) from None
    found = [experiment.found[key] for key in map(cell_key, cells) if key in experiment.found]
    if experiment.failures:
        place = {key: index for index, key in enumerate(wanted)}
        in_order = sorted(experiment.failures, key=lambda failure: place[cell_key(failure.cell)])
        raise CellsFailedError(in_order, found, path)
    return found


def _how_to_resume(experiment: _Experiment) -> tuple[str, str]:
    done = f"stopped after {len(experiment.found)} of {len(experiment.cells)} simulations"
    if experiment.path is None:
        return done, "name a file for the results to be able to go on"
    return done, f"run the same command again to go on from {experiment.path}"


@contextlib.contextmanager
def bar(title: str = "simulating") -> Iterator[OnProgress]:
    """A progress bar on stderr for as long as the context lasts; give it to `run`."""
    from rich import progress  # noqa: PLC0415 - slow to import
    from rich.console import Console  # noqa: PLC0415

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[last]}"),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(title, total=None, last="")

        def show(state: Progress) -> None:
            over = state.done + state.failed
            failed = f"{state.failed} failed " if state.failed else ""
            last = failed + (str(state.cell) if state.cell else "")
            shown.update(task, completed=over, total=state.total, last=last)

        yield show


@dataclass
class _Worker:
    process: ForkServerProcess
    pipe: Connection
    cell: Cell


@dataclass
class _Experiment:
    cells: dict[str, Cell]
    found: dict[str, SimulationResult]
    path: Path | None
    on_progress: OnProgress
    failures: list[Failure] = field(default_factory=list)
    busy: dict[Connection, _Worker] = field(default_factory=dict)

    def run(self, simulate: Simulate, workers: int) -> None:
        """Simulate what is not there yet; no worker is left behind, whatever happens."""
        self._tell()
        todo = [cell for key, cell in self.cells.items() if key not in self.found]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, simulate.__module__])
        try:
            while todo or self.busy:
                while todo and len(self.busy) < workers:
                    self._start(context, simulate, todo.pop(0))
                for ready in wait(list(self.busy)):
                    if isinstance(ready, Connection):
                        self._take(self.busy[ready])
        finally:
            for worker in self.busy.values():
                worker.process.kill()
            for worker in self.busy.values():
                worker.process.join()
                worker.pipe.close()

    def _start(self, context: ForkServerContext, simulate: Simulate, cell: Cell) -> None:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(simulate, cell, theirs), daemon=True)
        with _ctrl_c_waits():  # in between, a worker would run that nobody knows
            process.start()
            self.busy[mine] = _Worker(process, mine, cell)
        theirs.close()  # so that its end is seen here

    def _take(self, worker: _Worker) -> None:
        """Read what a worker left, or how it died."""
        try:
            message = worker.pipe.recv_bytes()
        except (EOFError, OSError):
            message = b""
        if message:
            worker.process.join()
        else:
            worker.process.join(timeout=1.0)  # it closed its pipe by dying
        del self.busy[worker.pipe]
        worker.pipe.close()
        if message.startswith(DONE):
            self._keep(worker.cell, message[len(DONE) :])
        else:
            why = message[len(RAISED) :].decode() or _death(worker.process.exitcode)
            self.failures.append(Failure(worker.cell, why))
            self._tell(worker.cell)

    def _keep(self, cell: Cell, encoded: bytes) -> None:
        result = msgspec.json.decode(encoded, type=SimulationResult)
        result = msgspec.structs.replace(result, cell=cell_key(cell))
        if self.path is not None:
            result_files.append(self.path, result)
        self.found[result.cell] = result
        self._tell(cell, result)

    def _tell(self, cell: Cell | None = None, result: SimulationResult | None = None) -> None:
        counts = (len(self.found), len(self.failures), len(self.cells))
        self.on_progress(Progress(*counts, cell=cell, result=result))


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Let a Ctrl-C within take effect at the end."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is None:
        yield  # it is never told of a Ctrl-C; None: a program around Python takes it
        return
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if heard:
            signal.raise_signal(signal.SIGINT)


def _death(code: int | None) -> str:
    """What the exit code of a worker says that left nothing else."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            hint = "; out of memory? try fewer workers" if name == "SIGKILL" else ""
            return f"its worker was killed by {name}{hint}"
    return f"its worker exited with code {code}"


# --- in a worker


def _work(simulate: Simulate, cell: Cell, pipe: Connection) -> None:
    """Simulate one cell, send its result, or what was raised."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it too; the parent ends it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        message = DONE + msgspec.json.encode(simulate(cell))
    except Exception as error:  # noqa: BLE001 - a cell's fault, whatever it is, is its own
        message = RAISED + _described(error).encode(errors="replace")
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(message)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _described(error: Exception) -> str:
    if isinstance(error, OnesError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
