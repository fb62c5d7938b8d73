"""kill -9 of everything that can die, while real jobs train."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.client import BlockingClient
from schemas.transport.keys import load_public
from tests.support.cluster import TOY, Cluster, await_gone, child_of, kill, looked, running
from tests.support.webhook_receiver import Receiver

pytestmark = pytest.mark.slow  # a cluster or devices of its own

EPOCH = list(range(400))
SLOW = {"PAUSE_S": "0.05", "OMP_NUM_THREADS": "1"}
OUTPUT = [f"epoch {(step - 1) // 20} step {step}" for step in range(1, 81)] + ["done"]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of its own: other tests should not see its parts die."""
    with running(tmp_path_factory.mktemp("s")) as made:
        yield made


def held(folder: Path) -> dict[str, str]:
    """Environment of a slow job that waits in epoch 2 until `go on` exists in the folder."""
    return {**SLOW, "HOLD": str(folder / "go on")}


def pid_of(house: Cluster, job: str) -> int:
    """Return the process of the first worker, once it has started."""
    shown = house.until(job, lambda shown: bool(shown["workers"] and shown["workers"][0]["pid"]))
    return shown["workers"][0]["pid"]


def kill_zygote_of(pid: int) -> None:
    stat = Path(f"/proc/{pid}/stat").read_text()
    kill(int(stat.rpartition(")")[2].split()[1]))


def trained_without_a_scratch(house: Cluster, job: str) -> None:
    assert house.wait(job).code == 0, house.said()
    assert house.output(job) == OUTPUT
    assert house.samples(job) == dict.fromkeys((1, 2, 3, 4), EPOCH)
    assert [event["type"] for event in house.events(job)] == [
        "job.submitted", "job.starting", "worker.started", "worker.ready", "job.running",
        *["job.epoch"] * 4, "worker.exited", "job.succeeded",
    ]  # fmt: skip


@pytest.mark.parametrize("parts", ["controller", "agent", "controller and agent"])
def test_a_killed_daemon_disturbs_no_training(house: Cluster, tmp_path: Path, parts: str) -> None:
    jobs = [house.submit(env=held(tmp_path), record_samples=True) for _ in range(4)]
    workers = {job: house.until_epoch(job, 1)["workers"] for job in jobs}
    pids = house.up()

    if "controller" in parts:
        kill(pids["controller"])
    if "agent" in parts:
        kill(pids["agents"][0])
    house.up()

    for job in jobs:
        house.until(job, lambda shown, job=job: shown["workers"] == workers[job])  # type: ignore[misc]
    (tmp_path / "go on").touch()
    for job in jobs:
        trained_without_a_scratch(house, job)


def test_a_controller_refuses_a_bad_option_in_one_line_and_training_goes_on(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    base = tmp_path_factory.mktemp("o")
    house = Cluster(base / "home", base / "jobs", slots=1)
    controller = house.up()["controller"]
    job = house.submit(env=held(base), record_samples=True)
    workers = house.until_epoch(job, 1)["workers"]
    settings = house.home / "controller.toml"
    of_fair = settings.read_text().replace('"fifo"', '"fair"')

    kill(controller)
    settings.write_text(of_fair + "options = { quantum_s = -1.0 }\n")
    refused = house.ones("local", "up", "--dir", str(house.home))
    settings.write_text(of_fair + "options = { quantum_s = 60.0 }\n")
    other = house.ones("local", "up", "--dir", str(house.home), "--policy", "gittins")
    again = house.ones("local", "up", "--dir", str(house.home))

    bad = "policy.options.quantum_s: -1.0 is below 0.0; raise it"
    assert refused.code == 4
    assert refused.err == f"ones: controller did not start: ones-controller: {bad}\n"
    assert other.code == 1
    assert f"the cluster in {house.home} has policy = fair, not gittins; edit " in other.err
    assert again.code == 0
    assert house.show(job)["workers"] == workers
    (base / "go on").touch()
    trained_without_a_scratch(house, job)
    house.down()


def said(house: Cluster, part: str, event: str) -> dict[str, Any]:
    """The fields of the last line of a part's log about something, once it is there."""
    log = house.home / "logs" / f"{part}.log"
    found = looked(
        lambda: [line for line in log.read_text().splitlines() if f'"{event}"' in line],
        why=log.read_text,
    )
    line = json.loads(found[-1])
    return {key: line[key] for key in line if key not in {"event", "level", "timestamp"}}


def test_jobs_train_on_after_sigterm_to_controller_and_agent(
    house: Cluster, tmp_path: Path
) -> None:
    job = house.submit(env=held(tmp_path), record_samples=True)
    workers = house.until_epoch(job, 1)["workers"]
    pids = house.up()

    for pid in (pids["controller"], *pids["agents"]):
        os.kill(pid, signal.SIGTERM)
        await_gone(pid)

    assert "term" in said(house, "controller", "controller stopped")
    assert said(house, "agent-1", "agent stopped, workers continue") == {"node": "node-1"}
    (tmp_path / "go on").touch()
    house.up()
    assert house.show(job)["workers"] in (workers, [])
    trained_without_a_scratch(house, job)


def test_exit_codes_and_output_of_workers_survive_a_dead_agent(house: Cluster) -> None:
    script = "import time, sys\nfor i in range(2000): print(i)\ntime.sleep(1)\nprint('last'); sys.exit(5)"
    job = house.submit(script)
    pid = pid_of(house, job)

    kill(house.up()["agents"][0])
    await_gone(pid)
    house.up()

    assert house.wait(job).code == 1
    assert house.show(job)["exit_code"] == 5
    assert house.output(job) == [*map(str, range(2000)), "last"]


def test_output_is_complete_although_the_relay_was_killed(house: Cluster) -> None:
    script = "import time\nfor i in range(100): print(i, flush=True); time.sleep(0.03)"
    job = house.submit(script)
    controller, _ = house.up()["controller"], pid_of(house, job)

    for _ in range(2):
        kill(child_of(controller, "ones: relay"))

    assert house.wait(job).code == 0
    assert house.output(job) == list(map(str, range(100)))
    assert house.up()["controller"] == controller


def test_the_relay_ends_with_its_controller(house: Cluster) -> None:
    controller = house.up()["controller"]
    relay = child_of(controller, "ones: relay")

    kill(controller)

    await_gone(relay)
    house.up()


def test_a_killed_worker_resumes_from_its_last_finished_epoch(
    house: Cluster, tmp_path: Path
) -> None:
    undisturbed = house.submit(env=SLOW)
    job = house.submit(env=held(tmp_path), record_samples=True)
    shown = house.until_epoch(job, 2)

    kill(shown["workers"][0]["pid"])
    (tmp_path / "go on").touch()

    assert house.wait(job).code == 0
    assert house.samples(job) == dict.fromkeys((1, 2, 3, 4), EPOCH)
    after = house.show(job)
    assert after["failures"] == 0
    first, second = (version["resumed_epoch"] for version in after["versions"])
    assert (first, second >= 2) == (0, True)
    reasons = [change["reason"] for change in after["history"] if change["to_state"] == "paused"]
    assert len(reasons) == 1
    assert reasons[0].startswith("a worker was killed by SIGKILL; resumes after epoch")
    house.wait(undisturbed)
    metrics = [[e["metrics"] for e in house.show(name)["epochs"]] for name in (undisturbed, job)]
    assert metrics[0] == metrics[1]


def test_a_zygote_that_dies_takes_no_worker_with_it(house: Cluster, tmp_path: Path) -> None:
    job = house.submit(env=held(tmp_path), record_samples=True)

    kill_zygote_of(house.until_epoch(job, 1)["workers"][0]["pid"])

    (tmp_path / "go on").touch()
    trained_without_a_scratch(house, job)
    assert house.wait(house.submit()).code == 0


def test_jobs_resume_after_the_whole_cluster_restarted(house: Cluster, tmp_path: Path) -> None:
    leaves_on_term = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"
    job = house.submit(env=held(tmp_path), record_samples=True)
    polite = house.submit(leaves_on_term + TOY, env=held(tmp_path))
    house.until_epoch(job, 1)
    house.until_epoch(polite, 2)

    house.down()
    house.up()

    (tmp_path / "go on").touch()
    assert house.wait(job).code == 0, house.said()
    assert house.samples(job) == dict.fromkeys((1, 2, 3, 4), EPOCH)
    assert house.wait(polite).code == 0, house.said()
    assert house.show(polite)["failures"] == 0


def test_an_epoch_before_an_early_exit_is_not_lost(house: Cluster) -> None:
    leaving = TOY.replace(
        "    while epoch == 2 and", "    if epoch == 2: break\n    while epoch == 2 and"
    )
    failing = leaving.replace("epoch == 2: break", "epoch == 2: raise SystemExit(3)")

    jobs = [house.submit(script) for script in (leaving, failing)]

    assert [house.wait(job).code for job in jobs] == [0, 1]
    assert [house.show(job)["epoch"] for job in jobs] == [3, 3]


def test_a_forked_child_that_fails_takes_no_report_of_its_parent(house: Cluster) -> None:
    fork = "    if epoch == 2:\n        pid = os.fork()\n        assert pid, 'the child fails'\n"
    fork += "        os.waitpid(pid, 0)\n"
    job = house.submit(TOY.replace("    agent.report(", fork + "    agent.report("))

    assert house.wait(job).code == 0
    assert [e["epoch"] for e in house.show(job)["epochs"]] == [1, 2, 3, 4]


def test_an_exit_code_is_known_even_if_the_zygote_died_before(
    house: Cluster, tmp_path: Path
) -> None:
    script = (
        "import os, sys, time\nwhile not os.path.exists(os.environ['HOLD']): time.sleep(0.01)\n"
    )
    job = house.submit(script + "sys.exit(3)", env={"HOLD": str(tmp_path / "go on")})

    kill_zygote_of(pid_of(house, job))
    (tmp_path / "go on").touch()

    assert house.wait(job).code == 1
    assert house.show(job)["reason"] == "the script exited with code 3"


def test_webhooks_bring_each_end_once_although_the_controller_is_killed_again_and_again(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    receiver = Receiver()
    hook = f'[[webhooks]]\nname = "a"\nurl = "{receiver.url}"'
    with running(tmp_path_factory.mktemp("w"), hook, slots=2) as house:
        jobs = []
        for _ in range(8):
            jobs += [house.submit("pass", slots=1), house.submit("raise SystemExit(3)", slots=1)]
            kill(house.up()["controller"])
            house.up()
        for job in jobs:
            house.wait(job)
        looked(
            lambda: {headers["webhook-id"] for headers, _ in receiver.accepted},
            lambda heard: len(heard) >= len(jobs),
        )
    receiver.close()

    once = {
        headers["webhook-id"]: (body["data"]["job"], body["type"])
        for headers, body in receiver.accepted
    }
    ends = ("job.succeeded", "job.failed")
    assert sorted(once.values()) == sorted((job, ends[at % 2]) for at, job in enumerate(jobs))


def test_a_new_key_of_the_controller_disturbs_no_training(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    base = tmp_path_factory.mktemp("k")
    house = Cluster(base / "home", base / "jobs", slots=1)
    pids = house.up()
    user = base / "user"  # a client and an agent have folders of their own
    shutil.copytree(house.home / "keys", user / "keys")
    shutil.copy(house.home / "client.toml", user)
    agent = house.home / "agent-1.toml"
    text = agent.read_text().replace("[controller]", '[controller]\nkey = "node/server.key"')
    (house.home / "node").mkdir()
    shutil.copy(house.home / "keys" / "server.key", house.home / "node")
    kill(pids["agents"][0])
    agent.write_text(text)
    pids = house.up()
    job = house.submit(env=held(base), record_samples=True)
    workers = house.until_epoch(job, 1)["workers"]

    assert house.ones("admin", "rotate-key", "--home", str(house.home)).code == 0
    os.kill(pids["controller"], signal.SIGHUP)
    looked((house.home / "node" / "server-next.key").exists)
    assert house.ones("logs", job, "--home", str(user)).code == 0
    looked((user / "keys" / "server-next.key").exists)
    with BlockingClient(user) as client:
        before = client.cluster().term
        assert house.ones("admin", "rotate-key", "--finish", "--home", str(house.home)).code == 0
        kill(pids["controller"])
        house.up()
        after = client.cluster().term

    assert after > before
    assert house.show(job)["workers"] == workers
    assert house.ones("ps", "--home", str(user)).code == 0
    new = load_public(house.home / "keys" / "server.key")
    assert load_public(user / "keys" / "server.key") == new
    assert load_public(house.home / "node" / "server.key") == new
    (base / "go on").touch()
    trained_without_a_scratch(house, job)
    house.down()
