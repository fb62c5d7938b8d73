"""`ones sim`: simulate policies, one at a time or in comparison."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Final, Literal

from cyclopts import App, Parameter

from controlplane.cli.output import print_data, print_table
from controlplane.cli.policy import policy_options
from controlplane.cli.progress import progress
from controlplane.cli.scenario_options import Setup, content_of
from controlplane.core.commands import Announce, Command
from controlplane.core.inputs import Input
from controlplane.policy.guard import PolicyError
from controlplane.service.planner.policy_check import check_policy
from controlplane.sim import executors, experiment
from controlplane.sim.analysis import comparison
from controlplane.sim.analysis import plots as figures
from controlplane.sim.analysis.comparison import comparison_json
from controlplane.sim.analysis.summary import summary
from controlplane.sim.cluster import ResultsError, TraceError
from controlplane.sim.engine.simulation import Recorder
from controlplane.sim.executors import ExecutorName
from controlplane.sim.experiment import Cell
from controlplane.sim.models.curves import encode
from controlplane.sim.models.recording import write_recording, write_whole
from controlplane.sim.models.table2 import gpu_times
from controlplane.sim.results import SimulationResult, Trace
from controlplane.sim.run import simulate
from controlplane.sim.scenario import trace_of
from controlplane.sim.traces.foreign_traces import import_trace, layout_of
from controlplane.sim.traces.journal_recording import recording_from_journal
from controlplane.sim.traces.trace_csv import write_trace
from controlplane.sim.traces.trace_layouts import Layout
from schemas.errors import BadFieldError, install_hint
from schemas.ids import Seconds
from schemas.jobs import ENDED

MAX_NUMBERS: Final = 10_000
MAX_DIGITS: Final = 15
MAX_WORKERS: Final = 1024


def check_run(
    options: Mapping[str, Mapping[str, Any]],
    ours: str,
    seeds: Sequence[int],
    workers: int,
    plots: Path | None,
) -> dict[str, str]:
    """Refuse settings that would only fail after the simulation.

    Modules of policies can be in the current folder, which comes first, as for `python -m`.

    Args:
        options: options of each policy.

    Returns:
        The digest of the code of each policy, which is "" for a policy that is part of ONES.
    """
    if not options:
        raise BadFieldError("no policies", "give names with commas between them", "policies")
    here, names = Path.cwd(), list(options)
    codes = {
        name: check_policy(name, given, simulated=True, folder=here).code
        for name, given in options.items()
    }
    if any(codes.values()):
        sys.path.insert(0, str(here))  # workers have the same path
    if ours not in names:
        problem = f"{ours!r} is not one of {', '.join(names)}"
        raise BadFieldError(problem, "give --ours NAME, one of them", "ours")
    if min(seeds) < 0:
        raise BadFieldError(f"seed {min(seeds)} is negative", "give 0 or more", "seed")
    if not 1 <= workers <= MAX_WORKERS:
        problem = f"workers = {workers} is out of range"
        raise BadFieldError(problem, f"give 1 to {MAX_WORKERS}", "workers")
    if plots is not None:
        try:
            plots.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadFieldError(f"{plots}: {error.strerror}", "give a folder", "plots") from None
    return codes


def numbers(text: str, field: str) -> list[int]:
    """Parse a list such as 1,3,5-7 and drop duplicates."""
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        ends = (low, high) if dash else (low,)
        valid = all(end.isdecimal() and len(end) <= MAX_DIGITS for end in ends)
        numbers = range(int(low), int(high or low) + 1) if valid else range(0)
        if not 1 <= len(numbers) <= MAX_NUMBERS:
            hint = f"give a list such as 0-4 or 1,3,7, with at most {MAX_NUMBERS} numbers"
            raise BadFieldError(f"{field} {text!r} is not a list of numbers", hint, field)
        found += numbers
    return list(dict.fromkeys(found))


def options_by_policy(given: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse POLICY.NAME=VALUE settings and group them by policy."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in policy_options(given).items():
        policy, dot, option = name.rpartition(".")  # the policy can be package.module:Class
        if not dot or policy not in names:
            problem = f"option {name!r} is for none of {', '.join(names)}"
            raise BadFieldError(problem, "give POLICY.NAME=VALUE", "option")
        found.setdefault(policy, {})[option] = value
    return found


ENDS: Final = frozenset(f"job.{state}" for state in ENDED)
HOUR_S: Final = 3600.0


@contextlib.contextmanager
def jobs_bar(output: str, policy: str, jobs: int) -> Iterator[Recorder]:
    """Show the progress on a terminal; yield the `record` argument of `simulate`."""
    with progress(output, f"simulating {policy}", unit="jobs ended") as on_jobs:
        done = 0

        def record(_: Seconds, __: Input, commands: Sequence[Command]) -> None:
            nonlocal done
            if over := ended(commands):
                done += over
                on_jobs(done, jobs)

        yield record


def ended(commands: Sequence[Command]) -> int:
    """Return the number of jobs that ended, according to the commands for one input."""
    return sum(isinstance(c, Announce) and c.event.event in ENDS for c in commands)


sim = App(name="sim", help="Simulate policies.")
sim.command(
    "controlplane.cli.train:train",
    name="train",
    help="Train a learned policy in the simulator, and write its model.",
)

DEFAULT = Setup()
Output = Annotated[Literal["table", "json", "jsonl"], Parameter(name=["--output", "-o"])]
Option = Annotated[list[str] | None, Parameter(name="--option", negative=())]


@sim.command
def run(
    *,
    policy: str = "ones",
    seed: int = 0,
    option: Option = None,
    output: Output = "table",
    plots: Path | None = None,
    setup: Setup = DEFAULT,
) -> None:
    """Simulate one policy.

    Parameters
    ----------
    policy
        Name of the policy.
    seed
        Seed of the trace, the jobs and the search.
    option
        NAME=VALUE setting of the policy; repeatable.
    output
        Table for people, or JSON.
    plots
        Folder for drawings of slots over time.
    setup
        Simulated scenario.
    """
    options = policy_options(option or [])
    code = check_run({policy: options}, policy, [seed], 1, plots)[policy]
    scenario = setup.scenario(record_allocations=plots is not None)
    trace = trace_of(scenario, seed)
    if code:
        result = _simulate_apart(
            Cell(policy=policy, options=options, scenario=scenario, seed=seed, code=code)
        )
    else:
        with jobs_bar(output, policy, len(trace.jobs)) as record:
            result = simulate(policy, scenario, seed, options, trace=trace, record=record)
    if plots is not None:
        figures.draw([result], plots)
    if output in {"json", "jsonl"}:
        print_data(summary(result), output)
    else:
        comparison.print_result(result)


@sim.command
def compare(
    *,
    policies: str = "fifo,tiresias,ones",
    seeds: str = "0-4",
    gpus: str = "",
    ours: str | None = None,
    option: Option = None,
    output: Output = "table",
    plots: Path | None = None,
    results: Path | None = None,
    executor: ExecutorName = "local",
    workers: int | None = None,
    setup: Setup = DEFAULT,
) -> None:
    """Simulate several policies on the same traces, and compare them job by job.

    Parameters
    ----------
    policies
        Names, separated by commas.
    seeds
        One, a list or a range: 0-4 or 1,3,7.
    gpus
        Sizes of the cluster: 64 or 16,32,64.
    ours
        The policy that the others are compared with; default: ones, else the last.
    option
        POLICY.NAME=VALUE setting of a policy; repeatable.
    output
        Table for people, or JSON.
    plots
        Folder for drawings.
    results
        File that stores results so that a run interrupted by Ctrl-C can continue; JSON lines.
    executor
        Where simulations run: on this host, or on the cluster of RAY_ADDRESS or
        DASK_SCHEDULER_ADDRESS.
    workers
        Number of simulations at a time; default: one for each core, or all that a cluster takes.
    setup
        Simulated scenario.
    """
    names = list(dict.fromkeys(name.strip() for name in policies.split(",") if name.strip()))
    seed_numbers, local = numbers(seeds, "seeds"), executor == "local"
    at_once = workers or ((os.cpu_count() or 1) if local else MAX_WORKERS)
    own = ours or ("ones" if "ones" in names else "".join(names[-1:]))
    given = options_by_policy(option or [], names)
    options = {name: given.get(name, {}) for name in names}
    codes = check_run(options, own, seed_numbers, at_once, plots)
    sizes: list[int | None] = [*numbers(gpus, "gpus")] if gpus else [None]
    scenarios = [setup.scenario(gpus=size) for size in sizes]
    cells = experiment.grid(options.items(), scenarios, seed_numbers, codes)
    call = simulate_cell if local else SimulateElsewhere(str(Path.cwd()))
    with executors.executor(executor) as submit, experiment.bar("simulating") as on_progress:
        simulated = experiment.run(cells, call, results, at_once, on_progress, submit=submit)
    if plots is not None:
        figures.draw(simulated, plots, own)
    if output in {"json", "jsonl"}:
        print_data(comparison_json(simulated, own), output)
    else:
        comparison.print_comparison(simulated, own)


@sim.command
def generate(file: Path, /, *, seed: int = 0, setup: Setup = DEFAULT) -> None:
    """Write a generated trace of Table 2's workloads into a file.

    Parameters
    ----------
    file
        CSV file to write.
    seed
        Seed of the random draws.
    setup
        Scenario of the trace.
    """
    scenario = setup.scenario()
    trace = trace_of(scenario, seed)
    write_trace(trace, file)
    _print_trace(file, trace)
    if scenario.physics == "table2":
        print_table(WORK, [_work("simulated", gpu_times(trace.jobs))])


@sim.command
def record_curves(file: Path, /, *, seed: int = 0, families: str = "") -> None:
    """Train classical algorithms and record their losses, for --physics curves.

    Parameters
    ----------
    file
        JSON file to write. The bundled file was made by this command.
    seed
        Seed of every randomised training.
    families
        Algorithms, separated by commas; default: all.
    """
    try:
        from controlplane.sim.models.recorded_curves import record  # noqa: PLC0415 - not always there
    except ImportError:
        raise ResultsError(
            "recording curves needs scikit-learn", install_hint("examples")
        ) from None
    wanted = [name.strip() for name in families.split(",") if name.strip()]
    today = datetime.now(tz=UTC).date().isoformat()
    recorded = record(seed, today, wanted, lambda name: sys.stderr.write(f"trained {name}\n"))
    write_whole(file, encode(recorded), TraceError)
    algorithms = {curve.family for curve in recorded.curves}
    print_table(("file", "curves", "algorithms"), [(file, len(recorded.curves), len(algorithms))])


@sim.command(name="import")
def import_(
    source: Path,
    file: Path,
    /,
    *,
    layout: Layout | Literal["journal"] | None = None,
    most_gpus: int | None = None,
) -> None:
    """Convert a foreign trace, or a cluster's own journal, into one that can be simulated.

    The output shows what the conversion changed, and how many jobs were left out.

    Parameters
    ----------
    source
        Trace file of another simulator, log of a cluster, or a controller's journal.
    file
        File to write: CSV, or a recording for --physics recorded.
    layout
        Format of the source; default: recognised from its first line.
    most_gpus
        Omit jobs that request more GPUs.
    """
    layout = layout or layout_of(source)
    if layout == "journal":
        with progress("table", f"reading {source.name}"):
            recording = recording_from_journal(source)
        write_recording(recording, file)
        _print_trace(file, recording.as_trace())
        return
    with progress("table", f"reading {source.name}"):
        found = import_trace(source, layout, most_slots=most_gpus)
    write_trace(found.trace, file)
    _print_trace(file, found.trace)
    if found.gpu_s:
        simulated = gpu_times(found.trace.jobs)
        print_table(WORK, [_work("source", found.gpu_s), _work("simulated", simulated)])
    changes = dict(found.left_out)
    if found.rounded:
        changes["requested a fraction of a GPU, which was rounded up"] = found.rounded
    if changes:
        print_table(("jobs", "note"), [(many, note) for note, many in changes.items()])


def simulate_cell(cell: Cell) -> SimulationResult:
    """Run one simulation of an experiment in a worker process."""
    on_call = experiment.called if cell.code else None
    return simulate(cell.policy, cell.scenario, cell.seed, cell.options, on_call=on_call)


@dataclass(frozen=True)
class SimulateElsewhere:
    """Function that runs one simulation on a host whose files may differ from the user's."""

    folder: str  # from which modules of policies are imported

    def __call__(self, cell: Cell) -> SimulationResult:
        """Check the files of the cell and simulate it."""
        here, hint = platform.node(), "put it into a folder that all hosts share"
        if cell.code:
            sys.path.insert(0, self.folder)
            folder = Path(self.folder)
            found = check_policy(cell.policy, cell.options, simulated=True, folder=folder)
            if found.code != cell.code:
                raise PolicyError(f"policy {cell.policy} has another file on {here}", hint)
        if content_of(cell.scenario) != cell.scenario.content:
            raise TraceError(f"a file of the scenario is missing or differs on {here}", hint)
        return simulate_cell(cell)


def _simulate_apart(cell: Cell) -> SimulationResult:
    """Run one simulation in a worker process, which its policy cannot leave."""
    try:
        with experiment.bar(f"simulating {cell.policy}") as on_progress:
            return experiment.run([cell], simulate_cell, on_progress=on_progress)[0]
    except experiment.CellsFailedError as error:
        raise PolicyError(error.failures[0].reason) from None


def _print_trace(file: Path, trace: Trace) -> None:
    row = file, len(trace.jobs), f"{trace.jobs[-1].at:.0f} s"
    print_table(("trace", "jobs", "submissions end after"), [row])


WORK: Final = ("work", "jobs", "GPU hours", "variation")  # standard deviation / mean of GPU times


def _work(title: str, gpu_s: Sequence[float]) -> tuple[object, ...]:
    hours, mean = sum(gpu_s) / HOUR_S, fmean(gpu_s)
    deviation = math.sqrt(fmean((each - mean) ** 2 for each in gpu_s))
    return title, len(gpu_s), f"{hours:.1f}", f"{deviation / mean:.2f}"
