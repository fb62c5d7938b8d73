"""Time to transfer a state: between memories, over a file, from another node's disk, pickled.

100 MB of a model and its optimizer on one host, median of a few. `p2p_vs_file` says how many times faster a
state comes from another worker's memory than over a shared file that is written durably. The results are raw
frames with a checked digest; a pickle gives tensors without a check.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Final

import torch

from elastic.sweep_worker.unit import digest, size, to_frames
from schemas.host.state_files import (
    StateFile,
    find_state,
    header_of,
    map_state,
    read_frames,
    write_state,
)
from schemas.ids import JobId
from schemas.transport.state_transfer import MemoryTarget, StateServer, fetch_state
from schemas.wire.files import AskState
from tests.bench import report
from tests.training.peers import FORKS

BYTES: Final = 100_000_000
TENSORS: Final = 30
ROUNDS: Final = 7
FILE: Final = StateFile(0, 1, 1)


def transfer_figures(*, quick: bool) -> dict[str, float]:
    rounds = 3 if quick else ROUNDS
    each = BYTES // TENSORS // 4
    state = {"model": {str(at): torch.randn(each) for at in range(TENSORS)}}
    frames = to_frames(state)
    own = digest(frames)
    asked = AskState(job=JobId("bench-1"), trial=0, version=1, digest=own, offset=0)
    took: dict[str, list[float]] = {}
    target = MemoryTarget()

    def measure(name: str, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        work()
        took.setdefault(name, []).append((time.perf_counter() - began) * 1000.0)

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as made:
        folder = Path(made)
        write_state(folder, FILE, frames, own)
        with _serving(folder, in_memory=True) as memory, _serving(folder, in_memory=False) as disk:
            for _ in report.counted("round", range(rounds), rounds):
                measure("memory to memory", lambda: _fetch(memory, asked, target))
                measure("another node's disk", lambda: _fetch(disk, asked, target))
                measure("over a file", lambda: _over_file(folder / "shared", frames, own))
                measure("pickled over a file", lambda: _pickled(folder / "pickled.pt", state))
    middle = {name: median(times) for name, times in took.items()}
    report.table(
        f"the way of a state of {size(frames) / 1e6:.0f} MB, median of {rounds}",
        ["", "ms", "ms, worst"],
        [[name, middle[name], max(times)] for name, times in took.items()],
    )
    return {
        "p2p_ms": middle["memory to memory"],
        "p2p_vs_file": middle["over a file"] / middle["memory to memory"],
        "p2p_vs_pickle": middle["pickled over a file"] / middle["memory to memory"],
    }


@contextmanager
def _serving(folder: Path, *, in_memory: bool) -> Iterator[str]:
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=_serve, args=(theirs, folder, in_memory), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        process.join(5)


def _serve(end: Connection, folder: Path, in_memory: bool) -> None:  # noqa: FBT001 - of a process
    path = folder / FILE.name
    kept = [bytes(frame) for frame in read_frames(map_state(path))] if in_memory else []

    def find(asked: AskState) -> list[bytes | memoryview] | None:
        if kept:
            return [header_of(kept, asked.digest), *kept]
        found = find_state(folder, asked.trial, asked.version, asked.digest)
        return None if found is None else [map_state(found)]

    server = StateServer("127.0.0.1", lambda _: "key", find)
    end.send(server.address)
    end.recv()
    server.close()


def _fetch(source: str, asked: AskState, target: MemoryTarget) -> object:
    fetch_state([source], asked, "key", target, lambda: None)
    return target.frames(asked.digest)


def _over_file(folder: Path, frames: list[bytes], own: str) -> object:
    write_state(folder, FILE, frames, own)
    return read_frames(map_state(folder / FILE.name), own)


def _pickled(path: Path, state: object) -> object:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return torch.load(path, weights_only=True)
