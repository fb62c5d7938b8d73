"""How others change a job's size: a cold restart, a blocking regroup, and DDP's steady state."""

from __future__ import annotations

import multiprocessing
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, Final

RESTART: Final = """
import sys, time, torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
path, leave = sys.argv[1], sys.argv[2] == "leave"
if not leave:
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
print("ready", time.time(), flush=True)
x = torch.randn(64, 64)
optimizer.zero_grad()
model(x).pow(2).mean().backward()
optimizer.step()
print("step", time.time(), flush=True)
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
"""


def cold_restart(base: Path, times: int) -> tuple[float, float]:
    """Checkpoint, kill, a new interpreter, load, step: as scripts do it without a cluster.

    Returns:
        Milliseconds without a step, and seconds until a new process has its model.
    """
    script, saved = base / "restart.py", base / "restart.pt"
    script.write_text(textwrap.dedent(RESTART))
    gaps, readies = [], []
    for _ in range(times):
        first = _run(script, saved, "leave")
        began = time.time()
        second = _run(script, saved, "load")
        gaps.append((second["step"] - first["step"]) * 1e3)
        readies.append(second["ready"] - began)
    return statistics.median(gaps), statistics.median(readies)


def _run(script: Path, saved: Path, how: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(script), str(saved), how],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return {word: float(at) for word, at in (line.split() for line in done.stdout.splitlines())}


def blocking_regroup_ms(times: int) -> float:
    """All stop, build the group of two anew, give the newcomer the state, go on."""
    context = multiprocessing.get_context("spawn")
    ports: Queue[int] = context.Queue()
    told: Queue[float] = context.Queue()
    processes = [
        context.Process(target=_regroup, args=(rank, times, ports, told)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = [told.get(timeout=120) for _ in range(times)]
    for process in processes:
        process.join(timeout=30)
    return statistics.median(found)


def _regroup(rank: int, times: int, ports: Queue[int], told: Queue[float]) -> None:
    import torch  # noqa: PLC0415 - in the child only

    from elastic.collectives.rendezvous import build_process_group  # noqa: PLC0415
    from elastic.collectives.rendezvous_store import StoreServer  # noqa: PLC0415
    from elastic.state.portions import encode_metadata  # noqa: PLC0415
    from elastic.state.state_tensors import TensorState  # noqa: PLC0415
    from elastic.state.transfer import broadcast_state  # noqa: PLC0415

    torch.set_num_threads(1)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    state = TensorState(model, optimizer)
    device = torch.device("cpu")
    header = encode_metadata({"structure": state.structure(device)})
    never = threading.Event()
    for version in range(times):
        began = time.perf_counter()
        if rank == 0:
            server = StoreServer("127.0.0.1")
            ports.put(server.port)
            port = server.port
        else:
            port = ports.get(timeout=60)
        group = build_process_group(
            version=version, store=f"127.0.0.1:{port}", rank=rank, size=2,
            address="127.0.0.1", device=device,
        )  # fmt: skip
        broadcast_state(state, group, 0, header if rank == 0 else b"", never)
        if rank == 0:
            told.put((time.perf_counter() - began) * 1e3)


def _model(width: int = 64) -> Any:
    from torch import nn  # noqa: PLC0415

    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


def ddp_ratios(steps: int) -> dict[str, float]:
    """Median step of ours over DDP's, and of a second DDP over the first, in turns in one run."""
    context = multiprocessing.get_context("spawn")
    ports: Queue[int] = context.Queue()
    told: Queue[tuple[float, float]] = context.Queue()
    processes = [
        context.Process(target=_side_by_side, args=(rank, steps, ports, told)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    ours, control = told.get(timeout=300)
    for process in processes:
        process.join(timeout=30)
    return {"ddp_step_ratio": ours, "ddp_control_ratio": control}


def _side_by_side(
    rank: int, steps: int, ports: Queue[int], told: Queue[tuple[float, float]]
) -> None:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    from elastic.collectives.control_words import FIXED_WORDS, ControlWords, read_agreed_words  # noqa: PLC0415
    from elastic.collectives.rendezvous import build_process_group  # noqa: PLC0415
    from elastic.collectives.rendezvous_store import StoreServer  # noqa: PLC0415
    from elastic.step.gradient_reduction import Reducer  # noqa: PLC0415

    torch.set_num_threads(1)
    if rank == 0:
        servers = [StoreServer("127.0.0.1"), StoreServer("127.0.0.1")]
        for server in servers:
            ports.put(server.port)
        found = [server.port for server in servers]
    else:
        found = [ports.get(timeout=60) for _ in range(2)]
    store = dist.TCPStore("127.0.0.1", found[0], is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = build_process_group(
        version=1, store=f"127.0.0.1:{found[1]}", rank=rank, size=2,
        address="127.0.0.1", device=torch.device("cpu"),
    )  # fmt: skip
    never = threading.Event()
    mine = _model(512)

    def reduce() -> None:
        bucket, tail = reducer.pack(0.5, FIXED_WORDS)
        tail[1:FIXED_WORDS] = torch.tensor(ControlWords(32).encode())
        group.all_reduce(bucket, never)
        reducer.unpack(read_agreed_words(tail.tolist(), 2).used)

    reducer = Reducer(mine.parameters(), reduce)
    reducer.active = True
    models = [mine, DistributedDataParallel(_model(512)), DistributedDataParallel(_model(512))]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.001) for model in models]
    inputs = torch.randn(32, 64)
    times: list[list[float]] = [[], [], []]
    for turn in range(steps + 10):
        for place in ((0, 1, 2), (1, 2, 0), (2, 0, 1))[turn % 3]:
            began = time.perf_counter()
            optimizers[place].zero_grad()
            models[place](inputs).pow(2).mean().backward()
            optimizers[place].step()
            if turn >= 10:
                times[place].append(time.perf_counter() - began)
    if rank == 0:
        first = [ours / ddp for ours, ddp in zip(times[0], times[1], strict=True)]
        second = [other / ddp for other, ddp in zip(times[2], times[1], strict=True)]
        told.put((statistics.median(first), statistics.median(second)))
    dist.destroy_process_group()
