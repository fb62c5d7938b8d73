"""Server that processes are forked from, and an agent that trains alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic import ScalingAgent
from tests.training.peers import fork_with

pytest.register_assert_rewrite("tests.training.frameworks.same_tests")


@pytest.fixture(scope="module", autouse=True)
def _forks() -> None:
    fork_with()


@pytest.fixture
def agent() -> Iterator[ScalingAgent]:
    made = ScalingAgent.from_env()
    yield made
    if made._reducer is not None:
        made._reducer.close()
