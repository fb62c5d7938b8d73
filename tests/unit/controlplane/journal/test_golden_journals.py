"""Stored journals of the current schema lead to the same state, events and history."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from msgspec import structs

from controlplane.core.commands import Announce
from controlplane.core.history import JobHistories, JobLeft, Record, SweepLeft
from controlplane.core.inputs import Input
from controlplane.core.reactor import Reactor
from controlplane.journal.backup import problems
from controlplane.journal.reader import Reader
from controlplane.journal.replay import recover, replay
from controlplane.journal.snapshots import FORMAT
from schemas.wire.feed import FeedEvent
from tests.support.recorded_history import GOLDEN, summary

JOURNALS: Final = sorted(GOLDEN.glob("*.sqlite"))
KINDS: Final = 19  # of inputs in them


def copy_of(journal: Path, folder: Path) -> Path:
    return Path(shutil.copy(journal, folder / "journal.sqlite"))


@pytest.mark.parametrize("journal", JOURNALS, ids=lambda path: path.stem)
def test_a_replay_gives_the_stored_state_and_events(journal: Path, tmp_path: Path) -> None:
    reader, reactor = Reader(copy_of(journal, tmp_path)), Reactor()
    told: list[FeedEvent] = []
    for at, event in reader.inputs():
        commands = reactor.handle(event, at)
        told += [command.event for command in commands if isinstance(command, Announce)]

    assert tuple(told) == reader.feed(1, 10**6)
    assert summary(reactor.state) == json.loads(journal.with_suffix(".json").read_text())
    reader.close()


def test_the_journals_have_most_kinds_of_input(tmp_path: Path) -> None:
    found: set[type[Input]] = set()
    for journal in JOURNALS:
        with contextlib.closing(Reader(copy_of(journal, tmp_path))) as reader:
            found |= {type(event) for _, event in reader.inputs()}

    assert len(found) == KINDS


@pytest.mark.parametrize("journal", JOURNALS, ids=lambda path: path.stem)
def test_the_stored_history_equals_that_of_a_replay(journal: Path, tmp_path: Path) -> None:
    histories, records = JobHistories(), list[Record]()

    def note(told: Sequence[Record]) -> None:
        histories.add(told)
        records.extend(told)

    with contextlib.closing(Reader(copy_of(journal, tmp_path))) as reader:
        replay(reader.inputs(), note)
        left = {one.job: one.last for one in records if isinstance(one, JobLeft)}
        sweeps = {one.job: one.history for one in records if isinstance(one, SweepLeft)}

        assert {name: reader.records.of(name) for name in histories.jobs} == histories.jobs
        assert {job.job: job.read() for job in reader.ended.after(0)} == left
        for name, history in sweeps.items():
            units, many = reader.sweeps.units(name, 0, 10**6)
            assert (units, many) == (history.units, len(history.units))
            trials = structs.replace(history, units=[])
            assert reader.sweeps.history(name, 0, 10**4) == trials
        assert list(problems(reader)) == []


@pytest.mark.parametrize("journal", JOURNALS, ids=lambda path: path.stem)
def test_a_snapshot_equals_the_state_of_a_replay(journal: Path, tmp_path: Path) -> None:
    passed_over: list[str] = []
    with contextlib.closing(Reader(copy_of(journal, tmp_path))) as reader:
        (snapshot,) = reader.snapshots()
        found = recover(reader, passed_over.append, most=snapshot.input)
        before = [(at, event) for number, at, event in reader.numbered_inputs(0, snapshot.input)]

    replayed = replay(before)
    assert (passed_over, found.snapshot) == ([], len(before))
    assert found.reactor.state == replayed.state
    assert found.reactor.totals == replayed.totals
    assert found.reactor.state.slot_index.order() == replayed.state.slot_index.order()


@pytest.mark.parametrize("journal", JOURNALS, ids=lambda path: path.stem)
def test_a_snapshot_of_another_format_is_skipped(journal: Path, tmp_path: Path) -> None:
    path, passed_over = copy_of(journal, tmp_path), list[str]()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE snapshots SET format = format - 1 WHERE format = ?", (FORMAT,))
        database.commit()

    with contextlib.closing(Reader(path)) as reader:
        (snapshot,) = reader.snapshots()
        found = recover(reader, passed_over.append)
        replayed = replay(reader.inputs())

    assert found.snapshot == 0
    said = f"release {snapshot.release} has format {snapshot.format}, this release reads {FORMAT}"
    assert passed_over == [f"snapshot {snapshot.input} of {said}"]
    assert found.reactor.state == replayed.state
