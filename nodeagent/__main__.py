"""`ones-agent --config FILE`: runs the agent; with `--end-workers`, ends the workers instead."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Final, NamedTuple

import psutil
from setproctitle import setproctitle

from schemas.errors import MissingExtraError, OnesError, one_line_error

try:
    import uvloop
except ModuleNotFoundError:
    sys.stderr.write(f"{MissingExtraError('ones-agent', 'uvloop', 'agent')}\n")
    sys.exit(2)

from nodeagent import app
from nodeagent.cgroups import find
from nodeagent.folders import NodeFolders, lock_run
from nodeagent.job_cgroups import JobGroups
from nodeagent.process_identity import open_process, session_members, signal_group
from nodeagent.settings import AgentSettings
from nodeagent.settings_check import NAMELESS
from nodeagent.zygotes import is_zygote
from schemas.host.checks import check_file
from schemas.host.logging import configure_logging

POLL_S: Final = 0.05


class _Living(NamedTuple):
    pid: int
    uid: int | None  # None: the agent's
    rigid: bool


def end_workers(folders: NodeFolders, grace_s: float, groups: JobGroups | None = None) -> int:
    """Send TERM to all worker groups, KILL the rest, then end the zygotes.

    KILL follows after `grace_s`, or after the longest grace of a program among the workers. Also
    remove the control groups, and sockets outside of the run folder. Return how many workers were
    alive.
    """
    living: dict[int, _Living] = {}  # by pidfd
    limit_s = grace_s
    for folder in folders.workers():
        mark = folder.mark()
        pidfd = open_process(mark.pid, mark.started_ticks) if mark else None
        if mark is not None and pidfd is not None:
            folder.mark_stopped()
            assignment = folder.assignment()
            rigid = assignment is not None and assignment.spec.rigid
            if assignment is not None and rigid:
                limit_s = max(limit_s, assignment.spec.grace_limit_s)
            living[pidfd] = _Living(mark.pid, folder.uid, rigid)
    _signal(living, signal.SIGTERM)
    count = len(living)
    _wait(living, limit_s)
    _signal(living, signal.SIGKILL)
    _wait(living, grace_s)
    for process in list(psutil.process_iter(["cmdline"])):
        if is_zygote(process, f"{folders.sockets}/"):
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGTERM)
    if not folders.sockets.is_relative_to(folders.run):
        shutil.rmtree(folders.sockets, ignore_errors=True)
    if groups is not None:
        groups.end_everything()
    return count


def _signal(living: dict[int, _Living], what: signal.Signals) -> None:
    for one in living.values():
        signal_group(one.pid, what, one.uid)


def _wait(living: dict[int, _Living], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while living and (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select(list(living), [], [], left)
        for pidfd in ready:
            one = living.pop(pidfd)
            os.close(pidfd)
            while one.rigid and time.monotonic() < deadline and session_members(one.pid):
                time.sleep(POLL_S)  # a shell dies of TERM before its program has saved
            signal_group(one.pid, signal.SIGKILL, one.uid)  # its remaining children


def main() -> None:
    """Run the agent. Exit with code 2 if its settings need a person, else with 1."""
    parser = argparse.ArgumentParser(prog="ones-agent", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="settings file (TOML)")
    parser.add_argument(
        "--end-workers",
        action="store_true",
        help="end all workers of this node, as before a reboot, and exit",
    )
    chosen = parser.parse_args()
    path = chosen.config.resolve()
    setproctitle(f"ones: agent {path}")
    configure_logging()
    try:
        if chosen.end_workers:
            sys.stdout.write(f"{_end_workers(path)} workers ended\n")
            return
        uvloop.run(app.run(path))
    except OnesError as error:
        sys.stderr.write(f"ones-agent: {error}\n")
        sys.exit(2 if error.needs_person else 1)
    except Exception as error:  # noqa: BLE001 - the log ends with the cause, not with a frame
        traceback.print_exc()
        sys.stderr.write(f"ones-agent: {one_line_error(error)}\n")
        sys.exit(1)


def _end_workers(path: Path) -> int:
    """Kill the workers of a node, even if its settings are such that an agent would not start.

    Raises:
        SettingsError: if an agent is running on the node, because it would start workers again.
    """
    findings, settings = check_file(AgentSettings, path, {"node": NAMELESS})
    for problem in findings.found:
        if problem.field in {"run", "jobs.cgroup"}:  # fields that tell where the workers are
            raise problem
    home = path.parent
    folders = NodeFolders(home / settings.run, home / settings.work, home / settings.checkpoints)
    groups = JobGroups(find(settings.jobs.cgroup), folders.run)
    lock = lock_run(folders, settings.node) if folders.run.is_dir() else None
    try:
        return end_workers(folders, settings.kill_grace_s, groups)
    finally:
        if lock is not None:
            os.close(lock)


if __name__ == "__main__":
    main()
