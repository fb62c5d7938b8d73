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
CLUSTERS = {"cluster", "pair", "house", "box"}  # fixtures that one process should start once
WAITING = ("tests/integration", "tests/examples", "tests/elastic")
MORE_THAN_CORES = 2  # clusters wait more than they compute
MOST_WORKERS = 16


def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: some more processes than cores."""
    return min(len(os.sched_getaffinity(0)) + MORE_THAN_CORES, MOST_WORKERS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that share a cluster run in one process; those that wait the longest begin."""
    for item in items:
        fixtures = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009 - no public way
        for name in CLUSTERS & fixtures.keys():
            home = fixtures[name][-1].baseid or "tests"
            item.add_marker(pytest.mark.xdist_group(f"{name} of {home}"))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(WAITING))


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
