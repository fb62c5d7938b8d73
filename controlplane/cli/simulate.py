"""sim: policies on simulated clusters, one by one or side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from cyclopts import App, Parameter

from controlplane.cli.exit_codes import Exit
from controlplane.cli.output import print_json, print_table
from controlplane.policy.registry import entry
from controlplane.sim import experiment
from controlplane.sim.analysis import report
from controlplane.sim.analysis.simulation_summary import summary
from controlplane.sim.experiment import Cell
from controlplane.sim.node_groups import Nodes
from controlplane.sim.scenario import Scenario, simulate, trace_of
from controlplane.sim.simulation_result import Outcome
from controlplane.sim.simulator_errors import TraceError
from controlplane.sim.traces.importers import Layout, import_trace
from controlplane.sim.traces.journal_recording import recorded
from controlplane.sim.traces.recording_file import write as write_recording
from controlplane.sim.traces.trace_csv import write
from schemas.errors import BadFieldError

MOST_GPUS: Final = 1_000_000
MOST_NUMBERS: Final = 10_000
MOST_DIGITS: Final = 15
MOST_WORKERS: Final = 1024
MOST_FILES: Final = 1000

sim = App(name="sim", help="Simulate policies before you use them.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is simulated; see docs/simulator.md."""

    physics: Literal["table2", "profiles", "recorded"] = "table2"
    "How jobs train: a model of the paper's Table 2, measured tables, or a cluster's own journal."
    profiles: str = ""
    "Folder of the measured tables (physics profiles)."
    workload: str = ""
    "Trace to submit, a CSV or a recording; default: one is generated."
    gpus: int | None = None
    "Slots of the cluster, instead of --nodes."
    nodes: str = "16"
    "Nodes: a number, or groups of GPU types such as 8xv100,8xk80."
    gpus_per_node: int = 4
    "Slots of each node."
    jobs: int = 400
    "Length of a generated trace."
    interval: float = 30.0
    "Mean seconds between its submissions."
    arrivals: Literal["poisson", "uniform", "bursts", "philly"] = "poisson"
    "How its submissions come."
    mix: Literal["philly", "uniform"] = "philly"
    "How its workloads are drawn."
    warm_up: float | None = None
    "Share of the first jobs that are not counted; default 0.05 of generated traces, else 0."
    round: float = 0.0
    "Seconds between plans, as in published simulators; 0: whenever something happens."
    stall: float | None = None
    "Seconds that a change of a group stalls it."
    first_stall: float | None = None
    "Seconds that a start takes."
    latency: float = 0.05
    "Seconds from a question to the policy's answer."
    knowledge: Literal["L0", "L2", "L3"] = "L2"
    "What may be known: a job's own past, its relatives' too, the work that users state too."
    interference: str = "none"
    "Slow-downs between neighbours: none, pollux:SHARE or pairwise:SHARE."
    erratic: bool = False
    "Loss curves with spikes and plateaus."
    crashes: float = 0.0
    "Share of the jobs whose scripts fail once."
    cancels: float = 0.0
    "Share of the jobs that their users give up."
    node_loss: float = 0.0
    "Mean seconds between losses of a node; 0: none."
    generations: int = 3
    "That a searching policy evolves at each question."
    think_every: float = 5.0
    "Least seconds between questions that only an epoch's end raised, to a searching policy."

    def scenario(self, *, gpus: int | None = None, stays: bool = False) -> Scenario:
        """The same as a value.

        Raises:
            TraceError: if it makes no sense; it names the option.
        """
        generated = not self.workload
        if self.physics == "profiles" and not self.profiles:
            hint = "give --profiles DIR, the folder of the measured tables"
            raise TraceError("physics profiles needs tables", hint, "profiles")
        return Scenario(
            physics=self.physics,
            profiles=_absolute(self.profiles),
            content=_content(self.workload, self.profiles),
            workload=_absolute(self.workload),
            jobs=self.jobs,
            interval_s=self.interval,
            arrivals=self.arrivals,
            mix=self.mix,
            warm_up=self.warm_up if self.warm_up is not None else 0.05 * generated,
            nodes=_nodes(self.nodes, self.gpus_per_node, gpus or self.gpus),
            round_s=self.round,
            stall_s=self.stall,
            first_stall_s=self.first_stall,
            latency_s=self.latency,
            knowledge=self.knowledge,
            interference=self.interference,
            erratic=self.erratic,
            crash_share=self.crashes,
            cancel_share=self.cancels,
            node_loss_s=self.node_loss,
            generations=self.generations,
            think_s=self.think_every,
            stays=stays,
        )


DEFAULT = Setup()
Output = Annotated[Literal["table", "json"], Parameter(name=["--output", "-o"])]
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
    _check_run([policy], policy, [seed], 1, plots)
    scenario = setup.scenario(stays=plots is not None)
    outcome = simulate(policy, scenario, seed, _options(option or []))
    if plots is not None:
        report.draw([outcome], plots)
    if output == "json":
        print_json(summary(outcome))
    else:
        report.tell_one(outcome)
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
        File that keeps outcomes, to go on after Ctrl-C; one JSON document on each line.
    workers
        Processes at a time; default: one for each core.
    setup
        What is simulated.
    """
    names = list(dict.fromkeys(name.strip() for name in policies.split(",") if name.strip()))
    numbers, processes = _numbers(seeds, "seeds"), workers or os.cpu_count() or 1
    mine = ours or ("ones" if "ones" in names else "".join(names[-1:]))
    _check_run(names, mine, numbers, processes, plots)
    sizes: list[int | None] = [*_numbers(gpus, "gpus")] if gpus else [None]
    scenarios = [setup.scenario(gpus=size) for size in sizes]
    given = _options_by_policy(option or [], names)
    cells = experiment.grid([(name, given.get(name, {})) for name in names], scenarios, numbers)
    with experiment.bar("simulating") as progress:
        outcomes = experiment.run(cells, simulate_cell, results, processes, progress)
    if plots is not None:
        report.draw(outcomes, plots, mine)
    if output == "json":
        print_json(report.comparison(outcomes, mine))
    else:
        report.tell_all(outcomes, mine)
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
    write(trace, file)
    print_table(("trace", "jobs", "submissions end after"), [_told(file, trace)])
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
        recording = recorded(source)
        write_recording(recording, file)
        trace = recording.as_trace()
    else:
        trace = import_trace(source, layout, most_slots=most_gpus)
        write(trace, file)
    print_table(("trace", "jobs", "submissions end after"), [_told(file, trace)])
    return Exit.OK


def simulate_cell(cell: Cell) -> Outcome:
    """One simulation of an experiment, in a worker process."""
    return simulate(cell.policy, cell.scenario, cell.seed, cell.options)


# --- what options mean


def _check_run(
    names: Sequence[str], ours: str, seeds: Sequence[int], workers: int, plots: Path | None
) -> None:
    """Refuse before anything is simulated what could not be shown afterwards.

    Raises:
        OnesError: naming the option.
    """
    if not names:
        raise BadFieldError("no policies", "give names with commas between them", "policies")
    for name in names:
        entry(name)
    if ours not in names:
        what = f"{ours!r} is none of {', '.join(names)}"
        raise BadFieldError(what, "give --ours NAME, one of these", "ours")
    if min(seeds) < 0:
        raise BadFieldError(f"seed {min(seeds)} is negative", "give 0 or more", "seed")
    if not 1 <= workers <= MOST_WORKERS:
        what = f"{workers} processes at a time"
        raise BadFieldError(what, f"give 1 to {MOST_WORKERS}", "workers")
    if plots is not None:
        try:
            plots.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadFieldError(f"{plots}: {error.strerror}", "give a folder", "plots") from None


def _content(workload: str, profiles: str) -> str:
    """A fingerprint of the files that are simulated: results of others are not theirs."""
    files = [Path(workload)] if workload else []
    if profiles:
        files += sorted(Path(profiles).expanduser().rglob("*.csv"))[:MOST_FILES]
    seen = sha256()
    for file in files:
        try:
            seen.update(file.expanduser().read_bytes())
        except OSError:  # whoever reads it says what is wrong
            continue
    return seen.hexdigest()[:16] if files else ""


def _told(file: Path, trace: Any) -> tuple[object, ...]:
    return file, len(trace.jobs), f"{trace.jobs[-1].at:.0f} s"


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve()) if path else ""


def _nodes(text: str, per_node: int, gpus: int | None) -> tuple[Nodes, ...]:
    """Groups of nodes alike; `gpus` in all if that was said."""
    if per_node < 1:
        raise TraceError(f"{per_node} GPUs on a node", "give at least 1", "gpus-per-node")
    if gpus is not None:
        if not text.strip().isdecimal():
            hint = "give one of them"
            raise TraceError(f"--gpus {gpus} and --nodes {text} say both", hint, "gpus")
        if gpus > MOST_GPUS:
            raise TraceError(f"{gpus} GPUs", f"give at most {MOST_GPUS}", "gpus")
        if gpus < 1 or (gpus > per_node and gpus % per_node):
            what = f"{gpus} GPUs cannot be dealt out to nodes of {per_node}"
            raise TraceError(what, "give a multiple, or another --gpus-per-node", "gpus")
        slots = min(gpus, per_node)
        return (Nodes(count=gpus // slots, slots=slots),)
    groups = []
    for part in text.split(","):
        count, _, model = part.strip().lower().partition("x")
        if not count.isdecimal() or not 1 <= int(count) <= MOST_GPUS // per_node:
            hint = f"as in 16 or 8xv100,8xk80, with at most {MOST_GPUS} GPUs"
            raise TraceError(f"nodes {text!r} make no sense", hint, "nodes")
        groups.append(Nodes(count=int(count), slots=per_node, model=model))
    return tuple(groups)


def _numbers(text: str, field: str) -> list[int]:
    """1,3,5-7 as numbers."""
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise BadFieldError(f"{field} {text!r} make no sense", "as in 0-4 or 1,3,7", field)
        numbers = range(int(low), int(high or low) + 1)
        if not 1 <= len(numbers) <= MOST_NUMBERS or len(low) > MOST_DIGITS:
            hint = f"as in 0-4, with at most {MOST_NUMBERS} numbers"
            raise BadFieldError(f"{field} {text!r} make no sense", hint, field)
        found += numbers
    return list(dict.fromkeys(found))


def _options(given: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE as settings; a value is JSON if it can be, else text."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise BadFieldError(f"option {text!r} has no value", "give NAME=VALUE", "option")
        try:
            found[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            found[name] = value
    return found


def _options_by_policy(given: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, value in _options(given).items():
        policy, dot, option = name.partition(".")
        if not dot or policy not in names:
            what = f"option {name!r} is for none of {', '.join(names)}"
            raise BadFieldError(what, "give POLICY.NAME=VALUE", "option")
        found.setdefault(policy, {})[option] = value
    return found
