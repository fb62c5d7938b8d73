"""`ones-agent --config FILE`."""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

import uvloop
from setproctitle import setproctitle

from nodeagent import agent_process, agent_settings
from nodeagent.control_groups import find
from nodeagent.end_workers import end_workers
from nodeagent.job_accounts import folders_of
from nodeagent.job_cgroups import JobGroups
from schemas.errors import OnesError, in_one_line
from schemas.logging_and_watchdog import configure_logging


def main() -> None:
    """Run the agent; exit code 2 when it cannot begin."""
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
            loaded = agent_settings.load(path)
            folders = folders_of(loaded, path.parent)
            folders.make()
            groups = JobGroups(find(loaded.jobs.cgroup), folders.run)
            count = end_workers(folders, loaded.kill_grace_s, groups)
            sys.stdout.write(f"{count} workers ended\n")
            return
        uvloop.run(agent_process.run(path))
    except OnesError as error:
        sys.stderr.write(f"ones-agent: {error}\n")
        sys.exit(2)
    except Exception as error:  # noqa: BLE001 - the log ends with the cause, not with a frame
        traceback.print_exc()
        sys.stderr.write(f"ones-agent: {in_one_line(error)}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
