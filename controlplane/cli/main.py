"""Entry point of `ones`: the command tree and the handling of errors."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import Final, Literal

from cyclopts import (
    App,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    UnknownCommandError,
    UnusedCliTokensError,
)

from controlplane.cli import job_list, job_output, local, operators, submit
from controlplane.cli import jobs as job_commands
from controlplane.cli.output import Exit, exit_code, print_error
from controlplane.cli.terminal import harmless_stream
from controlplane.client import Client
from schemas import __version__
from schemas.errors import MissingExtraError, OnesError, UnknownJobError

SUGGESTION_TIMEOUT_S = 2.0  # for the request of job names for a suggestion
GC_THRESHOLD = 100_000  # allocations between garbage collections; long tables are not garbage

START, JOBS, CLUSTER, SIMULATE = (
    Group(title, sort_key=place)
    for place, title in enumerate(("Start here", "Jobs", "Cluster", "Simulate"))
)
LATER: Final = (  # commands that are imported when they run: drawing and computing need long
    ("init", "init:init", START, 1,
     "Write a job file for SCRIPT, and show the lines to change for the library."),
    ("run", "run:run", START, 5,
     "Run a program on the cluster, with its output and exit code: ones run -- PROGRAM ARGS."),
    ("top", "top:top", START, 9, "Show jobs and slots, every second until Ctrl-C."),
    ("web", "web:web", START, 10, "Show the cluster in a browser; log in to its page."),
    ("attach", "attach:attach", JOBS, None,
     "Attach to the terminal of a job that `ones run --pty` started."),
    ("shell", "attach:shell", JOBS, None,
     "Open a terminal beside a running job, in its folder and with its limits."),
    ("forward", "attach:forward", JOBS, None,
     "Forward a port of this host to a port at which a running job listens."),
    ("sweep", "sweep.commands:sweep", JOBS, None,
     "Train many configurations of one model, and keep the best."),
    ("timeline", "timeline:timeline", JOBS, None,
     "Draw which job had which slot, from the journal."),
    ("trace", "trace:trace", JOBS, None,
     "Write a trace of a job for ui.perfetto.dev."),
    ("history", "usage:history", JOBS, None,
     "List jobs that have ended, newest first, and the sums of their slot hours."),
    ("usage", "usage:usage", CLUSTER, None,
     "Print how many slot hours users, projects or jobs used."),
    ("quota", "quota:quota", CLUSTER, None,
     "Show what projects and users have, may have and have used."),
    ("project", "quota:project", CLUSTER, None, "Set shares of projects and their users (admins)."),
    ("cluster", "cluster:cluster", CLUSTER, None,
     "Get nodes from Slurm, and return them."),
    ("scheduling", "quota:scheduling", CLUSTER, None,
     "Pause all starts and growths of jobs, or resume them (operators)."),
    ("policy", "policy:policy", CLUSTER, None,
     "Show which policy plans, or choose another one (admins)."),
    ("key", "operators:key", CLUSTER, None, "Manage keys and their rights (admins)."),
    ("doctor", "doctor:doctor", CLUSTER, None,
     "Check this host as a client, controller or node; each finding has a remedy."),
    ("admin", "admin:admin", CLUSTER, None,
     "Back up, restore, check and read the controller's journal, on its host."),
    ("sim", "sim:sim", SIMULATE, None, "Simulate policies."),
)  # fmt: skip
SAMPLE: Final = "Print a commented settings file or systemd unit; without NAME, list or write all."
CHECK: Final = "Print every problem of a settings file on this host."

SYNONYMS: Final = {  # commands of other schedulers and tools, with ours
    "delete": "cancel", "describe": "show", "down": "local down", "download": "fetch",
    "info": "show", "jobs": "ps", "kill": "cancel", "list": "ps", "ls": "ps",
    "nodes": "node list", "queue": "ps", "requeue": "rerun", "rm": "cancel", "sacct": "history",
    "sbatch": "submit",
    "scale": "resize", "scancel": "cancel", "sinfo": "node list", "squeue": "ps",
    "start": "submit", "status": "ps", "stop": "cancel", "suspend": "pause", "up": "local up",
    "version": "--version", "watch": "top",
}  # fmt: skip


EXTRAS: Final = {  # of packages that only some commands import
    "bokeh": "web", "jinja2": "web", "matplotlib": "sim", "numpy": "sim", "scipy": "sim",
    "starlette": "web", "torch": "train", "uvicorn": "web",
}  # fmt: skip


class UsageError(OnesError):
    """The command line is invalid."""

    code = "usage"


def build() -> App:
    """Return the command tree; commands about jobs also exist as subcommands of `job`."""
    app = App(name="ones", help="Submit training jobs to a cluster and follow them.")
    app.version = __version__
    app.default_parameter = Parameter(negative=())  # no --no-FLAG for flags that are off by default
    app.group_commands = Group("More", sort_key=9)  # for commands without a group
    here = App(
        name="local", help="Run a cluster in one folder of this host.", group=START, sort_key=0
    )
    here.command(local.up)
    here.command(local.down)
    app.command(here)
    job = App(name="job", help="Manage jobs.", show=False)
    first: list[Callable[..., int | None]] = [submit.submit, job_list.ps, job_output.logs]
    for place, begin in enumerate(first, start=2):
        app.command(begin, group=START, sort_key=place)
        job.command(begin)
    for command in (
        job_commands.show,
        job_commands.explain,
        submit.wait,
        submit.cancel,
        job_commands.resize,
        job_commands.pause,
        job_commands.resume,
        submit.hold,
        submit.release,
        submit.rerun,
        job_output.fetch,
        job_output.export,
        job_commands.samples,
        job_commands.events,
    ):
        app.command(command, group=CLUSTER if command is job_commands.events else JOBS)
        job.command(command)
    app.command(job)
    for name, where, group, key, said in LATER:
        app.command(f"controlplane.cli.{where}", name=name, help=said, group=group, sort_key=key)
    node = App(name="node", help="Manage nodes.", group=CLUSTER)
    node.command(operators.node_list, name="list")
    node.command(operators.template)
    node.command(operators.drain)
    node.command(operators.cordon)
    node.command(operators.reserve)
    node.command(operators.reservations)
    node.command(operators.unreserve)
    node.command(operators.undrain)
    node.command(operators.forget)
    settings = App(
        name="config", help="Check settings files, and write samples of them.", group=CLUSTER
    )
    settings.command("controlplane.cli.admin:check_settings", name="check", help=CHECK)
    settings.command("controlplane.cli.admin:sample", name="sample", help=SAMPLE)
    for part in (node, settings):
        app.command(part)
    app.command(completion)
    return app


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a script that completes commands, options and job names in SHELL.

    bash: ones completion bash > ~/.local/share/bash-completion/completions/ones
    """
    sys.stdout.write(build().generate_completion(prog_name="ones", shell=shell))


def main() -> None:
    """Run one command and exit with a code of `Exit`."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    gc.set_threshold(GC_THRESHOLD)
    # Matrices are small here, and waiting BLAS threads would occupy a core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    output = _option_value(sys.argv[1:], "--output", "-o") or "table"
    # Completion output is parsed by a shell and must not be escaped.
    if sys.argv[1:2] != ["__complete"]:
        sys.stdout, sys.stderr = harmless_stream(sys.stdout), harmless_stream(sys.stderr)
    try:
        code = build()(exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        print_error(usage_error(error), output)
        sys.exit(Exit.USAGE)
    except OnesError as error:
        if isinstance(error, UnknownJobError):
            error = _with_suggestion(error, _option_value(sys.argv[1:], "--home"))
        print_error(error, output)
        sys.exit(exit_code(error))
    except ImportError as error:
        if (missing := missing_extra(error)) is None:
            raise
        print_error(missing, output)
        sys.exit(exit_code(missing))
    except OverflowError:
        print_error(UsageError("a number is too large", "see `ones --help`"), output)
        sys.exit(Exit.USAGE)
    except UnicodeEncodeError as error:  # bytes outside the locale's encoding
        problem = f"{error.object!r} cannot be encoded in {error.encoding}"
        print_error(UsageError(problem, "use a UTF-8 locale, such as LC_ALL=C.UTF-8"), output)
        sys.exit(Exit.USAGE)
    except KeyboardInterrupt:
        os._exit(130)
    sys.exit(code or Exit.OK)


def missing_extra(error: ImportError) -> MissingExtraError | None:
    """Return the error for a command whose packages are not installed; None: another cause."""
    cause: BaseException | None = error
    while isinstance(cause, ImportError):
        package = (cause.name or "").partition(".")[0]
        if isinstance(cause, ModuleNotFoundError) and package in EXTRAS:
            return MissingExtraError("this command", package, EXTRAS[package])
        cause = cause.__cause__
    return None


def usage_error(error: CycloptsError) -> UsageError:
    """Return an error that says what is wrong with a command line and which help to read."""
    words = error.unused_tokens or [""]
    command = " ".join(("ones", *(error.command_chain or ())))
    hint = f"see `{command} --help`"
    if isinstance(error, UnknownCommandError) and not error.command_chain:
        if words[0].startswith("-"):
            hint = f"options follow the command, as in `ones ps {words[0]} ...`"
            return UsageError(f"{words[0]} is before the command", hint)
        if meant := SYNONYMS.get(words[0]):
            return UsageError(f"there is no command {words[0]!r}", f"did you mean `ones {meant}`?")
    if isinstance(error, UnusedCliTokensError):
        return UsageError(f"`{command}` does not take {' '.join(map(repr, words))}", hint)
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        argument = error.argument
        if any(name in words for name in argument.names):
            return UsageError(f"{argument.name} needs a value", hint)
        positional = argument.index is not None
        name = argument.name.lstrip("-").upper() if positional else argument.name
        return UsageError(f"`{command}` needs {name}", hint)
    text = " ".join(str(error).split()).partition(" Available commands")[0]  # --help has the list
    problem, _, guess = text.partition(" Did you mean ")
    if guess:
        return UsageError(problem.removesuffix("."), f"did you mean {guess} {hint}")
    return UsageError(problem.removesuffix("."), hint)


def _option_value(arguments: list[str], *names: str) -> str | None:
    """Return the value of an option in `arguments`, for errors outside of a command."""
    for place, argument in enumerate(arguments):
        if argument in names and place + 1 < len(arguments):
            return arguments[place + 1]
        if argument.startswith(f"{names[0]}="):
            return argument.partition("=")[2]
    return None


def _with_suggestion(error: UnknownJobError, home: str | None) -> UnknownJobError:
    try:
        return UnknownJobError(error.job, asyncio.run(_job_names(home)))
    except OnesError:
        return error


async def _job_names(home: str | None) -> list[str]:
    async with Client(home, SUGGESTION_TIMEOUT_S) as client:
        return await client.some_job_names()


if __name__ == "__main__":
    main()
