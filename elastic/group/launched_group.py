"""Group of the processes that another launcher started: torchrun, srun or mpirun.

The group has a fixed size, and a lost process ends the job. The launcher may start it again.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore

from elastic.collectives.backend_protocol import BUILD_TIMEOUT_S
from elastic.collectives.process_group import ProcessGroup
from elastic.collectives.rendezvous import build_process_group
from elastic.training_errors import UsageError
from schemas.ids import WorkerId

LAUNCHERS = (  # variables with rank, size, local rank and the job's name
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_JOB_ID"),  # set by srun only
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "PMIX_NAMESPACE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "PMI_ID"),
)
EXIT_S = 5.0  # longest wait for gloo's threads at the end of the process
PORTS = range(20_000, 30_000)  # below the system's own choices, for launchers that name no port


@dataclass(frozen=True, slots=True)
class LaunchedGroup:
    """This process's place among the processes of its launcher."""

    rank: int
    size: int
    local_rank: int  # index of the device
    host: str  # of rank 0
    port: int
    attempt: int = 0  # of the launcher
    serves: bool = True  # rank 0 serves the store; False if the launcher does

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Names of the members, by rank."""
        return tuple(WorkerId(f"rank {rank}") for rank in range(self.size))

    def connect(self, device: torch.device, prefetched_steps: int) -> ProcessGroup:
        """Return the process group of all processes.

        Raises:
            BrokenGroupError: if they do not meet in time.
        """
        host = _resolvable(self.host)
        if self.serves and self.rank == 0:
            _served.append(
                TCPStore(
                    host, self.port, is_master=True, wait_for_workers=False,
                    timeout=timedelta(seconds=BUILD_TIMEOUT_S),
                )
            )  # fmt: skip
        group = build_process_group(
            version=self.attempt,
            store=f"{host}:{self.port}",
            rank=self.rank,
            size=self.size,
            address=_own_address(host, self.port),
            device=device,
            prefetched_steps=prefetched_steps,
        )
        # gloo's threads may hold the last tensors. If they free them while the interpreter exits,
        # the process is aborted, and the launcher sees a failure (pytorch/pytorch#190489).
        atexit.register(group.retire, EXIT_S)
        return group


_served: list[TCPStore] = []  # the store of rank 0 lives as long as the process


def launched_group(variables: Mapping[str, str]) -> LaunchedGroup | None:
    """Return the group that the launcher's environment variables describe, or None if alone.

    Raises:
        UsageError: if the host of rank 0 is not known.
    """
    found = [names for names in LAUNCHERS if names[0] in variables]
    found = [names for names in found if int(variables.get(names[1], "1")) > 1]
    if not found:
        return None
    rank, size, local_rank, job = found[0]
    host = variables.get("MASTER_ADDR") or _first_host(variables)
    if not host:
        problem = f"{size} is {variables[size]}, but the host of rank 0 is not known"
        raise UsageError(problem, "set MASTER_ADDR to it, and MASTER_PORT to a free port on it")
    named = int.from_bytes(hashlib.blake2b(variables.get(job, "").encode()).digest()[:4], "big")
    return LaunchedGroup(
        rank=int(variables[rank]),
        size=int(variables[size]),
        local_rank=int(variables.get(local_rank, "0")),
        host=host,
        port=int(variables.get("MASTER_PORT") or PORTS[named % len(PORTS)]),
        attempt=int(variables.get("TORCHELASTIC_RESTART_COUNT", "0")),
        serves=variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )


def _first_host(variables: Mapping[str, str]) -> str:
    """Return the first host of a step of Slurm, this host for others on one host, or ""."""
    if nodes := variables.get("SLURM_STEP_NODELIST", ""):
        name, bracket, rest = nodes.partition("[")
        return name.split(",")[0] if not bracket or "," in name else _first_of(name, rest)
    local = variables.get("OMPI_COMM_WORLD_LOCAL_SIZE") or variables.get("MPI_LOCALNRANKS")
    size = variables.get("OMPI_COMM_WORLD_SIZE") or variables.get("PMI_SIZE")
    return "127.0.0.1" if local is not None and local == size else ""


def _first_of(name: str, ranges: str) -> str:
    """Return the first host of `name[001-004,007]suffix`."""
    numbers, _, suffix = ranges.partition("]")
    return name + numbers.split(",")[0].split("-")[0] + suffix.split(",")[0]


def _resolvable(host: str) -> str:
    """Return a host, or its address in Slurm if its name cannot be resolved here."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        command = ["scontrol", "show", "node", "--oneliner", host]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)  # noqa: S603
            if found := re.search(r" NodeAddr=(\S+)", said.stdout):
                return found[1]
    return host


def _own_address(host: str, port: int) -> str:
    """Return the address of this host from which `host` is reached; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
