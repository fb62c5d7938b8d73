"""A Slurm of Debian on loopback: munge, slurmctld and four slurmd, with their files in a folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

NEEDED: Final = ("munged", "slurmctld", "slurmd", "sbatch")
START_S: Final = 60.0
CONFIG: Final = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,requeue_delay=0
KillWait={kill_wait_s}
ReturnToService=2
NodeName=n[1-4] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 State=UNKNOWN
PartitionName=main Nodes=n[1-4] Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class SlurmCluster:
    """Four machines n1 to n4 on this host; `environ` has the variables of Slurm's commands."""

    folder: Path
    environ: dict[str, str]

    def call(self, *command: str) -> str:
        """Run a command of Slurm, and return its output."""
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def jobs(self) -> dict[str, str]:
        """Return the machine of each running job."""
        rows = self.call("squeue", "-h", "-t", "R", "-o", "%i %N").split("\n")
        return dict(row.split() for row in rows if row)


@contextlib.contextmanager
def slurm(folder: Path, kill_wait_s: int = 20) -> Iterator[SlurmCluster]:
    """Run Slurm until the block ends. Skip the test where it is not installed."""
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        pytest.skip(f"needs Debian's slurm-wlm and munge: {missing[0]} is missing")
    munge = folder / "munge"
    for path in (munge, folder / "state", *(folder / f"spool.n{n}" for n in range(1, 5))):
        path.mkdir(parents=True)
    for parent in (munge, *munge.parents):
        parent.chmod(parent.stat().st_mode | 0o011)
    (munge / "key").write_bytes(secrets.token_bytes(128))
    (munge / "key").chmod(0o400)
    for path in (munge, munge / "key"):
        shutil.chown(path, "munge", "munge")
    port = 18_000 + os.getpid() % 1_000 * 8
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(
        folder=folder, port=port, first=port + 1, last=port + 4, kill_wait_s=kill_wait_s
    ))  # fmt: skip
    environ = {**os.environ, "SLURM_CONF": str(config)}
    made = SlurmCluster(folder, environ)
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        with (folder / f"{Path(command[0]).name}.{len(daemons)}.out").open("wb") as out:
            daemons.append(subprocess.Popen(
                command, env=environ, stdout=out, stderr=out, start_new_session=True
            ))  # fmt: skip

    try:
        start(
            *("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"),
            *("munged", "--foreground", "--force", f"--key-file={munge}/key"),
            *(f"--socket={munge}/socket", f"--pid-file={munge}/pid"),
            *(f"--log-file={munge}/log", f"--seed-file={munge}/seed"),
        )
        _until((munge / "socket").exists, "munged")
        start("slurmctld", "-D")
        for number in range(1, 5):
            start("slurmd", "-D", "-N", f"n{number}")
        _until(lambda: _idle(environ) == 4, "four idle machines")
        yield made
        subprocess.run(["scancel", "-u", "root"], env=environ, timeout=60, check=False)
        _until(lambda: not made.call("squeue", "-h"), "the end of all jobs")
    finally:
        for daemon in reversed(daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGTERM)
        for daemon in reversed(daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()


def _idle(environ: dict[str, str]) -> int:
    shown = ["sinfo", "-h", "-N", "-o", "%T"]
    done = subprocess.run(
        shown, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.split().count("idle")


def _until(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < until, f"no sign of {what}"
        time.sleep(0.1)
