"""Blocking client for scripts without an event loop. Its methods wrap those of `Client`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from controlplane.client.client import Client
from controlplane.client.connection import Home
from controlplane.client.rows import html_table
from controlplane.client.sweeps.runs import SweepRun
from controlplane.client.sweeps.sweep import Sweep
from schemas.ids import JobId
from schemas.wire.feed import FeedEvent

P = ParamSpec("P")
T = TypeVar("T")
A_co = TypeVar("A_co", covariant=True)  # class of the async object


class Blocking(Generic[A_co]):
    """Blocking access to an async object. Its event loop runs in another thread."""

    _async: A_co
    _loop: asyncio.AbstractEventLoop

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _each(self, source: AsyncIterator[T]) -> Iterator[T]:
        """Yield the items of `source`. Items should be pages: each costs a thread switch."""
        end = object()

        async def following() -> T | object:
            return await anext(source, end)

        while (item := self._run(following())) is not end:
            yield item  # type: ignore[misc] # not the end, so a T


def _blocking(
    method: Callable[Concatenate[A_co, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Blocking[A_co], P], T]:
    """Return the blocking form of an async method, with its parameters and docstring."""

    @wraps(method)
    def call(self: Blocking[A_co], /, *args: P.args, **kwargs: P.kwargs) -> T:
        work: Coroutine[Any, Any, T] = getattr(self._async, method.__name__)(*args, **kwargs)
        return self._run(work)

    return call


def _pages(
    method: Callable[Concatenate[A_co, P], AsyncIterator[T]],
) -> Callable[Concatenate[Blocking[A_co], P], Iterator[T]]:

    @wraps(method)
    def call(self: Blocking[A_co], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        source: AsyncIterator[T] = getattr(self._async, method.__name__)(*args, **kwargs)
        return self._each(source)

    return call


class BlockingSweepRun(Blocking[SweepRun]):
    """A `SweepRun` for scripts without an event loop."""

    def __init__(self, run: SweepRun, loop: asyncio.AbstractEventLoop) -> None:
        self._async, self._loop = run, loop

    @property
    def job(self) -> JobId:
        """Name of the sweep."""
        return self._async.job

    def _repr_html_(self) -> str:
        """Return a table of the trials, best first, for notebooks."""
        return html_table(self.table())

    detail = _blocking(SweepRun.detail)
    table = _blocking(SweepRun.table)
    epochs = _blocking(SweepRun.epochs)
    best = _blocking(SweepRun.best)
    stop = _blocking(SweepRun.stop)
    pause = _blocking(SweepRun.pause)
    resume = _blocking(SweepRun.resume)
    delete = _blocking(SweepRun.delete)
    add = _blocking(SweepRun.add)
    clone = _blocking(SweepRun.clone)
    sample = _blocking(SweepRun.sample)
    manifest = _blocking(SweepRun.manifest)
    preview = _blocking(SweepRun.preview)
    export = _blocking(SweepRun.export)
    wait = _blocking(SweepRun.wait)
    cancel = _blocking(SweepRun.cancel)


class BlockingClient(Blocking[Client]):
    """A `Client` for scripts without an event loop; a context manager with the same arguments.

    Its event loop runs in a thread, which also calls `on_sent`, `on_bytes` and `on_added`.
    """

    def __init__(self, home: Home | Path | str | None = None, timeout: float | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ones", daemon=True)
        self._thread.start()
        try:
            self._async = self._run(_make(home, timeout))
            self._run(self._async.__aenter__())
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        """Return this client, which is already open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection and end its thread."""
        self.close()

    def close(self) -> None:
        """Close the connection and end its thread."""
        self._run(self._async.__aexit__())
        self._stop()

    cluster = _blocking(Client.cluster)
    search = _blocking(Client.search)

    submit = _blocking(Client.submit)
    submit_accepted = _blocking(Client.submit_accepted)
    submit_stored = _blocking(Client.submit_stored)
    check = _blocking(Client.check)
    expected_start = _blocking(Client.expected_start)

    jobs = _blocking(Client.jobs)
    find_jobs = _blocking(Client.find_jobs)
    history = _blocking(Client.history)
    job = _blocking(Client.job)
    state = _blocking(Client.state)
    usage = _blocking(Client.usage)
    explain = _blocking(Client.explain)
    wait = _blocking(Client.wait)
    wait_state = _blocking(Client.wait_state)
    cancel = _blocking(Client.cancel)
    resize = _blocking(Client.resize)
    pause = _blocking(Client.pause)
    resume = _blocking(Client.resume)
    hold = _blocking(Client.hold)
    release = _blocking(Client.release)
    rerun = _blocking(Client.rerun)

    files = _blocking(Client.files)
    fetch = _blocking(Client.fetch)
    fetch_file = _blocking(Client.fetch_file)
    last_checkpoint = _blocking(Client.last_checkpoint)
    export_model = _blocking(Client.export_model)

    nodes = _blocking(Client.nodes)
    drain = _blocking(Client.drain)
    cordon = _blocking(Client.cordon)
    reserve = _blocking(Client.reserve)
    cancel_reservation = _blocking(Client.cancel_reservation)
    undrain = _blocking(Client.undrain)
    forget_node = _blocking(Client.forget_node)

    sharing = _blocking(Client.sharing)
    change_sharing = _blocking(Client.change_sharing)
    pause_scheduling = _blocking(Client.pause_scheduling)
    policy = _blocking(Client.policy)
    choose_policy = _blocking(Client.choose_policy)

    keys = _blocking(Client.keys)
    add_key = _blocking(Client.add_key)
    revoke_key = _blocking(Client.revoke_key)

    sweep = _blocking(Client.sweep)
    change_sweep = _blocking(Client.change_sweep)
    ledger = _blocking(Client.ledger)

    output_pages = _pages(Client.output_pages)

    def events(self, from_seq: int = 1, follow: bool = False) -> Iterator[FeedEvent]:
        """Yield feed events; see `Client.events`."""
        for page in self._each(self._async.event_pages(from_seq, follow=follow)):
            yield from page

    def tail(self, job: str, rank: int | None = None, follow: bool = True) -> Iterator[str]:
        """Yield the lines of a job's output; see `Client.tail`."""
        for page in self.output_pages(job, rank, follow=follow):
            for line in page:
                yield line.text

    def samples(self, job: str) -> Iterator[dict[str, Any]]:
        """Yield a record for each committed step; see `Client.samples`."""
        for page in self._each(self._async.sample_pages(job)):
            yield from page

    def submit_sweep(
        self, sweep: Sweep, workdir: Path | str | None = None, key: str | None = None
    ) -> BlockingSweepRun:
        """Upload the working directory and submit a sweep; see `Client.submit_sweep`."""
        run = self._run(self._async.submit_sweep(sweep, workdir, key))
        return BlockingSweepRun(run, self._loop)

    def sweep_run(self, job: str) -> BlockingSweepRun:
        """Return a handle for the sweep of this name, without sending a request."""
        return BlockingSweepRun(self._async.sweep_run(job), self._loop)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _make(home: Home | Path | str | None, timeout: float | None) -> Client:  # noqa: ASYNC109
    return Client(home, timeout)
