"""Log lines end no process, whatever became of the place that they go to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.host.logging import LogLines


def said(lines: int) -> str:
    return f"{lines} lost"


def test_a_line_is_there_at_once_and_whole(tmp_path: Path) -> None:
    file = tmp_path / "log"
    fd = os.open(file, os.O_CREAT | os.O_WRONLY)
    lines = LogLines(fd, said)

    lines.msg("one")
    lines.warning("two \udcff")

    assert file.read_bytes() == b"one\ntwo \\udcff\n"
    os.close(fd)


def test_lines_that_nobody_takes_are_counted_and_the_count_comes_first() -> None:
    read, write = os.pipe2(os.O_NONBLOCK)
    lines = LogLines(write, said)
    filling = "x" * 4095
    taken = 0
    while not lines.missing:
        lines.msg(filling)
        taken += 1
    lines.msg("also lost")
    kept = os.read(read, 1 << 20)

    lines.msg("here again")

    assert kept.count(b"x" * 4095 + b"\n") == taken - 1
    assert os.read(read, 1 << 20) == b"2 lost\nhere again\n"
    os.close(read)
    os.close(write)


def test_a_line_that_was_cut_ends_before_the_next_one_begins() -> None:
    read, write = os.pipe2(os.O_NONBLOCK)
    lines = LogLines(write, said)
    while not lines.missing:
        lines.msg("y" * 5000)  # more than a pipe takes as a whole
    kept = os.read(read, 1 << 20)

    lines.msg("next")

    assert kept.endswith(b"y")
    assert os.read(read, 1 << 20) == b"\n1 lost\nnext\n"
    os.close(read)
    os.close(write)


WRITES = """
import structlog
from schemas.host.logging import Audit, configure_logging, notify
configure_logging()
audit = Audit()
for number in range(5):
    audit.refused("key", f"{number} is not authorised")
structlog.get_logger("x").error("told", number=1)
notify("READY=1")
print("lived")
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["/dev/full", "closed"])
def test_a_process_lives_on_when_its_stderr_takes_nothing(where: str) -> None:
    command = [sys.executable, "-c", WRITES]
    shell = '"$@" 2>&-' if where == "closed" else '"$@" 2>/dev/full'
    environ = {**os.environ, "NOTIFY_SOCKET": "/nowhere/notify"}

    done = subprocess.run(
        ["/bin/sh", "-c", shell, "sh", *command],
        stdout=subprocess.PIPE, text=True, check=False, env=environ,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (0, "lived\n")


@pytest.mark.slow
def test_what_was_lost_is_said_as_a_line_like_the_others(tmp_path: Path) -> None:
    script = """
import os
import resource
import signal
import structlog
from schemas.host.logging import configure_logging
configure_logging()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
log = structlog.get_logger("x")
resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
log.info("lost")
log.info("lost")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.info("here")
"""
    file = tmp_path / "stderr"
    with file.open("wb") as stderr:
        subprocess.run([sys.executable, "-c", script], stderr=stderr, check=True)

    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["event"], line.get("lines")) for line in found] == [
        ("log lines lost", 2),
        ("here", None),
    ]
