"""`ones-agent --config FILE`."""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

import uvloop
from setproctitle import setproctitle

from nodeagent import app
from nodeagent.cgroups import find
from nodeagent.end_workers import end_workers
from nodeagent.folders import NodeFolders
from nodeagent.job_cgroups import JobGroups
from nodeagent.settings import AgentSettings
from nodeagent.settings_check import NAMELESS
from schemas.errors import OnesError, one_line_error
from schemas.host.checks import check_file
from schemas.host.logging import configure_logging


def main() -> None:
    """Run the agent; exit code 2 if it cannot start."""
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
        sys.exit(2)
    except Exception as error:  # noqa: BLE001 - the log ends with the cause, not with a frame
        traceback.print_exc()
        sys.stderr.write(f"ones-agent: {one_line_error(error)}\n")
        sys.exit(1)


def _end_workers(path: Path) -> int:
    """Kill the workers of a node, even if an agent would refuse its settings."""
    findings, settings = check_file(AgentSettings, path, {"node": NAMELESS})
    for problem in findings.found:
        if problem.field in {"run", "jobs.cgroup"}:  # where its workers are
            raise problem
    home = path.parent
    folders = NodeFolders(home / settings.run, home / settings.work, home / settings.checkpoints)
    groups = JobGroups(find(settings.jobs.cgroup), folders.run)
    return end_workers(folders, settings.kill_grace_s, groups)


if __name__ == "__main__":
    main()
