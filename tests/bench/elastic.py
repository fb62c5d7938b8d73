"""Cost of a change of size for a training job, compared with other ways to change it.

Real clusters, real processes. A step is the time between two ends of a step of one worker; the pause of a
transition is the step that contains the switch, less the median step before it. In the first part steps sleep,
as on a device of their own; in the second they compete for the cores of this host, and so does the start-up of
a newcomer. Compared with: a cold restart, a blocking regroup, and the steady state of DDP.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic.collectives.control_words import FIXED_WORDS, ControlWords, read_agreed_words
from elastic.collectives.process_group import ProcessGroup
from elastic.collectives.rendezvous import build_process_group
from elastic.collectives.rendezvous_store import StoreServer
from elastic.state.portions import encode_metadata
from elastic.state.state_tensors import TensorState
from elastic.state.transfer import broadcast_state
from elastic.step.gradient_reduction import Reducer
from tests.bench import report
from tests.bench.steps import ends, steps_of, submit
from tests.support.cluster import Cluster, kill, resize

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
        [sys.executable, str(script), str(saved), how], capture_output=True, text=True,
        check=True, timeout=120,
    )  # fmt: skip
    return {word: float(at) for word, at in (line.split() for line in done.stdout.splitlines())}


def _in_two(target: Callable[..., None], times: int, answers: int) -> list[Any]:
    """Run `target` as two ranks with queues for ports and answers; return the answers."""
    context = multiprocessing.get_context("spawn")
    ports, told = context.Queue(), context.Queue()
    processes = [
        context.Process(target=target, args=(rank, times, ports, told)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = [told.get(timeout=300) for _ in range(answers)]
    for process in processes:
        process.join(timeout=30)
    return found


def blocking_regroup_ms(times: int) -> float:
    return statistics.median(_in_two(_regroup, times, times))


def _stores(rank: int, many: int, ports: Queue[int]) -> tuple[list[StoreServer], list[int]]:
    """Open stores on rank 0, and return the ports of them on both ranks."""
    if rank:
        return [], [ports.get(timeout=60) for _ in range(many)]
    servers = [StoreServer("127.0.0.1") for _ in range(many)]
    for server in servers:
        ports.put(server.port)
    return servers, [server.port for server in servers]


def _group(version: int, port: int, rank: int) -> ProcessGroup:
    return build_process_group(
        version=version, store=f"127.0.0.1:{port}", rank=rank, size=2, address="127.0.0.1",
        device=torch.device("cpu"),
    )  # fmt: skip


def _regroup(rank: int, times: int, ports: Queue[int], told: Queue[float]) -> None:
    torch.set_num_threads(1)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    state = TensorState(model, optimizer)
    header = encode_metadata({"structure": state.structure(torch.device("cpu"))})
    never = threading.Event()
    for version in range(times):
        began = time.perf_counter()
        _servers, (port,) = _stores(rank, 1, ports)
        group = _group(version, port, rank)
        broadcast_state(state, group, 0, header if rank == 0 else b"", never)
        if rank == 0:
            told.put((time.perf_counter() - began) * 1e3)


def _model(width: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


def ddp_ratios(steps: int) -> dict[str, float]:
    ((ours, control),) = _in_two(_side_by_side, steps, 1)
    return {"ddp_step_ratio": ours, "ddp_control_ratio": control}


def _side_by_side(
    rank: int, steps: int, ports: Queue[int], told: Queue[tuple[float, float]]
) -> None:
    torch.set_num_threads(1)
    _servers, found = _stores(rank, 2, ports)
    store = dist.TCPStore("127.0.0.1", found[0], is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = _group(1, found[1], rank)
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


@dataclass(frozen=True)
class Transition:
    grew: bool
    pause_ms: float
    pause_steps: float
    after_ratio: float  # the step after the swap, over the median in the new group
    cost_steps: float  # extra time from the order to two steps after the swap
    wait_ms: float  # for the batch at the boundary, over the median wait


class Job:
    def __init__(self, cluster: Cluster, folder: Path, **environ: object) -> None:
        self.cluster = cluster
        self.folder = folder
        self.job = submit(cluster, folder, env=environ)
        cluster.until(self.job, lambda shown: shown["state"] == "running")

    def resize(self, slots: int) -> None:
        resize(self.cluster, self.job, slots)

    def transitions(self) -> list[Transition]:
        orders = [v["time"] for v in self.cluster.show(self.job)["versions"] if v["kind"] == "join"]
        found = []
        for steps in steps_of(self.folder).values():
            times = [b.at - a.at for a, b in itertools.pairwise(steps)]  # times[i]: of steps[i + 1]
            swaps = [i for i in range(1, len(steps)) if steps[i].size != steps[i - 1].size]
            for swap, following in zip(swaps, [*swaps, len(steps)][1:], strict=False):
                before, after = times[max(0, swap - 9) : swap - 1], times[swap + 1 : following - 1]
                if steps[swap - 1].rank or len(before) < 4 or len(after) < 4:
                    continue
                usual, usual_after = statistics.median(before), statistics.median(after)
                ordered = max((at for at in orders if at < steps[swap].at), default=0.0)
                during = [t for s, t in zip(steps[1:], times, strict=True)
                          if s.at > ordered and s.step <= steps[swap].step + 2]  # fmt: skip
                waits = [s.wait_s for s in steps[max(0, swap - 9) : swap]]
                pause = max(0.0, times[swap - 1] - usual)
                found.append(
                    Transition(
                        grew=steps[swap].size > steps[swap - 1].size,
                        pause_ms=pause * 1e3,
                        pause_steps=pause / usual,
                        after_ratio=times[swap] / usual_after,
                        cost_steps=max(0.0, sum(during) - usual * len(during)) / usual,
                        wait_ms=(steps[swap].wait_s - statistics.median(waits)) * 1e3,
                    )
                )
        return found

    def gap_s(self, moment: float) -> float:
        times = ends(self.folder)
        return min(at for at in times if at > moment) - max(at for at in times if at <= moment)

    def ready_s(self) -> list[float]:
        ordered, found = 0.0, []
        for event in self.cluster.events(self.job):
            if event["type"] == "job.rescaling":
                ordered = event["time"]
            elif event["type"] == "worker.ready" and ordered:
                found.append(event["time"] - ordered)
        return found

    def stream(self) -> tuple[int, int]:
        shown = self.cluster.ones("cancel", self.job)
        assert shown.code == 0, shown.err
        epochs = self.cluster.samples(self.job)
        whole = [ids for epoch, ids in sorted(epochs.items())[:-1]]
        lost = sum(4096 - len(set(ids)) for ids in whole)
        return lost, sum(len(ids) - len(set(ids)) for ids in whole)


def middle(felt: Sequence[Transition], name: str) -> float:
    return statistics.median(getattr(t, name) for t in felt)


def walk(job: Job, rounds: int) -> None:
    """Resize 1 -> 2 -> 4 -> 2 -> 1, `rounds` times, about a second in each size."""
    for _ in range(rounds):
        for slots in (2, 4, 2, 1):
            job.resize(slots)
            time.sleep(12 * 0.05)


def main() -> None:
    chosen = report.arguments(__doc__, "fewer changes")
    rounds = 4 if chosen.quick else 50
    with report.folder() as base:
        cluster = Cluster(base / "home", base / "jobs")
        with report.running(cluster):
            figures = measured(cluster, base, rounds, quick=chosen.quick)
    report.finish(figures, chosen.json)


def measured(cluster: Cluster, base: Path, rounds: int, *, quick: bool) -> dict[str, float]:
    report.now(f"small model, {rounds} rounds of changes")
    small = Job(cluster, base / "small")
    walk(small, rounds)
    felt = small.transitions()
    ready = small.ready_s()
    pauses, shrunk = [t.pause_ms for t in felt], [t for t in felt if not t.grew]
    figures: dict[str, float] = {
        "transitions": len(felt),
        "pause_ms_median": statistics.median(pauses),
        "pause_ms_p99": report.quantile(pauses, 0.99),
        "pause_steps_median": middle(felt, "pause_steps"),
        "pause_steps_p99": report.quantile([t.pause_steps for t in felt], 0.99),
        "rescale_cost_steps": middle(felt, "cost_steps"),
        "shrink_ms_median": middle(shrunk, "pause_ms"),
        "shrink_ms_max": max(t.pause_ms for t in shrunk),
        "after_swap_ratio": middle(felt, "after_ratio"),
        "joiner_ready_s": statistics.median(ready),
    }
    table("small model, steps of 40 ms on a device of their own", felt)
    report.now("small model, kill -9 and suspension")
    figures |= killed(small, 2 if quick else 20)
    figures |= suspended(small, 1 if quick else 10)
    lost, repeated = small.stream()
    figures |= {"stream_lost": lost, "stream_repeated": repeated}

    report.now("loaders with workers")
    loaders = Job(cluster, base / "loaders", LOADERS=2)
    walk(loaders, 1 if quick else 10)
    waits = loaders.transitions()
    figures["loader_boundary_ms"] = middle(waits, "wait_ms")
    loaders.stream()

    report.now("workers that compete for the cores")
    busy = Job(cluster, base / "busy", IDLE_S=0.0, WIDTH=700)
    walk(busy, 2 if quick else 10)
    table(f"all workers compete for {os.cpu_count()} cores", busy.transitions())
    figures["busy_pause_steps_median"] = middle(busy.transitions(), "pause_steps")
    figures["busy_rescale_cost_steps"] = middle(busy.transitions(), "cost_steps")
    busy.stream()

    report.now("100 MB of parameters")
    large = Job(cluster, base / "large", WIDTH=5000, MOMENTUM=0.0, IDLE_S=0.3)
    time.sleep(8.0)  # a change counts only with some steps before it
    for slots in (2, 1) * (1 if quick else 6):
        large.resize(slots)
        time.sleep(8.0)
    grown = [t for t in large.transitions() if t.grew]
    table("100 MB of parameters, steps of 300 ms on a device of their own", large.transitions())
    figures["pause_100mb_ms"] = middle(grown, "pause_ms")
    figures["pause_100mb_steps"] = middle(grown, "pause_steps")
    figures["joiner_ready_100mb_s"] = statistics.median(large.ready_s())
    large.stream()

    report.now("cold restart, blocking regroup and DDP")
    restart_ms, cold_ready_s = cold_restart(base, 1 if quick else 3)
    regroup_ms = blocking_regroup_ms(5 if quick else 20)
    floor = max(0.1, figures["pause_ms_median"])
    figures |= {
        "cold_restart_ms": restart_ms,
        "blocking_regroup_ms": regroup_ms,
        "joiner_vs_cold": cold_ready_s / figures["joiner_ready_s"],
        "vs_checkpoint": restart_ms / floor,
        "vs_checkpoint_best": figures["parked_gap_ms"] / floor,
        "vs_blocking": regroup_ms / floor,
        **ddp_ratios(100 if quick else 400),
    }
    return figures


def killed(job: Job, times: int) -> dict[str, float]:
    """Kill a member of three with -9, and measure the time until the next step of any worker."""
    gaps = []
    job.resize(3)
    choose = random.Random(0)  # noqa: S311 - which of three workers
    for _ in range(times):
        time.sleep(0.5)
        shown = job.cluster.show(job.job)
        victims = [w for w in shown["workers"] if w["phase"] == "member"]
        moment = time.time()
        kill(choose.choice(victims)["pid"])
        time.sleep(1.0)
        gaps.append(job.gap_s(moment))
        job.cluster.until(job.job, lambda s: s["slots"] == 3 and s["state"] == "running")
    return {"resume_after_kill_s": statistics.median(gaps), "resume_after_kill_s_max": max(gaps)}


def suspended(job: Job, times: int) -> dict[str, float]:
    gaps, starts = [], []
    for _ in range(times):
        job.resize(0)
        moment = time.time()
        job.resize(2)
        time.sleep(1.0)
        gaps.append(job.gap_s(moment) * 1e3)
        starts.append(min(at for at in ends(job.folder) if at > moment) - moment)
    return {
        "parked_gap_ms": statistics.median(gaps),
        "resume_from_checkpoint_s": statistics.median(starts),
    }


def table(title: str, felt: list[Transition]) -> None:
    rows = []
    for name, chosen in (
        ("grow", [t for t in felt if t.grew]),
        ("shrink", [t for t in felt if not t.grew]),
    ):
        if chosen:
            both = [
                (middle(chosen, key), report.quantile([getattr(t, key) for t in chosen], 0.99))
                for key in ("pause_ms", "pause_steps")
            ]
            after = [middle(chosen, key) for key in ("after_ratio", "cost_steps")]
            rows.append((name, len(chosen), *both[0], *both[1], *after))
    columns = ["", "transitions", "pause ms", "p99", "in steps", "p99", "step after / median",
               "whole cost, steps"]  # fmt: skip
    report.table(title, columns, rows)


if __name__ == "__main__":
    main()
