"""ones submit on a real cluster: several jobs, overrides, and the reason of a failure."""

from __future__ import annotations

import json

import pytest

from tests.support.cluster import Cluster

BAD = """
import sys

for line in range(40):
    print("line", line)
sys.exit("the data are gone")
"""


@pytest.mark.slow
def test_waiting_for_a_job_that_fails_prints_its_error_and_its_last_lines(cluster: Cluster) -> None:
    done = cluster.ones("submit", str(cluster.write(BAD, name="bad")), "--wait")

    (job,) = done.out.splitlines()
    travels, note, *said = done.err.splitlines()
    assert done.code == 1
    assert " in 2 files of " in travels
    assert note.startswith(f"{job}: train.py does not use elastic.ScalingAgent, ")
    assert said[0].startswith(f"ones: {job} failed: ")
    assert said[0].endswith("(exit code 1)")
    assert said[1] == "last output of rank 0:"
    assert said[2:-1] == [*(f"  line {line}" for line in range(26, 40)), "  the data are gone"]
    assert said[-1] == f"complete output: ones logs {job} --rank 0"


@pytest.mark.slow
def test_wait_prints_the_reason_of_a_failed_job_as_json(cluster: Cluster) -> None:
    done = cluster.ones("submit", str(cluster.write(BAD, name="bad")), "--wait", "-o", "json")

    job = done.json["job"]
    error = json.loads(done.err)["error"]
    assert (done.code, error.pop("lines")[-1]) == (1, "the data are gone")
    assert error == {
        "code": "job_failed",
        "message": f"{job} failed: the data are gone (train.py:6) (exit code 1)",
        "hint": f"`ones logs {job} --rank 0`",
        "rank": 0,
    }


def test_several_files_are_submitted_at_once_with_the_same_overrides(cluster: Cluster) -> None:
    script = "import os, sys; print(sys.argv[1:], os.environ['MODE'])"
    files = [str(cluster.write(script, name=name)) for name in ("one", "two")]

    done = cluster.ones("submit", *files, "--wait", "--set", "args.width=8", "--set", "env.MODE=x",
                        "-o", "json")  # fmt: skip

    jobs = [accepted["job"] for accepted in done.json]
    assert (done.code, done.err) == (0, "")
    assert [job.rpartition("-")[0] for job in jobs] == ["one", "two"]
    assert [cluster.output(job) for job in jobs] == [["['--width', '8'] x"]] * 2
