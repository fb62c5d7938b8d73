"""`ones-controller --config FILE`."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

from setproctitle import setproctitle

from schemas.errors import MissingExtraError, OnesError, one_line_error

try:
    import uvloop
except ModuleNotFoundError:
    sys.stderr.write(f"{MissingExtraError('ones-controller', 'uvloop', 'controller')}\n")
    sys.exit(2)

from controlplane.service import app
from controlplane.service.standby.active import LeaseLostError
from controlplane.service.standby.election import restart
from controlplane.service.standby.follower import OtherReleaseError
from schemas.host.logging import configure_logging
from schemas.host.memory import collect_garbage_seldom


def main() -> None:
    """Run the controller. Exit with code 2 if it cannot start."""
    parser = argparse.ArgumentParser(prog="ones-controller", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="settings file (TOML)")
    path = parser.parse_args().config.resolve()
    setproctitle(f"ones: controller {path}")
    configure_logging()
    os.umask(0o077)  # the journal has the environments of all users' jobs
    collect_garbage_seldom()
    try:
        uvloop.run(app.run(path))
    except (LeaseLostError, OtherReleaseError) as error:
        restart(error)
    except OnesError as error:
        sys.stderr.write(f"ones-controller: {error}\n")
        sys.exit(2 if error.needs_person else 1)
    except Exception as error:  # noqa: BLE001 - the log should end with the cause
        traceback.print_exc()
        sys.stderr.write(f"ones-controller: {one_line_error(error)}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
