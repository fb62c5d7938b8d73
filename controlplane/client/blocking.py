"""The same client for scripts without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from controlplane.client.client import Client
from controlplane.client.connection import Home
from controlplane.client.files import MOST_BYTES, Fetch, Fetched, JobFile, JobFiles
from controlplane.client.streams import OutputLine
from controlplane.client.sweeps.blocking_runs import BlockingSweepRequests
from schemas.ids import JobId
from schemas.jobs import JobSpec
from schemas.wire.client import (
    Cluster,
    Explanation,
    JobAccepted,
    JobDetail,
    Jobs,
    JobState,
    JobSummary,
    NodeInfo,
    SearchInfo,
)
from schemas.wire.feed import FeedEvent

T = TypeVar("T")


class BlockingClient(BlockingSweepRequests):
    """A `Client` whose loop runs in a thread of its own; a context manager.

    Args:
        home: the cluster's folder; default: $ONES_HOME, else ~/.ones.
        timeout: seconds without an answer until a call fails; default: $ONES_TIMEOUT_S, else 10,
            and 2 at most where nobody listens.

    Raises:
        SettingsError: if there is no cluster in that folder, or its keys cannot be used.
    """

    def __init__(self, home: Home | Path | str | None = None, timeout: float | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ones", daemon=True)
        self._thread.start()
        try:
            self._client = self._run(_make(home, timeout))
            self._run(self._client.__aenter__())
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        """Nothing more to do: it is open."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Close the connection and end its thread."""
        self._run(self._client.__aexit__(None, None, None))
        self._stop()

    def cluster(self) -> Cluster:
        """Who answers, and as whom you are known."""
        return self._run(self._client.cluster())

    def submit(self, spec: JobSpec, key: str | None = None, *, project: str = "") -> JobId:
        """See `Client.submit`.

        Args:
            spec: what to run; relative paths are relative to the current directory.
            key: the same key gives the same job; None: a new job each time.
            project: of the key's: whose members see the job; empty: the first of them.
        """
        return self._run(self._client.submit(spec, key, project=project))

    def submit_accepted(
        self,
        spec: JobSpec,
        key: str | None = None,
        *,
        on_sent: Callable[[int, int], None] | None = None,
        project: str = "",
    ) -> JobAccepted:
        """See `Client.submit_accepted`.

        Args:
            spec: what to run; relative paths are relative to the current directory.
            key: the same key gives the same job; None: a new job each time.
            on_sent: called in the client's thread with bytes that arrived, and all of them.
            project: of the key's: whose members see the job; empty: the first of them.
        """
        done = self._client.submit_accepted(spec, key, on_sent=on_sent, project=project)
        return self._run(done)

    def submit_stored(
        self, spec: JobSpec, snapshot: str, key: str | None = None, *, project: str = ""
    ) -> JobAccepted:
        """See `Client.submit_stored`.

        Args:
            spec: what to run; its `workdir` is only told.
            snapshot: digest of the archive.
            key: the same key gives the same job; None: a new job each time.
            project: of the key's: whose members see the job; empty: the first of them.
        """
        return self._run(self._client.submit_stored(spec, snapshot, key, project=project))

    def check(self, spec: JobSpec) -> tuple[str, ...]:
        """See `Client.check`."""
        return self._run(self._client.check(spec))

    def jobs(self, *, ended: bool = False) -> tuple[JobSummary, ...]:
        """See `Client.jobs`.

        Args:
            ended: False: only jobs that have not ended.
        """
        return self._run(self._client.jobs(ended=ended))

    def find_jobs(
        self, *, ended: bool = False, states: Sequence[str] = (), user: str = "", name: str = ""
    ) -> Jobs:
        """See `Client.find_jobs`.

        Args:
            ended: ended ones too.
            states: only those in one of these, ended or not; none: in any.
            user: only this user's; empty: everybody's.
            name: of the job file or the job, or a pattern such as `lr-*`; empty: any.
        """
        return self._run(self._client.find_jobs(ended=ended, states=states, user=user, name=name))

    def job(self, job: str) -> JobDetail:
        """See `Client.job`.

        Args:
            job: its name, as `submit` returned it.
        """
        return self._run(self._client.job(job))

    def files(self, job: str, pattern: str = "*") -> JobFiles:
        """See `Client.files`.

        Args:
            job: its name, as `submit` returned it.
            pattern: of names, such as `*.png` or `checkpoints/*`.
        """
        return self._run(self._client.files(job, pattern))

    def fetch(
        self,
        job: str,
        to: Path,
        pattern: str = "*",
        *,
        most_bytes: int = MOST_BYTES,
        on_bytes: Callable[[int, int], None] | None = None,
    ) -> Fetch:
        """See `Client.fetch`.

        Args:
            job: its name, as `submit` returned it.
            to: a folder, made if there is none.
            pattern: of names, such as `*.png` or `checkpoints/*`.
            most_bytes: bound of all files together.
            on_bytes: called in the client's thread with the bytes that came, and all of them.
        """
        fetching = self._client.fetch(job, to, pattern, most_bytes=most_bytes, on_bytes=on_bytes)
        return self._run(fetching)

    def fetch_file(
        self,
        job: str,
        file: JobFile,
        target: Path,
        on_bytes: Callable[[int], None] | None = None,
    ) -> Fetched:
        """See `Client.fetch_file`.

        Args:
            job: its name, as `submit` returned it.
            file: of the list that `files` gave.
            on_bytes: called in the client's thread with the size of each piece.
        """
        return self._run(self._client.fetch_file(job, file, target, on_bytes))

    def last_checkpoint(self, job: str) -> JobFile:
        """See `Client.last_checkpoint`.

        Args:
            job: its name, as `submit` returned it.
        """
        return self._run(self._client.last_checkpoint(job))

    def explain(self, job: str) -> Explanation:
        """See `Client.explain`.

        Args:
            job: its name, as `submit` returned it.
        """
        return self._run(self._client.explain(job))

    def search(self) -> SearchInfo:
        """See `Client.search`."""
        return self._run(self._client.search())

    def cancel(self, job: str) -> JobDetail:
        """See `Client.cancel`.

        Args:
            job: its name, as `submit` returned it.
        """
        return self._run(self._client.cancel(job))

    def resize(
        self,
        job: str,
        slots: int | None = None,
        batch: int | None = None,
        on: Sequence[str] = (),
    ) -> JobDetail:
        """See `Client.resize`.

        Args:
            job: its name, as `submit` returned it.
            slots: how many; 0 pauses the job; None: as an order before this one said, without one
                as many as it has.
            batch: global batch, samples per step; None: the same.
            on: exactly these slots, NODE/INDEX; an order for the batch alone keeps those of before.
        """
        return self._run(self._client.resize(job, slots, batch, on))

    def pause(self, job: str) -> JobDetail:
        """See `Client.pause`.

        Args:
            job: its name, as `submit` returned it.
        """
        return self._run(self._client.pause(job))

    def resume(self, job: str, *, auto: bool = False) -> JobDetail:
        """See `Client.resume`.

        Args:
            job: its name, as `submit` returned it.
            auto: give the job back to the policy.
        """
        return self._run(self._client.resume(job, auto=auto))

    def nodes(self) -> tuple[NodeInfo, ...]:
        """See `Client.nodes`."""
        return self._run(self._client.nodes())

    def drain(self, node: str, within_s: float | None = None, reason: str = "") -> NodeInfo:
        """See `Client.drain`.

        Args:
            within_s: seconds, after which what still runs there is stopped; None: it is not.
            reason: for those whose jobs move.
        """
        return self._run(self._client.drain(node, within_s, reason))

    def undrain(self, node: str) -> NodeInfo:
        """See `Client.undrain`."""
        return self._run(self._client.undrain(node))

    def state(self, job: str, wait_s: float = 0.0) -> JobState:
        """See `Client.state`.

        Args:
            job: its name, as `submit` returned it.
            wait_s: the answer is held back so long, at most 30 s, while the job has not ended.
        """
        return self._run(self._client.state(job, wait_s))

    def wait_state(self, job: str, timeout: float | None = None) -> JobState:
        """See `Client.wait_state`.

        Args:
            timeout: seconds; None: for ever.
        """
        return self._run(self._client.wait_state(job, timeout))

    def wait(self, job: str, timeout: float | None = None) -> JobDetail:
        """See `Client.wait`.

        Args:
            job: its name, as `submit` returned it.
            timeout: seconds; None: for ever.
        """
        return self._run(self._client.wait(job, timeout))

    def events(self, from_seq: int = 1, follow: bool = False) -> Iterator[FeedEvent]:
        """See `Client.events`.

        Args:
            from_seq: number of the first one, 1-based.
            follow: go on for ever; else end at the last one there is.
        """
        for page in self._each(self._client.event_pages(from_seq, follow=follow)):
            yield from page

    def tail(self, job: str, rank: int | None = None, follow: bool = True) -> Iterator[str]:
        """See `Client.tail`.

        Args:
            job: its name, as `submit` returned it.
            rank: only of this worker; None: of all, as they arrived.
            follow: go on until the job has ended; else end at the last line there is.
        """
        for page in self.output_pages(job, rank, follow=follow):
            for line in page:
                yield line.text

    def output_pages(
        self,
        job: str,
        rank: int | None = None,
        *,
        follow: bool,
        since: float = 0.0,
        last: int | None = None,
        matching: str = "",
        unfinished: bool = False,
        raw: bool = False,
    ) -> Iterator[list[OutputLine]]:
        """See `Client.output_pages`.

        Args:
            job: its name, as `submit` returned it.
            rank: only of this worker; None: of all.
            follow: until the job has ended.
            since: only what reached the controller then or later, seconds since the epoch.
            last: of what there is now, only so many lines; None: all.
            matching: a regular expression that a line has to have a match of.
            unfinished: lines that go on, too, as far as they are there at the end of a page.
            raw: every state of a progress bar, as a line that ends in a carriage return.
        """
        pages = self._client.output_pages(
            job,
            rank,
            follow=follow,
            since=since,
            last=last,
            matching=matching,
            unfinished=unfinished,
            raw=raw,
        )
        return self._each(pages)

    def samples(self, job: str) -> Iterator[dict[str, Any]]:
        """See `Client.samples`.

        Args:
            job: its name; its spec has to ask for `record_samples`.
        """
        for page in self._each(self._client.sample_pages(job)):
            yield from page

    def _each(self, source: AsyncIterator[T]) -> Iterator[T]:
        """The items of `source`; it hands over pages, because each item costs a thread switch."""
        end = object()

        async def following() -> T | object:
            return await anext(source, end)

        while (item := self._run(following())) is not end:
            yield item  # type: ignore[misc] # it is not the end, so it is a T

    @property
    def _sweeps(self) -> Client:
        return self._client

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _make(home: Home | Path | str | None, timeout: float | None) -> Client:  # noqa: ASYNC109
    return Client(home, timeout)
