"""Fixtures that several rooms share, and how the suite is spread over processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.cluster import Cluster

settings.register_profile("full")
settings.register_profile("quick", max_examples=25)
SHARED = ("cluster", "nodes")  # fixtures that several files use, and one process should start
FIRST = ("integration/", "test_member", "core/test_properties", "test_quiet", "elastic/")
MORE_THAN_CORES = 2  # clusters wait more than they compute
MOST_WORKERS = 16


def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: some more processes than cores."""
    return min(len(os.sched_getaffinity(0)) + MORE_THAN_CORES, MOST_WORKERS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One process runs all tests of a file, or of a cluster; what takes longest begins."""
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        group = next((name for name in SHARED if _has(item, name)), item.nodeid.split("::")[0])
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=_rank)


def _has(item: pytest.Item, name: str) -> bool:
    """Whether a test uses that fixture for the whole session, not one of its file's own."""
    found = getattr(item, "_fixtureinfo").name2fixturedefs.get(name)  # noqa: B009 - no public way
    return found is not None and found[-1].scope == "session"


def _rank(item: pytest.Item) -> int:
    return next((n for n, part in enumerate(FIRST) if part in item.nodeid), len(FIRST))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of four slots that survives whatever the tests do to it."""
    base: Path = tmp_path_factory.mktemp("c")
    running = Cluster(base / "home", base / "jobs")
    running.up()
    yield running
    running.down()


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes of two slots under the search."""
    base: Path = tmp_path_factory.mktemp("n")
    running = Cluster(base / "home", base / "jobs", slots=2, agents=2, policy="ones")
    running.up()
    yield running
    running.down()


@pytest.fixture
def pair(nodes: Cluster) -> Iterator[Cluster]:
    """Two nodes of two slots under the search, on which no job is left behind."""
    yield nodes
    nodes.clear()
