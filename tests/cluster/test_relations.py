"""Arrays, chains, holds and reruns on a real cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, running
from tests.support.commands import Finished

pytestmark = pytest.mark.slow  # a cluster of its own


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("o"), agents=2, slots=2, policy="fifo") as made:
        yield made


@pytest.fixture
def cluster(house: Cluster) -> Iterator[Cluster]:
    yield house
    house.clear()


def run(cluster: Cluster, folder: Path, script: str, *options: str) -> Finished:
    return cluster.run(folder, "sh", "-c", script, options=(*options, "--detach"))


def test_an_array_of_50_programs_runs_each_index_once(cluster: Cluster, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    script = f'echo "$ONES_ARRAY_JOB $SLURM_ARRAY_TASK_ID" >> {tmp_path}/$ONES_ARRAY_INDEX'
    array = run(cluster, work, script, "--name", "part", "--array", "0-49").out.strip()
    after = run(cluster, work, "echo last", "--after", array).out.strip()

    assert cluster.ones("wait", array, after).code == 0
    shown = cluster.show(array)
    assert (shown["state"], shown["reason"]) == ("succeeded", "all 50 elements succeeded")
    for index in range(50):
        assert (tmp_path / str(index)).read_text() == f"{array} {index}\n"
    assert cluster.output(after) == ["last"]


def test_an_array_keeps_its_limit_and_is_cancelled_as_one(cluster: Cluster, tmp_path: Path) -> None:
    array = run(cluster, tmp_path, "sleep 600", "--name", "nap", "--array", "0-9999%2").out.strip()
    cluster.until(array, lambda shown: "2 are live" in shown["reason"])
    time.sleep(1.0)
    rows = cluster.ones("ps", "--name", "nap_*", "-o", "json").json
    assert len(rows) == 2

    assert cluster.ones("cancel", array).code == 0

    assert cluster.ones("wait", array).code == 1
    assert cluster.ones("ps", "--name", "nap*", "-o", "json").json == []


def test_a_chain_of_three_files_runs_in_order(cluster: Cluster, tmp_path: Path) -> None:
    order = tmp_path / "order"
    files = []
    for name, after in (("third", '["any:second"]'), ("second", '["first"]'), ("first", "[]")):
        command = f'["sh", "-c", "sleep 0.3; echo {name} >> {order}"]'
        fields = f'name = "{name}"\nkind = "command"\ncommand = {command}\nafter = {after}\n'
        (tmp_path / name).mkdir()
        files.append(tmp_path / name / "job.toml")
        files[-1].write_text(fields)

    done = cluster.ones("submit", *map(str, files), "--wait")

    assert done.code == 0, done.err
    assert [name.partition("-")[0] for name in done.out.split()] == ["first", "second", "third"]
    assert order.read_text().split() == ["first", "second", "third"]


def test_a_job_that_waits_in_vain_is_cancelled_and_a_handler_of_failures_runs(
    cluster: Cluster, tmp_path: Path
) -> None:
    bad = run(cluster, tmp_path, "sleep 1; exit 3").out.strip()
    vain = run(cluster, tmp_path, "echo no", "--after", f"ok:{bad}").out.strip()
    mends = run(cluster, tmp_path, "echo mends", "--after", f"failed:{bad}").out.strip()
    assert cluster.show(vain)["reason"] == f"waits for {bad} to succeed"

    cluster.ones("wait", bad, vain, mends)

    assert cluster.show(vain)["reason"] == f"waited for {bad} to succeed, which failed"
    assert cluster.output(mends) == ["mends"]


def test_a_held_job_waits_and_a_rerun_runs_again(cluster: Cluster, tmp_path: Path) -> None:
    job = run(cluster, tmp_path, "echo here", "--not-before", "+1h").out.strip()
    assert "or later (not_before)" in cluster.show(job)["reason"]
    assert cluster.ones("hold", job).code == 0
    assert cluster.show(job)["reason"].startswith("held by ")
    assert cluster.ones("release", job).code == 0

    again = cluster.ones("rerun", job).out.strip()

    assert cluster.ones("wait", again).code == 0
    assert cluster.output(again) == ["here"]
    past = run(cluster, tmp_path, "echo past", "--not-before", "2020-01-01T00:00Z").out.strip()
    assert cluster.ones("wait", past).code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--after", "gone-99"), "after: no job 'gone-99'"),
        (("--array", "0-999999"), "array: 1000000 elements, at most 10000"),
        (("--not-before", "tomorrow"), "not_before: 'tomorrow' is not a time"),
    ],
)
def test_bad_relations_are_refused(
    cluster: Cluster, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    done = run(cluster, tmp_path, "true", *options)

    assert (done.code, said in done.err) == (125, True), done.err
