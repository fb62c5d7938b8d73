"""`bin/gpu-day`: what is unverified on hardware, on the GPUs that are here; see docs/gpus.md."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import torch

from elastic.collectives.nccl import nccl_environment
from elastic.collectives.rendezvous_store import StoreServer
from tests.training.gpu.gpu_parts import PARTS, Answer, Member, Part

NO_GPU: Final = 77  # the exit code by which test runners know what was skipped
LIMIT_S: Final = 120.0  # of a part, beside what it lingers
GROUPS_OF_A_PART: Final = 10  # versions that a part may use
SHARED: Final = "ranks share a GPU and talk over sockets: this shows what happens, not how fast"


def main() -> int:
    """Play the parts that were chosen; 0 if all is as it should be, 1 if not, 77 without a GPU."""
    chosen = _arguments().parse_args()
    if chosen.member:
        return play(chosen)
    if not torch.cuda.is_available():
        sys.stdout.write("no GPU: nothing was looked at\n")
        return NO_GPU
    gpus = visible_gpus(torch.cuda.device_count())
    nccl = ".".join(str(number) for number in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    names = ", ".join(
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    )
    today = time.strftime("%Y-%m-%d", time.gmtime())
    say(f"{today}: {names}; torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}")
    server = None if chosen.store else StoreServer(chosen.address)
    store = chosen.store or f"{chosen.address}:{server.port if server else 0}"
    failed = [name for name in chosen.parts if run_part(name, chosen, store, gpus)]
    say(f"wrong: {', '.join(failed)}" if failed else "all is as it should be")
    return 1 if failed else 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bin/gpu-day", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", default=list(PARTS), metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument("--linger", type=float, default=75.0, help="seconds that survivors stay")
    parser.add_argument("--elements", type=int, default=1 << 26, help="of large tensors")
    parser.add_argument("--size", type=int, help="ranks; default: what a part needs")
    parser.add_argument("--ranks", help="those on this host, as 0,1; default: all")
    parser.add_argument("--address", default="127.0.0.1", help="of this host")
    parser.add_argument("--store", default="", help="HOST:PORT of the host of rank 0")
    parser.add_argument("--member", default="", help=argparse.SUPPRESS)
    return parser


def say(text: str) -> None:
    """Say one line at once.

    Args:
        text: without a newline.
    """
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run_part(name: str, chosen: argparse.Namespace, store: str, gpus: Sequence[str]) -> bool:
    """Play one part in processes of its own, and say what came of it.

    Args:
        name: of the part.
        chosen: the command line.
        store: HOST:PORT where the ranks meet.
        gpus: of this host, as CUDA_VISIBLE_DEVICES names them.

    Returns:
        Whether something is wrong.
    """
    part = PARTS[name]
    size = 1 if part.least == 1 else max(part.least, chosen.size or 0)
    here = range(size) if chosen.ranks is None else [int(rank) for rank in chosen.ranks.split(",")]
    mine = [rank for rank in here if rank < size]
    shared = len(mine) > len(gpus)
    if len(mine) < size:
        rest = ",".join(str(rank) for rank in range(size) if rank not in mine)
        say(
            f"{name}: elsewhere bin/gpu-day {name} --size {size} --ranks {rest} --store {store} --address ITS_OWN"
        )
    say(f"{name}: {size} ranks" + (f"; {SHARED}" if shared else ""))
    environments = [
        environment(rank, gpus[place % len(gpus)], chosen.address, shared)
        for place, rank in enumerate(mine)
    ]
    began = [
        start(name, Member(rank, size, store, chosen.address, version_of(name), chosen.elements, chosen.linger), env)
        for rank, env in zip(mine, environments, strict=True)
    ]  # fmt: skip
    ended = [finish(process, LIMIT_S + chosen.linger) for process in began]
    for rank, (code, answer, errors) in zip(mine, ended, strict=True):
        say(f"  rank {rank}: exit {code} {json.dumps(answer) if answer else errors[-600:]}")
    wrong = judge(part, size, dict(zip(mine, ended, strict=True)))
    if wrong:
        say(f"{name}: WRONG: {wrong}")
    return bool(wrong)


def version_of(name: str) -> int:
    """The first group of a part: parts meet at one store under versions of their own.

    Args:
        name: of the part.
    """
    return 1 + GROUPS_OF_A_PART * list(PARTS).index(name)


def visible_gpus(count: int) -> list[str]:
    """The GPUs that ranks may use, or MIG instances: CUDA itself shows one of these at most.

    Args:
        count: that CUDA shows.
    """
    named = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    return named or [str(index) for index in range(count)]


def environment(rank: int, gpu: str, address: str, shared: bool) -> dict[str, str]:  # noqa: FBT001
    """A rank's variables, as a worker would have them.

    Args:
        rank: of the part.
        gpu: that it uses.
        address: of this host.
        shared: NCCL takes ranks on one GPU only if it believes that they are on several hosts.
    """
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    if shared:
        env["NCCL_HOSTID"] = f"rank-{rank}"
    return env | nccl_environment(address, env)


def start(name: str, member: Member, env: dict[str, str]) -> subprocess.Popen[str]:
    """A rank in a process of its own.

    Args:
        name: of the part.
        member: which rank of it.
        env: its environment.
    """
    fields = json.dumps({field: getattr(member, field) for field in Member.__dataclass_fields__})
    command = [sys.executable, "-m", "tests.support.gpu_day", name, "--member", fields]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str], limit_s: float) -> tuple[int, Answer | None, str]:
    """Exit code, answer and errors of a rank; one that hangs is killed.

    Args:
        process: of the rank.
        limit_s: how long it may take.
    """
    try:
        out, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        errors = f"it hung; {errors}"
    lines = [line for line in out.splitlines() if line.startswith("{")]
    return process.returncode, json.loads(lines[-1]) if lines else None, errors


def judge(part: Part, size: int, ended: dict[int, tuple[int, Answer | None, str]]) -> str:
    """What is wrong with how a part ended; empty if nothing is.

    Args:
        part: which.
        size: its ranks.
        ended: exit code, answer and errors of the ranks on this host.
    """
    dead = {size - 1} if part.dies else set()
    codes = {rank: code for rank, (code, _, _) in ended.items()}
    wanted = {rank: -signal.SIGKILL if rank in dead else 0 for rank in ended}
    if codes != wanted:
        return f"exit codes {list(codes.values())}, not {list(wanted.values())}"
    answers = [answer for rank, (_, answer, _) in sorted(ended.items()) if rank not in dead]
    if None in answers:
        return "a rank gave no answer"
    found: Sequence[Any] = answers
    return part.wrong(list(found), size - len(dead)) if answers else ""


def play(chosen: argparse.Namespace) -> int:
    """Be one rank, and leave without taking anything apart, as workers do.

    Args:
        chosen: the command line of `start`.
    """
    answer = PARTS[chosen.parts[0]].play(Member(**json.loads(chosen.member)))
    say(json.dumps(answer))
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
