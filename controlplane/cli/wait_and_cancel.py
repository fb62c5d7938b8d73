"""wait and cancel: commands that take several jobs at once."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Final

from cyclopts import Parameter

from controlplane.cli.common_options import COMMON, Common, JobName
from controlplane.cli.exit_codes import Exit, exit_code
from controlplane.cli.job_commands import say_if_absent
from controlplane.cli.output import error_body, print_error, print_json, print_line
from controlplane.client import BlockingClient
from schemas.errors import OnesError, TimedOutError, UnreachableError

LATER: Final = "wait longer, or look with `ones show`"
Row = dict[str, Any]  # what became of one job


def wait(
    job: JobName,
    /,
    *more: JobName,
    timeout: Annotated[float | None, Parameter(help="seconds, for all of them")] = None,
    common: Common = COMMON,
) -> int:
    """Wait until each JOB has ended; exit 1 if one did not succeed, 6 after TIMEOUT s."""
    deadline = None if timeout is None else time.monotonic() + timeout
    states: list[str] = []
    with BlockingClient(common.home) as client:
        say_if_absent(client)

        def end_of(name: str) -> tuple[Row, str]:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                found = client.wait_state(name, left)
            except TimedOutError:
                raise TimedOutError(f"{name} had not ended after {timeout:g} s", LATER) from None
            states.append(found.state)
            row = _row(name, found.state, found.reason)
            return row, f"{name} {found.state}: {found.reason}"

        with said_to_go_on((job, *more)):
            refused = _for_each((job, *more), end_of, common)
    failed = any(state != "succeeded" for state in states)
    return refused or (Exit.JOB_FAILED if failed else Exit.OK)


@contextlib.contextmanager
def said_to_go_on(jobs: Sequence[str]) -> Iterator[None]:
    """Say at Ctrl-C that it ends the waiting, and no job."""
    try:
        yield
    except KeyboardInterrupt:
        goes, name = ("goes", jobs[0]) if len(jobs) == 1 else ("go", "JOB")
        sys.stderr.write(f"\nones: {', '.join(jobs)} {goes} on; `ones cancel {name}` ends it\n")
        sys.stderr.flush()
        raise


def cancel(job: JobName, /, *more: JobName, common: Common = COMMON) -> int:
    """End each JOB: TERM to its workers, KILL to those that do not go."""
    with BlockingClient(common.home) as client:

        def end(name: str) -> tuple[Row, str]:
            found = client.cancel(name).summary
            note = "" if found.state == "cancelled" else ", had ended before"
            return _row(name, found.state, found.reason), f"{name} {found.state}{note}"

        return _for_each((job, *more), end, common)


def _row(
    job: str, state: str | None = None, reason: str | None = None, *, error: Row | None = None
) -> Row:
    return {"job": job, "state": state, "reason": reason, "error": error}


def _for_each(jobs: Sequence[str], do: Callable[[str], tuple[Row, str]], common: Common) -> int:
    """Do it to every job, whatever becomes of one, and say at once what did.

    JSON is an object for one job and a list for several, in which a refusal is an `error`.

    Returns:
        The exit code of the first that was refused.

    Raises:
        OnesError: if there is but one job and it is refused, or nobody answers.
    """
    code: int = Exit.OK
    rows: list[Row] = []
    for job in dict.fromkeys(jobs):
        try:
            row, line = do(job)
        except OnesError as error:
            if len(jobs) == 1 or isinstance(error, UnreachableError):
                raise
            code = code or exit_code(error)
            row, line = _row(job, error=error_body(error)), ""
            print_error(error, "table")
        rows.append(row)
        if common.output == "jsonl":
            print_line(row)
        elif common.output == "table" and line:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    if common.output == "json":
        print_json(rows[0] if len(jobs) == 1 else rows)
    return code
