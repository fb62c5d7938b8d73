"""What the search process says by itself, when nobody asks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from controlplane.policy.api import ClusterView, StepsSeen
from controlplane.policy.registry import make
from controlplane.service.pipes import FrameDecoder, encode_frame
from controlplane.service.planner.search_messages import (
    FROM_SEARCH,
    BatchesChosen,
    Converged,
    EventObserved,
    FindPlan,
    FromSearch,
    FullView,
    PlanFound,
    ToSearch,
)
from controlplane.service.planner.search_process import SearchProcess
from schemas.ids import JobId, Seconds
from tests.support.builders import S0, S1, A, B, job_view
from tests.support.views import row_of, view_of

NOW = Seconds(100.0)
LIMIT_S = 120.0
LOUD = 1e9  # a noise scale at which the largest batch is the best


class Search:
    """The process' work in a thread, with a pipe on each side."""

    def __init__(self, **options: object) -> None:
        self._source, self._to = os.pipe()
        self._from, self._sink = os.pipe()
        self._frames, self._said = FrameDecoder(), list[FromSearch]()
        process = SearchProcess(make("ones", options), 0, self._source, self._sink)
        self._thread = threading.Thread(target=process.run)
        self._thread.start()

    def tell(self, *messages: ToSearch) -> None:
        os.write(self._to, b"".join(encode_frame(message) for message in messages))

    def next(self) -> FromSearch:
        while not self._said:
            bodies = self._frames.feed(os.read(self._from, 1 << 20))
            self._said += [FROM_SEARCH.decode(body) for body in bodies]
        return self._said.pop(0)

    def until_it_rests(self) -> None:
        while not isinstance(self.next(), Converged):
            pass

    def end(self) -> None:
        os.close(self._to)
        self._thread.join(LIMIT_S)
        for descriptor in (self._source, self._from, self._sink):
            os.close(descriptor)


@contextmanager
def at_rest(view: ClusterView, **options: object) -> Iterator[Search]:
    """A search without chance that was asked about a cluster and has nothing more to find."""
    search = Search(search="greedy", **options)
    try:
        search.tell(FullView(view=view), FindPlan(number=1, now=NOW))
        search.until_it_rests()
        yield search
    finally:
        search.end()


def two_that_train() -> ClusterView:
    how = {"family": "f", "epoch": 1, "batch_limit": 8192, "local_limit": 8192}
    jobs = [
        job_view(job, running_on={slot: 64}, placed_at=NOW, **how)
        for job, slot in ((A, S0), (B, S1))
    ]
    return view_of(row_of(2), *jobs)


def telemetry(job: JobId) -> EventObserved:
    """Ten steps with a batch of 64."""
    steps = StepsSeen(
        job=job, family="f", group=1, slots=1, nodes=1, global_batch=64, step=10,
        samples_done=640, samples_per_s=640.0, noise_scale=LOUD, group_steps=10,
    )  # fmt: skip
    return EventObserved(event=steps, at=NOW)


def test_telemetry_changes_a_batch_before_the_next_plan() -> None:
    """As a simulation in rounds does; the plan that comes later says the same."""
    with at_rest(two_that_train()) as search:
        search.tell(telemetry(A))

        first, then = search.next(), search.next()

    assert isinstance(first, BatchesChosen)
    assert first.plan.local_batch == {A: {S0: 128}}
    assert first.plan.reasons[A].code == "batch"
    assert isinstance(then, PlanFound)
    assert then.plan.local_batch == {A: {S0: 128}, B: {S1: 64}}


def test_batches_of_jobs_that_report_together_are_chosen_together() -> None:
    with at_rest(two_that_train()) as search:
        search.tell(telemetry(A), telemetry(B))

        found = search.next()

    assert isinstance(found, BatchesChosen)
    assert found.plan.local_batch == {A: {S0: 128}, B: {S1: 128}}


def test_a_requested_plan_includes_the_new_batches() -> None:
    with at_rest(two_that_train()) as search:
        search.tell(telemetry(A), FindPlan(number=2, now=NOW))

        first, then = search.next(), search.next()

    assert isinstance(first, PlanFound)
    assert (first.number, first.plan.local_batch[A]) == (2, {S0: 128})
    assert isinstance(then, Converged)


def test_telemetry_before_the_first_view_schedules_no_work() -> None:
    process = SearchProcess(make("ones", {}), 0, source=-1, sink=-1)

    process._receive(telemetry(A))

    assert process._timeout_s() is None
