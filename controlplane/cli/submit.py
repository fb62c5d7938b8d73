"""submit: what would travel, what was accepted, and with --wait what became of it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from controlplane.cli.common_options import COMMON, Common
from controlplane.cli.dry_run import say_dry
from controlplane.cli.exit_codes import Exit, exit_code
from controlplane.cli.failure_report import as_json, as_text, failure_of
from controlplane.cli.output import (
    byte_count,
    error_body,
    print_error,
    print_json,
    print_line,
)
from controlplane.cli.submission import (
    Submission,
    library_note,
    on_screen,
    prepared,
    snapshot_line,
)
from controlplane.cli.terminal import terminal_console
from controlplane.cli.wait_and_cancel import said_to_go_on
from controlplane.client import BlockingClient
from controlplane.client.workdir_archive import IGNORE_FILE
from schemas.errors import BadFieldError, OnesError, UnreachableError
from schemas.messages.client import JobAccepted

MUCH: Final = 100_000_000  # bytes of a working directory that are worth a question
NAMED: Final = 3  # of the largest files
OF_NO_SWEEP: Final = frozenset({"script", "batch_size", "max_batch_size", "sweep"})
ASK_S: Final = 3.0  # a dry run waits so long for a controller
SHOWN_FROM: Final = 4 << 20  # bytes of an archive whose way is worth a bar
KEY_HELP: Final = "submitting twice with it gives one job"
PROJECT_HELP: Final = "of your key's: whose members see the job; default: the first of them"
SET_HELP: Final = "KEY=VALUE over the file: lr=0.1, args.width=64, env.MODE=fast, stop.epochs=3"


def submit(
    file: Path,
    /,
    *more: Path,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="", help=SET_HELP)] = None,
    wait: Annotated[bool, Parameter(help="until it ends; exit 1 if it fails, and say why")] = False,
    key: Annotated[str | None, Parameter(help=KEY_HELP)] = None,
    project: Annotated[str, Parameter(help=PROJECT_HELP)] = "",
    dry_run: Annotated[bool, Parameter(help="check, say what would go, submit nothing")] = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], help="ask nothing")] = False,
    common: Common = COMMON,
) -> int:
    """Submit the job that each FILE (TOML) describes, with a snapshot of its working directory."""
    files = (file, *more)
    if key is not None and more:
        raise BadFieldError("--key is of one job", "submit these files one at a time", "key")
    # All are good before one goes.
    ready = [prepared(path, set_ or ())._replace(project=project) for path in files]
    return send(ready, key=key, wait=wait, dry_run=dry_run, yes=yes, common=common)


def send(
    ready: Sequence[Submission],
    *,
    key: str | None,
    wait: bool,
    dry_run: bool,
    yes: bool,
    common: Common,
) -> int:
    """Submit jobs that are ready to go, or only say what would go.

    Args:
        key: submitting twice with it gives one job.

    Returns:
        The exit code.
    """
    if dry_run:
        return say_dry(ready, common)
    if not all(_agreed(one, common, yes=yes) for one in ready):
        return Exit.USAGE
    with BlockingClient(common.home) as client:
        first_event = client.cluster().last_seq + 1 if wait else 0
        accepted, code = _all_sent(client, ready, key, common)
        return (_waited(client, accepted, first_event, common) if wait else Exit.OK) or code


def _all_sent(
    client: BlockingClient, ready: Sequence[Submission], key: str | None, common: Common
) -> tuple[list[JobAccepted], int]:
    """Submit each, whatever becomes of another; a refusal of several is an `error` in JSON.

    Returns:
        What was accepted, and the exit code of the first refusal.

    Raises:
        OnesError: if there is but one and it is refused.
    """
    accepted: list[JobAccepted] = []
    rows: list[Any] = []
    code: int = Exit.OK
    for one in ready:
        try:
            accepted.append(_sent(client, one, key, common))
            rows.append(accepted[-1])
        except OnesError as error:
            if len(ready) == 1:
                raise
            code = code or exit_code(error)
            rows.append({"file": str(one.file), "error": error_body(error)})
            print_error(error, "table")
            if isinstance(error, UnreachableError):
                break
    if common.output == "json":
        print_json(rows[0] if len(ready) == 1 else rows)
        sys.stdout.flush()
    return accepted, code


def _sent(client: BlockingClient, one: Submission, key: str | None, common: Common) -> JobAccepted:
    if one.stored:
        accepted = client.submit_stored(one.spec, one.stored, key, project=one.project)
    else:
        with _progress(one) as on_sent:
            accepted = client.submit_accepted(one.spec, key, on_sent=on_sent, project=one.project)
    if common.output == "jsonl":
        print_line(accepted)
    elif common.output != "json":
        sys.stdout.write(f"{accepted.job}\n")
        sys.stdout.flush()
    if common.output == "table":
        for note in filter(None, (library_note(one), *accepted.notes)):
            sys.stderr.write(f"{accepted.job}: {note}\n")
    return accepted


def _waited(
    client: BlockingClient, accepted: Sequence[JobAccepted], first_event: int, common: Common
) -> int:
    code: int = Exit.OK
    for one in accepted:
        with said_to_go_on([job.job for job in accepted[accepted.index(one) :]]):
            detail = client.wait(one.job)
        if detail.summary.state == "succeeded":
            if common.output == "table":
                sys.stderr.write(f"{one.job} succeeded: {detail.summary.reason}\n")
            continue
        code = Exit.JOB_FAILED
        if common.output == "quiet":
            continue
        failure = failure_of(client, detail, first_event)
        in_json = common.output in {"json", "jsonl"}
        for line in [json.dumps(as_json(failure))] if in_json else as_text(failure):
            sys.stderr.write(f"{line}\n")
    return code


# --- what travels


def _agreed(one: Submission, common: Common, *, yes: bool) -> bool:
    """Say what travels; ask whether that much should, where somebody is there to answer."""
    if common.output == "table":
        sys.stderr.write(f"{on_screen(snapshot_line(one), sys.stderr)}\n")
    if one.size <= MUCH or yes:
        return True
    remedy = f"name large data in {Path(one.spec.workdir) / IGNORE_FILE}, read it from its place"
    sys.stderr.write(f"ones: more than {byte_count(MUCH)} would travel; {remedy}\n")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    sys.stderr.write("submit it all the same? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in {"y", "yes"}:
        return True
    sys.stderr.write("nothing was submitted\n")
    return False


@contextlib.contextmanager
def _progress(one: Submission) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal for what takes its time; nothing anywhere else."""
    if not sys.stderr.isatty() or one.size < SHOWN_FROM:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn  # noqa: PLC0415

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=terminal_console(on_stderr=True), transient=True) as bar:
        task = bar.add_task(f"packing {one.spec.name}", total=None)

        def sent(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=f"sending {one.spec.name}")

        yield sent
