"""Log lines and audit lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import structlog.testing

from schemas.host.logging import Audit, LogLines


def said(lines: int) -> str:
    return f"{lines} lost"


def test_a_line_is_written_at_once(tmp_path: Path) -> None:
    file = tmp_path / "log"
    fd = os.open(file, os.O_CREAT | os.O_WRONLY)
    lines = LogLines(fd, said)

    lines.msg("one")
    lines.warning("two \udcff")

    assert file.read_bytes() == b"one\ntwo \\udcff\n"
    os.close(fd)


def test_lost_lines_are_counted_and_the_count_comes_before_the_next_line() -> None:
    for line, kept_end, after in (
        ("x" * 4095, b"x\n", b"2 lost\nhere again\n"),
        ("y" * 5000, b"y", b"\n2 lost\nhere again\n"),  # more than a pipe takes as a whole
    ):
        read, write = os.pipe2(os.O_NONBLOCK)
        lines = LogLines(write, said)
        taken = 0
        while not lines.missing:
            lines.msg(line)
            taken += 1
        lines.msg("also lost")
        kept = os.read(read, 1 << 20)
        lines.msg("here again")

        assert (kept.endswith(kept_end), kept.count(b"\n")) == (True, taken - 1)
        assert os.read(read, 1 << 20) == after
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
def test_a_process_continues_when_its_stderr_takes_nothing(where: str) -> None:
    command = [sys.executable, "-c", WRITES]
    shell = '"$@" 2>&-' if where == "closed" else '"$@" 2>/dev/full'
    environ = {**os.environ, "NOTIFY_SOCKET": "/nowhere/notify"}

    done = subprocess.run(
        ["/bin/sh", "-c", shell, "sh", *command],
        stdout=subprocess.PIPE, text=True, check=False, env=environ,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (0, "lived\n")


@pytest.mark.slow
def test_lost_lines_are_logged_as_json(tmp_path: Path) -> None:
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


# --- audit: refusals are limited, privileged actions are not


def test_refusals_are_limited_per_second_and_the_others_counted() -> None:
    now = [10.0]
    audit = Audit(limit_per_s=3, clock=lambda: now[0])

    with structlog.testing.capture_logs() as lines:
        for what in ("request", "key", "hello") * 2:
            audit.refused(what, "no", peer="ann")
        now[0] = 11.0
        audit.refused("key", "no")
        audit.refused("key", "no")
        now[0] = 12.0
        audit._begin_second()
        for _ in range(5):
            audit.refused("key", "no")
        now[0] = 13.0
        audit._begin_second()

    assert [(line["what"], line.get("lines")) for line in lines] == [
        ("request", None), ("key", None), ("hello", None), ("suppressed", 3), ("key", None), ("key", None),
        ("key", None), ("key", None), ("key", None), ("suppressed", 2),
    ]  # fmt: skip


def test_a_flood_of_one_peer_hides_no_line_about_others() -> None:
    audit = Audit(limit_per_s=20, of_one_per_s=2, clock=lambda: 10.0)

    with structlog.testing.capture_logs() as lines:
        for _ in range(1000):
            audit.refused("request", "no", peer="user:eve")
        audit.refused("request", "no", peer="user:ann")

    assert [line["peer"] for line in lines] == ["user:eve", "user:eve", "user:ann"]


def test_privileged_actions_are_never_suppressed() -> None:
    audit = Audit(limit_per_s=1, clock=lambda: 10.0)

    with structlog.testing.capture_logs() as lines:
        for _ in range(10):
            audit.refused("key", "no", peer="10.0.0.9")
            audit.done("RevokeKey", "admin:root", key="eve")

    done = [line for line in lines if line["what"] == "RevokeKey"]
    assert (len(done), done[0]["by"], done[0]["of_key"]) == (10, "admin:root", "eve")
