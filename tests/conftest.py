"""Fixtures that several rooms share, and how the suite is spread over processes."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings
from structlog.dev import ConsoleRenderer, plain_traceback
from xdist.scheduler import LoadScopeScheduling

from tests.support.cluster import Cluster
from tests.support.sizes import FULL
from tests.support.turns import by_commit, turn

# No deadlines: suites run on busy machines too.
settings.register_profile("full", deadline=None, max_examples=FULL // 2 if by_commit() else FULL)
settings.register_profile("quick", max_examples=25, deadline=None)
# Tracebacks that are drawn in colours take a tenth of a second each.
structlog.configure(
    [
        *structlog.get_config()["processors"][:-1],
        ConsoleRenderer(exception_formatter=plain_traceback),
    ]
)
TOGETHER = {  # files that share a cluster, which one process should start
    "tests/integration/test_training.py": "cluster",
    "tests/integration/test_bad_input.py": "cluster",
    "tests/integration/test_submit.py": "cluster",
    "tests/integration/test_docs.py": "cluster",
    "tests/integration/test_wire_page.py": "cluster",
    "tests/integration/test_init.py": "cluster",
    "tests/integration/test_pages.py": "cluster",
    "tests/examples/test_examples.py": "cluster",
    "tests/examples/test_notebook.py": "cluster",
    # and files whose processes are forked from a server that has torch
    **dict.fromkeys(
        (
            "tests/elastic/test_group_changes.py",
            "tests/elastic/test_carried_state.py",
            "tests/elastic/test_exact_or_refused.py",
            "tests/elastic/test_gradient_bucket.py",
            "tests/elastic/test_hopper_process.py",
            "tests/elastic/test_iterable_data.py",
            "tests/elastic/test_job_seed.py",
            "tests/elastic/test_launch.py",
            "tests/elastic/test_process_group.py",
            "tests/elastic/test_several_optimizers.py",
            "tests/elastic/test_state_transfer.py",
        ),
        "crews",
    ),
    "tests/elastic/gpu/test_gpu_faults.py": "devices",
    "tests/elastic/gpu/test_gpu_parts.py": "devices",
    "tests/elastic/gpu/test_hopper_device.py": "devices",
    "tests/elastic/gpu/test_nccl_double.py": "devices",
}
APART = frozenset(  # every test is a cluster of its own, or takes half a minute by itself
    {
        "tests/chaos/test_laboratory.py",
        "tests/chaos/test_partitions.py",
        "tests/controlplane/core/test_properties.py",
        "tests/integration/test_policies_act.py",
        "tests/integration/test_quality_and_promises.py",
    }
)
LONGEST = (  # in this order
    "chaos/", "fuzz/",
    "integration/test_rescale", "integration/test_training", "test_group_changes",
    "integration/test_scheduling", "integration/test_two_nodes", "integration/test_survival",
    "test_launch", "ones/test_steady_cluster", "cli/test_simulate", "core/test_properties", "core/test_sweeps_and_policies", "core/test_hostile",
    "integration/", "elastic/gpu/", "test_kinds_of_models", "sim/test_simulated_planner", "service/test_search_planner", "sim/test_recorded_model",
    "ones/test_evolution", "sim/test_scenario", "sim/test_plots", "sim/", "elastic/",
)  # fmt: skip
# Clusters wait more than they compute; beyond it, tests are late on loaded hosts.
MORE_THAN_CORES = 1
MOST_WORKERS = 16


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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing that is imported is ever freed: the garbage collector need not look through it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Who runs what, in a run of several processes."""
    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: some more processes than cores."""
    return min(len(os.sched_getaffinity(0)) + MORE_THAN_CORES, MOST_WORKERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whose turn it is stays; in a run of several processes, what takes longest begins."""
    _take_turns(config, items)
    if hasattr(config, "workerinput"):
        items.sort(key=_rank)


def _take_turns(config: pytest.Config, items: list[pytest.Item]) -> None:
    together: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        for mark in item.iter_markers("turns"):
            together.setdefault((mark.args[0], mark.kwargs["of"]), []).append(item)
    out = {
        item
        for (what, of), those in together.items()
        for item in set(those) - set(turn(sorted(those, key=_name), what, of=of))
    }
    if out:
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]


def _name(item: pytest.Item) -> str:
    return item.nodeid


def _rank(item: pytest.Item) -> int:
    return next((n for n, part in enumerate(LONGEST) if part in item.nodeid), len(LONGEST))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of four slots that survives whatever the tests do to it."""
    base: Path = tmp_path_factory.mktemp("c")
    running = Cluster(base / "home", base / "jobs")
    running.up()
    yield running
    running.down()
