"""Shared fixtures, the rules of the gate, and how the suite is spread over processes."""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings
from structlog.dev import ConsoleRenderer, plain_traceback
from xdist.scheduler import LoadScopeScheduling

from tests.support import commands
from tests.support.cluster import Cluster
from tests.support.leftovers import Surroundings, surround
from tests.support.sizes import FULL

# No deadlines: suites run on busy machines too. The gate draws the same examples in every run.
settings.register_profile("full", deadline=None, max_examples=FULL)
settings.register_profile("quick", deadline=None, max_examples=20, derandomize=True)
# Tracebacks that are drawn in colours take a tenth of a second each.
structlog.configure(
    [
        *structlog.get_config()["processors"][:-1],
        ConsoleRenderer(exception_formatter=plain_traceback),
    ]
)

LEFT_OUT = ("slow", "root", "gpu")  # marks of tests that the gate does not run
MAX_ON_CLUSTER = 12  # tests of the gate that share the cluster
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"}
# matplotlib lists the host's fonts when it is first imported there
KNOWN_STARTS = (commands.__file__, "fc-list", "system_profiler")
NO_PROCESS = "a test of the gate starts no process: mark it `slow`"

SURROUNDINGS = pytest.StashKey[Surroundings]()
TORCH_SERVER = "crews"  # files whose processes are forked from one server that has torch
TOGETHER = {  # files that share what takes seconds to start
    **dict.fromkeys(
        (
            "tests/cluster/test_training.py",
            "tests/cluster/test_bad_input.py",
            "tests/cluster/test_submit.py",
            "tests/cluster/test_docs.py",
            "tests/cluster/test_wire_page.py",
            "tests/cluster/test_init.py",
            "tests/cluster/test_pages.py",
            "tests/cluster/test_migration_pages.py",
            "tests/cluster/test_examples.py",
            "tests/cluster/test_notebook.py",
        ),
        "cluster",
    ),
    **dict.fromkeys(
        (
            "tests/training/test_group_changes.py",
            "tests/training/test_carried_state.py",
            "tests/training/test_exact_or_refused.py",
            "tests/training/test_sweep_worker_process.py",
            "tests/training/test_iterable_data.py",
            "tests/training/test_job_seed.py",
            "tests/training/test_launch.py",
            "tests/training/test_process_group.py",
            "tests/training/test_several_optimizers.py",
            "tests/training/test_state_transfer.py",
        ),
        TORCH_SERVER,
    ),
    "tests/training/gpu/test_gpu_faults.py": "devices",
    "tests/training/gpu/test_gpu_parts.py": "devices",
    "tests/training/gpu/test_sweep_worker_device.py": "devices",
    "tests/training/gpu/test_nccl_double.py": "devices",
}
APART = frozenset(  # every test is a cluster of its own, or takes half a minute by itself
    {
        "tests/chaos/test_laboratory.py",
        "tests/chaos/test_partitions.py",
        "tests/unit/controlplane/core/test_properties.py",
        "tests/cluster/test_policies_act.py",
        "tests/cluster/test_quality_and_promises.py",
    }
)
LONGEST = (  # in this order
    "chaos/", "fuzz/",
    "cluster/test_rescale", "cluster/test_training", "test_group_changes",
    "cluster/test_scheduling", "system/test_two_nodes", "cluster/test_survival",
    "test_launch", "ones/test_steady_cluster", "cli/test_simulate", "core/test_properties", "core/test_sweeps_and_policies", "core/test_hostile",
    "cluster/", "system/", "training/gpu/", "test_kinds_of_models", "sim/test_simulated_planner", "service/test_search_planner", "sim/test_recorded_model",
    "ones/test_evolution", "sim/test_scenario", "sim/test_plots", "sim/", "training/",
)  # fmt: skip
MORE_THAN_CORES = 1  # processes
MAX_WORKERS = 16

_in_gate: pytest.Item | None = None  # the test that runs, if it belongs to the gate


class ByFile(LoadScopeScheduling):
    """One process runs all tests of a file, or of files that share something, in their order."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file in APART:
            return nodeid
        return TOGETHER.get(file, file)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give the whole run one temporary folder, which shows what is left behind."""
    if not hasattr(config, "workerinput") and config.option.basetemp is None:
        config.stash[SURROUNDINGS] = surround()
        config.option.basetemp = str(config.stash[SURROUNDINGS].pytest_folder)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that leaves anything behind."""
    multiprocessing.forkserver._forkserver._stop()
    multiprocessing.resource_tracker._resource_tracker._stop()
    multiprocessing.util._run_finalizers()  # which delete the folder of its sockets
    surroundings = session.config.stash.get(SURROUNDINGS, None)
    if surroundings is None:
        return
    commands.stop_server()
    left = surroundings.left()
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        sys.stderr.write("\n".join(["", "the tests left behind:", *left, ""]))
    green = session.exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
    surroundings.end(keep=not green)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector: nothing that is imported is ever freed."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Distribute whole files."""
    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: a process for each core, and more where clusters wait more than they compute."""
    more = 0 if "not slow" in config.option.markexpr else MORE_THAN_CORES
    return min(len(os.sched_getaffinity(0)) + more, MAX_WORKERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Hold the gate's bound on live tests; several processes begin with what takes longest."""
    on_cluster = [item for item in items if in_gate(item) and "cluster" in item.fixturenames]  # type: ignore[attr-defined]
    if len(on_cluster) > MAX_ON_CLUSTER:
        names = "\n  ".join(item.nodeid for item in on_cluster)
        raise pytest.UsageError(
            f"the gate has {len(on_cluster)} tests on the cluster and at most {MAX_ON_CLUSTER} "
            f"may be; mark some `slow`:\n  {names}"
        )
    if hasattr(config, "workerinput"):
        items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    return next((n for n, part in enumerate(LONGEST) if part in item.nodeid), len(LONGEST))


def in_gate(item: pytest.Item) -> bool:
    """Return whether `bin/test` without arguments runs the test."""
    return not any(item.get_closest_marker(mark) for mark in LEFT_OUT)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Know which test runs."""
    global _in_gate  # noqa: PLW0603 - audit hooks are global, too
    _in_gate = item if in_gate(item) and "cluster" not in item.fixturenames else None  # type: ignore[attr-defined]
    try:
        return (yield)
    finally:
        _in_gate = None


def _refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if _in_gate is None or event not in STARTS:
        return
    if not any(known in str(arguments) for known in KNOWN_STARTS):
        raise RuntimeError(NO_PROCESS)


def _start(process: multiprocessing.process.BaseProcess) -> None:
    if _in_gate is not None:
        raise RuntimeError(NO_PROCESS)
    _start_process(process)


sys.addaudithook(_refuse_processes)
_start_process = multiprocessing.process.BaseProcess.start
multiprocessing.process.BaseProcess.start = _start  # type: ignore[method-assign]


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose short name leaves room for those of Unix sockets."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of four slots that survives whatever the tests do to it."""
    base: Path = tmp_path_factory.mktemp("c")
    running = Cluster(base / "home", base / "jobs")
    running.up()
    yield running
    running.down()
