"""Findings of `ones doctor` about a host: their type, and the checks that all roles share.

Functions that take measured values are pure. The others measure, and change nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

import msgspec
import psutil

from schemas import __version__
from schemas.errors import OnesError, SettingsError, install_hint
from schemas.host.settings import PREFIX

State = Literal["ok", "warning", "error"]
LOW_PART: Final = 0.05  # of free space or inodes
SYNC_COUNT: Final = 9
SYNC_BYTES: Final = 4096  # a page of the journal
SLOW_SYNC_S: Final = 0.05  # a commit waits for one
MIN_FILES: Final = 4096
SKEW_S: Final = 2.0
TIME_ERROR: Final = 5  # result of adjtimex(2): no time service has set the clock
TIMEX_BYTES: Final = 512  # more than struct timex


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one check."""

    check: str
    state: State
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(check=check, state="ok", found=found)


def warning(check: str, found: str, remedy: str) -> Finding:
    """Return a finding that may be intended."""
    return Finding(check=check, state="warning", found=found, remedy=remedy)


def error(check: str, found: str, remedy: str) -> Finding:
    """Return a finding that keeps the role from working."""
    return Finding(check=check, state="error", found=found, remedy=remedy)


def refusal(check: str, why: OnesError) -> Finding:
    """Return the finding for an error of the project's own code."""
    return error(check, why.message, why.hint)


def settings_findings(problems: Sequence[SettingsError]) -> list[Finding]:
    """Return the findings for the result of `ones config check`."""
    return [refusal("settings", one) for one in problems] or [ok("settings", "valid")]


def versions(extra: str = "", needed: Iterable[str] = ()) -> Finding:
    """Name the versions, and check that the modules of an extra are installed."""
    if missing := [name for name in needed if find_spec(name) is None]:
        return error("versions", f"{', '.join(missing)} not installed", install_hint(extra))
    own = f"ONES {__version__}, Python {platform.python_version()}"
    return ok("versions", f"{own}, pyzmq {metadata.version('pyzmq')}")


def release_finding(theirs: str) -> Finding:
    """Compare the controller's release with this one; neighbouring minor releases work together."""
    if theirs == __version__:
        return ok("release", f"the controller has {theirs}, too")
    found = f"the controller has {theirs}, this installation {__version__}"
    try:
        (major, minor), (own_major, own_minor) = (
            tuple(map(int, release.split(".")[:2])) for release in (theirs, __version__)
        )
    except ValueError:
        return warning("release", found, "install the same release on both sides")
    if major == own_major and abs(minor - own_minor) <= 1:
        return ok("release", found)
    return error("release", found, "they are more than one release apart: upgrade the older one")


def skew_finding(theirs: float, before: float, after: float) -> Finding:
    """Compare the controller's clock with this host's clocks before and after the request."""
    if not theirs:
        return warning("clock", "the controller does not tell its time", "upgrade it")
    skew = max(theirs - after, before - theirs, 0.0)
    found = f"differs from the controller's by {skew:.1f} s"
    if skew < SKEW_S:
        return ok("clock", found)
    return warning("clock", found, "let a time service set both clocks, such as chrony")


def clock_synchronised() -> Finding:
    """Check that a time service sets the kernel's clock."""
    libc = ctypes.CDLL(None, use_errno=True)
    state = libc.adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))  # modes = 0: reads only
    if state == TIME_ERROR:
        remedy = "start one, such as chrony or systemd-timesyncd"
        return warning("clock", "no time service sets the clock of this host", remedy)
    if state < 0:
        return ok("clock", "not visible in this container")
    return ok("clock", "set by a time service")


def space_finding(
    name: str, free_bytes: int, free_part: float, inodes_part: float, least_bytes: int
) -> Finding:
    """Judge the free space of the file system of a folder.

    Args:
        name: setting and path of the folder.
        free_bytes: free for this user.
        free_part: free part of the space, in [0, 1].
        inodes_part: free part of the inodes; 1 if the file system has no fixed number.
        least_bytes: with less, the daemon refuses work.
    """
    found = f"{name}: {free_bytes / 2**30:.1f} GiB free ({free_part:.0%})"
    if free_bytes < least_bytes:
        return error("disk", f"{found}, needs {least_bytes / 2**30:.1f} GiB", "free space there")
    if inodes_part < LOW_PART:
        found = f"{name}: {inodes_part:.0%} of the inodes free"
        return warning("disk", found, "delete small files there, or use another file system")
    if free_part < LOW_PART:
        return warning("disk", found, "free space there, or shorten what is kept")
    return ok("disk", found)


def space(name: str, path: Path, least_bytes: int) -> list[Finding]:
    """Check the file system of a folder, or of its nearest parent that exists."""
    there = next(one for one in (path, *path.parents) if one.exists())
    try:
        status = os.statvfs(there)
    except OSError as why:
        return [error("disk", f"{name} {there}: {why.strerror}", "check its file system")]
    free, inodes = (
        status.f_bavail / max(1, status.f_blocks),
        status.f_favail / status.f_files if status.f_files else 1.0,
    )
    free_bytes = status.f_bavail * status.f_frsize
    return [space_finding(f"{name} {there}", free_bytes, free, inodes, least_bytes)]


def sync_time(folder: Path) -> float | None:
    """Return the median seconds of an fsync in a folder; None: its file system cannot tell.

    The file has no name, so nothing is left even if this process is killed.
    """
    times = []
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
        try:
            for _ in range(SYNC_COUNT):
                os.write(descriptor, bytes(SYNC_BYTES))
                began = time.perf_counter()
                os.fsync(descriptor)
                times.append(time.perf_counter() - began)
        finally:
            os.close(descriptor)
    return statistics.median(times) if times else None


def sync_finding(name: str, seconds: float | None) -> Finding:
    """Judge the time of an fsync."""
    if seconds is None:
        return ok("disk", f"{name}: the time of an fsync is unknown")
    found = f"{name}: an fsync takes {seconds * 1e3:.1f} ms"
    if seconds > SLOW_SYNC_S:
        return warning("disk", found, "use a local SSD: every commit waits for an fsync")
    return ok("disk", found)


def daemon_of(kind: str, path: Path) -> psutil.Process | None:
    """Return the running daemon ("controller" or "agent") of a settings file, by its title."""
    title = f"ones: {kind} {path}"
    for process in psutil.process_iter(["cmdline"]):
        if " ".join(process.info["cmdline"] or ()).strip("\0 ") == title:
            return process
    return None


@contextlib.contextmanager
def overrides_of(daemon: psutil.Process | None) -> Iterator[None]:
    """Apply the variables with which a daemon overrides its settings file, if they can be read."""
    kept = dict(os.environ)
    with contextlib.suppress(psutil.Error, OSError):
        found = {} if daemon is None else daemon.environ()
        os.environ.update({name: found[name] for name in found if name.startswith(PREFIX)})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def open_files(daemon: psutil.Process | None) -> Finding:
    """Check the limit of open files of a running daemon, or else what this shell can set."""
    who, limit = "this shell", resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(psutil.Error, OSError):
        if daemon is not None:
            limit, who = daemon.rlimit(psutil.RLIMIT_NOFILE)[0], f"process {daemon.pid}"
    found = f"{who} may open {'any number of' if limit < 0 else limit} files"
    if 0 <= limit < MIN_FILES:
        remedy = f"`ulimit -n {MIN_FILES}`, or LimitNOFILE of the service"
        return warning("limits", found, remedy)
    return ok("limits", found)
