"""Termination of all workers and zygotes of a node, which continue when the agent stops."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import time
from pathlib import Path

import psutil

from nodeagent.folders import NodeFolders
from nodeagent.job_cgroups import JobGroups
from nodeagent.process_identity import open_process, signal_group
from nodeagent.zygote_process import is_zygote


def end_workers(folders: NodeFolders, grace_s: float, groups: JobGroups | None = None) -> int:
    """Send TERM to all worker groups, KILL to the rest after `grace_s`, then end the zygotes.

    Also removes sockets outside of the run folder, and control groups. Returns the worker count.
    """
    living: dict[int, tuple[int, int | None]] = {}  # by pidfd: pid, and uid if not the agent's
    for folder in folders.workers():
        mark = folder.mark()
        pidfd = open_process(mark.pid, mark.started_ticks) if mark else None
        if mark is not None and pidfd is not None:
            folder.mark_stopped()
            owner = folder.owner
            living[pidfd] = mark.pid, owner.uid if owner else None
    _signal(living, signal.SIGTERM)
    count = len(living)
    _wait(living, grace_s)
    _signal(living, signal.SIGKILL)
    _wait(living, grace_s)
    for pid in _zygotes(folders.sockets):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    if not folders.sockets.is_relative_to(folders.run):
        shutil.rmtree(folders.sockets, ignore_errors=True)
    if groups is not None:
        groups.end_everything()
    return count


def _signal(living: dict[int, tuple[int, int | None]], what: signal.Signals) -> None:
    for pid, uid in living.values():
        signal_group(pid, what, uid)


def _wait(living: dict[int, tuple[int, int | None]], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while living and (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select(list(living), [], [], left)
        for pidfd in ready:
            pid, uid = living[pidfd]
            signal_group(pid, signal.SIGKILL, uid)  # its remaining children
            os.close(pidfd)
            del living[pidfd]


def _zygotes(sockets: Path) -> list[int]:
    prefix = f"{sockets}/"
    every = psutil.process_iter(["cmdline"])
    return [process.pid for process in every if is_zygote(process, prefix)]
