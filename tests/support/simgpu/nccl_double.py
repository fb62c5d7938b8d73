"""What torch's ProcessGroupNCCL promises and does (PyTorch 2.13, NCCL 2.29), on `simgpu` and over gloo.

- Nothing is connected before the first operation, which then connects in the thread that calls it, or
  `eager_connect_single_device`; a blocking connection cannot be aborted.
- Operations are enqueued, in order, on the communicator's stream, behind the caller's current stream.
  `wait()` blocks the caller's *stream*; `wait(limit)` also the thread, counts from the operation's
  beginning, and aborts the communicator when that is over.
- A lone send or receive has a communicator of two ranks, unless it was connected eagerly.
- After an abort what was under way is complete, without an exception, and its tensor is garbage.
- An error, or an operation that takes longer than the group's timeout, ends the process a while later
  unless TORCH_NCCL_ASYNC_ERROR_HANDLING=0; a rank that ends so asks the others to end as well.

`NCCL_DOUBLE` chooses the mode. `ordinary`: communicators run side by side, and those who talk to a dead
peer get an error. `worst`: the device has room for one operation at a time, in the order in which its
host launched them, and who talks to a dead peer waits until somebody aborts.
"""

from __future__ import annotations

import collections
import itertools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from tests.support.simgpu.device import NAME, OPS, Gate

MODE: Final = "NCCL_DOUBLE"
GLOO: Final[Any] = dist.ProcessGroupGloo
FOR_EVER: Final = timedelta(hours=1)
NO_LIMIT: Final = timedelta(0)
LOOK_S: Final = 0.002
WATCH_S: Final = 0.05
DUMP_S: Final = 0.3  # between an error and the end of the process; 60 s in truth
BLOCKING: Final = -(2**31)  # of a configuration that says nothing
REFUSED: Final = {torch.int16, torch.complex64, torch.complex128}
SPARED: Final = {"0", "2"}  # values of TORCH_NCCL_ASYNC_ERROR_HANDLING that end nobody


class _Launched:
    """The operations of this process in the order of their launch: on a full device it counts."""

    def __init__(self) -> None:
        self._works: collections.deque[Work] = collections.deque()
        self._moved = threading.Condition()

    def add(self, work: Work) -> None:
        with self._moved:
            self._works.append(work)

    @contextmanager
    def turn(self, work: Work, *, alone: bool) -> Iterator[None]:
        """Run now, or once all that was launched before is over."""
        with self._moved:
            self._moved.wait_for(lambda: not alone or work.over or self._works[0] is work)
        yield

    def remove(self, work: Work) -> None:
        with self._moved:
            if work in self._works:
                self._works.remove(work)
            self._moved.notify_all()


LAUNCHED: Final = _Launched()


class Options:
    """As `ProcessGroupNCCL.Options`."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:  # noqa: FBT001, FBT002 - torch's
        self._timeout = timedelta(minutes=10)
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(blocking=BLOCKING)


class _Settings:
    """What a group read from its environment when it was made, and what its threads share."""

    def __init__(self, options: Options, rank: int) -> None:
        mode = os.environ.get(MODE, "ordinary")
        if mode not in {"ordinary", "worst"}:
            raise RuntimeError(f"{MODE}: no mode {mode!r}")
        self.worst = mode == "worst"
        self.rank = rank
        self.timeout = options._timeout
        self.blocking = options.config.blocking != 0
        self.blocking_wait = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1"
        handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
        self.ends_process = handling not in SPARED and not self.blocking_wait
        self.asks_others = os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT", "1") != "0"
        self.heeds_others = os.environ.get("TORCH_NCCL_ENABLE_MONITORING", "1") != "0"
        self.closed = threading.Event()
        self.error: Exception | None = None


class Work:
    """One operation."""

    def __init__(
        self, communicator: Communicator, name: str, tensor: torch.Tensor,
        begin: Callable[[torch.Tensor], Any],
    ) -> None:  # fmt: skip
        self.communicator = communicator
        self.name = name
        self.tensor = tensor
        self.begin = begin
        self.behind = torch.accelerator.current_stream().record_event()
        self.made = time.monotonic()
        self.over = False  # the device is through with it
        self.error: Exception | None = None
        self._gate = Gate()
        self._gate.block(communicator.stream)

    def end(self) -> None:
        """The device is through with it, whatever its tensor holds now."""
        self.over = True
        self._gate.open()
        LAUNCHED.remove(self)

    def late(self, limit: timedelta) -> bool:
        """Whether it took longer than `limit`, from its beginning."""
        return not self.over and time.monotonic() - self.made >= limit.total_seconds()

    def is_completed(self) -> bool:
        return self.over or self.error is not None

    def exception(self) -> Exception | None:
        return self.error

    def synchronize(self) -> None:
        self._gate.block(torch.accelerator.current_stream())

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        settings = self.communicator.settings
        self.synchronize()
        if timeout == NO_LIMIT and not settings.blocking_wait:
            return True
        limit = timeout if timeout != NO_LIMIT else settings.timeout
        while not self.is_completed() and not self.late(limit):
            time.sleep(LOOK_S)
        if not self.is_completed():
            self.error = _error(settings.rank, f"{self.name} timed out in blocking wait")
        if self.error is not None:
            self.communicator.abort()
            raise self.error
        return True


def _error(rank: int, what: str) -> Exception:
    return dist.DistBackendError(f"[Rank {rank}] {what}")  # a RuntimeError


class Communicator:
    """Some ranks that are connected, and a stream on each one's device."""

    def __init__(self, settings: _Settings, store: Any, key: str, ranks: list[int]) -> None:
        self.settings = settings
        self.stream = torch.Stream(device=torch.accelerator.current_accelerator())
        self.connected = threading.Event()
        self.aborted = threading.Event()
        self._place = {rank: place for place, rank in enumerate(ranks)}
        self._gloo: Any = None
        self._works: collections.deque[Work] = collections.deque()
        self._given = threading.Condition()
        self.unfinished: dict[Work, None] = {}
        if settings.rank == ranks[0]:  # its id comes over the group's own store, and blocks
            store.set(f"{key}-id", "made")
        else:
            store.wait([f"{key}-id"])
        meeting = PrefixStore(f"{key}-ranks", store.clone())
        threading.Thread(target=self._run, args=(meeting,), name=f"nccl {key}", daemon=True).start()
        if settings.blocking:
            self.connected.wait()

    def _run(self, meeting: PrefixStore) -> None:
        if len(self._place) > 1:
            options = GLOO._Options()
            options._timeout = FOR_EVER  # it waits until all have come
            options._threads = 1
            options._devices = [GLOO.create_device(hostname="127.0.0.1")]
            place = self._place[self.settings.rank]
            with suppress(RuntimeError):  # whoever served the store is gone
                self._gloo = GLOO(meeting, place, len(self._place), options)
            if self._gloo is None:
                return
        self.connected.set()
        while True:
            with self._given:
                self._given.wait_for(lambda: self._works or self.aborted.is_set())
                if self.aborted.is_set():
                    return
                work = self._works.popleft()
            self._carry_out(work)

    def enqueue(
        self, name: str, tensor: torch.Tensor, begin: Callable[[Any, torch.Tensor], Any]
    ) -> Work:
        """Let the device do `begin`, of gloo's group and a tensor of the host, when its turn comes."""
        while not self.connected.is_set() and not self.aborted.is_set():
            time.sleep(LOOK_S)  # an operation waits until its communicator is ready
        if self.aborted.is_set():
            raise _error(self.settings.rank, "NCCL communicator was aborted")
        work = Work(self, name, tensor, lambda host: begin(self._gloo, host))
        LAUNCHED.add(work)
        with self._given:
            self.unfinished[work] = None
            self._works.append(work)
            self._given.notify_all()
        return work

    def place(self, rank: int) -> int:
        """Which of this communicator's ranks the group's `rank` is."""
        return self._place[rank]

    def _carry_out(self, work: Work) -> None:
        work.behind.synchronize()
        with LAUNCHED.turn(work, alone=self.settings.worst):
            if self.aborted.is_set():
                return
            here = OPS.host_view(work.tensor)
            travels = here.clone()
            OPS.spoil(work.tensor)  # until it is over there is nothing to be read
            try:
                if self._gloo is not None:
                    work.begin(travels).wait(FOR_EVER)
            except RuntimeError as error:
                self._lost_peer(work, error)
                return
        if self.aborted.is_set():
            return
        here.copy_(travels)
        self.unfinished.pop(work, None)
        work.end()

    def _lost_peer(self, work: Work, error: RuntimeError) -> None:
        """The device spins until somebody aborts; whether the host learns why depends."""
        if not self.settings.worst and not self.aborted.is_set():
            text = str(error).splitlines()[0][:100]
            work.error = _error(self.settings.rank, f"{work.name}: remote process exited: {text}")
            self.settings.error = work.error
        self.aborted.wait()

    def abort(self) -> None:
        """End whatever is under way as if it had succeeded."""
        if self.settings.blocking:
            self.connected.wait()
        self.aborted.set()
        with self._given:
            self._given.notify_all()
        while self.unfinished:
            with suppress(KeyError):
                self.unfinished.popitem()[0].end()


class ProcessGroupNCCL:
    """The double itself; torch's signatures."""

    Options = Options

    def __init__(self, store: Any, rank: int, size: int, options: Options | None = None) -> None:
        if torch.accelerator.device_count() == 0:
            raise ValueError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!")
        self._store = store
        self._rank = rank
        self._size = size
        self._settings = _Settings(options or Options(), rank)
        self._communicators: dict[str, Communicator] = {}
        self._eager = False
        self._lock = threading.Lock()
        watched = (weakref.ref(self), self._settings, store)
        threading.Thread(target=_watch, args=watched, name="nccl watchdog", daemon=True).start()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._settings.timeout = timeout

    # --- connections

    def eager_connect_single_device(self, device: torch.device) -> None:
        if device.type != NAME or device.index is None:
            raise ValueError(f"eager connection wants a device with an index, not {device}")
        self._whole()
        self._eager = True

    def _is_initialized(self) -> bool:
        whole = self._communicators.get("all")
        return whole is not None and whole.connected.is_set()

    def _whole(self) -> Communicator:
        return self._communicator("all", list(range(self._size)))

    def _pair(self, peer: int) -> Communicator:
        if self._eager:
            return self._whole()
        ranks = sorted((self._rank, peer))
        return self._communicator("-".join(map(str, ranks)), ranks)

    def _communicator(self, key: str, ranks: list[int]) -> Communicator:
        with self._lock:
            if key not in self._communicators:
                self._communicators[key] = Communicator(self._settings, self._store, key, ranks)
            return self._communicators[key]

    # --- operations

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Work:
        tensor = _checked(tensors)
        given = options or dist.AllreduceOptions()
        return self._whole().enqueue(
            "ALLREDUCE", tensor, lambda gloo, host: gloo.allreduce([host], given)
        )

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Work:
        tensor = _checked(tensors)
        given = options or dist.BroadcastOptions()
        return self._whole().enqueue(
            "BROADCAST", tensor, lambda gloo, host: gloo.broadcast([host], given)
        )

    def send(self, tensors: list[torch.Tensor], to: int, _tag: int) -> Work:
        tensor, pair = _checked(tensors), self._pair(to)
        return pair.enqueue(
            f"SEND to {to}", tensor, lambda gloo, host: gloo.send([host], pair.place(to), 0)
        )

    def recv(self, tensors: list[torch.Tensor], source: int, _tag: int) -> Work:
        tensor, pair = _checked(tensors), self._pair(source)
        return pair.enqueue(
            f"RECV from {source}",
            tensor,
            lambda gloo, host: gloo.recv([host], pair.place(source), 0),
        )

    # --- the end

    def abort(self) -> None:
        for communicator in list(self._communicators.values()):
            communicator.abort()

    def shutdown(self) -> None:
        for communicator in list(self._communicators.values()):
            while communicator.unfinished and not communicator.aborted.is_set():
                time.sleep(LOOK_S)
        self.abort()
        self._settings.closed.set()

    def __del__(self) -> None:
        if hasattr(self, "_settings"):
            self._settings.closed.set()
            self.abort()

    def _late(self) -> Work | None:
        works = itertools.chain.from_iterable(c.unfinished for c in self._communicators.values())
        return next((work for work in list(works) if work.late(self._settings.timeout)), None)


def _checked(tensors: list[torch.Tensor]) -> torch.Tensor:
    (tensor,) = tensors
    if tensor.device.type != NAME or tensor.is_sparse:
        raise ValueError("Tensors must be CUDA and dense")
    if not tensor.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    if tensor.dtype in REFUSED:
        raise TypeError(
            f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}"
        )
    return tensor


def _watch(group: weakref.ref[ProcessGroupNCCL], settings: _Settings, store: Any) -> None:
    """The watchdog: what it does to the process is the point."""
    others = store.clone() if settings.heeds_others or settings.asks_others else None
    while not settings.closed.wait(WATCH_S):
        here = group()
        if here is not None and settings.error is None and (late := here._late()) is not None:
            settings.error = late.error = _error(
                settings.rank, f"Watchdog caught {late.name} timeout"
            )
        del here
        if settings.error is not None:
            if others is not None and settings.asks_others:
                with suppress(RuntimeError):
                    others.set("exception_dump", "asked")
            if settings.ends_process:
                _end(f"Process group watchdog thread terminated with exception: {settings.error}")
            return
        if others is not None and settings.heeds_others:
            with suppress(RuntimeError):  # its server may be gone
                if others.check(["exception_dump"]):
                    _end("Received a dump signal from another rank")


def _end(why: str) -> None:
    sys.stderr.write(f"{why}, taking the entire process down\n")
    sys.stderr.flush()
    time.sleep(DUMP_S)
    os.kill(os.getpid(), signal.SIGABRT)
