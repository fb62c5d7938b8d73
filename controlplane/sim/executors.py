"""Executors of `ones sim compare`: clusters of Ray and Dask that run simulations.

A worker of the cluster starts `python -m controlplane.sim.executors` for each simulation, because
it may run several in its threads and, under Dask, may not use `multiprocessing`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType
from typing import Final, Literal

from controlplane.sim.cluster import ResultsError
from controlplane.sim.experiment import Submit, message_of
from schemas import __version__
from schemas.host.reachable import reach

WATCH_S: Final = 5.0  # between two looks at a cluster
GONE_S: Final = 30.0  # after which a cluster is gone
ExecutorName = Literal["local", "ray", "dask"]


@contextlib.contextmanager
def executor(name: ExecutorName) -> Iterator[Submit | None]:
    """Connect to a cluster and yield its `submit`, or None for `local`.

    Simulations that a lost worker ran are repeated by the cluster. Those of Ray end with the
    context; Dask finishes those that run, but starts no others.

    Raises:
        ResultsError: if the cluster or its library is missing.
    """
    if name == "local":
        yield None
        return
    try:
        with CLUSTERS[name](_on_worker()) as submit:
            yield submit
    except ImportError:
        hint = f"in a checkout of ONES: pip install '.[{name}]'"
        raise ResultsError(f"executor {name} needs {name.capitalize()}", hint) from None


@contextlib.contextmanager
def _ray(on_worker: Callable[[str, bytes], bytes]) -> Iterator[Submit]:
    import ray  # noqa: PLC0415 - optional dependency

    address = os.environ.get("RAY_ADDRESS", "")
    try:
        if ":" in address and "://" not in address:
            reach(address)  # Ray tries for five minutes
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        hint = "set RAY_ADDRESS, or start one here: ray start --head"
        raise ResultsError(f"no Ray cluster: {_first_line(error)}", hint) from None
    sent: set[Future[bytes]] = set()
    over = threading.Event()
    task = ray.remote(on_worker)
    watch = partial(_watch, ray.get_runtime_context().gcs_address, sent, over)
    threading.Thread(target=watch, daemon=True).start()

    def submit(job: bytes) -> Future[bytes]:
        future: Future[bytes] = task.remote(__version__, job).future()
        sent.add(future)
        future.add_done_callback(sent.discard)
        return future

    try:
        yield submit
    finally:
        over.set()
        ray.shutdown()


def _watch(address: str, sent: set[Future[bytes]], over: threading.Event) -> None:
    """End all futures when the cluster is gone; Ray would end this process, after 60 s."""
    seen = time.monotonic()
    while not over.wait(WATCH_S):
        try:
            reach(address)
            seen = time.monotonic()
        except OSError:
            if time.monotonic() - seen > GONE_S:
                break
    for future in [] if over.is_set() else list(sent):
        future.set_exception(ConnectionError(f"the Ray cluster at {address} is gone"))


@contextlib.contextmanager
def _dask(on_worker: Callable[[str, bytes], bytes]) -> Iterator[Submit]:
    import dask  # noqa: PLC0415 - optional dependency
    from distributed import Client  # noqa: PLC0415

    address = dask.config.get("scheduler-address", None)
    if not address:
        hint = "set DASK_SCHEDULER_ADDRESS, as tcp://HOST:8786"
        raise ResultsError("no Dask scheduler is named", hint)
    try:
        client = Client(address)
    except (OSError, ValueError) as error:
        hint = "correct DASK_SCHEDULER_ADDRESS, or start it: dask scheduler"
        raise ResultsError(f"no Dask scheduler: {_first_line(error)}", hint) from None
    for name in ("distributed", "distributed.client"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures have their own message
    with client:
        yield partial(client.get_executor(pure=False).submit, on_worker, __version__)


CLUSTERS: Final = MappingProxyType({"ray": _ray, "dask": _dask})


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _on_worker() -> Callable[[str, bytes], bytes]:
    """Return the function that workers call.

    It is defined inside another one so that it travels by value: workers may lack this module.
    """

    def on_worker(release: str, job: bytes) -> bytes:
        import platform  # noqa: PLC0415 - on the worker
        import sys  # noqa: PLC0415

        try:
            import schemas  # noqa: PLC0415
        except ImportError:
            found = "no ONES"
        else:
            found = f"ONES {schemas.__version__}"
            if schemas.__version__ == release:
                from controlplane.sim.executors import simulate_apart  # noqa: PLC0415

                return simulate_apart(job)
        where = f"{sys.executable} on {platform.node()}"
        return f"?a worker has {found}; install ONES {release} for {where}".encode()

    return on_worker


# --- on a worker


def simulate_apart(job: bytes) -> bytes:
    """Simulate a pickled (simulate, cell) in an interpreter of its own."""
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:  # noqa: S603 - our own module
        assert child.stdin is not None  # noqa: S101
        assert child.stdout is not None  # noqa: S101
        child.stdin.write(job)
        child.stdin.flush()  # it stays open: the child ends when this process does
        message = child.stdout.read()
    if not message:
        raise RuntimeError(f"the simulation exited with code {child.returncode}")
    return message


def main() -> None:
    """Simulate the cell on standard input."""
    sink = os.dup(1)
    os.dup2(2, 1)  # what a simulation prints is not part of the answer
    simulate, cell = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own parent
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with os.fdopen(sink, "wb") as answer:
        answer.write(message_of(simulate, cell))


def _exit_with_parent() -> None:
    os.read(0, 1)  # a lock of `sys.stdin` would stay locked in forked processes
    os._exit(1)


if __name__ == "__main__":
    main()
