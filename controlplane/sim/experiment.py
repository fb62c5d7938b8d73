"""Parallel simulations, here or on a cluster; each result is saved as soon as it arrives.

A result file consists of JSON lines; a last line that a crash left incomplete is ignored. A file
that cannot be read or written, and a line that is not a result, raise `ResultsError`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import msgspec

from controlplane.policy.guard import REMEDY
from controlplane.sim.cluster import ResultsError
from controlplane.sim.results import SimulationResult
from schemas.errors import OnesError, one_line_error
from schemas.host.memory import limit_memory
from schemas.ids import Seconds

if TYPE_CHECKING:
    from ctypes import c_double

T = TypeVar("T")


class _Key(msgspec.Struct, frozen=True):
    """Fields that identify the simulation of a result; decoding skips all other fields."""

    policy: str
    options: dict[str, Any]
    setting: dict[str, Any]
    seed: int
    cell: str = ""


def key(result: SimulationResult | _Key) -> str:
    """Return JSON text that identifies a result's simulation; the order of options is ignored."""
    parts = (result.policy, result.options, result.setting, result.seed, result.cell)
    return msgspec.json.encode(parts, order="deterministic").decode()


def create(path: Path) -> None:
    """Create the file if it is missing, to find out early whether results can be written."""
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}", "choose another file") from None


def append(path: Path, result: SimulationResult) -> bool:
    """Append a result durably, or return False if its simulation already has a result in the file.

    Several processes may append to the file at the same time.
    """
    try:
        with path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
            file.seek(0)
            mine, size = key(result), 0
            for number, line in _complete_lines(file):
                if key(_decoded(path, number, line, _Key)) == mine:
                    return False
                size += len(line)
            file.truncate(size)
            file.write(msgspec.json.encode(result) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}", "choose another file") from None
    return True


def load(path: Path) -> list[SimulationResult]:
    """Return the results in a file, one for each simulation, or [] if the file is missing."""
    found: dict[str, SimulationResult] = {}
    try:
        with path.open("rb") as file:
            for number, line in _complete_lines(file):
                result = _decoded(path, number, line, SimulationResult)
                found.setdefault(key(result), result)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}", "name a readable file") from None
    return list(found.values())


def _complete_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(file, start=1):
        if line.endswith(b"\n"):
            yield number, line


def _decoded(path: Path, number: int, line: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = f"{path}:{number}: {error}"
        raise ResultsError(problem, "delete the line to simulate it again") from None


MAX_SHOWN_FAILURES: Final = 5  # number of failures that an error message describes
ERROR_PREFIX: Final = b"!"  # first byte of a message in which a worker reports an error
RESULT_PREFIX: Final = b"="  # first byte of a message that contains a result
UNFIT_PREFIX: Final = b"?"  # first byte of a message of a cluster's worker that can run no cell


class Cell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Simulation of an experiment: policy, options, scenario and seed."""

    policy: str
    options: dict[str, Any]  # options of the policy
    scenario: Any  # frozen struct that msgspec can encode: trace, model, cluster, costs
    seed: int
    code: str = ""  # digest of the file of a policy from outside; "": the policy is part of ONES

    def __str__(self) -> str:
        """Return a label that identifies the cell within an experiment."""
        given = ", ".join(f"{name}={value}" for name, value in self.options.items())
        label = f"{self.policy}({given})" if given else self.policy
        return f"{label} with seed {self.seed} [{cell_key(self)[:8]}]"


Simulate = Callable[[Cell], SimulationResult]  # a module-level function, because workers import it
OnProgress = Callable[["ExperimentProgress"], None]
# Sends a pickled (simulate, cell) to a cluster. The future is the message of `message_of`.
Submit = Callable[[bytes], "futures.Future[bytes]"]


@dataclass(frozen=True, slots=True)
class ExperimentProgress:
    """Progress of an experiment, reported at the start and after each cell."""

    done: int  # including results that were already in the file
    failed: int
    total: int
    cell: Cell | None = None  # cell that has just finished; None: at the start
    result: SimulationResult | None = None  # result of `cell`; None: the cell failed


@dataclass(frozen=True, slots=True)
class Failure:
    """Cell that has no result, and the reason."""

    cell: Cell
    reason: str


class StoppedError(OnesError):
    """Raised when Ctrl-C, or a worker that can run nothing, stops an experiment."""

    code: ClassVar[str] = "stopped"


class CellsFailedError(OnesError):
    """Raised when some cells failed; `results` contains the results of all other cells."""

    code: ClassVar[str] = "cells_failed"

    def __init__(
        self, failures: Sequence[Failure], results: Sequence[SimulationResult], path: Path | None
    ) -> None:
        reasons = "; ".join(f"{each.cell}: {each.reason}" for each in failures[:MAX_SHOWN_FAILURES])
        left = len(failures) - MAX_SHOWN_FAILURES
        more = f"; and {left} more" if left > 0 else ""
        kept = f"the {len(results)} others are kept"
        again = f" in {path}: run the same command again for these only" if path else ""
        super().__init__(f"{len(failures)} failed: {reasons}{more}", kept + again)
        self.failures = tuple(failures)
        self.results = tuple(results)


def cell_key(cell: Cell) -> str:
    """Return 32 hexadecimal digits that identify a cell on any machine; equal cells share them."""
    return hashlib.sha256(msgspec.json.encode(cell, order="deterministic")).hexdigest()[:32]


def grid(
    policies: Iterable[tuple[str, dict[str, Any]]],
    scenarios: Sequence[Any],
    seeds: Sequence[int],
    codes: Mapping[str, str] | None = None,
) -> list[Cell]:
    """Return one cell for each policy, scenario and seed; the policy varies fastest.

    `codes` has the digest of each policy from outside.
    """
    chosen, digests = list(policies), codes or {}
    return [
        Cell(
            policy=policy,
            options=options,
            scenario=scenario,
            seed=seed,
            code=digests.get(policy, ""),
        )
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
    *,
    submit: Submit | None = None,
    fork: bool = False,
) -> list[SimulationResult]:
    """Simulate all cells, each in its own process, and return their results in the same order.

    Args:
        cells: simulations to run; equal cells are simulated once.
        path: file to which results are appended. A cell that already has a result in this file is
            not simulated again. None: results are not saved.
        workers: number of cells that run, or are queued on a cluster, at the same time; at least 1.
        submit: sends a cell to a cluster; None: cells run on this host.
        fork: fork processes from this one, which spares imports; it should have no other threads.

    Raises:
        StoppedError: at Ctrl-C, after all workers on this host exited, or if a cluster's worker
            can run no cell; the file contains the finished results.
        CellsFailedError: if workers crashed or raised; all other cells are simulated first.
    """
    if workers < 1:
        raise ValueError("workers must be at least 1")
    wanted = {cell_key(cell): cell for cell in cells}
    known = []
    if path is not None:
        create(path)
        known = load(path)
    experiment = _Experiment(
        cells=wanted,
        found={result.cell: result for result in known if result.cell in wanted},
        path=path,
        on_progress=on_progress or (lambda _: None),
    )
    try:
        if submit is None:
            experiment.run(simulate, workers, fork=fork)
        else:
            experiment.run_on(submit, simulate, workers)
    except (KeyboardInterrupt, _UnfitWorkerError) as error:
        hint = "name a results file to be able to resume"
        if path is not None:
            hint = f"run the same command again to resume from {path}"
        done = f"stopped after {len(experiment.found)} of {len(wanted)} simulations"
        why = f": {error}" if isinstance(error, _UnfitWorkerError) else ""
        raise StoppedError(done + why, hint) from None
    found = [experiment.found[key] for key in map(cell_key, cells) if key in experiment.found]
    if experiment.failures:
        place = {key: index for index, key in enumerate(wanted)}
        in_order = sorted(experiment.failures, key=lambda failure: place[cell_key(failure.cell)])
        raise CellsFailedError(in_order, found, path)
    return found


@contextlib.contextmanager
def bar(title: str = "simulating") -> Iterator[OnProgress]:
    """Show a progress bar on stderr during the context; yield the callback for `run`."""
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

        def show(state: ExperimentProgress) -> None:
            over = state.done + state.failed
            failed = f"{state.failed} failed " if state.failed else ""
            last = failed + (str(state.cell) if state.cell else "")
            shown.update(task, completed=over, total=state.total, last=last)

        yield show


class _UnfitWorkerError(Exception):
    """A worker of a cluster can run no cell."""


@dataclass(frozen=True, slots=True)
class _Worker:
    process: BaseProcess
    cell: Cell
    called_at: c_double  # see `called`


@dataclass
class _Experiment:
    cells: dict[str, Cell]
    found: dict[str, SimulationResult]
    path: Path | None
    on_progress: OnProgress
    failures: list[Failure] = field(default_factory=list)
    busy: dict[Connection, _Worker] = field(default_factory=dict)

    def run(self, simulate: Simulate, workers: int, *, fork: bool) -> None:
        """Simulate the cells without a result; all workers have exited when this call ends."""
        todo = self._begin()
        context: ForkContext | ForkServerContext
        context = get_context("fork") if fork else get_context("forkserver")
        context.set_forkserver_preload([__name__, simulate.__module__])
        try:
            while todo or self.busy:
                while todo and len(self.busy) < workers:
                    self._start(context, simulate, todo.pop(0))
                for ready in wait(list(self.busy)):
                    if isinstance(ready, Connection):
                        self._receive(ready)
        finally:
            for worker in self.busy.values():
                worker.process.kill()
            for pipe, worker in self.busy.items():
                worker.process.join()
                pipe.close()

    def run_on(self, submit: Submit, simulate: Simulate, at_once: int) -> None:
        """Simulate the cells without a result on a cluster, which repeats those that it loses."""
        todo = self._begin()
        sent: dict[futures.Future[bytes], Cell] = {}
        while todo or sent:
            while todo and len(sent) < at_once:
                cell = todo.pop(0)
                sent[_sent(submit, simulate, cell)] = cell
            for future in futures.wait(sent, return_when=futures.FIRST_COMPLETED).done:
                cell = sent.pop(future)
                try:
                    message = future.result()
                except futures.CancelledError:
                    message = ERROR_PREFIX + b"the scheduler of the cluster is gone"
                except Exception as error:  # noqa: BLE001 - of any cluster
                    message = ERROR_PREFIX + one_line_error(error).encode(errors="replace")
                if message.startswith(UNFIT_PREFIX):
                    raise _UnfitWorkerError(message[len(UNFIT_PREFIX) :].decode())
                self._take(cell, message)

    def _begin(self) -> list[Cell]:
        """Report the start and return the cells without a result."""
        self._report_progress()
        return [cell for key, cell in self.cells.items() if key not in self.found]

    def _start(
        self, context: ForkContext | ForkServerContext, simulate: Simulate, cell: Cell
    ) -> None:
        mine, theirs = context.Pipe(duplex=False)
        called_at = context.RawValue("d", -1.0)
        arguments = (simulate, cell, theirs, called_at)
        process = context.Process(target=_run_worker, args=arguments, daemon=True)
        with _delay_ctrl_c():  # an interrupt between these lines would leave an unregistered worker
            process.start()
            self.busy[mine] = _Worker(process, cell, called_at)
        theirs.close()  # so that reading ends when the worker exits

    def _receive(self, pipe: Connection) -> None:
        """Save the result that a worker sent; if it sent an error or crashed, record a failure."""
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            message = b""
        worker = self.busy[pipe]
        cell = worker.cell
        # Without a message the worker is exiting.
        worker.process.join(timeout=None if message else 1.0)
        del self.busy[pipe]
        pipe.close()
        self._take(cell, message or ERROR_PREFIX + _describe_end(worker).encode())

    def _take(self, cell: Cell, message: bytes) -> None:
        if message.startswith(RESULT_PREFIX):
            self._save(cell, message[len(RESULT_PREFIX) :])
        else:
            self.failures.append(Failure(cell, message[len(ERROR_PREFIX) :].decode()))
            self._report_progress(cell)

    def _save(self, cell: Cell, encoded: bytes) -> None:
        result = msgspec.json.decode(encoded, type=SimulationResult)
        result = msgspec.structs.replace(result, cell=cell_key(cell))
        if self.path is not None:
            append(self.path, result)
        self.found[result.cell] = result
        self._report_progress(cell, result)

    def _report_progress(
        self, cell: Cell | None = None, result: SimulationResult | None = None
    ) -> None:
        counts = (len(self.found), len(self.failures), len(self.cells))
        self.on_progress(ExperimentProgress(*counts, cell=cell, result=result))


def _sent(submit: Submit, simulate: Simulate, cell: Cell) -> futures.Future[bytes]:
    try:
        return submit(pickle.dumps((simulate, cell)))
    except Exception as error:  # noqa: BLE001 - the cluster is gone
        failed: futures.Future[bytes] = futures.Future()
        failed.set_exception(error)
        return failed


@contextlib.contextmanager
def _delay_ctrl_c() -> Iterator[None]:
    """Delay a Ctrl-C signal until the end of the context."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is None:
        yield  # another thread gets no Ctrl-C, or C code outside Python handles it
        return
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if heard:
            signal.raise_signal(signal.SIGINT)


def _describe_end(worker: _Worker) -> str:
    """Return why a worker ended without a message, in a policy from outside or elsewhere."""
    code, at = worker.process.exitcode, worker.called_at.value
    if at < 0.0:
        return _describe_exit(code)
    what = f"ended its process: {_describe_exit(code)}"
    if code == -signal.SIGALRM:
        what = f"did not return within {CALL_TIMEOUT_S:.0f} s"
    return f"policy {worker.cell.policy} {what}, at {at:.1f} s of virtual time; {REMEDY}"


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            hint = "; out of memory? try fewer workers" if name == "SIGKILL" else ""
            return f"its worker was killed by {name}{hint}"
    return f"its worker exited with code {code}"


# --- in a worker


def message_of(simulate: Simulate, cell: Cell) -> bytes:
    """Simulate a cell in a process forked from this one; return its result or its failure."""
    try:
        (result,) = run([cell], simulate, fork=True)
    except CellsFailedError as error:
        return ERROR_PREFIX + error.failures[0].reason.encode()
    return RESULT_PREFIX + msgspec.json.encode(result)


CALL_TIMEOUT_S: Final = 60.0  # longest call of a policy from outside
_called_at: c_double | None = None  # of this worker


def called(now: Seconds | None) -> None:
    """Tell the parent that a policy is called at this virtual time; None: the simulation is over.

    If the policy does not return in time, the timer kills this worker.
    """
    if _called_at is not None:
        _called_at.value = -1.0 if now is None else now
        signal.setitimer(signal.ITIMER_REAL, 0.0 if now is None else CALL_TIMEOUT_S)


def _run_worker(simulate: Simulate, cell: Cell, pipe: Connection, called_at: c_double) -> None:
    global _called_at  # noqa: PLW0603 - a worker has one cell
    _called_at = called_at
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and kills workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.dup2(2, 1)  # what a policy prints is not part of the parent's output
    if cell.code:
        limit_memory()
    try:
        message = RESULT_PREFIX + msgspec.json.encode(simulate(cell))
    except Exception as error:  # noqa: BLE001 - any error fails this cell only
        message = ERROR_PREFIX + _describe_error(error).encode(errors="replace")
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(message)


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _describe_error(error: Exception) -> str:
    if isinstance(error, OnesError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
