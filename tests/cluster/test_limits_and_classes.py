"""Limits of users, a class that preempts, and maintenance, on a cluster of two slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.test_shared_cluster import user_of
from tests.support.cluster import Cluster, explained, running

pytestmark = pytest.mark.slow  # a cluster of its own
RULES = """
[sharing.classes.urgent]
rank = 10
roles = ["admin"]
limit = 2
preempts = true
"""


def submit(cluster: Cluster, folder: Path, *options: str) -> str:
    """Submit a program on both slots that may begin again."""
    line = ("submit", "--wrap", "sleep 600", "--set", "slots=2", "--set", "on_loss=restart")
    done = cluster.ones(*line, *options, cwd=folder)
    assert done.code == 0, done.err
    return done.out.strip()


def why(cluster: Cluster, job: str, words: str) -> None:
    """Wait until the job waits for this reason."""
    cluster.until(job, lambda shown: shown["slots"] == 0 and words in shown["reason"])


def test_limits_hold_at_run_time_and_a_class_takes_slots(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    with running(tmp_path, RULES, policy="fifo", agents=1, slots=2) as cluster:
        ann = user_of(cluster, tmp_path, "ann", "vision")
        job = submit(ann, files)
        ann.until(job, lambda shown: shown["slots"] == 2)

        # Only admins may name the class; it takes the slots, and the program begins again.
        refused = ann.ones("submit", "--wrap", "true", "--class", "urgent", cwd=files)
        assert (refused.code, "class: ann may not use 'urgent'" in refused.err) == (2, True)
        done = cluster.ones("submit", "--wrap", "true", "--class", "urgent", "--wait", cwd=files)
        assert done.code == 0, done.err
        stopped = [one["reason"] for one in explained(ann, job)]
        assert any(reason.startswith("stopped: gives slots to") for reason in stopped), stopped
        ann.until(job, lambda shown: shown["slots"] == 2)

        # Limits are set while jobs run: programs keep their slots, others wait.
        assert cluster.ones("quota", "user", "ann", "--running", "1", "--queued", "1").code == 0
        second = submit(ann, files)
        why(ann, second, "user ann runs 1 job, as many as one user may")
        refused = ann.ones("submit", "--wrap", "true", cwd=files)
        assert "ann has 1 queued jobs and may have 1; this adds 1" in refused.err
        assert cluster.ones("cancel", job).code == 0
        ann.until(second, lambda shown: shown["slots"] == 2)

        # A program without a time limit waits until planned maintenance is over, or cancelled.
        assert cluster.ones("quota", "user", "ann", "--running", "none").code == 0
        plan = cluster.ones("node", "reserve", "node-1", "--from", "+1h", "--for", "1h")
        assert plan.code == 0, plan.err
        assert cluster.ones("cancel", second).code == 0
        third = submit(ann, files)
        why(ann, third, "would run into the maintenance of node-1")
        assert "maintenance" in cluster.ones("node", "reservations").out
        assert cluster.ones("node", "unreserve", "r-1").code == 0
        ann.until(third, lambda shown: shown["slots"] == 2)

        # A reservation for the user does not keep the program from the node.
        assert cluster.ones("cancel", third).code == 0
        window = ("node", "reserve", "node-1", "--from", "+1h", "--for", "1h")
        unknown = cluster.ones(*window, "--user", "nobody")
        assert "users: 'nobody' is unknown" in unknown.err
        assert cluster.ones(*window, "--user", "ann", "-o", "quiet").out.strip() == "r-2"
        ann.until(submit(ann, files), lambda shown: shown["slots"] == 2)
