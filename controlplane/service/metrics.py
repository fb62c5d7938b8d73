"""Metrics of the cluster for Prometheus, and the HTTP server for GET /metrics.

The server runs in the event loop. Slow or idle clients cannot block others.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

import h11
from prometheus_client import (
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client import Counter as Count
from prometheus_client.exposition import choose_encoder

from controlplane.core.model.job import JobOwner
from controlplane.core.model.job_phases import Phase
from controlplane.core.model.node import NodePhase
from controlplane.core.reactor import Reactor
from controlplane.service.api.replies import DRAINED, DRAINING, UNHEALTHY, node_state
from schemas.errors import SettingsError
from schemas.jobs import STATES
from schemas.wire.client import SearchInfo

UPDATE_INTERVAL_S: Final = 1.0
PROMISES: Final = ("open", "kept", "broken")
SEARCH_GAUGES: Final = {  # field of `SearchInfo` -> name and help
    "running": ("ones_search_up", "1 while the policy produces the plans."),
    "best_fitness": ("ones_search_best_fitness", "Fitness of the best candidate."),
    "mean_fitness": ("ones_search_mean_fitness", "Mean fitness of the population."),
    "incumbent_fitness": ("ones_search_incumbent_fitness", "Fitness of the plan in force."),
    "diversity": (
        "ones_search_diversity",
        "Mean share of jobs in which two candidates differ, 0 to 1.",
    ),
    "predicted_gain": (
        "ones_gain_predicted_ratio",
        "Predicted speed-up of re-scales, geometric mean.",
    ),
    "realised_gain": (
        "ones_gain_realised_ratio",
        "Realised speed-up of re-scales, geometric mean.",
    ),
    "gain_error": (
        "ones_gain_error_ratio",
        "Factor by which realised speed-ups were off, geometric mean.",
    ),
    "length_error": (
        "ones_length_error_ratio",
        "Error of predicted work over what was left, median.",
    ),
}
COUNTERS: Final = {
    "generations": ("ones_search_generations", "Generations evolved."),
    "restarts": ("ones_search_restarts", "Restarts of the search process."),
    "plans": ("ones_plans", "Plans that changed something."),
    "rescales": ("ones_rescales", "Changes of membership of jobs."),
    "batch_changes": ("ones_batch_changes", "Changes of batch alone."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFigures:
    """Condition of the controller itself."""

    stalled: bool = False  # the journal cannot be written
    outdated: bool = False  # nodes know inputs that the journal lost
    tail_inputs: int = 0  # inputs that a restart has to handle again
    tail_s: float = 0.0  # time that this takes
    snapshot_age_s: float | None = None  # None: no snapshot yet
    snapshot_failures: int = 0  # since the start
    journal_bytes: int = 0  # with the write-ahead log
    commit_s: float = 0.0  # longest wait of an input for its commit since the last call
    key_ends: Mapping[str, float] = field(default_factory=dict)  # name -> seconds since the epoch


SERVICE_GAUGES: Final = {  # field of `ServiceFigures` -> name and help
    "stalled": ("ones_journal_stalled", "1 while the journal cannot be written."),
    "outdated": ("ones_journal_outdated", "1 while nodes know inputs that the journal lost."),
    "tail_inputs": ("ones_journal_tail_inputs", "Inputs that a restart has to handle again."),
    "tail_s": ("ones_journal_tail_seconds", "Time that handling them again takes."),
    "snapshot_age_s": ("ones_snapshot_age_seconds", "Age of the newest snapshot of the state."),
    "journal_bytes": ("ones_journal_bytes", "Size of the journal with its write-ahead log."),
    "commit_s": ("ones_commit_seconds", "Longest wait for a commit in the last second."),
}


class Metrics:
    """Metrics of the cluster and of the controller, updated about once a second."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self.registry = CollectorRegistry()

        def gauge(name: str, what: str, *labels: str) -> Gauge:
            return Gauge(name, what, labels, registry=registry)

        def count(name: str, what: str) -> Count:
            return Count(name, what, registry=registry)

        self._jobs = gauge("ones_jobs", "Jobs by state.", "state")
        self._promises = gauge("ones_promises", "Promised ends of jobs by outcome.", "outcome")
        self._slots = gauge("ones_slots", "Slots of nodes that are up.")
        self._busy = gauge("ones_slots_busy", "Slots with a process.")
        self._nodes = gauge("ones_nodes", "Nodes by state.", "state")
        self._search = {field: gauge(name, what) for field, (name, what) in SEARCH_GAUGES.items()}
        self._length_coverage = gauge(
            "ones_length_coverage_ratio", "Share of jobs' work within the interval.", "interval"
        )
        self._decision = gauge("ones_decision_seconds", "Time to make the last plan.")
        self._service = {field: gauge(name, what) for field, (name, what) in SERVICE_GAUGES.items()}
        self._snapshot_failures = count("ones_snapshot_failures", "Snapshots that failed.")
        self._lag = gauge("ones_event_loop_lag_seconds", "Delay of the event loop.")
        self._key_ends = gauge("ones_key_expiry_timestamp_seconds", "End of a valid key.", "name")
        self._user_jobs = gauge("ones_user_jobs", "Jobs with slots.", "user", "project")
        self._user_slots = gauge("ones_user_slots", "Slots of jobs.", "user", "project")
        ProcessCollector(registry=registry)  # memory, processor time, open files
        self._counters = {field: count(name, what) for field, (name, what) in COUNTERS.items()}
        self._last_counts: dict[str, int] = {}

    def page(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics as text, in a format that `accept` allows, and the content type."""
        encode, kind = choose_encoder(accept)
        return encode(self.registry), kind

    async def keep(
        self,
        core: Callable[[], Reactor],
        search: Callable[[], SearchInfo],
        figures: Callable[[], ServiceFigures],
    ) -> None:
        """Update the metrics about once a second until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self.write(core(), search(), figures())
            due = loop.time() + UPDATE_INTERVAL_S
            await asyncio.sleep(UPDATE_INTERVAL_S)
            self._lag.set(max(0.0, loop.time() - due))

    def write(
        self, core: Reactor, search: SearchInfo, figures: ServiceFigures = ServiceFigures()
    ) -> None:
        """Update the metrics. A counter that is below its last value has restarted from 0."""
        self._write_service(figures)
        self._write_users(core)
        state, totals = core.state, core.totals
        counts = state.job_counters
        for name in STATES:
            count = counts.phases[Phase(name)] + totals.ended.get(name, 0)
            self._jobs.labels(name).set(count)
        promises = {
            "open": len(counts.promised),
            "kept": totals.promises_kept,
            "broken": totals.promises_broken,
        }
        for outcome in PROMISES:
            self._promises.labels(outcome).set(promises[outcome])
        shown = Counter(node_state(node) for node in state.nodes.values())
        for name in (*(phase.value for phase in NodePhase), UNHEALTHY, DRAINING, DRAINED):
            self._nodes.labels(name).set(shown[name])
        up = [node for node in state.nodes.values() if node.phase is NodePhase.UP]
        self._slots.set(sum(len(node.spec.slots) for node in up))
        self._busy.set(len(state.slot_index.owners()))
        for name, metric in self._search.items():
            metric.set(_or_nan(getattr(search, name)))
        self._decision.set(search.decision_ms / 1000.0)
        self._length_coverage.labels("80").set(_or_nan(search.length_coverage_80))
        self._length_coverage.labels("90").set(_or_nan(search.length_coverage_90))
        for name, counter in self._counters.items():
            value = int(getattr(search, name))
            before = self._last_counts.get(name, 0)
            counter.inc(value - before if value >= before else value)
            self._last_counts[name] = value

    def _write_service(self, figures: ServiceFigures) -> None:
        for name, metric in self._service.items():
            metric.set(_or_nan(getattr(figures, name)))
        before = self._last_counts.get("snapshot_failures", 0)
        self._snapshot_failures.inc(max(0, figures.snapshot_failures - before))
        self._last_counts["snapshot_failures"] = figures.snapshot_failures
        self._key_ends.clear()
        for name, at in figures.key_ends.items():
            self._key_ends.labels(name).set(at)

    def _write_users(self, core: Reactor) -> None:
        jobs, slots = Counter[JobOwner](), Counter[JobOwner]()
        for name, allocation in core.state.slot_index.allocations().items():
            owner = core.state.jobs[name].owner
            jobs[owner] += 1
            slots[owner] += len(allocation)
        self._user_jobs.clear()
        self._user_slots.clear()
        for owner, number in jobs.items():
            self._user_jobs.labels(*owner).set(number)
            self._user_slots.labels(*owner).set(slots[owner])


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


MAX_CONNECTIONS: Final = 64
MAX_HEADER: Final = 16 << 10  # bytes of the request line and headers
REQUEST_TIMEOUT_S: Final = 5.0  # from the start of the connection to the complete request
REPLY_TIMEOUT_S: Final = 10.0  # for sending a reply
PAGE_REUSE_S: Final = 0.5  # time for which a rendered page is reused
CHUNK: Final = 4096
Render = Callable[[str], tuple[bytes, str]]  # Accept header -> page, content type


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    host: str
    writer: asyncio.StreamWriter


class MetricsServer:
    """HTTP server that answers one request per connection and then closes the connection.

    At the connection limit, the host with the most connections loses its oldest connection.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._pages: dict[str, tuple[float, bytes, str]] = {}
        self._connections: dict[_Connection, None] = {}  # in order of arrival
        self._answering: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def served(self, host: str, port: int) -> AsyncIterator[None]:
        """Serve while the context is active. With port 0, serve nothing.

        Raises:
            SettingsError: if the port cannot be bound.
        """
        if not port:
            yield
            return
        try:
            server = await asyncio.start_server(self._accept, host, port, limit=CHUNK)
        except OSError as error:
            what = f"listen.metrics: {host}:{port}: {error.strerror}"
            raise SettingsError(
                what, "choose another port, or 0 to disable metrics", "metrics"
            ) from None
        try:
            yield
        finally:
            server.close()
            for connection in list(self._connections):
                connection.writer.transport.abort()
            for task in self._answering:
                task.cancel()
            await asyncio.gather(*self._answering, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername") or ("",)
        connection = _Connection(str(peer[0]), writer)
        self._connections[connection] = None
        if len(self._connections) > MAX_CONNECTIONS:
            hosts = Counter(each.host for each in self._connections)
            most = max(hosts.values())
            first = next(each for each in self._connections if hosts[each.host] == most)
            del self._connections[first]
            first.writer.transport.abort()
        task = asyncio.create_task(self._answer(reader, connection))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, reader: asyncio.StreamReader, connection: _Connection) -> None:
        writer = connection.writer
        writer.transport.set_write_buffer_limits(high=0)  # so that drain() returns once all is sent
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                request = await _request(http, reader)
            if request is not None:
                async with asyncio.timeout(REPLY_TIMEOUT_S):
                    await self._reply(http, writer, request)
        except (OSError, TimeoutError):
            writer.transport.abort()
        finally:
            self._connections.pop(connection, None)
            writer.close()

    async def _reply(
        self, http: h11.Connection, writer: asyncio.StreamWriter, request: h11.Request | int
    ) -> None:
        kind, page = "text/plain; charset=utf-8", b""
        if not isinstance(request, h11.Request):
            status = request
        elif request.target.partition(b"?")[0] != b"/metrics":
            status, page = HTTPStatus.NOT_FOUND, b"use /metrics\n"
        elif request.method not in {b"GET", b"HEAD"}:
            status = HTTPStatus.METHOD_NOT_ALLOWED
        else:
            status = HTTPStatus.OK
            accept = b",".join(value for name, value in request.headers if name == b"accept")
            page, kind = self._page(accept.decode("latin-1"))
        headers = {"Content-Type": kind, "Content-Length": str(len(page)), "Connection": "close"}
        fields = [(name.encode(), value.encode()) for name, value in headers.items()]
        head = h11.Response(status_code=int(status), headers=fields)
        for event in (head, h11.Data(data=page), h11.EndOfMessage()):
            writer.write(http.send(event) or b"")
        await writer.drain()

    def _page(self, accept: str) -> tuple[bytes, str]:
        kept = self._pages.get(accept)
        now = time.monotonic()
        if kept is None or now - kept[0] > PAGE_REUSE_S:
            if len(self._pages) > MAX_CONNECTIONS:
                self._pages.clear()
            kept = self._pages[accept] = (now, *self._render(accept))
        return kept[1:]


async def _request(http: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | int | None:
    """Return the request, None if none arrives, or the error status for a malformed request."""
    try:
        while True:
            event = http.next_event()
            if isinstance(event, h11.Request):
                return event
            if event is not h11.NEED_DATA:
                return None
            http.receive_data(await reader.read(CHUNK))
    except h11.RemoteProtocolError as error:
        return error.error_status_hint
