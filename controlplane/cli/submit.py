"""`ones submit`, `wait` and `cancel`: submission, waiting, and reports of failed jobs."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from cyclopts import Parameter

from controlplane.cli.job_list import NO_FILTERS, Filters
from controlplane.cli.job_options import NO_OPTIONS, JobOptions
from controlplane.cli.jobs import warn_if_absent
from controlplane.cli.output import (
    COMMON,
    Common,
    Exit,
    JobName,
    error_body,
    exit_code,
    print_error,
    print_json,
    print_line,
    say,
)
from controlplane.cli.progress import progress
from controlplane.cli.submission import (
    Submission,
    fit_terminal,
    library_note,
    prepare,
    prepare_wrapped,
    print_dry_run,
    snapshot_line,
)
from controlplane.client import BlockingClient
from controlplane.client.archive import IGNORE_FILE
from controlplane.client.formats import byte_count
from controlplane.client.job_order import submission_order, with_parents
from controlplane.client.streams import OutputLine
from schemas.errors import BadFieldError, OnesError, TimedOutError, UnreachableError
from schemas.ids import JobId
from schemas.wire.client import JobAccepted, JobDetail
from schemas.wire.feed import FeedEvent

LAST_LINES: Final = 15
EXITED: Final = "worker.exited"
FOREIGN_SIGNALS: Final = frozenset({9, 15})  # sent after another worker's exit, or from outside


def failure_report(
    client: BlockingClient, detail: JobDetail, from_seq: int, *, in_json: bool
) -> list[str]:
    """Return lines about an unsuccessful job, with the last output of the worker that failed.

    `from_seq` must precede the first feed event of the job. In JSON, the report is one error.
    """
    job, rank = detail.summary, None
    lines: list[OutputLine] = []
    if job.state == "failed":
        rank = failing_rank(e for e in client.events(from_seq) if e.job == job.job)
        pages = client.output_pages(job.job, rank, follow=False, last=LAST_LINES)
        lines = [line for page in pages for line in page]
    what = f"{job.job} {job.state}: {job.reason}"
    logs = f"ones logs {job.job}" + ("" if rank is None else f" --rank {rank}")
    if in_json:
        error = {
            "code": "job_failed",
            "message": what,
            "hint": f"`{logs}`",
            "rank": rank,
            "lines": [line.text for line in lines],
        }
        return [json.dumps({"error": error})]
    if job.state != "failed":
        return [f"ones: {what}"]
    who = "its workers" if rank is None else f"rank {rank}"
    if not lines:
        return [f"ones: {what}", f"{who} wrote no output"]
    several = len({line.rank for line in lines}) > 1
    shown = [f"  [{line.rank}] {line.text}" if several else f"  {line.text}" for line in lines]
    return [f"ones: {what}", f"last output of {who}:", *shown, f"complete output: {logs}"]


def failing_rank(events: Iterable[FeedEvent]) -> int | None:
    """Return the rank of the first worker of the last group to fail by itself, or None."""
    newest, found = -1, None
    for event in events:
        if event.event != EXITED:
            continue
        detail = event.detail
        version, rank = int(detail.get("version") or 0), int(detail.get("rank") or 0)
        if version > newest:
            newest, found = version, None
        own_end = detail.get("code") or (detail.get("signal") or 9) not in FOREIGN_SIGNALS
        if found is None and version == newest and own_end:
            found = rank
    return found


WAIT_HINT: Final = "wait longer, or inspect the job with `ones show`"
Row = dict[str, Any]  # result for one job


def wait(
    job: JobName,
    /,
    *more: JobName,
    timeout: Annotated[
        float | None, Parameter(help="seconds for all jobs together (default: no limit)")
    ] = None,
    common: Common = COMMON,
) -> int:
    """Wait until each JOB has ended; exit 1 if one did not succeed, 6 after TIMEOUT seconds."""
    deadline = None if timeout is None else time.monotonic() + timeout
    states: list[str] = []
    with BlockingClient(common.home) as client:
        warn_if_absent(client)

        def end_of(name: str) -> tuple[Row, str]:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                found = client.wait_state(name, left, _say_failure(name, common))
            except TimedOutError:
                problem = f"{name} had not ended after {timeout:g} s"
                raise TimedOutError(problem, WAIT_HINT) from None
            states.append(found.state)
            row = _row(name, found.state, found.reason)
            return row, f"{name} {found.state}: {found.reason}"

        with jobs_continue_notice((job, *more)):
            refused = _for_each((job, *more), end_of, common)
    failed = any(state != "succeeded" for state in states)
    return refused or (Exit.JOB_FAILED if failed else Exit.OK)


def _say_failure(job: str, common: Common) -> Callable[[str], None] | None:
    """Return a function that prints why a try of a job failed; None if nobody reads it."""

    def say_failure(failure: str) -> None:
        sys.stderr.write(f"ones: {job}: {failure}\n")
        sys.stderr.flush()

    return say_failure if common.output == "table" else None


@contextlib.contextmanager
def jobs_continue_notice(jobs: Sequence[str]) -> Iterator[None]:
    """If Ctrl-C interrupts the block, print that the jobs continue."""
    try:
        yield
    except KeyboardInterrupt:
        goes, name = ("goes", jobs[0]) if len(jobs) == 1 else ("go", "JOB")
        sys.stderr.write(f"\nones: {', '.join(jobs)} {goes} on; `ones cancel {name}` ends it\n")
        sys.stderr.flush()
        raise


SHOWN_JOBS: Final = 5  # named in a question
AllYes = Annotated[bool, Parameter(name=["--yes", "-y"], help="do not ask before several jobs")]


def cancel(
    *jobs: JobName, filters: Filters = NO_FILTERS, yes: AllYes = False, common: Common = COMMON
) -> int:
    """Cancel each JOB, or the selected jobs: their workers receive SIGTERM, then SIGKILL."""
    return _change("cancel", jobs, filters, common, yes=yes)


def hold(
    *jobs: JobName, filters: Filters = NO_FILTERS, yes: AllYes = False, common: Common = COMMON
) -> int:
    """Keep each JOB from starting until `release`. A running job goes on, and is not restarted."""
    return _change("hold", jobs, filters, common, yes=yes)


def release(
    *jobs: JobName, filters: Filters = NO_FILTERS, yes: AllYes = False, common: Common = COMMON
) -> int:
    """Let each held JOB start again."""
    return _change("release", jobs, filters, common, yes=yes)


def _change(
    verb: Literal["cancel", "hold", "release"],
    jobs: Sequence[str],
    filters: Filters,
    common: Common,
    *,
    yes: bool,
) -> int:
    with BlockingClient(common.home) as client:
        if not (chosen := _chosen(client, jobs, filters, verb, yes=yes)):
            return Exit.USAGE

        def changed(name: str) -> tuple[Row, str]:
            found = getattr(client, verb)(name).summary
            line = f"{name} {found.state}: {found.reason}"
            if verb == "cancel":
                line = f"{name} {found.state}{', had ended before' * (found.state != 'cancelled')}"
            return _row(name, found.state, found.reason), line

        return _for_each(chosen, changed, common)


def _chosen(
    client: BlockingClient, jobs: Sequence[str], filters: Filters, verb: str, *, yes: bool
) -> Sequence[str]:
    """Return the named or selected jobs, or none if the user at a terminal declines."""
    if jobs and not filters.stated:
        return jobs
    options = "--state, --user, --name, --older or --label"
    if not filters.stated:
        raise BadFieldError(f"`ones {verb}` needs JOB", f"or {options}", "job")
    if jobs:
        raise BadFieldError("jobs are named and selected", f"omit JOB, or {options}", "job")
    chosen = [job.job for job in client.find_jobs(**filters.fields()).jobs]
    if not chosen:
        raise BadFieldError("no job is selected", "`ones ps` takes the same options", "job")
    if len(chosen) == 1 or yes:
        return chosen
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise BadFieldError(f"{len(chosen)} jobs are selected", f"`ones {verb} --yes`", "yes")
    shown = ", ".join(chosen[:SHOWN_JOBS]) + ", ..." * (len(chosen) > SHOWN_JOBS)
    return chosen if confirmed(f"{verb} {len(chosen)} jobs ({shown})?") else ()


def rerun(
    job: JobName,
    *,
    key: Key = None,
    secret_env: Annotated[
        Path | None, Parameter(help="file of secret variables, which are not kept after the end")
    ] = None,
    common: Common = COMMON,
) -> None:
    """Submit your JOB again, with its stored working directory, even if it has ended."""
    with BlockingClient(common.home) as client:
        accepted = client.rerun(job, key, secret_env=secret_env or "")
    say(common, accepted, accepted.job, quiet=[accepted.job])
    if common.output == "table":
        sys.stderr.writelines(f"{accepted.job}: {note}\n" for note in accepted.notes)


def _row(
    job: str, state: str | None = None, reason: str | None = None, *, error: Row | None = None
) -> Row:
    return {"job": job, "state": state, "reason": reason, "error": error}


def _for_each(jobs: Sequence[str], do: Callable[[str], tuple[Row, str]], common: Common) -> int:
    """Apply `do` to each job, print each result at once; return the exit code of the first error.

    With several jobs, an error does not end the loop. In JSON, the result of one job is an object,
    and those of several jobs are a list in which a refused job has an `error`.
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


LARGE_UPLOAD_BYTES: Final = 100_000_000  # above this size, `submit` asks for confirmation
KEY_HELP: Final = "idempotency key: repeated submissions with the same key give one job"
PROJECT_HELP: Final = "project whose members see the job (default: the first one of the key)"
SET_HELP: Final = (
    "KEY=VALUE, overrides the file: lr=0.1, args.width=64, env.MODE=fast, stop.epochs=3"
)
Key = Annotated[str | None, Parameter(help=KEY_HELP)]
Project = Annotated[str, Parameter(help=PROJECT_HELP)]
Yes = Annotated[bool, Parameter(name=["--yes", "-y"], help="do not ask before large uploads")]


def submit(
    *files: Path,
    wrap: Annotated[
        str, Parameter(help="shell command that is the job, instead of FILE: 'python prepare.py'")
    ] = "",
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="", help=SET_HELP)] = None,
    wait: Annotated[
        bool, Parameter(help="wait until the job ends; exit 1 and print the reason if it fails")
    ] = False,
    options: JobOptions = NO_OPTIONS,
    key: Key = None,
    project: Project = "",
    dry_run: Annotated[
        bool, Parameter(help="check the job and list its files without submitting")
    ] = False,
    when: Annotated[
        bool, Parameter(negative="", help="with --dry-run: predict when the job would start")
    ] = False,
    yes: Yes = False,
    common: Common = COMMON,
) -> int:
    """Submit the job that each FILE (TOML) describes, with a snapshot of its working directory.

    `after` in a file may name jobs of the other files, which are submitted first.
    """
    if bool(files) == bool(wrap):
        problem = "FILE and --wrap are both given" if files else "`ones submit` needs FILE"
        raise BadFieldError(problem, "give one of: FILE, --wrap 'COMMAND'", "file")
    if when and not dry_run:
        raise BadFieldError("--when predicts and submits nothing", "add --dry-run", "when")
    if key is not None and len(files) > 1:
        raise BadFieldError("--key applies to one job", "submit the files one at a time", "key")
    # All files are checked before the first job is submitted.
    with progress(common.output, "listing the files to upload"):
        ready = [prepare(path, set_ or (), options) for path in files]
        if wrap:
            ready = [prepare_wrapped(wrap, set_ or (), options)]
    ready = [one._replace(project=project) for one in ready]
    ready = [ready[place] for place in submission_order([one.spec for one in ready])]
    if dry_run:
        print_dry_run(ready, common, when=when)
        return Exit.OK
    return send(ready, key=key, wait=wait, yes=yes, common=common)


def send(
    ready: Sequence[Submission], *, key: str | None, wait: bool, yes: bool, common: Common
) -> int:
    """Submit prepared jobs; return the exit code."""
    if not all(_confirmed(one, common, yes=yes) for one in ready):
        return Exit.USAGE
    with BlockingClient(common.home) as client:
        first_event = client.cluster().last_seq + 1 if wait else 0
        accepted, code = _submit_all(client, ready, key, common)
        return (_wait_for_all(client, accepted, first_event, common) if wait else Exit.OK) or code


def _submit_all(
    client: BlockingClient, ready: Sequence[Submission], key: str | None, common: Common
) -> tuple[list[JobAccepted], int]:
    """Submit each job; return the accepted jobs, and the exit code of the first refusal.

    With several jobs, a refusal does not end the loop; in JSON it appears as an `error`. The loop
    ends if the controller does not reply.
    """
    accepted: list[JobAccepted] = []
    rows: list[Any] = []
    code: int = Exit.OK
    names: dict[str, JobId | None] = {one.spec.name: None for one in ready}
    for one in ready:
        try:
            spec = with_parents(one.spec, names)
            accepted.append(_submit_one(client, one._replace(spec=spec), key, common))
            names[spec.name] = accepted[-1].job
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


def _submit_one(
    client: BlockingClient, one: Submission, key: str | None, common: Common
) -> JobAccepted:
    if one.stored:
        accepted = client.submit_stored(one.spec, one.stored, key, project=one.project)
    else:
        name = one.spec.name
        with progress(common.output, f"packing {name}", f"sending {name}") as on_sent:
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


def _wait_for_all(
    client: BlockingClient, accepted: Sequence[JobAccepted], first_event: int, common: Common
) -> int:
    code: int = Exit.OK
    for one in accepted:
        with jobs_continue_notice([job.job for job in accepted[accepted.index(one) :]]):
            detail = client.wait(one.job, on_failure=_say_failure(one.job, common))
        if detail.summary.state == "succeeded":
            if common.output == "table":
                sys.stderr.write(f"{one.job} succeeded: {detail.summary.reason}\n")
            continue
        code = Exit.JOB_FAILED
        if common.output != "quiet":
            report = failure_report(client, detail, first_event, in_json=common.in_json)
            sys.stderr.writelines(f"{line}\n" for line in report)
    return code


# --- upload


def _confirmed(one: Submission, common: Common, *, yes: bool) -> bool:
    """Print the upload's size; return False if it is large and the user at a terminal declines."""
    if common.output == "table":
        sys.stderr.write(f"{fit_terminal(snapshot_line(one), sys.stderr)}\n")
    if one.size <= LARGE_UPLOAD_BYTES or yes:
        return True
    remedy = f"list large data in {Path(one.spec.workdir) / IGNORE_FILE}, read it from its place"
    sys.stderr.write(f"ones: the upload exceeds {byte_count(LARGE_UPLOAD_BYTES)}; {remedy}\n")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    return confirmed("submit anyway?")


def confirmed(question: str) -> bool:
    """Return whether the user at the terminal agrees. Otherwise say that nothing was changed."""
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in {"y", "yes"}:
        return True
    sys.stderr.write("nothing was changed\n")
    return False
