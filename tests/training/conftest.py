"""Where the processes of this folder's tests are forked from."""

from __future__ import annotations

import pytest

from tests.training.peers import fork_with

pytest.register_assert_rewrite("tests.training.frameworks.same_tests")


@pytest.fixture(scope="module", autouse=True)
def _forks() -> None:
    fork_with()
