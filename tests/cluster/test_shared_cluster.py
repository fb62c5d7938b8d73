"""One cluster for all work of a lab: three users, two projects, four kinds of jobs at a time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.test_rigid_jobs import DDP
from tests.support.cluster import (
    Cluster,
    assert_nothing_lost,
    explained,
    looked,
    running,
    training_job,
)
from tests.support.commands import Finished

pytestmark = pytest.mark.slow  # a cluster of its own
BORROWED_BACK_S = 5.0
RULES = """
[sharing.projects.vision]
guaranteed = 2
[sharing.projects.nlp]
guaranteed = 2
"""


def user_of(cluster: Cluster, folder: Path, name: str, project: str) -> Cluster:
    """The same cluster, as a user of a project sees it."""
    out = ("--project", project, "--out", str(folder / name))
    done = cluster.ones("key", "add", name, "--role", "user", *out)
    assert done.code == 0, done.err
    return Cluster(folder / name, folder / f"jobs-of-{name}")


def run(user: Cluster, folder: Path, *line: str, options: tuple[str, ...] = ()) -> Finished:
    return user.ones("run", *options, "--", *line, cwd=folder)


def test_three_users_and_all_kinds_of_work_on_four_slots(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "ddp.py").write_text(DDP)
    with running(tmp_path, RULES, policy="fair") as cluster:
        ann = user_of(cluster, tmp_path, "ann", "vision")
        bob = user_of(cluster, tmp_path, "bob", "nlp")
        cat = user_of(cluster, tmp_path, "cat", "nlp")

        # Alone, ann borrows the whole cluster.
        mine = training_job(ann, 4)
        ann.until(mine, lambda shown: shown["slots"] == 4 and shown["epoch"] >= 2)

        # Bob's own slots are back within seconds, without a lost step.
        began = time.monotonic()
        his = training_job(bob)
        took_s = time.monotonic() - began
        assert took_s < BORROWED_BACK_S
        looked(lambda: ann.show(mine)["slots"], lambda slots: slots <= 3)
        gave = [one["reason"] for one in explained(cluster, mine) if one["code"] == "gave_back"]
        assert any("bob" in reason for reason in gave), gave

        # Cat runs an unmodified script of torchrun and a command; both are within the guarantee
        # of her project, so elastic jobs make room for them.
        gang = run(cat, files, "torchrun", "--nproc-per-node=2", "ddp.py", "20")
        assert gang.code == 0, gang.err
        done = run(cat, files, "sh", "-c", "echo prepared; exit 4")
        assert (done.code, done.out) == (4, "prepared\n")

        # Everybody sees the shares; nothing was lost by anybody.
        accounts = cluster.ones("quota", "-o", "json").json["accounts"]
        assert {(one["project"], one["user"]) for one in accounts} >= {
            ("vision", "ann"), ("nlp", "bob"), ("nlp", "cat"),
        }  # fmt: skip
        ann.until_epoch(mine, ann.show(mine)["epoch"] + 2)
        bob.until_epoch(his, bob.show(his)["epoch"] + 2)
        assert_nothing_lost(ann, mine)
        assert_nothing_lost(bob, his)
