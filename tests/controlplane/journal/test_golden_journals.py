"""Journals of former releases are read by this one, and mean what they meant."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import pytest

from controlplane.core.commands import Announce
from controlplane.core.inputs import Input
from controlplane.core.reactor import Reactor
from controlplane.journal.reader import Reader
from schemas.messages.feed import FeedEvent
from tests.support.recorded_history import GOLDEN, summary

JOURNALS: Final = sorted(GOLDEN.glob("*.sqlite"))
KINDS: Final = 19  # of inputs that there were when schema 2 was left


def copy_of(journal: Path, folder: Path) -> Path:
    return Path(shutil.copy(journal, folder / "journal.sqlite"))


@pytest.mark.parametrize("journal", JOURNALS, ids=lambda path: path.stem)
def test_it_comes_to_the_same_state_and_tells_the_same_events(
    journal: Path, tmp_path: Path
) -> None:
    reader, reactor = Reader(copy_of(journal, tmp_path)), Reactor()
    told: list[FeedEvent] = []
    for at, event in reader.inputs():
        commands = reactor.handle(event, at)
        told += [command.event for command in commands if isinstance(command, Announce)]

    assert tuple(told) == reader.feed(1, 10**6)
    assert summary(reactor.state) == json.loads(journal.with_suffix(".json").read_text())
    reader.close()


def test_those_of_the_first_schema_that_is_kept_have_every_kind_of_input(tmp_path: Path) -> None:
    found: set[type[Input]] = set()
    for journal in JOURNALS:
        if journal.stem.startswith("schema-2-"):
            reader = Reader(copy_of(journal, tmp_path))
            found |= {type(event) for _, event in reader.inputs()}
            reader.close()

    assert len(found) == KINDS
