"""Recordings of journals, and their files."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.core.inputs import ControllerStarted
from controlplane.core.reactor import Reactor
from controlplane.journal.database import Entry, input_from
from controlplane.journal.writer import Writer
from controlplane.sim.cluster import NodeGroup, TraceError
from controlplane.sim.models.recording import (
    ChangeTimes,
    Epoch,
    EpochSpeed,
    Family,
    Recording,
    Submission,
    read_recording,
    write_recording,
)
from controlplane.sim.results import Trace, TraceJob
from controlplane.sim.traces.journal_recording import recording_from_journal
from schemas.epochs import StepTimes
from schemas.ids import Seconds, Term
from schemas.jobs import JobSpec, StopRule
from tests.support import builders
from tests.support.builders import N1, N2, S0, S1, T0, A, B
from tests.support.controller import Controller, begin, cluster_of, training
from tests.support.recorded_history import GOLDEN, write

SAME_FOLDER = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def journal_of(controller: Controller, folder: Path) -> Path:
    path = folder / "journal.sqlite"
    write(path, controller.history)
    return path


def writing(controller: Controller, path: Path) -> Writer:
    """A journal that is open, with a transaction for each input."""
    durable: SimpleQueue[int] = SimpleQueue()
    writer, reactor = Writer(path, durable.put), Reactor()
    for at, body in controller.history:
        event = input_from(body)
        reactor.handle(event, at)
        writer.append(Entry(at=at, input=event, records=tuple(reactor.records)))
        durable.get(timeout=60.0)
    return writer


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement)


def spec(name: str, **changes: Any) -> JobSpec:
    fields = {"slots": (1, 4), "max_batch_size": 256, "family": name, "slots_wanted": 1}
    return builders.job_spec(name, **{**fields, **changes})


def busy_cluster() -> Controller:
    """Job a told of two epochs and was cancelled, job b succeeded after one; c waits."""
    controller = cluster_of(n1=2, n2=1)
    training(controller, S0, name="a", env={"TOKEN": "secret"}, args=("--key", "secret"))
    controller.now += 10.0
    controller.tell(N1, builders.epoch_end(A, 1, noise_scale=64.0))
    times = StepTimes(pass_s=0.1, sync_s=0.0, local_batch=64, passes=1)
    controller.tell(N1, builders.epoch_end(A, 2, samples_per_s=600.0, step_times=times))
    training(controller, T0, name="b", user="bob", stop=StopRule(epochs=1))
    controller.now += 10.0
    controller.tell(N2, builders.epoch_end(B, 1, epochs=1))
    controller.tell(N2, builders.finished(B, index=4, reason="all done"))
    controller.tell(N2, builders.exited(B, code=0))
    controller.take(builders.cancelled(A))
    controller.now += 10.0
    controller.submit("c")
    return controller


def a_recording() -> Recording:
    family = Family(
        name="m", speeds=(EpochSpeed(1, 1, 64, 500.0), EpochSpeed(1, 2, 64, 800.0, 0.01, 2)),
        epoch_samples=1000, finished=(9000,), furthest=1,
    )  # fmt: skip
    job = Submission(
        name="a-1", at=0.0, user="user-1", family="m", spec=spec("a", family="m"),
        ended="cancelled", ended_after_s=60.5, samples=2000, stated_samples=10_000,
        epoch_samples=1000,
        epochs=(Epoch(1, 64, 32.0, 1.5, EpochSpeed(1, 1, 64, 500.0)), Epoch(2, 64, None, None)),
    )  # fmt: skip
    failed = msgspec.structs.replace(job, name="b-2", at=3.0, ended="failed")
    return Recording(
        name="week", nodes=(NodeGroup(count=2, slots=4),), took=ChangeTimes(start_s=3.0),
        families=(family,), jobs=(job, failed), left_out={"too large": 2},
    )  # fmt: skip


def complaint(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_recording(path)
    return str(caught.value).replace(str(path), "FILE")


def refused(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        recording_from_journal(path)
    return str(caught.value).replace(str(path), "FILE")


def test_a_journal_becomes_submissions_families_and_a_cluster(tmp_path: Path) -> None:
    found = recording_from_journal(journal_of(busy_cluster(), tmp_path))

    took = ChangeTimes(start_s=0.0)
    assert found == Recording(
        name="journal",
        nodes=(NodeGroup(count=1, slots=2), NodeGroup(count=1, slots=1)),
        took=took,
        families=(
            Family(
                name="a", speeds=(EpochSpeed(1, 1, 64, 500.0), EpochSpeed(1, 1, 64, 600.0, 0.0, 1)),
                epoch_samples=1000, took=took, finished=(), furthest=2000,
            ),
            Family(
                name="b", speeds=(EpochSpeed(1, 1, 64, 500.0),), epoch_samples=1000, took=took,
                finished=(1000,), furthest=1000,
            ),
        ),
        jobs=(
            Submission(
                name="a-1",
                at=0.0,
                user="user-1",
                family="a",
                spec=spec("a"),
                ended="cancelled",
                ended_after_s=20.0,
                samples=2000,
                stated_samples=10_000,
                epoch_samples=1000,
                epochs=(
                    Epoch(1, 64, 64.0, 1.0, EpochSpeed(1, 1, 64, 500.0)),
                    Epoch(2, 64, None, 0.5, EpochSpeed(1, 1, 64, 600.0, 0.0, 1)),
                ),
            ),
            Submission(
                name="b-2", at=10.0, user="user-2", family="b",
                spec=spec("b", stop=StopRule(epochs=1)), ended="succeeded", ended_after_s=10.0,
                samples=1000, stated_samples=1000, epoch_samples=1000,
                epochs=(Epoch(1, 64, None, 1.0, EpochSpeed(1, 1, 64, 500.0)),),
            ),
        ),
        left_out={"no job of its family trained a whole epoch on one group": 1},
    )  # fmt: skip


def test_a_recording_contains_no_secrets_and_no_names(tmp_path: Path) -> None:
    write_recording(recording_from_journal(journal_of(busy_cluster(), tmp_path)), tmp_path / "week")

    text = (tmp_path / "week").read_bytes()
    assert b"secret" not in text
    assert b"ann" not in text


def test_the_recorded_cluster_is_the_one_with_most_slots(tmp_path: Path) -> None:
    controller = cluster_of(n1=2, n2=3)
    controller.lose(N2)
    controller.now += 10.0
    training(controller, S0, S1, name="a", epochs=1)
    nodes = recording_from_journal(journal_of(controller, tmp_path)).nodes

    assert nodes == (NodeGroup(count=1, slots=3), NodeGroup(count=1, slots=2))


def test_an_unfinished_job_is_recorded_with_its_stated_work(tmp_path: Path) -> None:
    controller = cluster_of(n1=2)
    training(controller, S0, name="a", epochs=1, stop=StopRule(epochs=7))
    metric = StopRule(metric="accuracy", at_least=0.9)
    training(controller, S1, name="b", epochs=1, stop=metric)

    found = recording_from_journal(journal_of(controller, tmp_path))

    (job,) = found.jobs
    assert (job.ended, job.ended_after_s, job.stated_samples) == ("unfinished", None, 7000)
    assert found.left_out == {"it had not ended, and did not state how much work it was": 1}


def test_families_of_the_same_name_stay_apart(tmp_path: Path) -> None:
    controller = cluster_of(n1=2)
    training(controller, S0, name="a", epochs=1, args=("--small",))
    training(controller, S1, name="a", epochs=1, args=("--large",))

    found = recording_from_journal(journal_of(controller, tmp_path))

    assert [job.family for job in found.jobs] == ["a", "a (2)"]


def test_first_starts_and_restarts_are_measured_apart(tmp_path: Path) -> None:
    controller = cluster_of(n1=1)
    controller.submit("a")
    for version, took_s in ((1, 4.0), (3, 2.0)):
        controller.place({A: S0})
        controller.now += took_s
        controller.tell(N1, builders.started(A, version))
        controller.tell(N1, builders.ready(A, version, resumed=version // 3))
        controller.tell(N1, builders.formed(A, version, epoch=version // 3))
        if version == 1:
            controller.tell(N1, builders.epoch_end(A, 1))
            controller.tell(N1, builders.exited(A, signal=9))

    assert recording_from_journal(journal_of(controller, tmp_path)).took == ChangeTimes(
        start_s=4.0, restart_s=2.0
    )


def test_durations_of_epochs_are_known_within_one_group(tmp_path: Path) -> None:
    controller = cluster_of(n1=1)
    training(controller, S0, name="a")
    for epoch in (1, 2):
        controller.now += 3.0
        controller.tell(N1, builders.epoch_end(A, epoch))
    controller.tell(N1, builders.exited(A, signal=9))
    controller.now += 100.0
    begin(controller, A, 3)
    for epoch in (3, 4):
        controller.now += 4.0
        controller.tell(N1, builders.epoch_end(A, epoch, 3, index=epoch))

    (job,) = recording_from_journal(journal_of(controller, tmp_path)).jobs

    assert [epoch.speed for epoch in job.epochs] == [EpochSpeed(1, 1, 64, 500.0)] * 4
    assert [epoch.lasted_s for epoch in job.epochs] == [None, 3.0, None, 4.0]


def test_the_folder_of_the_journal_is_not_changed(tmp_path: Path) -> None:
    journal = journal_of(busy_cluster(), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    recording_from_journal(journal)

    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_the_journal_of_a_running_controller_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    writer = writing(busy_cluster(), path)

    assert len(recording_from_journal(path).jobs) == 2
    writer.append(Entry(at=Seconds(2000.0), input=ControllerStarted(term=Term(2), release="0")))
    writer.close()
    assert len(recording_from_journal(path).jobs) == 2


def test_a_torn_transaction_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    writer = writing(busy_cluster(), tmp_path / "live" / "journal.sqlite")
    for file in ("journal.sqlite", "journal.sqlite-wal"):
        shutil.copy(tmp_path / "live" / file, tmp_path / file)
    writer.close()
    log = tmp_path / "journal.sqlite-wal"
    log.write_bytes(log.read_bytes()[:-100])

    found = recording_from_journal(tmp_path / "journal.sqlite")

    assert ([job.name for job in found.jobs], found.left_out) == (["a-1", "b-2"], {})


def test_other_files_are_refused_with_a_remedy(tmp_path: Path) -> None:
    text, other = tmp_path / "text", tmp_path / "other"
    text.write_text("hello" * 1000)
    change(other, "CREATE TABLE mine (x)")

    assert refused(tmp_path / "none").startswith("FILE: no such file; name the file")
    assert refused(tmp_path).startswith("FILE: no such file; name the file")
    assert refused(text) == (
        "FILE is not a journal: file is not a database; "
        "name the file journal.sqlite in a controller's state folder"
    )
    assert refused(other).startswith("FILE is not a journal: no such table: meta")


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE meta SET value = '99'", "FILE is a journal of schema 99; this release reads schema 7; export it with the"),
        ("UPDATE inputs SET body = x'00' WHERE id = 3", "FILE: input 3: "),
        ("DELETE FROM inputs WHERE id = 4", "FILE: input 4: it is missing; restore a backup"),
    ],
)  # fmt: skip
def test_a_damaged_or_newer_journal_is_refused(tmp_path: Path, statement: str, said: str) -> None:
    path = journal_of(busy_cluster(), tmp_path)
    change(path, statement)

    assert refused(path).startswith(said)


def test_a_damaged_row_of_a_past_job_is_left_out(tmp_path: Path) -> None:
    path = Path(shutil.copy(GOLDEN / "jobs.sqlite", tmp_path / "journal.sqlite"))
    whole = recording_from_journal(path)
    change(path, "UPDATE ended_jobs SET body = x'81' WHERE number = 2")

    found = recording_from_journal(path)

    assert [job.name for job in found.jobs] == [
        job.name for at, job in enumerate(whole.jobs) if at != 1
    ]
    damaged = {"its row in the journal is damaged (`ones admin check`)": 1}
    assert found.left_out == whole.left_out | damaged


def test_a_recording_is_a_trace() -> None:
    job = TraceJob(
        name="a-1", at=Seconds(0.0), workload="a-1", slots=1, batch=64, user="user-1",
        cancelled_after_s=60.5, samples=2000,
    )  # fmt: skip
    failed = msgspec.structs.replace(
        job, name="b-2", at=Seconds(3.0), workload="b-2", cancelled_after_s=None,
        crashes_at=1.0 - 1e-6,
    )  # fmt: skip

    assert a_recording().as_trace() == Trace(name="week", jobs=(job, failed))


def test_a_written_recording_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "week.jsonl"

    write_recording(a_recording(), path)

    assert read_recording(path) == a_recording()
    assert [file.name for file in tmp_path.iterdir()] == ["week.jsonl"]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (b'"version":1', b'"version":2', "FILE:1: a recording of version 2; this release reads"),
        (b'"recording"', b'"trace"', "FILE:1: Invalid enum value 'trace'"),
        (b'"count":2', b'"count":0', "FILE:1: a cluster without slots; give nodes with some"),
        (b'"model":""', b'"model":"z"', "FILE:1: unknown GPU type; leave it empty"),
        (b'"jobs":2', b'"jobs":3', "FILE:5: the file ends before all its jobs; name a file"),
        (b'"jobs":2', b'"jobs":1', "FILE:4: more lines than the header states; export it again"),
        (b"500.0,null", b"-1,null", "FILE:2: Expected `float` >= 1e-09 - at `$.speeds[0][3]`; export it"),
        (b"500.0,null", b"1e999,null", "FILE:2: "),
        (b"500.0,null", b"NaN,null", "FILE:2: "),
        (b'"b-2"', b'"a-1"', "FILE:4: 'a-1' is duplicated; delete one"),
        (b'"family":"m","spec"', b'"family":"n","spec"', "FILE:3: job a-1: there is no line for"),
        (b'"ended_after_s":60.5', b'"ended_after_s":null', "FILE:3: job a-1 was cancelled at an"),
        (b'"slots":[1,4]', b'"slots":[5,4]', "FILE:3: job a-1: slots: slots [5, 4] is not a range"),
        (b'"script":"train.py"', b'"script":7', "FILE:3: Expected `str`, got `int`"),
    ],
)  # fmt: skip
def test_invalid_lines_are_refused(tmp_path: Path, before: bytes, after: bytes, said: str) -> None:
    path = tmp_path / "week.jsonl"
    write_recording(a_recording(), path)
    text = path.read_bytes()
    assert before in text
    path.write_bytes(text.replace(before, after, 1))

    assert complaint(path).startswith(said)


def test_other_files_are_no_recordings(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_bytes(b"")

    assert complaint(empty).startswith("FILE:1: the file is empty; name a file")
    assert complaint(tmp_path).startswith("FILE: Is a directory; name a readable file")
    assert complaint(tmp_path / "none").startswith("FILE: No such file or directory")
    assert "embedded null byte" in complaint(Path("a\0b"))
    assert complaint(Path("/dev/zero")).startswith("FILE:1: ")
    deep = tmp_path / "deep"
    deep.write_bytes(b'{"kind":"recording","version":1,"x":' + b"[" * 100_000)
    assert complaint(deep).startswith("FILE:1: ")


@SAME_FOLDER
@given(cut=st.integers(0, 2000), put=st.binary(max_size=40), drop=st.integers(0, 40))
def test_damaged_bytes_raise_trace_errors(tmp_path: Path, cut: int, put: bytes, drop: int) -> None:
    path = tmp_path / "week.jsonl"
    write_recording(a_recording(), path)
    text = path.read_bytes()
    path.write_bytes(text[:cut] + put + text[cut + drop :])

    try:
        found = read_recording(path)
    except TraceError as error:
        assert str(path) in str(error)  # noqa: PT017 - most of them are none, some still are
    else:
        assert found.jobs
