"""Whatever a user, a script or a stranger does: a clear answer, and every other job goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
import zmq.auth

from schemas.errors import install_hint
from tests.support.cluster import TOY, Cluster, await_gone
from tests.support.sizes import examples


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "field", "remedy"), [
    ({"script": "missing.py"}, "script", "correct script or workdir"),
    ({"max_batch_size": "kep"}, "max_batch_size", 'write max_batch_size = 2048, "keep" or "auto"'),
    ({"stop": {"epoch": 3}}, "stop.epoch", "did you mean epochs?"),
])  # fmt: skip
def test_a_bad_job_file_is_answered_with_field_and_remedy(
    cluster: Cluster, fields: dict[str, Any], field: str, remedy: str
) -> None:
    done = cluster.ones("submit", str(cluster.write(TOY, **fields)), "-o", "json")

    error = json.loads(done.err)["error"]
    assert done.code == 2
    assert error["field"] == field
    assert field in error["message"]
    assert remedy in f"{error['message']}; {error['hint']}"


@pytest.mark.slow
def test_errors_are_one_line_with_the_documented_exit_codes(cluster: Cluster) -> None:
    missing = cluster.ones("show", "nobody-1")
    usage = cluster.ones("submit", "--no-such-option")
    nowhere = cluster.ones("ps", "--home", str(cluster.base / "nowhere"))
    job = cluster.submit("import time; time.sleep(60)")
    late = cluster.ones("wait", job, "--timeout", "0.1")
    cluster.ones("cancel", job)
    cancelled = cluster.ones("wait", job)

    codes = [done.code for done in (missing, usage, nowhere, late, cancelled)]
    assert codes == [3, 2, 2, 6, 1]
    assert missing.err == "ones: no job 'nobody-1'; `ones ps --all` lists every job\n"
    assert all(len(done.err.splitlines()) == 1 for done in (usage, nowhere, late))


@pytest.mark.slow
def test_samples_of_a_job_that_records_none_are_refused_with_the_remedy(cluster: Cluster) -> None:
    done = cluster.ones("samples", cluster.submit("pass"))

    assert (done.code, done.out) == (2, "")
    assert done.err.endswith(
        "does not record its samples; set `record_samples = true` in the job file and submit it again\n"
    )


@pytest.mark.slow
def test_a_cluster_that_is_down_is_unreachable(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "keys").symlink_to(cluster.home / "keys")
    (tmp_path / "client.toml").write_text('endpoint = "tcp://127.0.0.1:9"\n')
    env = {name: value for name, value in os.environ.items() if name != "ONES_TIMEOUT_S"}

    done = subprocess.run(
        [sys.executable, "-m", "controlplane.cli.main", "ps", "--home", str(tmp_path)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
        timeout=9,  # without the look at the port it would be 10
    )

    assert (done.returncode, done.stderr) == (
        4,
        "ones: no controller replies at tcp://127.0.0.1:9; check that the controller runs and that its port is reachable from this host\n",
    )


@pytest.mark.slow
@pytest.mark.parametrize(("script", "reason"), [
    ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' (train.py:1)"),
    ("import sys; sys.exit(3)", "the script exited with code 3"),
    ("x = (", "SyntaxError: '(' was never closed"),
    (TOY.replace("step += 1", "1 / (3 - step); step += 1"), "ZeroDivisionError: division by zero"),
    ("import os; os.abort()", "a worker crashed with SIGABRT"),
])  # fmt: skip
def test_the_reason_names_the_error_of_a_failing_script(
    cluster: Cluster, script: str, reason: str
) -> None:
    job = cluster.submit(script)

    assert cluster.wait(job).code == 1
    shown = cluster.show(job)
    assert (shown["state"], shown["failures"]) == ("failed", 1)
    assert shown["reason"].startswith(reason)


def test_a_failing_script_is_retried_from_its_last_epoch(cluster: Cluster) -> None:
    script = TOY.replace(
        'print("done")',
        'open("tried", "a").write("x")\nassert len(open("tried").read()) > 1\nprint("done")',
    )
    job = cluster.submit(script, retries=1)

    assert cluster.wait(job).code == 0
    shown = cluster.show(job)
    assert (shown["failures"], shown["epoch"], len(shown["epochs"])) == (1, 4, 4)
    assert [change["to_state"] for change in shown["history"]].count("starting") == 2


@pytest.mark.slow
def test_a_script_that_forks_leaves_no_child_behind(cluster: Cluster) -> None:
    job = cluster.submit(
        "import os, time\npid = os.fork()\nif not pid: time.sleep(600)\nprint(pid)"
    )

    assert cluster.wait(job).code == 0
    await_gone(int(cluster.output(job)[0]))


@pytest.mark.slow
def test_a_flood_of_output_arrives_complete(cluster: Cluster) -> None:
    lines = examples(1_000_000)  # of 100 bytes
    script = f"for i in range({lines}): print(f'{{i:099d}}')"

    job = cluster.submit(script)
    assert cluster.wait(job).code == 0
    other = cluster.submit()
    shown = cluster.ones("logs", job).out

    assert len(shown) == 100 * lines
    assert shown == "".join(f"{i:099d}\n" for i in range(lines))
    assert cluster.wait(other).code == 0


@pytest.mark.slow
def test_a_script_that_ignores_term_is_killed(cluster: Cluster) -> None:
    script = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", flush=True)
    time.sleep(600)
    """
    job = cluster.submit(script)
    pid = cluster.until(job, lambda shown: bool(shown["workers"] and shown["workers"][0]["pid"]))[
        "workers"
    ][0]["pid"]
    followed = subprocess.Popen(
        [sys.executable, "-m", "controlplane.cli.main", "logs", "-f", job],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "ONES_HOME": str(cluster.home)},
    )
    assert followed.stdout.readline() == "deaf\n"

    assert cluster.ones("cancel", job).code == 0

    assert cluster.show(job)["state"] == "cancelled"
    free = cluster.until(job, lambda shown: not shown["workers"])
    assert free["workers"] == []
    assert not Path(f"/proc/{pid}").exists()
    followed.communicate(timeout=30)


@pytest.mark.slow
def test_an_interpreter_without_torch_is_named(cluster: Cluster, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare" / "bin" / "python")

    bare = cluster.submit(python=python)
    absent = cluster.submit(python=str(tmp_path / "no" / "python"))
    cluster.wait(bare)
    cluster.wait(absent)

    assert f"python '{python}' cannot run workers" in cluster.show(bare)["reason"]
    assert install_hint("train", python) in cluster.show(bare)["reason"]
    assert "No such file or directory" in cluster.show(absent)["reason"]


# --- bytes


@pytest.fixture
def stranger(cluster: Cluster) -> Iterator[Stranger]:
    made = Stranger(cluster.home)
    yield made
    made.close()


class Stranger:
    """A peer that holds a key and sends what it likes."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.context = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []
        controller = tomllib.loads((home / "controller.toml").read_text())
        self.ports: dict[str, int] = {
            k: v for k, v in controller["listen"].items() if isinstance(v, int)
        }

    def connect(
        self, port: str, kind: int = zmq.DEALER, key: str | None = "admin"
    ) -> zmq.Socket[bytes]:
        """Connect with one of the cluster's keys, or with one that nobody knows."""
        socket = self.context.socket(kind)
        self.sockets.append(socket)
        socket.linger = 0
        socket.curve_serverkey, _ = zmq.auth.load_certificate(self.home / "keys" / "server.key")
        if key is None:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        else:
            certificate = zmq.auth.load_certificate(self.home / "keys" / f"{key}.key_secret")
            socket.curve_publickey = certificate[0]
            socket.curve_secretkey = certificate[1] or b""
        socket.connect(f"tcp://127.0.0.1:{self.ports[port]}")
        return socket

    def close(self) -> None:
        """Give up all connections."""
        for socket in self.sockets:
            socket.close()
        self.context.term()

    def ask(self, socket: zmq.Socket[bytes], *frames: bytes) -> dict[str, Any]:
        """The reply to these frames, which comes however busy the host is."""
        socket.send_multipart(frames)
        assert socket.poll(60_000), "no reply"
        return msgpack.unpackb(socket.recv_multipart()[-1])

    def is_ignored(self, socket: zmq.Socket[bytes], *frames: bytes) -> bool:
        """Whether these frames get no reply within a second."""
        socket.send_multipart(frames)
        return not socket.poll(1000)


GOOD = msgpack.packb({"type": "client.get_cluster.1"})
HOSTILE = {
    "random": os.urandom(300),
    "empty": b"",
    "truncated": GOOD[:-5],
    "nested": b"\x91" * 3000 + b"\xc0",
    "nested inside": b"\x82" + GOOD[1:] + b"\xa1x" + b"\x91" * 3000 + b"\xc0",
    "unknown type": msgpack.packb({"type": "client.destroy_all.1"}),
    "wrong field": msgpack.packb({"type": "client.get_job.1", "job": 5}),
}


@pytest.mark.slow
def test_an_unknown_key_is_refused_on_every_port_and_audited(
    cluster: Cluster, stranger: Stranger
) -> None:
    for port in ("clients", "agents", "followers", "shippers"):
        assert stranger.is_ignored(stranger.connect(port, key=None), b"1", GOOD)

    assert "is not authorised" in (cluster.home / "logs" / "controller.log").read_text()
    assert cluster.ones("ps").code == 0


@pytest.mark.slow
def test_hostile_bytes_to_the_agents_ports_are_dropped_and_audited(
    cluster: Cluster, stranger: Stranger
) -> None:
    job = cluster.submit(env={"PAUSE_S": "0.01", "OMP_NUM_THREADS": "1"})
    for port, kind in (("agents", zmq.DEALER), ("events", zmq.PUB), ("shippers", zmq.DEALER)):
        socket = stranger.connect(port, kind, key="node-1")
        for data in HOSTILE.values():
            socket.send_multipart([b"node-1", data] if kind == zmq.PUB else [data])
        impostor = stranger.connect(port, kind, key="admin")
        impostor.send_multipart([b"node-1", GOOD] if kind == zmq.PUB else [GOOD])

    assert cluster.wait(job).code == 0
    assert '"what": "message"' in (cluster.home / "logs" / "controller.log").read_text()


@pytest.mark.slow
def test_the_feed_sends_events_to_readers_and_not_to_nodes(
    cluster: Cluster, stranger: Stranger
) -> None:
    reader = stranger.connect("feed", zmq.SUB)
    node = stranger.connect("feed", zmq.SUB, key="node-1")
    for socket in (reader, node):
        socket.subscribe(b"job/")
    told: list[str] = []
    while "job.succeeded" not in told:
        cluster.submit("")
        while reader.poll(1000):
            topic, body = reader.recv_multipart()
            event = msgpack.unpackb(body)
            assert topic.decode() == f"job/{event['job']}"
            told.append(event["event"])

    assert {"job.submitted", "job.starting", "worker.exited"} <= set(told)
    assert not node.poll(0)
    for socket in (reader, node):
        socket.close()
    assert cluster.wait(cluster.submit("")).code == 0


def test_a_node_key_cannot_submit(stranger: Stranger) -> None:
    answer = stranger.ask(stranger.connect("clients", key="node-1"), b"1", GOOD)

    assert answer["code"] == "denied"
