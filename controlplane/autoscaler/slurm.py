"""Slurm as the engine: each node is a Slurm job of one whole machine, with an agent in it.

Separate jobs of one machine start, requeue, end and are returned independently of each other. One
allocation of several machines would have to be given back as a whole.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from controlplane.autoscaler.decision import Allocation
from controlplane.autoscaler.machine_script import machine_script
from controlplane.autoscaler.settings import AutoscalerSettings
from schemas.errors import OnesError

PREFIX: Final = "slurm"  # name of the join key, and beginning of the names of its nodes
LISTED: Final = "PENDING,CONFIGURING,RUNNING,SUSPENDED,COMPLETING"
CALL_S: Final = 30.0  # limit of one command of Slurm; without munge they hang
LEAVING: Final = ("drain", "fail", "maint", "down")  # beginnings of the states of such machines
KILL_WAIT: Final = "KillWait"
NOTICE_MARGIN_S: Final = 5.0  # between an agent's own deadline and Slurm's KILL
DEFAULT_KILL_WAIT_S: Final = 30.0
HEAD: Final = """\
#!/bin/bash
# Agent of one machine. Slurm starts this script, and `ones cluster up` submitted it.
#   TERM (scancel, requeue, end of the job): jobs move away or are saved, then the agent ends.
#   USR1 ({notice_s:.0f} s before the time limit): the same, with more time.
machine=$SLURMD_NODENAME slots={slots} cores=$SLURM_CPUS_ON_NODE
address=$(scontrol show node "$SLURMD_NODENAME" | grep -o 'NodeAddr=[^ ]*')
address=${{address#*=}}
"""
SIGNALS: Final = """\
trap 'echo {notice_s:.0f} > "$run/end-of-time-limit"' USR1
trap 'kill -TERM $child' TERM
"""


class SlurmError(OnesError):
    """A command of Slurm failed."""

    code = "slurm"


class Slurm:
    """Machines from Slurm, by its own commands."""

    prefix = PREFIX
    most = None

    def __init__(self, settings: AutoscalerSettings, home: Path) -> None:
        self._name = settings.name
        self._settings = settings.slurm
        self._python = settings.python
        self._home = home

    async def allocations(self) -> list[Allocation]:
        """Return the waiting and running jobs of this cluster, oldest first."""
        text = await _call(
            "squeue", "-h", "-u", str(os.getuid()), "-n", self._name, "-t", LISTED,
            "-S", "i", "-o", "%i|%T|%N|%e|%r",
        )  # fmt: skip
        rows = [line.split("|", 4) for line in text.splitlines()]
        hosts = [host for _, state, host, *_ in rows if state != "PENDING" and host]
        leaving = await self._leaving(hosts) if hosts else {}
        return [
            Allocation(id=job, note=why)
            if state in {"PENDING", "CONFIGURING"} or not host
            else Allocation(
                id=job, node=f"{PREFIX}-{host}",
                leaves="it ends" if state == "COMPLETING" else leaving.get(host, ""),
                ends_at=float(end) if end.isdecimal() else None,
            )
            for job, state, host, end, why in rows
        ]  # fmt: skip

    async def _leaving(self, hosts: Sequence[str]) -> dict[str, str]:
        """Return why Slurm wants machines back, by host."""
        text = await _call("sinfo", "-h", "-N", "-n", ",".join(hosts), "-o", "%N|%T|%E")
        rows = [line.split("|", 2) for line in text.splitlines()]
        return {
            host: f"Slurm: {state}, {why}" for host, state, why in rows if state.startswith(LEAVING)
        }

    async def request(self, count: int, exclude: Sequence[str]) -> None:
        """Submit `count` jobs of one machine each, none on the nodes in `exclude`."""
        said = self._settings
        hosts = ",".join(name.removeprefix(f"{PREFIX}-") for name in exclude)
        options = [
            "--parsable", "--nodes=1", "--exclusive", "--requeue", f"--job-name={self._name}",
            f"--chdir={self._home}", f"--output={self._home}/logs/slurm-%j.log",
            f"--signal=B:USR1@{said.notice_s:.0f}",
            *([f"--partition={said.partition}"] if said.partition else ()),
            *([f"--time={said.time}"] if said.time else ()),
            *([f"--gpus-per-node={said.gpus}"] if said.gpus else ()),
            *([f"--exclude={hosts}"] if hosts else ()),
            *said.options,
        ]  # fmt: skip
        slots = said.slots or "$SLURM_CPUS_ON_NODE"
        script = machine_script(
            HEAD.format(notice_s=said.notice_s, slots=slots),
            before=SIGNALS.format(notice_s=said.notice_s),
            prefix=PREFIX, name=self._name, home=self._home, python=self._python,
        )  # fmt: skip
        for _ in range(count):
            await _call("sbatch", *options, given=script)

    async def release(self, allocation: str) -> None:
        """End a job, or withdraw it."""
        await _call("scancel", allocation)

    async def controller_host(self) -> str:
        """Return the address of slurmctld, by which this host's own address is found."""
        for line in (await _call("scontrol", "show", "config")).splitlines():
            name, _, value = line.partition("=")
            if name.strip() == "SlurmctldHost[0]":
                host, _, address = value.strip().partition("(")
                return address.rstrip(")") or host
        raise SlurmError("scontrol names no SlurmctldHost", "give --address")

    async def on_term_s(self) -> float:
        """Return the seconds between TERM and KILL at the end of a job, with a margin."""
        kill_wait_s = DEFAULT_KILL_WAIT_S
        for line in (await _call("scontrol", "show", "config")).splitlines():
            name, _, value = line.partition("=")
            if name.strip() == KILL_WAIT:
                kill_wait_s = float(value.split()[0])
        return max(1.0, kill_wait_s - NOTICE_MARGIN_S)

    async def aclose(self) -> None:
        """Do nothing; there is no connection."""


async def _call(*command: str, given: str = "") -> str:
    """Run a command of Slurm and return its output.

    Raises:
        SlurmError: if it is missing, fails, or takes too long.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
        )  # fmt: skip
    except OSError as error:
        problem = f"{command[0]}: {error.strerror}"
        raise SlurmError(problem, "install Slurm's client commands on this host") from None
    try:
        async with asyncio.timeout(CALL_S):
            out, said = await process.communicate(given.encode())
    except TimeoutError:
        problem = f"{command[0]} gave no reply for {CALL_S:.0f} s"
        raise SlurmError(problem, "check munge and slurmctld (`scontrol ping`)") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines()
        raise SlurmError(f"{command[0]}: {lines[-1] if lines else process.returncode}")
    return out.decode(errors="replace")
