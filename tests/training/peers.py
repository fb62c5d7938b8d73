"""Real processes, forked from a server with torch; none outlives its test."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, Final

import torch

from elastic.collectives.process_group import ProcessGroup
from elastic.collectives.rendezvous import build_process_group
from elastic.collectives.rendezvous_store import StoreServer

FORKS: Final = multiprocessing.get_context("forkserver")
PRELOAD: Final = ["elastic.worker.zygote", "pytest"]  # with torch and its compiler
LIMIT_S: Final = 120.0
CPU: Final = torch.device("cpu")
HERE: Final = "127.0.0.1"


def fork_with(*modules: str) -> None:
    """From now on processes are forked from a server that has torch and `modules` imported.

    There is one server in a process: another test's may be there already, without torch, which
    each fork would then import anew.
    """
    preload, server = [*PRELOAD, *modules], forkserver._forkserver  # type: ignore[attr-defined]
    if server._preload_modules != preload:
        server._stop()
        FORKS.set_forkserver_preload(preload)


fork_with()


def run_forked(target: Callable[..., Any], *arguments: Any, limit_s: float = 60.0) -> int | None:
    """Return the exit code of a forked process."""
    process = FORKS.Process(target=target, args=arguments)
    process.start()
    process.join(limit_s)
    code = process.exitcode
    process.close()
    return code


class RendezvousInfo:
    def __init__(self, rank: int, size: int, store: str, port: int) -> None:
        self.rank = rank
        self.size = size
        self.store = store
        self.parent = port

    def group(self, version: int = 1, *, size: int | None = None) -> ProcessGroup:
        return build_process_group(
            version=version, store=self.store, rank=self.rank, size=size or self.size,
            address=HERE, device=CPU,
        )  # fmt: skip


class Peers:
    """Processes that each run one function of (meeting, *arguments)."""

    def __init__(self, function: Callable[..., Any], size: int, arguments: Sequence[Any]) -> None:
        self._server = StoreServer(HERE)
        store = f"{HERE}:{self._server.port}"
        self._began = time.monotonic()
        self.processes: list[ForkServerProcess] = []
        self._ends: list[Connection] = []
        for rank in range(size):
            ours, theirs = FORKS.Pipe()
            meeting = RendezvousInfo(rank, size, store, os.getpid())
            process = FORKS.Process(target=_run, args=(theirs, function, meeting, *arguments))
            process.start()
            theirs.close()
            self.processes.append(process)
            self._ends.append(ours)

    def said(self, rank: int) -> Any:
        """Return the result of peer `rank`; a lost or late peer fails the test."""
        left = max(0.1, LIMIT_S - (time.monotonic() - self._began))
        end = self._ends[rank]
        if not wait([end], left):
            raise AssertionError(f"peer {rank} said nothing for {LIMIT_S} s")
        try:
            kind, value = end.recv()
        except EOFError:
            self.processes[rank].join(5)
            code = self.processes[rank].exitcode
            raise AssertionError(f"peer {rank} ended with {code}") from None
        if kind == "raised":
            raise AssertionError(f"peer {rank}: {value}")
        return value

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].join(5)

    def tell(self, rank: int, word: Any) -> None:
        self._ends[rank].send(word)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process, end in zip(self.processes, self._ends, strict=True):
            process.join(5)
            process.close()
            end.close()


@contextlib.contextmanager
def peers(function: Callable[..., Any], size: int, *arguments: Any) -> Iterator[Peers]:
    made = Peers(function, size, arguments)
    try:
        yield made
    finally:
        made.close()


def each(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    with peers(function, size, *arguments) as made:
        return [made.said(rank) for rank in range(size)]


class Parent:
    """A peer's line to the test."""

    end: Connection

    @classmethod
    def hears(cls, word: Any) -> None:
        cls.end.send(("said", word))

    @classmethod
    def says(cls) -> Any:
        return cls.end.recv()


def _run(end: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    Parent.end = end
    try:
        result = ("said", function(*arguments))
    except BaseException as error:  # noqa: BLE001 - the test is to see it
        import traceback  # noqa: PLC0415

        result = ("raised", "".join(traceback.format_exception(error)))
    end.send(result)
    os._exit(0)
