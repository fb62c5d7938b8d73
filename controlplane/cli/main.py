"""Entry point: commands, and what becomes of their errors."""

from __future__ import annotations

import gc
import os
import signal
import sys

from cyclopts import App, CycloptsError

from controlplane.cli import (
    fetch,
    job_commands,
    job_list,
    job_output,
    local_cluster,
    node_commands,
    submit,
    wait_and_cancel,
)
from controlplane.cli.exit_codes import Exit, exit_code
from controlplane.cli.output import print_error
from controlplane.cli.terminal import harmless_stream
from schemas import __version__
from schemas.errors import OnesError

DRAWN = {  # modules that draw, which takes long to import; loaded when they are asked for
    "top": "Show jobs and slots, every second until Ctrl-C.",
    "timeline": "Draw which job had which slot, from the journal.",
}


LONG_LISTS = 100_000  # objects that are made before garbage is looked for: rows are none

INIT = "Write a job file for SCRIPT, and say which lines of it to change for the library."
CHECK = "Name everything that is wrong with a settings file on this host."
KEY = "Who may connect, and what they may do; for admins."
SWEEP = "Train many configurations of one model, and keep the best."
SIM = "Simulate policies before you use them."
ADMIN = "The controller's journal: copies, checks, and what is in it."


class UsageError(OnesError):
    """The command line cannot be understood."""

    code = "usage"


def build() -> App:
    """The command tree; job commands have short aliases at the top."""
    app = App(name="ones", help="Submit training jobs to a cluster and follow them.")
    app.version = __version__
    job = App(name="job", help="Everything about jobs.")
    node = App(name="node", help="Everything about nodes.")
    here = App(name="local", help="A cluster in one folder of this host.")
    for command in (
        submit.submit,
        job_list.ps,
        job_commands.show,
        job_commands.explain,
        job_output.logs,
        wait_and_cancel.wait,
        wait_and_cancel.cancel,
        job_commands.resize,
        job_commands.pause,
        job_commands.resume,
        fetch.fetch,
        fetch.export,
        job_commands.samples,
        job_commands.events,
    ):
        app.command(command)
        job.command(command)
    app.command("controlplane.cli.init:init", name="init", help=INIT)
    for name, help_text in DRAWN.items():
        app.command(f"controlplane.cli.{name}:{name}", name=name, help=help_text)
    node.command(node_commands.node_list, name="list")
    node.command(node_commands.drain)
    node.command(node_commands.undrain)
    here.command(local_cluster.up)
    here.command(local_cluster.down)
    for group in (job, node, here):
        app.command(group)
    settings = App(name="config", help="Everything about settings files.")
    settings.command("controlplane.cli.config_check:check", name="check", help=CHECK)
    app.command(settings)
    app.command("controlplane.cli.key_commands:key", name="key", help=KEY)
    app.command("controlplane.cli.sweep.commands:sweep", name="sweep", help=SWEEP)
    app.command("controlplane.cli.simulate:sim", name="sim", help=SIM)
    app.command("controlplane.cli.admin:admin", name="admin", help=ADMIN)
    return app


def main() -> None:
    """Run one command; exit codes as `Exit` says."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    gc.set_threshold(LONG_LISTS)
    # Matrices are small here, and threads that wait for each other burn a core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    output = _asked_output(sys.argv[1:])
    sys.stdout, sys.stderr = harmless_stream(sys.stdout), harmless_stream(sys.stderr)
    try:
        code = build()(exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        print_error(UsageError(" ".join(str(error).split()), "see `ones --help`"), output)
        sys.exit(Exit.USAGE)
    except OnesError as error:
        print_error(error, output)
        sys.exit(exit_code(error))
    except OverflowError:
        print_error(UsageError("a number is too large", "see `ones --help`"), output)
        sys.exit(Exit.USAGE)
    except UnicodeEncodeError as error:  # of bytes that the locale has no characters for
        what = f"{error.object!r} is not text that can be sent in {error.encoding}"
        print_error(UsageError(what, "use a UTF-8 locale, such as LC_ALL=C.UTF-8"), output)
        sys.exit(Exit.USAGE)
    except KeyboardInterrupt:
        os._exit(130)
    sys.exit(code or Exit.OK)


def _asked_output(arguments: list[str]) -> str:
    """The output format, for errors that come before the arguments are understood."""
    for place, argument in enumerate(arguments):
        if argument in {"-o", "--output"} and place + 1 < len(arguments):
            return arguments[place + 1]
        if argument.startswith("--output="):
            return argument.partition("=")[2]
    return "table"


if __name__ == "__main__":
    main()
