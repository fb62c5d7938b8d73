"""What is said of jobs that a user stops waiting for."""

from __future__ import annotations

import pytest

from controlplane.cli.submit import jobs_continue_notice


@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        (["a-1"], "\nones: a-1 goes on; `ones cancel a-1` ends it\n"),
        (["a-1", "b-2"], "\nones: a-1, b-2 go on; `ones cancel JOB` ends it\n"),
    ],
)
def test_an_interrupted_wait_says_that_its_jobs_go_on(
    jobs: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt), jobs_continue_notice(jobs):
        raise KeyboardInterrupt

    assert capsys.readouterr().err == said
