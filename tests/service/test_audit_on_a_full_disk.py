"""What is refused while the disk takes no line of the audit stops nobody, and is counted."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from schemas.host.logging import configure_logging
from schemas.wire.client import Cluster, Failed, GetCluster
from tests.support.schemas_links import BOUND_S
from tests.support.service import Person


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """A file that all log lines of this process go to, as a service's do."""
    before, path = structlog.get_config(), tmp_path / "controller.log"
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    configure_logging(descriptor)
    yield path
    structlog.configure(**before)
    os.close(descriptor)


@pytest.fixture
def full_disk() -> Iterator[Any]:
    """Called with a size, no file of this process grows beyond it; with nothing, all do."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN

    def bound(size: int | None = None) -> None:
        soft = before[0] if size is None else size
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, before[1]))

    yield bound
    bound()


def lines_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


async def test_the_audit_counts_the_lines_lost_on_a_full_disk(
    log: Path, people: tuple[Person, Person], full_disk: Any
) -> None:
    ann, _ = people

    async def say_what_is_none() -> None:
        ann.requests.send(b"x", b"\xc1")
        answer = await ann.answer(b"x")
        assert isinstance(answer, Failed)
        assert answer.code == "malformed"

    await say_what_is_none()
    full_disk(log.stat().st_size)  # noqa: ASYNC240
    for _ in range(3):
        await say_what_is_none()
    assert isinstance(await ann.ask(GetCluster()), Cluster)
    assert not [line for line in lines_of(log) if line["event"] == "log lines lost"]

    full_disk()
    async with asyncio.timeout(BOUND_S):
        while not any(line["event"] == "log lines lost" for line in lines_of(log)):
            await say_what_is_none()

    told = lines_of(log)
    lost = next(line for line in told if line["event"] == "log lines lost")
    assert lost["lines"] >= 3
    assert [line["what"] for line in told if line["event"] == "audit"].count("request") >= 2
