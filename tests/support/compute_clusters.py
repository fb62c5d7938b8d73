"""Clusters of Ray and Dask on loopback, whose nodes are processes that can be killed.

The environment of the processes on a node says in `NODE` which one it is.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

import psutil
import pytest

from tests.support.documented import ROOT

START_S: Final = 300.0
MEMORY: Final = str(80 * 2**20)  # bytes of each object store


class ComputeCluster:
    """Processes of a cluster, by the names of their nodes; `head` has the scheduler."""

    variable: str  # of the environment, with the address

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.address = f"127.0.0.1:{_free_port()}"
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def add(self, node: str, env: Mapping[str, str] | None = None) -> None:
        """Start a node with one CPU."""
        raise NotImplementedError

    def kill(self, node: str, sign: int = signal.SIGKILL) -> None:
        """Kill a node with all its processes, or send them another signal.

        Trackers of shared memory are left, which then clean up and end.
        """
        process = self.nodes.pop(node)
        for pid in psutil.pids():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getpgid(pid) == process.pid and not _is_tracker(pid):
                    os.kill(pid, sign)
        process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all nodes."""
        for node in list(self.nodes):
            self.kill(node)

    def _start(
        self, node: str, command: list[str], started: str, env: Mapping[str, str] | None
    ) -> None:
        log = self.folder / f"{node}.log"
        scripts = Path(sys.executable).parent
        paths = os.pathsep.join(filter(None, ((env or {}).get("PYTHONPATH"), str(ROOT))))
        end = time.monotonic() + START_S
        while True:  # Ray gives up after 30 s, which a busy host may need
            with log.open("wb") as file:
                self.nodes[node] = subprocess.Popen(
                    [str(scripts / command[0]), *command[1:]],
                    env={**os.environ, **(env or {}), "NODE": node, "PYTHONPATH": paths,
                         "DASK_TEMPORARY_DIRECTORY": str(self.folder)},
                    stdout=file, stderr=file, start_new_session=True,
                )  # fmt: skip
            while self.nodes[node].poll() is None:
                assert time.monotonic() < end, log.read_text()
                if started in log.read_text():
                    return
                time.sleep(0.1)
            assert "timed out during startup" in log.read_text()
            self.kill(node)


class DaskCluster(ComputeCluster):
    """A scheduler of Dask, `head`, and workers with one thread each."""

    variable = "DASK_SCHEDULER_ADDRESS"

    def __init__(self, folder: Path) -> None:
        _skip_without("distributed")
        super().__init__(folder)
        self.address = f"tcp://{self.address}"
        command = ["dask", "scheduler", "--host", self.address, "--dashboard-address", ":0"]
        self._start("head", command, "Scheduler at", None)

    def add(self, node: str, env: Mapping[str, str] | None = None) -> None:
        """Start a worker."""
        command = [
            "dask", "worker", self.address, "--host", "127.0.0.1", "--nthreads", "1",
            "--name", node, "--no-dashboard", "--local-directory", str(self.folder / node),
        ]  # fmt: skip
        self._start(node, command, "Registered to", env)


class RayCluster(ComputeCluster):
    """A head without CPUs, and raylets."""

    variable = "RAY_ADDRESS"
    COMMON = (
        "--block", "--disable-usage-stats", "--object-store-memory", MEMORY,
        "--min-worker-port", "0", "--max-worker-port", "0", "--dashboard-agent-listen-port", "0",
    )  # fmt: skip

    def __init__(self, folder: Path) -> None:
        _skip_without("ray")
        super().__init__(folder)
        command = [
            "ray", "start", "--head", "--port", self.address.rpartition(":")[2], "--num-cpus", "0",
            "--num-gpus", "0", "--temp-dir", str(folder), "--include-dashboard", "false", *self.COMMON,
        ]  # fmt: skip
        self._start("head", command, "Ray runtime started", None)

    def add(
        self, node: str, env: Mapping[str, str] | None = None, cpus: int = 1, gpus: int = 0
    ) -> None:
        """Start a raylet."""
        command = [
            "ray", "start", "--address", self.address, "--num-cpus", str(cpus),
            "--num-gpus", str(gpus),
        ]  # fmt: skip
        self._start(node, [*command, *self.COMMON], "Ray runtime started", env)

    @property
    def environ(self) -> dict[str, str]:
        """Environment of programs that use the cluster."""
        return {**os.environ, self.variable: self.address}

    def drain(self, start: str) -> None:
        """Tell Ray to drain the node whose id starts so, within a minute."""
        listed = (
            "import ray; ray.init(log_to_driver=False); print(*(n['NodeID'] for n in ray.nodes()))"
        )
        done = subprocess.run(
            [sys.executable, "-c", listed],
            env=self.environ, check=True, capture_output=True, text=True,
        )  # fmt: skip
        (node,) = [one for one in done.stdout.split() if one.startswith(start)]
        ray = str(Path(sys.executable).with_name("ray"))
        subprocess.run(
            [ray, "drain-node", "--address", self.address, "--node-id", node, "--reason",
             "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot",
             "--deadline-remaining-seconds", "60"],
            check=True, capture_output=True,
        )  # fmt: skip


def _is_tracker(pid: int) -> bool:
    return any("resource_tracker" in part for part in psutil.Process(pid).cmdline())


def _skip_without(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {module}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
