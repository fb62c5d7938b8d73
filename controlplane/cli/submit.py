"""submit: what would travel, what was accepted, and with --wait what became of it."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TextIO

import msgspec
from cyclopts import Parameter

from controlplane.cli.common_options import COMMON, Common
from controlplane.cli.exit_codes import Exit, exit_code
from controlplane.cli.failure_report import as_json, as_text, failure_of
from controlplane.cli.job_lines import cut
from controlplane.cli.output import (
    byte_count,
    error_body,
    plain,
    print_error,
    print_json,
    print_line,
)
from controlplane.client import BlockingClient, JobSpec
from controlplane.client.jobfile import load_job
from controlplane.client.sweeps.sweep import in_words
from controlplane.client.workdir_archive import IGNORE_FILE, PackedFile, survey
from schemas.errors import BadFieldError, OnesError, SettingsError, UnreachableError
from schemas.messages.client import JobAccepted
from schemas.sweeps import SweepSpec

MUCH: Final = 100_000_000  # bytes of a working directory that are worth a question
NAMED: Final = 3  # of the largest files
OF_NO_SWEEP: Final = frozenset({"script", "batch_size", "max_batch_size", "sweep"})
ASK_S: Final = 3.0  # a dry run waits so long for a controller
SHOWN_FROM: Final = 4 << 20  # bytes of an archive whose way is worth a bar
KEY_HELP: Final = "submitting twice with it gives one job"
SET_HELP: Final = "KEY=VALUE over the file: lr=0.1, args.width=64, env.MODE=fast, stop.epochs=3"


class Submission(NamedTuple):
    """One job file, ready to go."""

    file: Path
    spec: JobSpec
    travels: tuple[PackedFile, ...]
    stored: str = ""  # digest of the archive that the cluster should have already; nothing travels

    @property
    def size(self) -> int:
        """Bytes of all files that travel, before they are packed."""
        return sum(file.size for file in self.travels)

    @property
    def largest(self) -> list[PackedFile]:
        """The files that make most of it, largest first."""
        return sorted(self.travels, key=lambda file: -file.size)[:NAMED]


def submit(
    file: Path,
    /,
    *more: Path,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="", help=SET_HELP)] = None,
    wait: Annotated[bool, Parameter(help="until it ends; exit 1 if it fails, and say why")] = False,
    key: Annotated[str | None, Parameter(help=KEY_HELP)] = None,
    dry_run: Annotated[bool, Parameter(help="check, say what would go, submit nothing")] = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], help="ask nothing")] = False,
    common: Common = COMMON,
) -> int:
    """Submit the job that each FILE (TOML) describes, with a snapshot of its working directory."""
    files = (file, *more)
    if key is not None and more:
        raise BadFieldError("--key is of one job", "submit these files one at a time", "key")
    ready = [prepared(path, set_ or ()) for path in files]  # all are good before one goes
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
        ready: checked.
        key: submitting twice with it gives one job.
        wait: until all have ended.
        dry_run: submit nothing.
        yes: ask nothing.
        common: how to print.

    Returns:
        The exit code.
    """
    if dry_run:
        return _say_dry(ready, common)
    if not all(_agreed(one, common, yes=yes) for one in ready):
        return Exit.USAGE
    with BlockingClient(common.home) as client:
        first_event = client.cluster().last_seq + 1 if wait else 0
        accepted, code = _all_sent(client, ready, key, common)
        return (_waited(client, accepted, first_event, common) if wait else Exit.OK) or code


def prepared(file: Path, overrides: Sequence[str]) -> Submission:
    """A job file, checked, with what would travel.

    Args:
        file: of a job or a sweep.
        overrides: KEY=VALUE over the file.

    Raises:
        SettingsError: if the file cannot be used.
        BadFieldError: if a value cannot be accepted.
    """
    spec = load_job(file, overrides)
    return Submission(file, spec, survey(Path(spec.workdir)))


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
        accepted = client.submit_stored(one.spec, one.stored, key)
    else:
        with _progress(one) as on_sent:
            accepted = client.submit_accepted(one.spec, key, on_sent=on_sent)
    if common.output == "jsonl":
        print_line(accepted)
    elif common.output != "json":
        sys.stdout.write(f"{accepted.job}\n")
        sys.stdout.flush()
    if common.output == "table":
        for note in accepted.notes:
            sys.stderr.write(f"{accepted.job}: {note}\n")
    return accepted


def _waited(
    client: BlockingClient, accepted: Sequence[JobAccepted], first_event: int, common: Common
) -> int:
    code: int = Exit.OK
    for one in accepted:
        detail = client.wait(one.job)
        if detail.summary.state == "succeeded":
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


def snapshot_line(one: Submission) -> str:
    """What travels with a job, for people: how much, how many files, the largest of them."""
    if one.stored:
        return f"{one.stored[:12]}, which the cluster has from an earlier job"
    many = len(one.travels)
    line = f"{byte_count(one.size)} in {many} file{'s' * (many != 1)} of {one.spec.workdir}"
    largest = ", ".join(f"{name} {byte_count(size)}" for name, size in one.largest)
    return f"{line} ({'largest: ' * (many > 1)}{largest})" if largest else line


def _shown(line: str, stream: TextIO) -> str:
    return cut(line, shutil.get_terminal_size().columns) if stream.isatty() else line


def _agreed(one: Submission, common: Common, *, yes: bool) -> bool:
    """Say what travels; ask whether that much should, where somebody is there to answer."""
    if common.output == "table":
        sys.stderr.write(f"{_shown(snapshot_line(one), sys.stderr)}\n")
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
    from rich.console import Console  # noqa: PLC0415 - slow to import, and seldom needed
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn  # noqa: PLC0415

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"packing {one.spec.name}", total=None)

        def sent(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=f"sending {one.spec.name}")

        yield sent


# --- a dry run


def _say_dry(ready: Sequence[Submission], common: Common) -> int:
    notes, why_not = _notes(ready, common)
    rows = [_dry(one) | {"notes": said} for one, said in zip(ready, notes, strict=True)]
    if common.output == "json":
        print_json(rows[0] if len(rows) == 1 else rows)
        return Exit.OK
    for one, row in zip(ready, rows, strict=True):
        if common.output == "jsonl":
            print_line(row)
        elif common.output == "table":
            sys.stdout.write(f"{one.file} can be submitted\n")
            for name, value in _stated(one.spec).items():
                sys.stdout.write(f"  {name:15s} {value}\n")
            line = f"  {'snapshot':15s} {snapshot_line(one)}"
            sys.stdout.write(f"{_shown(line, sys.stdout)}\n")
            for note in row["notes"] or ():
                sys.stdout.write(f"  {'note':15s} {note}\n")
    if why_not and common.output == "table":
        sys.stderr.write(f"no controller was asked: {why_not}\n")
    return Exit.OK


def _notes(
    ready: Sequence[Submission], common: Common
) -> tuple[list[tuple[str, ...] | None], OnesError | None]:
    """What the controller would say of each job; None, and perhaps why, where none can be asked.

    Raises:
        BadFieldError: if it would not accept one of them.
    """
    try:
        with BlockingClient(common.home, ASK_S) as client:
            return [None if one.stored else client.check(one.spec) for one in ready], None
    except BadFieldError:
        raise
    except SettingsError:  # nobody spoke of a cluster
        return [None] * len(ready), None
    except OnesError as error:
        return [None] * len(ready), error


def _dry(one: Submission) -> dict[str, Any]:
    """A job that can be submitted, for programs; `notes` is None if no controller was asked."""
    largest = [{"path": name, "bytes": size} for name, size in one.largest]
    snapshot = {"bytes": one.size, "files": len(one.travels), "largest": largest}
    return {"job": None, "state": "valid", "spec": one.spec, "snapshot": snapshot}


def _stated(spec: JobSpec) -> dict[str, str]:
    """The fields that are not as they would be without a word, and those that rule its size."""
    found = {}
    sweep = spec.stated_sweep
    for field in msgspec.structs.fields(spec):
        if sweep is not None and field.name in OF_NO_SWEEP:
            continue
        value = getattr(spec, field.name)
        if field.required or field.name == "slots" or value != field.default:
            found[field.name] = _text(plain(value))
    least, most = spec.slots
    found["slots"] = f"{least} to {most}"
    if sweep is not None:
        found |= _stated_search(sweep)
    return {name: text for name, text in found.items() if text}


def _stated_search(sweep: SweepSpec) -> dict[str, str]:
    search = sweep.search
    options = plain(search.searcher)
    kind = options.pop("type")
    chosen = ", ".join(f"{name}={value}" for name, value in options.items())
    names = ("input_fn", "model_fn", "train_fn", "eval_fn")
    return {
        "functions": " ".join(path for name in names if (path := getattr(sweep, name))),
        "searcher": f"{kind} {chosen}".strip(),
        "epochs": f"at most {search.epochs} each",
        "metric": f"{search.mode} of {search.metric}",
        "partitions": str(sweep.partitions),
        **{f"space.{name}": in_words(one) for name, one in search.space.items()},
    }


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items() if v is not None)
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
