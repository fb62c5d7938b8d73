"""Metrics of the cluster and of the controller for Prometheus."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import Counter as Count
from prometheus_client import Histogram

from controlplane.core.model.job import JobOwner
from controlplane.core.model.job_phases import Phase
from controlplane.core.model.node import NodePhase
from controlplane.core.reactor import Reactor
from controlplane.service.api.replies import CORDONED, DRAINED, DRAINING, UNHEALTHY, node_state
from schemas.host.metrics_server import Registry
from schemas.jobs import STATES
from schemas.wire.client import SearchInfo

UPDATE_INTERVAL_S: Final = 1.0
MAX_SHARE: Final = 0.01  # of the time of the event loop
QUEUE_WAIT_BUCKETS_S: Final = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86_400, 604_800)
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
    relay_up: bool = False  # the log relay serves its ports
    relay_restarts: int = 0  # since the start
    key_ends: Mapping[str, float] = field(default_factory=dict)  # name -> seconds since the epoch
    requests: Mapping[str, int] = field(default_factory=dict)  # user -> number since the start
    webhooks: Mapping[str, int] = field(default_factory=dict)  # name -> events that wait
    standbys: Mapping[str, int] = field(default_factory=dict)  # host -> inputs that it lacks


SERVICE_GAUGES: Final = {  # field of `ServiceFigures` -> name and help
    "stalled": ("ones_journal_stalled", "1 while the journal cannot be written."),
    "outdated": ("ones_journal_outdated", "1 while nodes know inputs that the journal lost."),
    "tail_inputs": ("ones_journal_tail_inputs", "Inputs that a restart has to handle again."),
    "tail_s": ("ones_journal_tail_seconds", "Time that handling them again takes."),
    "snapshot_age_s": ("ones_snapshot_age_seconds", "Age of the newest snapshot of the state."),
    "journal_bytes": ("ones_journal_bytes", "Size of the journal with its write-ahead log."),
    "commit_s": ("ones_commit_seconds", "Longest wait for a commit in the last second."),
    "relay_up": ("ones_log_relay_up", "1 while the log relay serves its ports."),
}


class Metrics:
    """Metrics of the cluster and of the controller, updated about once a second."""

    def __init__(self) -> None:
        self.registry = Registry()
        gauge, count = self.registry.gauge, self.registry.counter
        self._jobs = gauge("ones_jobs", "Jobs by state.", "state")
        self._bad_losses = gauge(
            "ones_jobs_loss_not_finite", "Jobs whose last epoch's loss is NaN."
        )
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
        self._relay_restarts = count("ones_log_relay_restarts", "Restarts of the log relay.")
        self._lag = gauge("ones_event_loop_lag_seconds", "Delay of the event loop.")
        self._key_ends = gauge("ones_key_expiry_timestamp_seconds", "End of a valid key.", "name")
        self._user_jobs = gauge("ones_user_jobs", "Jobs with slots.", "user", "project")
        self._user_slots = gauge("ones_user_slots", "Slots of jobs.", "user", "project")
        self._requests = count("ones_requests", "Requests of users on port 7702.", "user")
        self._webhooks = gauge("ones_webhook_waiting", "Events not delivered yet.", "name")
        self._standbys = gauge(
            "ones_standby_missing_inputs", "Inputs that a standby has not stored yet.", "host"
        )
        self.queue_wait = Histogram(
            "ones_queue_wait_seconds",
            "Time from a job's submission to its first slots.",
            buckets=QUEUE_WAIT_BUCKETS_S,
            registry=self.registry.collectors,
        )
        self._counters = {field: count(name, what) for field, (name, what) in COUNTERS.items()}
        self._last_counts: dict[str, int] = {}

    async def keep(
        self,
        core: Callable[[], Reactor],
        search: Callable[[], SearchInfo],
        figures: Callable[[], ServiceFigures],
    ) -> None:
        """Update the metrics until cancelled: once a second, or in a large cluster less often."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            self.write(core(), search(), figures())
            due = loop.time() + max(UPDATE_INTERVAL_S, (loop.time() - began) / MAX_SHARE)
            await asyncio.sleep(due - loop.time())
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
        for name in (*(phase.value for phase in NodePhase), UNHEALTHY, DRAINING, DRAINED, CORDONED):
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
            self._count(name, counter, int(getattr(search, name)))

    def _count(self, name: str, counter: Count, value: int) -> None:
        before = self._last_counts.get(name, 0)
        counter.inc(value - before if value >= before else value)
        self._last_counts[name] = value

    def _write_service(self, figures: ServiceFigures) -> None:
        for name, metric in self._service.items():
            metric.set(_or_nan(getattr(figures, name)))
        self._count("snapshot_failures", self._snapshot_failures, figures.snapshot_failures)
        self._count("relay_restarts", self._relay_restarts, figures.relay_restarts)
        for user, number in figures.requests.items():
            self._count(f"requests {user}", self._requests.labels(user), number)
        for name, waiting in figures.webhooks.items():
            self._webhooks.labels(name).set(waiting)
        for host, missing in figures.standbys.items():
            self._standbys.labels(host).set(missing)
        self._key_ends.clear()
        for name, at in figures.key_ends.items():
            self._key_ends.labels(name).set(at)

    def _write_users(self, core: Reactor) -> None:
        jobs, slots = Counter[JobOwner](), Counter[JobOwner]()
        for name, allocation in core.state.slot_index.allocations().items():
            owner = core.state.jobs[name].owner
            jobs[owner] += 1
            slots[owner] += len(allocation)
        progress = (core.state.jobs[name].progress for name in core.state.slot_index.allocations())
        self._bad_losses.set(sum(each.loss_is_not_finite for each in progress))
        self._user_jobs.clear()
        self._user_slots.clear()
        for owner, number in jobs.items():
            self._user_jobs.labels(*owner).set(number)
            self._user_slots.labels(*owner).set(slots[owner])


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
