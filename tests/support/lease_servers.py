"""PostgreSQL and etcd of Debian, on loopback, with their files in a folder of the test."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import psutil
import pytest

Place = Callable[[], contextlib.AbstractContextManager[None]]  # where a server is started
START_S: Final = 30.0
POSTGRES: Final = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


class LeaseServer:
    """Server of leases that can be killed and started again."""

    def __init__(self, url: str, command: list[str], is_ready: list[str], at: Place) -> None:
        self.url, self._command, self._is_ready, self._at = url, command, is_ready, at
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and wait until it replies."""
        with self._at():
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            until = time.monotonic() + START_S
            while time.monotonic() < until:
                if subprocess.run(self._is_ready, check=False, capture_output=True).returncode == 0:
                    return
                time.sleep(0.05)
        raise TimeoutError(self._command)

    def kill(self, sign: int = signal.SIGKILL) -> None:
        """Kill the server with its children, or send them another signal.

        Each child of PostgreSQL has a process group of its own.
        """
        if self._process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                server = psutil.Process(self._process.pid)
                for process in (server, *server.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(sign)
            if sign == signal.SIGKILL:
                self._process.wait()


@contextlib.contextmanager
def postgresql(
    folder: Path, host: str = "127.0.0.1", at: Place = contextlib.nullcontext
) -> Iterator[LeaseServer]:
    """Serve a new database. Root serves it as `nobody`, because PostgreSQL refuses root."""
    if not POSTGRES:
        pytest.skip("needs Debian's postgresql")
    programs, data, port = POSTGRES[-1], folder / "postgresql", _free_port(host, at)
    data.mkdir()
    as_nobody = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    become = as_nobody if os.geteuid() == 0 else []
    if become:
        shutil.chown(data, "nobody", "nogroup")
        for parent in folder.parents:
            if parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o011)
        folder.chmod(0o711)
    init = [f"{programs}/initdb", "-D", str(data), "-A", "trust", "-U", "ones", "--no-sync"]
    subprocess.run([*become, *init], check=True, stdout=subprocess.DEVNULL)
    command = [
        *become, f"{programs}/postgres", "-D", str(data), "-k", str(data), "-h", host, "-p", str(port),
    ]  # fmt: skip
    (data / "pg_hba.conf").write_text("host all all all trust\nlocal all all trust\n")
    is_ready = [f"{programs}/pg_isready", "-q", "-h", host, "-p", str(port)]
    url = f"postgresql://ones@{host}:{port}/postgres"
    with _served(LeaseServer(url, command, is_ready, at)) as server:
        yield server


@contextlib.contextmanager
def etcd(
    folder: Path,
    host: str = "127.0.0.1",
    at: Place = contextlib.nullcontext,
    certificates: Path | None = None,
) -> Iterator[LeaseServer]:
    """Serve a new etcd of one member. With `certificates`, it uses TLS and demands it of clients."""
    if shutil.which("etcd") is None:
        pytest.skip("needs Debian's etcd-server")
    port, peer = _free_port(host, at), _free_port(host, at)
    scheme, secured, checked, query = "http", [], [], ""
    if certificates is not None:
        ca, cert, key = (
            str(certificates / name) for name in ("ca.crt", "server.crt", "server.key")
        )
        scheme = "https"
        secured = [
            "--cert-file",
            cert,
            "--key-file",
            key,
            "--client-cert-auth",
            "--trusted-ca-file",
            ca,
        ]
        checked = ["--cacert", ca, "--cert", cert, "--key", key]
        query = f"?cacert={ca}&cert={certificates}/client.crt&key={certificates}/client.key"
    client, member = f"{scheme}://{host}:{port}", f"http://{host}:{peer}"
    command = [
        "etcd", "--data-dir", str(folder / "etcd"), "--name", "one",
        "--listen-client-urls", client, "--advertise-client-urls", client,
        "--listen-peer-urls", member, "--initial-advertise-peer-urls", member,
        "--initial-cluster", f"one={member}", *secured,
    ]  # fmt: skip
    is_ready = ["curl", "-sf", "--noproxy", "*", *checked, f"{client}/health"]
    url = f"{'etcds' if query else 'etcd'}://{host}:{port}{query}"
    with _served(LeaseServer(url, command, is_ready, at)) as server:
        yield server


def make_certificates(folder: Path) -> Path:
    """Create a certification authority, and certificates for a server on loopback and a client."""
    folder.mkdir()

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, cwd=folder, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        "req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=ca", "-days", "1"
    )
    for name in ("server", "client"):
        (folder / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1")
        openssl(
            "req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"
        )
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key",
            "-CAcreateserial", "-out", f"{name}.crt", "-days", "1", "-extfile", f"{name}.ext",
        )  # fmt: skip
    return folder


@contextlib.contextmanager
def _served(server: LeaseServer) -> Iterator[LeaseServer]:
    server.start()
    try:
        yield server
    finally:
        server.kill()


def _free_port(host: str, at: Place) -> int:
    with at(), socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
