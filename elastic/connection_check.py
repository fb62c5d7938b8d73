"""Trial of groups of two processes: `python -P -m elastic.connection_check ADDRESS [GPU ...]`.

It prints one JSON document: what the interpreter has, and whether two processes form a group over
ADDRESS on the CPU, and on the first two GPUs (UUIDs), as workers of a job would. With one GPU both
processes share it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any, Final

import torch

from elastic.collectives.backend_protocol import BUILD_TIMEOUT_S, OPERATION_TIMEOUT
from elastic.collectives.backends import CPU
from elastic.collectives.nccl import nccl_environment
from elastic.collectives.rendezvous import build_process_group
from elastic.collectives.rendezvous_store import StoreServer, connect_store
from schemas import __version__

SIZE: Final = 2
VERSION: Final = 1  # of the group
LIMIT_S: Final = 2 * BUILD_TIMEOUT_S  # includes two imports of torch


def main() -> None:
    """Print the facts; with --rank, be a member of a group instead."""
    parser = argparse.ArgumentParser(prog="elastic.connection_check", description=__doc__)
    parser.add_argument("address", help="address of this host")
    parser.add_argument("gpus", nargs="*", help="UUIDs of GPUs")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank is not None:
        _join(chosen.address, chosen.rank, chosen.store, on_gpu=bool(chosen.gpus))
        return
    groups = {"gloo": _trial(chosen.address, [])}
    if chosen.gpus and torch.version.cuda:
        groups["nccl"] = _trial(chosen.address, chosen.gpus)
    facts = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "ones": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "nccl": _nccl_version(),
        "gpus": torch.cuda.device_count() if torch.version.cuda else 0,
        "groups": groups,
    }
    sys.stdout.write(json.dumps(facts) + "\n")


def _nccl_version() -> str:
    if not torch.version.cuda:
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _trial(address: str, gpus: list[str]) -> dict[str, Any]:
    """Return the seconds that a group took, or why its members could not form it."""
    began = time.monotonic()
    try:
        server = StoreServer(address)
    except (OSError, RuntimeError) as error:
        return {"error": str(error).splitlines()[0]}
    host = f"[{address}]" if ":" in address else address
    members = [
        subprocess.Popen(  # noqa: S603 - this interpreter and module
            [sys.executable, "-P", "-m", "elastic.connection_check", address, *gpus,
             "--rank", str(rank), "--store", f"{host}:{server.port}"],
            env=_environment(address, gpus, rank), stderr=subprocess.PIPE, text=True,
        )
        for rank in range(SIZE)
    ]  # fmt: skip
    problems = [_end(member, began + LIMIT_S) for member in members]
    if any(problems):
        return {"error": next(filter(None, problems))}
    return {"seconds": round(time.monotonic() - began, 1)}


def _environment(address: str, gpus: list[str], rank: int) -> dict[str, str]:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)] if gpus else ""}
    if len(gpus) == 1:
        environ["NCCL_HOSTID"] = f"rank-{rank}"  # else NCCL refuses two ranks on one GPU
    return environ | nccl_environment(address, environ)


def _end(member: subprocess.Popen[str], deadline: float) -> str:
    """Wait for a member; return its last line if it failed."""
    try:
        _, errors = member.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        member.kill()
        member.communicate()
        return f"no group within {LIMIT_S:.0f} s"
    lines = errors.strip().splitlines() or [f"exit code {member.returncode}"]
    return lines[-1] if member.returncode else ""


def _join(address: str, rank: int, store: str, *, on_gpu: bool) -> None:
    device = torch.device("cuda:0") if on_gpu else CPU
    group = build_process_group(
        version=VERSION, store=store, rank=rank, size=SIZE, address=address, device=device
    )
    row, cancel = torch.full((1024,), float(rank + 1), device=device), threading.Event()
    group.all_reduce(row, cancel)
    if row.tolist() != [float(sum(range(1, SIZE + 1)))] * len(row):
        sys.exit("a sum over the group is wrong")
    meeting = connect_store(store, VERSION)
    meeting.set(f"done-{rank}", "")
    meeting.wait([f"done-{one}" for one in range(SIZE)], OPERATION_TIMEOUT)
    os._exit(0)  # closing a group waits for its threads


if __name__ == "__main__":
    main()
