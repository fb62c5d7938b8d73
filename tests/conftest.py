"""Fixtures that several rooms share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of four slots that survives whatever the tests do to it."""
    base: Path = tmp_path_factory.mktemp("c")
    running = Cluster(base / "home", base / "jobs")
    running.up()
    yield running
    running.down()
