"""`ones logs`, `fetch` and `export`: output, files and trained model of a job."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final, TextIO

from cyclopts import Parameter

from controlplane.cli import output
from controlplane.cli.job_list import cut
from controlplane.cli.jobs import warn_if_absent
from controlplane.cli.progress import OnDone, progress
from controlplane.cli.terminal import COLOUR, drawn, harmless, harmless_output
from controlplane.client import BlockingClient
from controlplane.client.files import Fetch, Fetched, JobFiles, matches
from controlplane.client.formats import byte_count, moment
from controlplane.client.interpreters import NoTorchError
from controlplane.client.streams import OutputLine, line_pattern
from schemas.errors import BadFieldError

SILENT_STATES: Final = frozenset({"queued", "starting", "paused"})  # states without output
CLEAR: Final = "\r\x1b[K"  # clears the line of the cursor


def logs(
    job: output.JobName,
    *,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], help="continue until the job ends")
    ] = False,
    rank: Annotated[int | None, Parameter(help="only output of this worker")] = None,
    tail: Annotated[int | None, Parameter(help="start with this many of the last lines")] = None,
    since: Annotated[
        str | None, Parameter(help="only output of the last 90s, 5m, 2h or 1d")
    ] = None,
    grep: Annotated[
        str | None, Parameter(help="only lines with a match of this regular expression")
    ] = None,
    prefix: Annotated[
        bool | None,
        Parameter(
            help="prefix lines with [RANK] (default: if several ranks write)",
            negative="--no-prefix",
        ),
    ] = None,
    timestamps: Annotated[
        bool,
        Parameter(name=["--timestamps", "-t"], help="prefix each line with its arrival time (UTC)"),
    ] = False,
    raw: Annotated[
        bool,
        Parameter(help="output unchanged, with all states of progress bars and control characters"),
    ] = False,
    common: output.Common = output.COMMON,
) -> None:
    """Print the output of JOB from its start, also across restarts of the controller or workers."""
    if tail is not None and tail < 0:
        raise BadFieldError(f"--tail {tail} is below 0", "give a number of lines", "tail")
    line_pattern(grep or "")  # an invalid pattern fails before any request
    first_s = time.time() - output.seconds_of(since, "since") if since else 0.0
    with BlockingClient(common.home) as client:
        if follow:
            warn_if_absent(client)
        now = client.state(job)
        waits = now.state in SILENT_STATES
        if waits:
            sys.stderr.write(f"ones: {job} is {now.state}: {now.reason}\n")
        pages = client.output_pages(
            job,
            rank,
            follow=follow,
            since=first_s,
            last=tail,
            matching=grep or "",
            unfinished=follow and common.output == "table" and not grep,
            raw=raw,
        )
        if not (waits or grep or since or tail == 0):
            source = job if rank is None else f"rank {rank} of {job}"
            silent = f"{source} has no output; `ones show {job}` prints its state"
            if client.job(job).spec.array:
                elements = f"{job.rpartition('-')[0]}_*"
                silent = f"{job} is an array; `ones ps -a --name '{elements}'` lists its elements"
            pages = warn_if_empty(pages, silent)
        if common.in_json:
            output.print_data(
                (
                    {"time": line.time, "node": line.node, "rank": line.rank, "text": line.text}
                    for page in pages
                    for line in page
                ),
                common.output,
            )
            return
        pages = with_ranks(pages, prefix=prefix)
        if timestamps:
            pages = map(with_times, pages)
        out = drawn(sys.stdout)
        into_file = not follow and not out.isatty()
        shown = progress(common.output, f"reading {job}", unit="lines")
        with shown if into_file else contextlib.nullcontext() as on_lines:
            read = counted(pages, on_lines)
            if raw:
                for line in (line for page in read for line in page):
                    out.write(line.text + line.end)
                    out.flush()
            else:
                draw = draw_lines if out.isatty() else write_lines
                draw(read, out)


def counted(
    pages: Iterable[Sequence[OutputLine]], on_lines: OnDone | None
) -> Iterator[Sequence[OutputLine]]:
    """Yield the pages, and report the number of lines so far."""
    done = 0
    for page in pages:
        done += len(page)
        if on_lines is not None:
            on_lines(done, None)
        yield page


def draw_lines(pages: Iterable[Sequence[OutputLine]], out: TextIO) -> None:
    """Print finished lines, and redraw the newest unfinished line at the bottom of the terminal."""
    going: dict[int | None, str] = {}  # by rank
    for page in filter(None, pages):
        text = CLEAR if going else ""
        for line in page:
            going.pop(line.rank, None)
            if line.end == "\n":
                text += f"{harmless_output(line.text)}\n"
            elif line.text.strip():
                going[line.rank] = harmless(COLOUR.sub("", line.text))
        if going:
            last = [*going.values()][-1].expandtabs()
            text += cut(last, shutil.get_terminal_size().columns - 1)
        out.write(text)
        out.flush()


def write_lines(pages: Iterable[Sequence[OutputLine]], out: TextIO) -> None:
    """Write finished lines, and once per page the newest state of each progress bar."""
    bars: dict[int | None, str] = {}  # by rank: the state that was written last
    for page in pages:
        for line in page:
            if line.end == "\n" and bars.pop(line.rank, None) != line.text:
                out.write(f"{line.text}\n")
            elif line.end == "\r" and line.text.strip() and bars.get(line.rank) != line.text:
                bars[line.rank] = line.text
                out.write(f"{line.text}\n")
        out.flush()


def warn_if_empty(pages: Iterable[list[OutputLine]], silent: str) -> Iterator[list[OutputLine]]:
    """Yield the pages; if they contain no line, print `silent` to stderr at the end."""
    came = False
    for page in pages:
        came = came or bool(page)
        yield page
    if not came:
        sys.stderr.write(f"ones: {silent}\n")


def with_times(page: Sequence[OutputLine]) -> list[OutputLine]:
    """Prefix each line with the time at which the controller received it."""
    return [
        line._replace(text=f"{moment(line.time)} {line.text}") if line.time else line
        for line in page
    ]


def with_ranks(
    pages: Iterable[Sequence[OutputLine]], *, prefix: bool | None
) -> Iterator[list[OutputLine]]:
    """Prefix lines with their rank; if `prefix` is None, start when a second rank has written."""
    ranks: set[int] = set()
    for page in pages:
        ranks.update(line.rank for line in page if line.rank is not None)
        several = len(ranks) > 1 if prefix is None else prefix
        yield [
            line._replace(text=f"[{line.rank}] {line.text}")
            if several and line.rank is not None
            else line
            for line in page
        ]


MODEL: Final = "model.pt"
PYTHON_HELP: Final = "interpreter that has torch (default: this one, else the job's)"


def fetch(
    job: output.JobName,
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
    common: output.Common = output.COMMON,
) -> int:
    """Fetch the files that JOB created or changed, its checkpoints, and model.pt."""
    with BlockingClient(common.home) as client:
        if list_:
            return _say_list(job, client.files(job, pattern), common, pattern)
        folder, most = to or Path(job), int(most_gb * 1e9)
        with progress(common.output, f"fetching {job}") as on_bytes:
            done = client.fetch(job, folder, pattern, most_bytes=most, on_bytes=on_bytes)
        if matches(MODEL, pattern):
            with progress(common.output, f"exporting {MODEL}") as on_bytes:
                export = partial(_exported, client, job, folder / MODEL, python, on_bytes)
                done = _with_model(export, done)
    _say_fetched(job, folder, done, common, pattern)
    if done.missing:
        return output.Exit.UNREACHABLE
    return output.Exit.OK if done.files else output.Exit.NOT_FOUND


def _with_model(export: Callable[[], Fetched], done: Fetch) -> Fetch:
    """Export the model if a checkpoint exists, and add the file to the result of the fetch."""
    try:
        model = export()
    except NoTorchError as error:
        return done._replace(missing=(*done.missing, f"{MODEL}: {error.message}"))
    except BadFieldError:  # no checkpoint
        return done
    return done._replace(files=(*done.files, model))


def export(
    job: output.JobName,
    file: Path,
    /,
    *,
    python: Annotated[str | None, Parameter(help=PYTHON_HELP)] = None,
    common: output.Common = output.COMMON,
) -> None:
    """Write the `state_dict` of JOB's last checkpoint, or of the best trial of a sweep, to FILE."""
    shown = progress(common.output, f"exporting the model of {job}")
    with BlockingClient(common.home) as client, shown as on_bytes:
        made = _exported(client, job, file, python, on_bytes)
    row = {"job": job, "file": str(made.path), "bytes": made.size, "sha256": made.sha256}
    output.say(common, row, f"{made.path}  {byte_count(made.size)}")


def _exported(
    client: BlockingClient, job: str, target: Path, python: str | None, on_bytes: OnDone
) -> Fetched:
    if client.job(job).spec.stated_sweep is not None:
        return _as_fetched(client.sweep_run(job).export(target, None, python).path)
    checkpoint = client.last_checkpoint(job)
    client.export_model(job, checkpoint, target, python, on_bytes)
    return _as_fetched(target)


def _as_fetched(path: Path) -> Fetched:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Fetched(path, path.stat().st_size, digest)


# --- output


def _nothing(job: str, pattern: str) -> str:
    if pattern == "*":
        return f"ones: {job} created or changed no file, and has no checkpoint\n"
    return f"ones: no file of {job} matches {pattern!r}; `ones fetch {job} --list` names them\n"


def _say_list(job: str, there: JobFiles, common: output.Common, pattern: str = "*") -> int:
    rows = [{"path": file.name, "bytes": file.size} for file in there.files]
    lines = (f"{byte_count(file.size):>8}  {file.name}" for file in there.files)
    document = {"files": rows, "refused": there.refused, "missing": there.missing}
    output.say(common, document, *lines, rows=rows, quiet=[file.name for file in there.files])
    _warn(there, common)
    if not rows and not there.missing and common.output == "table":
        sys.stderr.write(_nothing(job, pattern))
    return output.Exit.UNREACHABLE if there.missing else output.Exit.OK


def _say_fetched(
    job: str, folder: Path, done: Fetch, common: output.Common, pattern: str = "*"
) -> None:
    rows = [{"path": str(f.path), "bytes": f.size, "sha256": f.sha256} for f in done.files]
    document = {
        "job": job,
        "to": str(folder),
        "files": rows,
        "refused": done.refused,
        "missing": done.missing,
    }
    lines = [f"{byte_count(f.size):>8}  {f.path.relative_to(folder)}" for f in done.files]
    if lines:
        many = f"{len(lines)} file{'s' * (len(lines) != 1)}"
        lines.append(f"{many}, {byte_count(sum(f.size for f in done.files))}, in {folder}")
    output.say(common, document, *lines, rows=rows, quiet=[str(f.path) for f in done.files])
    if not rows and not done.missing and common.output == "table":
        sys.stderr.write(_nothing(job, pattern))
    _warn(done, common)


def _warn(found: JobFiles | Fetch, common: output.Common) -> None:
    if common.output != "json":
        lines = (*found.refused, *found.missing)
        sys.stderr.writelines(f"ones: not fetched: {line}\n" for line in lines)
