"""What only hardware can show of a group on GPUs, in parts that each rank plays.

Each part uses the library's own groups, so it runs on whatever device has a backend: on GPUs by
`bin/gpu-day`, in the suite on the simulated one.
"""

from __future__ import annotations

import hashlib
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from elastic.collectives.backends import finish_device_work, slot_device, use_device
from elastic.collectives.process_group import ProcessGroup
from elastic.collectives.rendezvous import build_process_group
from elastic.training_errors import BrokenGroupError, CancelledError

Answer = dict[str, Any]
NEVER: Final = threading.Event()
TOLD_S: Final = 1.0  # from a death until the survivors hear of it; an agent tells within ms
STEPS: Final = 20  # before a group is built and after it is crossed into


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a part."""

    rank: int
    size: int
    store: str  # HOST:PORT
    address: str  # of this host
    version: int  # of the part's first group; the next ones follow
    elements: int  # of large tensors
    linger_s: float = 0.0  # that survivors stay alive, to see whether they do

    def group(self, later: int = 0, size: int | None = None) -> ProcessGroup:
        """Meet the first `size` ranks."""
        return build_process_group(
            version=self.version + later, store=self.store, rank=self.rank,
            size=size or self.size, address=self.address, device=slot_device(),
        )  # fmt: skip


def device(_: Member) -> Answer:
    """What the library takes for granted of a device."""
    here = slot_device()
    use_device(here)
    layer = torch.nn.Linear(8, 8, device=here)
    seen: list[int] = []
    layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append(threading.get_ident()))
    layer(torch.ones(2, 8, device=here)).sum().backward()
    current: list[int] = []
    look = threading.Thread(target=lambda: current.append(torch.accelerator.current_device_index()))
    look.start()
    look.join()
    return {
        "device": str(layer.weight.device),
        "hooks run in a thread of their own": seen != [threading.get_ident()],
        "a new thread's device": current,
    }


def bits(member: Member) -> Answer:
    """Sums have the same bits on every rank, and are sums."""
    group, digests, errors = member.group(), [], []
    for count in (1, 1000, 4097, member.elements):
        given = [_random(rank, count) for rank in range(member.size)]
        tensor = given[member.rank].to(group.device)
        group.all_reduce(tensor, NEVER)
        found = tensor.cpu()
        wanted = torch.stack(given).double().sum(0)
        errors.append(float((found - wanted).abs().max()))
        digests.append(hashlib.sha256(found.numpy().tobytes()).hexdigest())
    group.retire()
    return {"digests": digests, "largest error": max(errors)}


def _random(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def bandwidth(member: Member) -> Answer:
    """Gradients over the device, and state over the host."""
    group = member.group()
    tensor = torch.ones(member.elements, device=group.device)
    group.all_reduce(tensor, NEVER)
    finish_device_work(group.device)
    began = time.monotonic()
    for _ in range(5):
        group.all_reduce(tensor, NEVER)
    finish_device_work(group.device)
    took = (time.monotonic() - began) / 5
    moved = 2 * (member.size - 1) / member.size * 4 * member.elements  # bytes, as a ring would
    host = torch.ones(member.elements)
    began = time.monotonic()
    if member.rank < 2:
        work = group.send(host, 1) if member.rank == 0 else group.receive(host, 0)
        work.wait()
    sent = 4 * member.elements / (time.monotonic() - began)
    _meet(group)
    group.retire()
    return {"all-reduce GB/s": round(moved / took / 1e9, 3), "host GB/s": round(sent / 1e9, 3)}


def _meet(group: ProcessGroup) -> None:
    group.broadcast_bytes(b"", NEVER)
    group.all_reduce(torch.zeros(1, device=group.device), NEVER)


def beside(member: Member) -> Answer:
    """The next group is built in a thread while training goes on, and is crossed into."""
    group = member.group()
    weights = torch.randn(512, 512, device=group.device)
    built: list[ProcessGroup] = []
    took: list[float] = []

    def build() -> None:
        began = time.monotonic()
        made = member.group(1)
        took.append(time.monotonic() - began)
        built.append(made)

    def step(over: ProcessGroup) -> tuple[float, bool]:
        """Its seconds, and whether all ranks had the next group when it began."""
        began = time.monotonic()
        tail = torch.full((1024,), float(bool(built)), device=over.device)
        (weights @ weights).sum()
        over.all_reduce(tail, NEVER)
        ready = float(tail[0]) == member.size
        return time.monotonic() - began, ready

    before = [step(group)[0] for _ in range(STEPS)]
    thread = threading.Thread(target=build)
    thread.start()
    during = []
    ready = False
    while not ready:
        seconds, ready = step(group)
        during.append(seconds)
    thread.join()
    former, group = group, built[0]
    former.retire()
    after = [step(group)[0] for _ in range(STEPS)]
    group.retire()
    return {
        "median ms": _ms(statistics.median(before)), "slowest ms before": _ms(max(before)),
        "slowest ms while it is built": _ms(max(during)), "first ms after": _ms(after[0]),
        "slowest ms after": _ms(max(after)), "built s": round(took[0], 3),
    }  # fmt: skip


def death(member: Member) -> Answer:
    """The last rank dies under an all-reduce; the others form a group without it, and live on."""
    group = member.group()
    tensor = torch.ones(4096, device=group.device)
    group.all_reduce(tensor, NEVER)
    finish_device_work(group.device)
    if member.rank == member.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told = threading.Event()
    threading.Timer(TOLD_S, told.set).start()
    ended = "the sum of a group with a dead member"
    try:
        group.all_reduce(torch.ones(4096, device=group.device), told)
    except (BrokenGroupError, CancelledError) as error:
        ended = type(error).__name__
    told.wait()
    began = time.monotonic()
    group.abort()
    finish_device_work(group.device)
    freed = time.monotonic() - began
    group.retire()
    group = member.group(1, member.size - 1)
    tensor = torch.ones(4096, device=group.device)
    group.all_reduce(tensor, NEVER)
    whole = float(tensor[0])
    recovered = time.monotonic() - began
    time.sleep(member.linger_s)
    group.all_reduce(tensor, NEVER)
    group.retire()
    return {
        "ended by": ended, "abort s": round(freed, 3), "recovered s": round(recovered, 3),
        "sum": whole, "lived on s": member.linger_s,
    }  # fmt: skip


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


@dataclass(frozen=True, slots=True)
class Part:
    """A part, how many ranks it needs, and what its answers have to be."""

    play: Callable[[Member], Answer]
    least: int
    wrong: Callable[[list[Answer], int], str] = lambda _, __: ""  # of answers and living ranks
    dies: bool = False  # its last rank is killed, and gives no answer


def _unequal(answers: list[Answer], _: int) -> str:
    if any(answer["digests"] != answers[0]["digests"] for answer in answers):
        return "ranks have different bits"
    return "the sums are no sums" if max(a["largest error"] for a in answers) > 1e-5 else ""


def _unmended(answers: list[Answer], living: int) -> str:
    if any(answer["sum"] != living for answer in answers):
        return "the new group does not sum"
    wrong = [a["ended by"] for a in answers if not a["ended by"].endswith("Error")]
    return f"a broken all-reduce gave {wrong[0]}" if wrong else ""


def _other_device(answers: list[Answer], _: int) -> str:
    answer = answers[0]
    if not answer["device"].endswith(":0") or answer["a new thread's device"] != [0]:
        return "the device is not index 0 everywhere"
    return "" if answer["hooks run in a thread of their own"] else "hooks run in the calling thread"


PARTS: Final = {
    "device": Part(device, 1, _other_device),
    "bits": Part(bits, 2, _unequal),
    "bandwidth": Part(bandwidth, 2),
    "beside": Part(beside, 2),
    "death": Part(death, 3, _unmended, dies=True),
}
