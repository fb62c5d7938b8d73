"""The crew with which other tests train a group."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.groups import LOOP, PLAIN, crew, script

pytestmark = pytest.mark.slow


def test_all_reports_of_a_worker_that_has_ended_are_heard(tmp_path: Path) -> None:
    with crew(tmp_path, script(PLAIN, LOOP)) as job:
        job.start(12)
        job.trains_on(1)
        (worker,) = job.workers.values()

        def has_ended() -> bool:
            (tmp_path / "enough").touch()
            worker.process.join(60)
            return not worker.alive

        job.until(has_ended, "the worker has ended")

        assert job.epochs()[-1].epoch == job.words()[-1]["epoch"]
