"""The live dashboard: its content, owners of slots, and an absent controller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest
from rich.console import Console, RenderableType

from controlplane.cli import job_list, top
from schemas.errors import UnknownJobError, UnreachableError
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of
from schemas.wire.client import Cluster, JobSummary, NodeInfo, SearchInfo, WorkerInfo
from schemas.wire.feed import FeedEvent
from tests.support.builders import N1, N2, S0, S1, T0, A, B, C, news
from tests.support.client_examples import summary

CLUSTER = msgspec.convert(
    {"type": "client.cluster.1", "release": "1.2", "policy": "fifo", "term": 3, "user": "ann",
     "role": "user", "feed_port": 1, "log_port": 2, "last_seq": 10},
    Cluster,
)  # fmt: skip


def node(name: NodeId, slots: int, free: int, *jobs: JobId, state: str = "up") -> NodeInfo:
    fields = {
        "type": "client.node_info.1", "node": name, "state": state, "reason": "", "host": "h",
        "address": "h", "slots": slots, "free": free, "kind": "cpu", "model": "CPU",
        "jobs": jobs, "release": "1.2",
    }  # fmt: skip
    return msgspec.convert(fields, NodeInfo)


def worker(slot: SlotId, phase: str = "member") -> WorkerInfo:
    fields = {
        "type": "client.worker_info.2", "rank": 0, "node": node_of(slot), "slot": slot, "pid": 1,
        "version": 1, "phase": phase, "local_batch": 1,
    }  # fmt: skip
    return msgspec.convert(fields, WorkerInfo)


RUNNING = summary(
    A, state="running", reason="trains on 2 slots, batch 64", slots=2, global_batch=64, lr=0.01,
    samples_per_s=1088.4, progress=0.5, train_loss=0.54812, rescales=2, batch_changes=1,
)  # fmt: skip
LEGEND = "██ used, in the colour of the job   ▒▒ taken   ░░ free"
QUIET = SearchInfo(policy="ones", running=True)
STATUS = top.ClusterStatus(
    CLUSTER, QUIET, (RUNNING, summary(B, reason="waits for 1 slot, 0 free", lr=0.1)),
    (node(N1, 2, 0, A), node(N2, 2, 1, C, state="lost")), {S0: A, S1: A}, {A: 0, B: 1},
)  # fmt: skip


def shown(drawn: RenderableType, width: int = 130) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(drawn)
    return [line.rstrip() for line in capture.get().splitlines()]


class Controller:
    """Client that replies from prepared values, and notes the jobs requested."""

    def __init__(self) -> None:
        self.nodes_now = [node(N1, 2, 1, A)]
        self.crews: dict[JobId, tuple[WorkerInfo, ...]] = {A: (worker(S0),)}
        self.feed: list[FeedEvent] = []
        self.asked: list[str] = []
        self.away = 0  # how many looks in a row it is away, from the second one on
        self.looks = 0

    def cluster(self) -> Cluster:
        self.looks += 1
        if 1 < self.looks <= 1 + self.away:
            raise UnreachableError("the controller does not reply", "check it")
        return msgspec.structs.replace(CLUSTER, last_seq=10 + len(self.feed))

    def jobs(self, *, ended: bool) -> tuple[JobSummary, ...]:
        return (RUNNING,)

    def search(self) -> SearchInfo:
        return QUIET

    def nodes(self) -> tuple[NodeInfo, ...]:
        return tuple(self.nodes_now)

    def job(self, job: JobId) -> Any:
        self.asked.append(job)
        if job not in self.crews:
            raise UnknownJobError(job)
        return type("Detail", (), {"workers": self.crews[job]})()

    def events(self, from_seq: int) -> Iterator[FeedEvent]:
        return iter([event for event in self.feed if event.seq >= from_seq])


# --- what is drawn


def test_the_dashboard_shows_the_cluster_its_jobs_and_its_slots() -> None:
    assert shown(top.dashboard(STATUS, 130)) == [
        "slots 2 of 2   jobs 1 running, 1 waiting   users ann   policy fifo",
        "job  state    progress          %    slots  batch    lr  samples/s    loss  re-scales  why",
        "─" * 114,
        "a-1  running  ━━━━━━━━          50%      2     64  0.01       1088  0.5481          2  trains on 2 slots, batch 64",
        "b-2  queued                     0%                  0.1                             0  waits for 1 slot, 0 free",
        "n1 ██ ██   n2 lost ▒▒ ░░",
        LEGEND,
    ]  # fmt: skip


def test_a_job_that_stops_at_a_metric_shows_its_epoch_instead_of_progress() -> None:
    status = STATUS._replace(jobs=(summary(A, progress=None, epoch=7),))

    assert "epoch 7" in shown(top.dashboard(status, 130))[3]


LONG = summary(
    JobId("language-12"), state="running", reason="2 slots: the next epoch lowers its loss by 4%",
    slots=2, global_batch=64, lr=0.003, samples_per_s=51088.4, progress=0.5, train_loss=1.54812,
)  # fmt: skip
FORETOLD = msgspec.structs.replace(
    LONG, predicted_loss=1.49251, promised_end=Seconds(1_760_000_100.5)
)


@pytest.mark.parametrize(
    ("job", "width", "left_out"),
    [
        (LONG, 120, set()),
        (LONG, 110, {"progress"}),
        (LONG, 80, {"progress", "re-scales", "why"}),
        (FORETOLD, 170, set()),
        (FORETOLD, 120, {"progress", "re-scales"}),
        (FORETOLD, 80, {"progress", "re-scales", "why", "lr"}),
        (FORETOLD, 60, {"progress", "re-scales", "why", "lr", "batch", "samples/s", "slots"}),
    ],
)
def test_narrow_terminals_show_less(job: JobSummary, width: int, left_out: set[str]) -> None:
    told = job.predicted_loss is not None
    head, _, line = shown(top.job_table([job], {job.job: 0}, width), width)[:3]

    columns = [
        name for name in top.COLUMNS if name not in {"uses", "starts in"}
    ]  # not known of these jobs
    there = [name for name in columns if told or name not in {"predicted", "promised"}]
    assert head.split() == [name for name in there if name not in left_out]
    assert len(line) <= width
    assert "…" not in line.partition("2 slots:")[0]


def test_predictions_stand_beside_current_values() -> None:
    line = shown(top.job_table([FORETOLD, LONG], {LONG.job: 0}, 80), 80)[2:4]

    assert [row.split()[6:] for row in line] == [["1.548", "1.493", "08:55:00Z"], ["1.548"]]


def test_a_waiting_job_shows_when_it_should_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_list.time, "time", lambda: 1000.0)
    soon, due = (summary(B, start_at=Seconds(at)) for at in (1243.0, 990.0))

    head, _, *lines = shown(top.job_table([soon, due], {B: 0}, 130), 130)

    assert [line[head.index("starts in") :][:9].strip() for line in lines[:2]] == ["4m03s", "0.0s"]


def test_a_promise_that_is_expected_to_be_broken_is_yellow() -> None:
    kept, late = (
        msgspec.structs.replace(FORETOLD, expected_end=Seconds(1_760_000_100.5 + more))
        for more in (0.0, 1.0)
    )

    styles = [
        [str(cell.style) for cell in top.job_table([job], {job.job: 0}, 120).columns[9].cells]
        for job in (kept, late)
    ]

    assert styles == [[""], ["yellow"]]


def test_slots_have_the_colour_of_their_job_and_free_ones_are_grey() -> None:
    drawn = top.slot_strip(node(N1, 3, 1, A, B), {S0: A, S1: B}, {A: 0, B: 1})

    assert drawn.plain == "n1 ██ ██ ░░"
    assert [str(span.style) for span in drawn.spans] == ["#4e79a7", "#f28e2b", "grey35"]


def test_the_header_counts_slots_jobs_and_users_and_names_problems() -> None:
    jobs = [summary(JobId(f"j-{n}"), user=f"u{n}", slots=n % 2) for n in range(4)]
    ended = summary(C, user="gone", state="succeeded")
    status = STATUS._replace(
        cluster=msgspec.structs.replace(CLUSTER, stalled="the disk is full"),
        search=SearchInfo(policy="ones", running=False),
        jobs=(*jobs, ended),
        nodes=(node(N1, 8, 2, A), node(N2, 4, 4, state="lost")),
    )

    assert top.header(status).plain.split("   ") == [
        "slots 6 of 8",
        "jobs 2 running, 2 waiting",
        "users 4",
        "policy fifo",
        "submissions are refused: the disk is full",
        "search unavailable, free slots are filled greedily",
    ]


def test_the_header_fits_into_80_columns() -> None:
    status = STATUS._replace(nodes=(node(N1, 1024, 1000),))

    assert len(top.header(status).plain) < 80


# --- whose slot it is


def test_a_slot_belongs_to_its_owner_and_not_to_a_newcomer() -> None:
    crews = {B: [worker(S0, "ready")], A: [worker(S0), worker(S1, "leaving")]}
    absent = {A: [worker(S0), worker(T0, "ready"), worker(S1, "exited")]}

    assert top.owners_of([node(N1, 2, 0, A, B)], crews) == {S0: A, S1: A}
    assert top.owners_of([node(N1, 2, 0, A, B)], dict(reversed(crews.items()))) == {S0: A, S1: A}
    assert top.owners_of([node(N1, 2, 1, A), node(N2, 1, 1)], absent) == {S0: A}


def test_a_job_keeps_its_colour_and_a_new_job_takes_the_first_free_colour() -> None:
    assert top.assign_colours({}, [A, B]) == {A: 0, B: 1}
    assert top.assign_colours({A: 0, B: 1}, [B, C]) == {B: 1, C: 0}
    assert top.assign_colours({C: 7}, [C, A, C]) == {C: 7, A: 0}


# --- again and again


def test_workers_are_requested_again_only_when_the_feed_names_their_job() -> None:
    client = Controller()
    reader = top.StatusReader(cast("Any", client))

    assert reader.read().owners == {S0: A}
    client.feed.append(news("job.epoch", A, seq=11).event)
    assert reader.read().owners == {S0: A}
    assert client.asked == [A]

    client.feed.append(news("worker.started", A, seq=12).event)
    client.crews[A] = (worker(S0), worker(S1))
    assert reader.read().owners == {S0: A, S1: A}
    assert client.asked == [A, A]


def test_a_slot_of_an_unknown_job_has_no_owner() -> None:
    client = Controller()
    client.nodes_now = [node(N1, 2, 1, C)]

    assert top.StatusReader(cast("Any", client)).read().owners == {}
