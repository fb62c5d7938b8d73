"""What people and Prometheus read of a search is what its policy said of it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec
import pytest

from controlplane.core.inputs import PlanProposed
from controlplane.policy.api import Plan, SearchStats
from controlplane.policy.baselines.fifo import Fifo
from controlplane.service.api import replies
from controlplane.service.metrics import Metrics, ServiceFigures
from controlplane.service.planner.planner import InlinePlanner
from schemas.ids import JobId, Seconds
from schemas.wire.client import SearchInfo
from tests.support.builders import N1, A, cancelled, exited
from tests.support.controller import Controller, running


class Searching(Fifo):
    """A policy that says how it stands."""

    def stats(self) -> SearchStats:
        return SearchStats(
            generations=30, best_fitness=0.75, mean_fitness=0.5, incumbent_fitness=0.6,
            diversity=0.25, decision_ms=1.5, length_predictions=16, length_error=0.125,
            length_coverage_80=0.75, length_coverage_90=0.875,
        )  # fmt: skip


def told(controller: Controller) -> SearchInfo:
    """What a client is told of the search of that cluster."""
    look = (controller.view(), Seconds(controller.now))
    planner = InlinePlanner(Searching(), lambda: look, lambda *_: None)
    return replies.search_info(controller.reactor.totals, "mine", planner)


def numbers(controller: Controller) -> dict[str, float]:
    """What Prometheus reads of everything but jobs, nodes and promises."""
    metrics = Metrics()
    metrics.write(controller.reactor, told(controller))
    return {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for family in metrics.registry.collectors.collect()
        for sample in family.samples
        if (not sample.labels or "interval" in sample.labels)
        and not sample.name.startswith(("process_", "ones_queue_wait_seconds"))
    }


def test_clients_and_prometheus_read_what_the_policy_states() -> None:
    controller = running()
    unmeasured = numbers(controller)
    controller.reactor.totals.gains.append((2.0, 1.0))

    assert told(controller) == SearchInfo(
        policy="mine", running=True, plans=1, generations=30, best_fitness=0.75, mean_fitness=0.5,
        incumbent_fitness=0.6, diversity=0.25, decision_ms=1.5, predicted_gain=2.0,
        realised_gain=1.0, gain_error=2.0, length_error=0.125, length_coverage_80=0.75,
        length_coverage_90=0.875,
    )  # fmt: skip
    assert numbers(controller) == {
        "ones_jobs_loss_not_finite": 0.0, "ones_slots": 1.0, "ones_slots_busy": 1.0, "ones_search_up": 1.0,
        "ones_search_best_fitness": 0.75, "ones_search_mean_fitness": 0.5,
        "ones_search_incumbent_fitness": 0.6, "ones_search_diversity": 0.25,
        "ones_decision_seconds": 0.0015, "ones_gain_predicted_ratio": 2.0,
        "ones_gain_realised_ratio": 1.0, "ones_gain_error_ratio": 2.0,
        "ones_length_error_ratio": 0.125, "ones_length_coverage_ratio/80": 0.75,
        "ones_length_coverage_ratio/90": 0.875, "ones_journal_stalled": 0.0,
        "ones_search_generations_total": 30.0, "ones_search_restarts_total": 0.0,
        "ones_journal_outdated": 0.0, "ones_journal_tail_inputs": 0.0,
        "ones_journal_tail_seconds": 0.0, "ones_snapshot_age_seconds": pytest.approx(math.nan, nan_ok=True),
        "ones_journal_bytes": 0.0, "ones_commit_seconds": 0.0, "ones_snapshot_failures_total": 0.0,
        "ones_log_relay_up": 0.0, "ones_log_relay_restarts_total": 0.0,
        "ones_event_loop_lag_seconds": 0.0, "ones_plans_total": 1.0, "ones_rescales_total": 0.0, "ones_batch_changes_total": 0.0,
    }  # fmt: skip
    gains = [unmeasured[f"ones_gain_{name}_ratio"] for name in ("predicted", "realised", "error")]
    assert all(map(math.isnan, gains))


def test_the_inputs_that_a_standby_lacks_are_shown() -> None:
    controller, metrics = running(), Metrics()
    figures = ServiceFigures(standbys={"h2": 7, "h3": 0})

    metrics.write(controller.reactor, SearchInfo(policy="mine", running=True), figures)

    found = metrics.registry.collectors.get_sample_value
    name = "ones_standby_missing_inputs"
    assert [found(name, {"host": host}) for host in ("h2", "h3")] == [7.0, 0.0]


def test_counters_count_only_increments() -> None:
    controller, metrics = running(), Metrics()
    counted = told(controller)

    for generations in (30, 42, 5):  # the last of a search process that was started again
        search = msgspec.structs.replace(counted, generations=generations)
        metrics.write(controller.reactor, search)

    assert metrics.registry.collectors.get_sample_value("ones_search_generations_total") == 47.0


def test_promises_are_counted_by_outcome() -> None:
    controller = running()
    for name in ("b", "c", "d"):
        controller.submit(name)
    ends = {"a-1": controller.now + 9.0, "b-2": controller.now + 9.0, "c-3": controller.now + 9.0}
    promised = {JobId(job): Seconds(end) for job, end in ends.items()}
    plan = Plan(based_on=controller.state.version, promised=promised)
    controller.take(PlanProposed(plan=plan))
    controller.take(cancelled(JobId("b-2")))
    controller.now += 10.0
    controller.tell(N1, exited(A, code=0))
    metrics = Metrics()

    metrics.write(controller.reactor, told(controller))

    read = metrics.registry.collectors.get_sample_value
    assert {
        outcome: read("ones_promises", {"outcome": outcome})
        for outcome in ("open", "kept", "broken")
    } == {"open": 1.0, "kept": 0.0, "broken": 1.0}


def test_an_operator_sees_who_has_slots_and_the_condition_of_the_controller() -> None:
    controller, metrics = running(), Metrics()
    figures = ServiceFigures(
        outdated=True, tail_inputs=7, snapshot_age_s=60.0, snapshot_failures=2,
        key_ends={"eve": 1e9},
    )  # fmt: skip

    metrics.write(controller.reactor, told(controller), figures)
    metrics.write(controller.reactor, told(controller), figures)

    found = {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for family in metrics.registry.collectors.collect()
        for sample in family.samples
    }
    wanted = {
        "ones_user_jobs/ann/ann": 1.0, "ones_user_slots/ann/ann": 1.0, "ones_nodes/up": 1.0,
        "ones_nodes/unhealthy": 0.0, "ones_journal_outdated": 1.0, "ones_journal_tail_inputs": 7.0,
        "ones_snapshot_age_seconds": 60.0, "ones_snapshot_failures_total": 2.0,
        "ones_key_expiry_timestamp_seconds/eve": 1e9,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted


def test_every_alert_uses_metrics_that_exist() -> None:
    text = (Path(__file__).parents[4] / "docs" / "alerts.yml").read_text()
    controller, metrics = running(), Metrics()
    figures = ServiceFigures(
        key_ends={"eve": 1e9}, webhooks={"chat": 1}, requests={"eve": 2}, standbys={"h2": 0}
    )
    metrics.write(controller.reactor, told(controller), figures)
    known = {
        sample.name for family in metrics.registry.collectors.collect() for sample in family.samples
    }

    assert set(re.findall(r"\bones_[a-z_]+", text)) <= known


def test_requests_are_counted_by_user_and_waits_in_a_histogram() -> None:
    controller, metrics = running(), Metrics()
    for requests in ({"ann": 3, "bob": 1}, {"ann": 5, "bob": 1}):
        figures = ServiceFigures(requests=requests, webhooks={"chat": 4})
        metrics.write(controller.reactor, told(controller), figures)
    metrics.queue_wait.observe(70.0)

    value = metrics.registry.collectors.get_sample_value
    assert (
        value("ones_requests_total", {"user": "ann"}),
        value("ones_webhook_waiting", {"name": "chat"}),
    ) == (5.0, 4.0)
    assert [
        value("ones_queue_wait_seconds_bucket", {"le": limit})
        for limit in ("60.0", "300.0", "+Inf")
    ] == [0.0, 1.0, 1.0]
