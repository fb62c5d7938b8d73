"""Run of a user's script as `__main__`, and output to a disk that might be full.

The library is imported before the script's folder is added to the path.

Instead of a script, a worker can run units of a sweep, or a trial of a sweep that continues as an
elastic job. Such a job uses the user functions of the sweep and starts with the state that the
sweep left. `unit.loader` returns the elastic loader of all partitions together, so `train_fn`
trains one epoch of the whole data set, in a group that grows and shrinks.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from setproctitle import setproctitle
from torch.utils.data import ConcatDataset, DataLoader, Dataset

import elastic  # noqa: F401 - before the script's folder is on the path
from elastic.agent import ScalingAgent
from elastic.collectives.nccl import nccl_environment
from elastic.reporting import ReportFile, report_file
from elastic.state.checkpoints import drain_checkpoints
from elastic.state.random_state import seed_generators, seed_initial_generators
from elastic.sweep_worker.process import run_sweep_worker
from elastic.sweep_worker.state_store import fetch_frames
from elastic.sweep_worker.unit import (
    EvalFunction,
    Unit,
    UserFunctions,
    from_frames,
    import_functions,
    keyed_seed,
)
from elastic.sweep_worker.unit_runner import Trained, UnitRunner, as_trained
from elastic.training_errors import MissingMetricError, UsageError
from schemas.codec import ASSIGNMENT
from schemas.errors import one_line_error, root_cause
from schemas.sweeps import TrialSpec
from schemas.transport.state_transfer import MemoryTarget
from schemas.wire.agent import START, ScriptFailed
from schemas.wire.files import AskState
from schemas.wire.worker import Assignment

LOADED: Final = frozenset({"model", "optimizer"})  # `load` handles these; others are tracked


@dataclass(frozen=True, slots=True)
class WholeUnit(Unit):
    """An epoch over all partitions, as passed to `train_fn` and `eval_fn`."""

    elastic_loader: Any = None

    def loader(
        self, data: Any, batch_size: int, *, shuffle: bool = True, **options: Any
    ) -> DataLoader[Any]:
        """Return the loader of the job, which decides the batch and the order of samples."""
        return self.elastic_loader  # type: ignore[no-any-return]


def train_graduated(assignment: Assignment, trial: TrialSpec) -> None:
    """Train a trial to its last epoch, as a member of its job's group."""
    functions = import_functions(trial.functions)
    runner = UnitRunner(functions, trial.partitions, torch.device("cpu"))
    data = _all_partitions(runner, trial.partitions)
    trained = _build_trained(functions, trial)
    if assignment.kind == START and assignment.rank == 0 and assignment.group.resume is None:
        trained.load(_fetch_trial_state(trial))  # others receive rank 0's state, or a checkpoint
    agent = ScalingAgent.from_env()
    batch = assignment.spec.batch_size
    _, _, loader = agent.load(
        lambda: trained.model,
        lambda _: trained.optimizer,
        data,
        batch_size=batch,
        schedule_batch=batch,
    )
    agent.track(**{name: getattr(trained, name) for name in trained if name not in LOADED})
    for epoch in agent.epochs(trial.epochs - trial.epochs_done):
        unit = WholeUnit(
            config=str(trial.trial),
            values=trial.values,
            epoch=trial.epochs_done + 1 + epoch,
            partition=0,
            partitions=trial.partitions,
            sweep_seed=trial.seed,
            device=agent.device,
            elastic_loader=loader,
        )
        metrics = dict(functions.train_fn(trained, data, unit) or {})
        if functions.eval_fn is not None:
            metrics |= _evaluate(functions.eval_fn, trained, runner.data(None), unit)
        agent.report(**{name: float(value) for name, value in metrics.items()})


def _build_trained(functions: UserFunctions, trial: TrialSpec) -> Trained:
    seed_generators(keyed_seed(trial.seed, str(trial.trial)))
    trained = as_trained(functions.model_fn(dict(trial.values)))
    if "optimizer" not in list(trained):
        hint = "return (model, optimizer): a trial that continues as a job needs both"
        raise UsageError("model_fn returned no optimizer", hint, "model_fn")
    return trained


def _evaluate(
    eval_fn: EvalFunction, trained: Trained, held_out: Any, unit: WholeUnit
) -> dict[str, float]:
    trained.model.eval()
    with torch.no_grad():
        found = dict(eval_fn(trained, held_out, unit))
    trained.model.train()
    return found


def _all_partitions(runner: UnitRunner, partitions: int) -> ConcatDataset[Any]:
    parts = [runner.data(partition) for partition in range(partitions)]
    for part in parts:
        if not isinstance(part, Dataset):
            problem = f"input_fn returned a {type(part).__name__}"
            hint = "return a torch Dataset: a trial that continues as a job needs one"
            raise UsageError(problem, hint, "input_fn")
    return ConcatDataset(parts)


def _fetch_trial_state(trial: TrialSpec) -> dict[str, Any]:
    asked = AskState(
        job=trial.sweep, trial=trial.trial, version=trial.version, digest=trial.digest, offset=0
    )
    return from_frames(fetch_frames(MemoryTarget(), trial.sources, asked, trial.states_key))


USAGE_ERROR = 2


def main() -> None:
    """Run the script that the command line names."""
    if len(sys.argv) < USAGE_ERROR:
        sys.stderr.write("usage: python -P -m elastic.launch SCRIPT [ARGS]\n")
        sys.exit(USAGE_ERROR)
    seed_initial_generators(None)
    script = Path(sys.argv[1])
    sys.exit(_run_source(script, _source(script), sys.argv[2:], lambda *_: None))


def prepare_worker(folder: Path) -> Callable[[], int]:
    """Prepare this process as the worker of `folder`; return a function that runs user code.

    The function returns the exit code of the process. An OSError is raised before any user code
    runs.
    """
    assignment = ASSIGNMENT.decode((folder / "assignment").read_bytes())
    owner = f"{assignment.user}/" if assignment.user else ""
    setproctitle(f"ones: {owner}{assignment.job} rank {assignment.rank}")
    os.environ.update(assignment.env)
    if assignment.env.get("CUDA_VISIBLE_DEVICES"):
        os.environ.update(nccl_environment(assignment.address, os.environ))
    os.environ["ONES_WORKER"] = str(folder)
    os.environ["ONES_WORKER_PID"] = str(os.getpid())  # a container has numbers of its own
    os.environ["ONES_JOB"] = assignment.job
    threads = assignment.env.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > 0:
        torch.set_num_threads(int(threads))  # torch read the variable before the fork
    seed_initial_generators(assignment.spec.stated_seed)
    workdir = Path(assignment.workdir)
    os.chdir(workdir)
    report = partial(_report_failure, report_file(folder / "reports"), assignment)
    if assignment.spec.record_samples:
        (folder / "samples").touch(mode=0o600)
    if (sweep := assignment.spec.stated_sweep) is not None:
        train = partial(run_sweep_worker, assignment, folder, sweep)
        return lambda: _run_functions(assignment, train, report)
    if (trial := assignment.spec.stated_trial) is not None:
        train = partial(train_graduated, assignment, trial)
        return lambda: _run_functions(assignment, train, report)
    script = workdir / assignment.spec.script
    source = _source(script)
    return lambda: _run_source(script, source, assignment.spec.args, report)


def _run_functions(
    assignment: Assignment, run: Callable[[], None], report: Callable[..., None]
) -> int:
    """Run a sweep worker, or a trial that continues as a job; return the exit code."""
    workdir = Path(assignment.workdir)
    sys.argv = [str(workdir / assignment.spec.script), *assignment.spec.args]
    sys.path.insert(0, str(workdir))
    try:
        run()
    except BaseException as error:  # noqa: BLE001 - any error ends the worker
        traceback.print_exception(error)
        place = _location(error.__cause__ or root_cause(error), workdir / "sweep")
        report(error, place)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _report_failure(
    reports: ReportFile, assignment: Assignment, error: BaseException | str, where: str
) -> None:
    """Write the last report of a worker, after the reports of finished epochs."""
    cause = root_cause(error) if isinstance(error, BaseException) else None
    drain_checkpoints()  # finished epochs are reported first
    reports.report(
        ScriptFailed,
        assignment,
        error=(error if isinstance(error, str) else one_line_error(error))[:2000],
        where=where,
        refused=isinstance(cause, UsageError | MissingMetricError),
    )


def _source(script: Path) -> bytes | None:
    return script.read_bytes() if script.is_file() else None


def _run_source(
    script: Path, source: bytes | None, args: Sequence[str], report: Callable[..., None]
) -> int:
    """Run `source` as `__main__` and return its exit code; print a traceback if it raised."""
    if source is None:
        sys.stderr.write(f"[ones] script {script.name} does not exist\n")
        report(f"script {script.name!r} is not in the working directory", "")
        return USAGE_ERROR
    script = script.resolve()
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.parent))
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=str(script), __builtins__=builtins)
    sys.modules["__main__"] = module
    try:
        code = compile(source, str(script), "exec")
        exec(code, module.__dict__)  # noqa: S102 - running the user's script is the purpose
    except SystemExit as leaving:
        if not isinstance(leaving.code, int | None):
            report(leaving, _location(leaving, script))
        return _exit_code(leaving)
    except BaseException as error:  # noqa: BLE001 - any error ends the script
        shown = _script_part(error, script) or error.__traceback__
        traceback.print_exception(type(error), error, shown)
        report(error, _location(root_cause(error), script) or _location(error, script))
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def _script_part(error: BaseException, script: Path) -> types.TracebackType | None:
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != str(script):
        frame = frame.tb_next
    return frame


def _location(error: BaseException, script: Path) -> str:
    """Return FILE:LINE of the innermost frame in the script's folder, or "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(script.parent):
            continue
        own = path.relative_to(script.parent)
        if ".venv" not in own.parts:
            place = f"{own}:{line}"
    return place


DISK_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})


class LossyOutput(io.RawIOBase):
    """Output stream that drops and counts the bytes that a full disk does not accept."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lost = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the underlying descriptor."""
        return self._descriptor

    def write(self, data: object) -> int:
        """Write the bytes that fit, after a line about earlier lost bytes if there are any.

        Returns the length of `data`, including lost bytes.
        """
        view = memoryview(data)  # type: ignore[arg-type] # any buffer of the text layer
        size = view.nbytes
        try:
            if self._lost:
                text = f"\n[ones] {self._lost} bytes of output were lost: the disk was full\n"
                note = memoryview(text.encode())
                while note:
                    note = note[os.write(self._descriptor, note) :]
                self._lost = 0
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            if error.errno not in DISK_ERRNOS:
                raise
            self._lost += view.nbytes
        return size
