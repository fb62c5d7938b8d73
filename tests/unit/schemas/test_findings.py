"""Findings of `ones doctor` from measured values."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from schemas import __version__
from schemas.host.findings import (
    SLOW_SYNC_S,
    overrides_of,
    release_finding,
    skew_finding,
    space,
    space_finding,
    sync_finding,
    sync_time,
    versions,
)

MAJOR, MINOR = map(int, __version__.split(".")[:2])


@pytest.mark.parametrize(
    ("theirs", "state"),
    [
        (__version__, "ok"),
        (f"{MAJOR}.{MINOR + 1}.7", "ok"),
        (f"{MAJOR}.{MINOR + 2}.0", "error"),
        (f"{MAJOR + 1}.{MINOR}.0", "error"),
        ("unknown", "warning"),
    ],
)
def test_neighbouring_releases_work_together(theirs: str, state: str) -> None:
    assert release_finding(theirs).state == state


@pytest.mark.parametrize(
    ("theirs", "state"), [(10.0, "ok"), (11.9, "ok"), (13.5, "warning"), (7.0, "warning")]
)
def test_a_reply_between_two_readings_bounds_the_difference_of_the_clocks(
    theirs: float, state: str
) -> None:
    assert skew_finding(theirs, before=9.5, after=10.5).state == state


@pytest.mark.parametrize(
    ("free", "part", "inodes", "state"),
    [
        (9 << 30, 0.5, 1.0, "ok"),
        (9 << 30, 0.01, 1.0, "warning"),
        (9 << 30, 0.5, 0.01, "warning"),
        (1 << 20, 0.5, 1.0, "error"),
    ],
)
def test_space_and_inodes(free: int, part: float, inodes: float, state: str) -> None:
    assert space_finding("work /w", free, part, inodes, 64 << 20).state == state


def test_a_folder_that_is_missing_counts_as_its_parent(tmp_path: Path) -> None:
    (one,) = space("work", tmp_path / "a" / "b", 0)

    assert one.found.startswith(f"work {tmp_path}: ")


def test_a_measured_fsync_leaves_nothing(tmp_path: Path) -> None:
    seconds = sync_time(tmp_path)

    assert seconds is None or seconds >= 0.0
    assert list(tmp_path.iterdir()) == []
    assert sync_time(tmp_path / "missing") is None
    assert sync_finding("state", SLOW_SYNC_S * 2).state == "warning"


def test_a_missing_package_names_the_extra() -> None:
    found = versions("controller", ["json", "not_installed"])

    assert (found.state, found.found) == ("error", "not_installed not installed")
    assert "[controller]" in found.remedy


def test_variables_of_the_daemon_apply_during_its_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONES__KEY", "mine")
    daemon = psutil.Process()
    monkeypatch.setattr(daemon, "environ", lambda: {"ONES__KEY": "its", "PATH": "/its"})

    with overrides_of(daemon):
        inside = (os.environ["ONES__KEY"], os.environ["PATH"])

    assert inside == ("its", os.environ["PATH"])
    assert os.environ["ONES__KEY"] == "mine"
