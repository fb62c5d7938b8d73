"""`ones run`: a program on the cluster, with its output here and its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter

from controlplane.cli.attach import CANCELLED, NOT_RUN, attached, code_of
from controlplane.cli.job_options import NO_OPTIONS, JobOptions, pairs_of
from controlplane.cli.job_output import SILENT_STATES, draw_lines, with_ranks, write_lines
from controlplane.cli.output import COMMON, Common, print_error
from controlplane.cli.submission import Submission
from controlplane.cli.submit import Project, Yes, send
from controlplane.cli.terminal import drawn
from controlplane.client import BlockingClient
from controlplane.client.archive import survey
from controlplane.client.command_line import job_of_command, job_on_terminal
from controlplane.client.job_file import checked
from controlplane.client.secret_env import secret_file
from schemas.errors import OnesError
from schemas.jobs import ENDED, JobSpec

LOOK_S: Final = 0.3  # between looks at a job that waits


def run(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    slots: Annotated[int | None, Parameter(help="slots of the program (default: 1)")] = None,
    name: Annotated[str, Parameter(help="name of the job (default: the program's)")] = "",
    env: Annotated[
        list[str] | None, Parameter(help="NAME=VALUE, a variable of the program", negative="")
    ] = None,
    workdir: Annotated[Path, Parameter(help="folder that is uploaded")] = Path(),
    max_run_s: Annotated[float | None, Parameter(help="time limit in seconds")] = None,
    grace_s: Annotated[float | None, Parameter(help="seconds from TERM to KILL")] = None,
    retries: Annotated[int | None, Parameter(help="restarts after failures")] = None,
    pty: Annotated[
        bool, Parameter(help="on a terminal, which is attached to this one; default: a shell")
    ] = False,
    detach: Annotated[
        bool, Parameter(name=["--detach", "-d"], help="print the job's name, and do not wait")
    ] = False,
    options: JobOptions = NO_OPTIONS,
    project: Project = "",
    yes: Yes = False,
    common: Common = COMMON,
) -> int:
    """Run a program on the cluster: ones run [OPTIONS] -- PROGRAM ARGUMENTS.

    Prints its output, and exits with its code: 124 if it reached its time limit, 125 if the cluster
    could not run it, 128 + N after signal N. Ctrl-C cancels the job, and a second Ctrl-C leaves it.
    A line of torchrun starts one process on each slot. With --pty, the program has a terminal:
    keys go there, Enter ~ . detaches, and `ones attach` returns to it.
    """
    try:
        if pty:
            fields, remark = job_on_terminal(command, os.environ), ""
        else:
            fields, remark = job_of_command(command)
        stated = {
            "slots": slots, "name": name or None, "max_run_s": max_run_s, "grace_s": grace_s,
            "retries": retries, "env": fields.get("env", {}) | pairs_of(env or (), "env"),
        }  # fmt: skip
        fields |= {field: value for field, value in stated.items() if value is not None}
        fields |= options.fields()
        spec = checked(msgspec.convert({**fields, "workdir": str(workdir)}, JobSpec), Path.cwd())
        if remark:
            sys.stderr.write(f"ones: {remark}\n")
        uploads = survey(Path(spec.workdir), secret_file(spec))
        one = Submission(Path("command"), spec, uploads, project=project)
        if detach:
            return send([one], key=None, wait=False, yes=yes, common=common)
        return _run(one, common)
    except OnesError as error:
        print_error(error, common.output)
        return NOT_RUN


def _run(one: Submission, common: Common) -> int:
    with BlockingClient(common.home) as client:
        job = client.submit_accepted(one.spec, None, project=one.project).job
        sys.stderr.write(f"ones: {job}\n")
        with _cancelled_by_ctrl_c(client, job):
            _await_start(client, job)
            if one.spec.kind == "interactive" and client.state(job).state not in ENDED:
                return asyncio.run(attached(job, common))
            several = one.spec.kind == "torchrun" and one.spec.slots[0] > 1
            pages = with_ranks(client.output_pages(job, None, follow=True), prefix=several)
            out = drawn(sys.stdout)
            (draw_lines if out.isatty() else write_lines)(pages, out)
            return code_of(job, client.wait_state(job))


@contextlib.contextmanager
def _cancelled_by_ctrl_c(client: BlockingClient, job: str) -> Iterator[None]:
    """Cancel the job at the first Ctrl-C in the block; at the second one, leave at once."""

    def cancel(*_: object) -> None:
        signal.signal(signal.SIGINT, lambda *_: os._exit(CANCELLED))
        sys.stderr.write(f"\nones: cancelling {job}; Ctrl-C again leaves it\n")
        client.cancel(job)

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _await_start(client: BlockingClient, job: str) -> None:
    """Print why a job waits, whenever the reason changes, until it has started or ended."""
    said = ""
    while (now := client.state(job)).state in SILENT_STATES:
        if now.state != "starting" and now.reason not in {"", "submitted", said}:
            said = now.reason
            sys.stderr.write(f"ones: {job} {said}\n")
        time.sleep(LOOK_S)
