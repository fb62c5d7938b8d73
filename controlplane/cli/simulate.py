"""sim: policies on simulated clusters, one by one or side by side."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from controlplane.cli.exit_codes import Exit
from controlplane.cli.output import print_data, print_table
from controlplane.cli.scenario_options import Setup
from controlplane.cli.simulation_arguments import (
    check_run,
    numbers,
    options_by_policy,
    policy_options,
)
from controlplane.cli.simulation_progress import jobs_bar
from controlplane.sim import experiment
from controlplane.sim.analysis import figures, report_tables
from controlplane.sim.analysis.results_by_policy import comparison_json
from controlplane.sim.analysis.simulation_summary import summary
from controlplane.sim.experiment import Cell
from controlplane.sim.models.curves.loss_curves import encode
from controlplane.sim.run_scenario import simulate
from controlplane.sim.scenario_loading import trace_of
from controlplane.sim.simulation_result import SimulationResult
from controlplane.sim.simulator_errors import ResultsError, TraceError
from controlplane.sim.submissions import Trace
from controlplane.sim.traces.atomic_file import write_whole
from controlplane.sim.traces.importers import Layout, import_trace
from controlplane.sim.traces.journal_recording import recording_from_journal
from controlplane.sim.traces.recording_file import write_recording
from controlplane.sim.traces.trace_csv import write_trace

sim = App(name="sim", help="Simulate policies before you use them.")
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
) -> int:
    """Simulate one policy.

    Parameters
    ----------
    policy
        Its name.
    seed
        Of the trace, the jobs and the search.
    option
        NAME=VALUE of the policy, as in its settings; again for more.
    output
        Table for people, or JSON.
    plots
        Folder to draw slots over time into.
    setup
        What is simulated.
    """
    check_run([policy], policy, [seed], 1, plots)
    scenario = setup.scenario(record_allocations=plots is not None)
    trace, options = trace_of(scenario, seed), policy_options(option or [])
    with jobs_bar(policy, len(trace.jobs)) as record:
        result = simulate(policy, scenario, seed, options, trace=trace, record=record)
    if plots is not None:
        figures.draw([result], plots)
    if output in {"json", "jsonl"}:
        print_data(summary(result), output)
    else:
        report_tables.print_result(result)
    return Exit.OK


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
    workers: int | None = None,
    setup: Setup = DEFAULT,
) -> int:
    """Simulate several policies on the same traces, and compare them job by job.

    Parameters
    ----------
    policies
        Names, with commas between them.
    seeds
        One, a list or a range: 0-4 or 1,3,7.
    gpus
        Sizes of the cluster: 64 or 16,32,64.
    ours
        The policy that the others are compared with; default: ones, else the last.
    option
        POLICY.NAME=VALUE of a policy, as in its settings; again for more.
    output
        Table for people, or JSON.
    plots
        Folder to draw into.
    results
        File that keeps results, to go on after Ctrl-C; one JSON document on each line.
    workers
        Processes at a time; default: one for each core.
    setup
        What is simulated.
    """
    names = list(dict.fromkeys(name.strip() for name in policies.split(",") if name.strip()))
    seed_numbers, processes = numbers(seeds, "seeds"), workers or os.cpu_count() or 1
    mine = ours or ("ones" if "ones" in names else "".join(names[-1:]))
    check_run(names, mine, seed_numbers, processes, plots)
    sizes: list[int | None] = [*numbers(gpus, "gpus")] if gpus else [None]
    scenarios = [setup.scenario(gpus=size) for size in sizes]
    given = options_by_policy(option or [], names)
    cells = experiment.grid(
        [(name, given.get(name, {})) for name in names], scenarios, seed_numbers
    )
    with experiment.bar("simulating") as progress:
        simulated = experiment.run(cells, simulate_cell, results, processes, progress)
    if plots is not None:
        figures.draw(simulated, plots, mine)
    if output in {"json", "jsonl"}:
        print_data(comparison_json(simulated, mine), output)
    else:
        report_tables.print_comparison(simulated, mine)
    return Exit.OK


@sim.command
def generate(file: Path, /, *, seed: int = 0, setup: Setup = DEFAULT) -> int:
    """Write a generated trace of Table 2's workloads into a file.

    Parameters
    ----------
    file
        CSV to write.
    seed
        Of the draws.
    setup
        What is generated.
    """
    trace = trace_of(setup.scenario(), seed)
    write_trace(trace, file)
    print_table(("trace", "jobs", "submissions end after"), [_row(file, trace)])
    return Exit.OK


@sim.command
def record_curves(file: Path, /, *, seed: int = 0, families: str = "") -> int:
    """Train classical algorithms for real and write down their losses, for --physics curves.

    Parameters
    ----------
    file
        To write: JSON. The one that ships was made so.
    seed
        Of every training that draws.
    families
        Algorithms, with commas between them; default: all.
    """
    try:
        from controlplane.sim.models.curves.record import record  # noqa: PLC0415 - not always there
    except ImportError:
        hint = "in a checkout of ONES: pip install '.[examples]'"
        raise ResultsError("recording curves needs scikit-learn", hint) from None
    wanted = [name.strip() for name in families.split(",") if name.strip()]
    today = datetime.now(tz=UTC).date().isoformat()
    recorded = record(seed, today, wanted, lambda name: sys.stderr.write(f"trained {name}\n"))
    write_whole(file, encode(recorded), TraceError)
    algorithms = {curve.family for curve in recorded.curves}
    print_table(("file", "curves", "algorithms"), [(file, len(recorded.curves), len(algorithms))])
    return Exit.OK


@sim.command(name="import")
def import_(
    source: Path,
    file: Path,
    /,
    *,
    layout: Layout | Literal["journal"],
    most_gpus: int | None = None,
) -> int:
    """Turn a foreign trace, or a cluster's own journal, into one that can be simulated.

    Parameters
    ----------
    source
        File of another simulator's trace, or a controller's journal.
    file
        To write: CSV, or a recording for --physics recorded.
    layout
        Whose columns it has.
    most_gpus
        Leave out jobs that want more.
    """
    if layout == "journal":
        recording = recording_from_journal(source)
        write_recording(recording, file)
        trace = recording.as_trace()
    else:
        trace = import_trace(source, layout, most_slots=most_gpus)
        write_trace(trace, file)
    print_table(("trace", "jobs", "submissions end after"), [_row(file, trace)])
    return Exit.OK


def simulate_cell(cell: Cell) -> SimulationResult:
    """One simulation of an experiment, in a worker process."""
    return simulate(cell.policy, cell.scenario, cell.seed, cell.options)


def _row(file: Path, trace: Trace) -> tuple[object, ...]:
    return file, len(trace.jobs), f"{trace.jobs[-1].at:.0f} s"
