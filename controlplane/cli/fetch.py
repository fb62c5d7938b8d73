"""`ones fetch` and `ones export`: files that a job created, and its trained model."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from controlplane.cli.output import (
    COMMON,
    Common,
    Exit,
    JobName,
    byte_count,
    print_data,
    print_json,
    print_line,
)
from controlplane.cli.terminal import terminal_console
from controlplane.client import BlockingClient
from controlplane.client.files import Fetch, Fetched, JobFiles, matches
from controlplane.client.sweeps.runs import NoTorchError, convert_state
from schemas.errors import BadFieldError

MODEL: Final = "model.pt"
SHOWN_FROM: Final = 4 << 20  # bytes of a transfer above which a bar is shown
PYTHON_HELP: Final = "interpreter that has torch (default: this one, else the job's)"


def fetch(
    job: JobName,
    pattern: str = "*",
    /,
    *,
    to: Annotated[Path | None, Parameter(help="target folder (default: ./JOB)")] = None,
    list_: Annotated[
        bool, Parameter(name="--list", help="list the files without fetching them")
    ] = False,
    most_gb: Annotated[
        float, Parameter(help="maximum size in GB; larger results are not fetched")
    ] = 10.0,
    python: Annotated[str | None, Parameter(help=PYTHON_HELP)] = None,
    common: Common = COMMON,
) -> int:
    """Fetch the files that JOB created or changed, its checkpoints, and model.pt."""
    with BlockingClient(common.home) as client:
        if list_:
            return _say_list(job, client.files(job, pattern), common, pattern)
        folder, most = to or Path(job), int(most_gb * 1e9)
        with progress(f"fetching {job}") as on_bytes:
            done = client.fetch(job, folder, pattern, most_bytes=most, on_bytes=on_bytes)
        if matches(MODEL, pattern):
            done = _with_model(client, job, folder, python, done)
    _say_fetched(job, folder, done, common, pattern)
    if done.missing:
        return Exit.UNREACHABLE
    return Exit.OK if done.files else Exit.NOT_FOUND


def _with_model(
    client: BlockingClient, job: str, folder: Path, python: str | None, done: Fetch
) -> Fetch:
    """Add the model to the files, if a checkpoint is available."""
    try:
        model = _exported(client, job, folder / MODEL, python)
    except NoTorchError as error:
        return done._replace(missing=(*done.missing, f"{MODEL}: {error.message}"))
    except BadFieldError:  # no checkpoint
        return done
    return done._replace(files=(*done.files, model))


def export(
    job: JobName,
    file: Path,
    /,
    *,
    python: Annotated[str | None, Parameter(help=PYTHON_HELP)] = None,
    common: Common = COMMON,
) -> int:
    """Write the model of JOB's last checkpoint, or a sweep's best, to FILE: a `state_dict`."""
    with BlockingClient(common.home) as client:
        made = _exported(client, job, file, python)
    row = {"job": job, "file": str(made.path), "bytes": made.size, "sha256": made.sha256}
    if common.output in {"json", "jsonl"}:
        print_data(row, common.output)
    elif common.output == "table":
        sys.stdout.write(f"{made.path}  {byte_count(made.size)}\n")
    return Exit.OK


def _exported(client: BlockingClient, job: str, target: Path, python: str | None) -> Fetched:
    spec = client.job(job).spec
    if spec.stated_sweep is not None:
        return _as_fetched(client.sweep_run(job).export(target, None, python).path)
    own, checkpoint = spec.python, client.last_checkpoint(job)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".ones-", dir=target.parent) as folder:
            local = Path(folder, "checkpoint.pt")
            with progress(f"fetching {checkpoint.name}") as on_bytes:
                came = 0

                def count(size: int) -> None:
                    nonlocal came
                    came += size
                    if on_bytes is not None:
                        on_bytes(came, max(came, checkpoint.size))

                client.fetch_file(job, checkpoint, local, count)
            convert_state(
                local, target, [python] if python else [sys.executable, *filter(None, [own])]
            )
    except OSError as error:
        raise BadFieldError(f"{target}: {error.strerror}", "choose another file", "file") from None
    return _as_fetched(target)


def _as_fetched(path: Path) -> Fetched:
    import hashlib  # noqa: PLC0415 - only here

    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Fetched(path, path.stat().st_size, digest)


# --- output


def _nothing(job: str, pattern: str) -> str:
    if pattern == "*":
        return f"ones: {job} created or changed no file, and has no checkpoint\n"
    return f"ones: no file of {job} matches {pattern!r}; `ones fetch {job} --list` names them\n"


def _say_list(job: str, there: JobFiles, common: Common, pattern: str = "*") -> int:
    rows: list[dict[str, Any]] = [{"path": file.name, "bytes": file.size} for file in there.files]
    if common.output == "json":
        refused, missing = list(there.refused), list(there.missing)
        print_json({"files": rows, "refused": refused, "missing": missing})
    elif common.output == "jsonl":
        for row in rows:
            print_line(row)
    else:
        for row in rows:
            size = "" if common.output == "quiet" else f"{byte_count(row['bytes']):>8}  "
            sys.stdout.write(f"{size}{row['path']}\n")
    _warn((*there.refused, *there.missing), common)
    if not rows and not there.missing and common.output == "table":
        sys.stderr.write(_nothing(job, pattern))
    return Exit.UNREACHABLE if there.missing else Exit.OK


def _say_fetched(job: str, folder: Path, done: Fetch, common: Common, pattern: str = "*") -> None:
    rows = [{"path": str(f.path), "bytes": f.size, "sha256": f.sha256} for f in done.files]
    if common.output == "json":
        more = {"refused": list(done.refused), "missing": list(done.missing)}
        print_json({"job": job, "to": str(folder), "files": rows, **more})
    elif common.output == "jsonl":
        for row in rows:
            print_line(row)
    elif common.output == "quiet":
        sys.stdout.writelines(f"{f.path}\n" for f in done.files)
    else:
        for f in done.files:
            sys.stdout.write(f"{byte_count(f.size):>8}  {f.path.relative_to(folder)}\n")
        total = byte_count(sum(f.size for f in done.files))
        many = f"{len(done.files)} file{'s' * (len(done.files) != 1)}"
        if done.files:
            sys.stdout.write(f"{many}, {total}, in {folder}\n")
        elif not done.missing:
            sys.stderr.write(_nothing(job, pattern))
    _warn((*done.refused, *done.missing), common)


def _warn(lines: tuple[str, ...], common: Common) -> None:
    if common.output != "json":
        for line in lines:
            sys.stderr.write(f"ones: not fetched: {line}\n")


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on a terminal for a large transfer."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=terminal_console(on_stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, visible=False)

        def on_bytes(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=total >= SHOWN_FROM)

        yield on_bytes
