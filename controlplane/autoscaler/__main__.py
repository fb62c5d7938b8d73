"""`python -m controlplane.autoscaler --config FILE`, which `ones cluster up` starts."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from setproctitle import setproctitle

from controlplane.autoscaler import app
from schemas.errors import OnesError
from schemas.host.logging import configure_logging


def main() -> None:
    """Run the autoscaler. Exit with code 2 if it cannot start."""
    parser = argparse.ArgumentParser(prog="ones-autoscaler", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="settings file (TOML)")
    path = parser.parse_args().config.resolve()
    setproctitle(f"ones: autoscaler {path}")
    configure_logging()
    try:
        asyncio.run(app.run(path))
    except OnesError as error:
        sys.stderr.write(f"ones-autoscaler: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
