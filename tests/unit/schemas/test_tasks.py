"""A task that fails is started again, unless its failure is fatal."""

from __future__ import annotations

import pytest

from schemas.host import tasks
from schemas.host.tasks import supervised


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "PAUSE_S", 0.0)


class Work:
    """Fails as often as told, then ends."""

    def __init__(self, failures: int) -> None:
        self.failures, self.runs = failures, 0

    async def run(self) -> None:
        self.runs += 1
        if self.runs <= self.failures:
            raise OSError(24, "Too many open files")


async def test_a_failed_task_is_started_again() -> None:
    work = Work(failures=2)

    await supervised("files", work.run, lambda: False)

    assert work.runs == 3


async def test_a_fatal_failure_ends_the_daemon() -> None:
    work = Work(failures=2)

    with pytest.raises(OSError, match="Too many open files"):
        await supervised("files", work.run, lambda: True)

    assert work.runs == 1
