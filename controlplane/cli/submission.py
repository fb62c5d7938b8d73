"""Job files prepared for submission, and the report of `submit --dry-run`."""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO, TypeVar

import msgspec

from controlplane.cli.job_list import cut
from controlplane.cli.job_options import NO_OPTIONS, JobOptions
from controlplane.cli.output import Common, plain, say
from controlplane.cli.terminal import width_of
from controlplane.client import BlockingClient, JobSpec
from controlplane.client.archive import PackedFile, survey
from controlplane.client.command_line import job_of_command, shell_command
from controlplane.client.formats import byte_count
from controlplane.client.job_file import checked, load_job
from controlplane.client.sbatch import BASH, command_line, job_of_batch_script
from controlplane.client.secret_env import secret_file
from controlplane.client.spec_overrides import with_overrides
from controlplane.client.sweeps.sweep import describe_parameter
from schemas.errors import BadFieldError, OnesError, SettingsError
from schemas.host.settings import convert
from schemas.sweeps import SweepSpec
from schemas.wire.client import ExpectedStart

NAMED_FILES: Final = 3  # number of largest files that are named
LIBRARY: Final = b"elastic"
HALF_DAY_S: Final = 43_200.0
Answer = TypeVar("Answer")


class Submission(NamedTuple):
    """A checked job file and the files to upload for it."""

    file: Path
    spec: JobSpec
    uploads: tuple[PackedFile, ...]
    stored: str = ""  # digest of an archive in the cluster, if nothing is uploaded
    project: str = ""  # its members see the job; empty: first project of the key

    @property
    def size(self) -> int:
        """Total size of the files to upload, before compression, bytes."""
        return sum(file.size for file in self.uploads)

    @property
    def largest(self) -> list[PackedFile]:
        """The three largest files to upload, largest first."""
        return sorted(self.uploads, key=lambda file: -file.size)[:NAMED_FILES]


def prepare(file: Path, overrides: Sequence[str], options: JobOptions = NO_OPTIONS) -> Submission:
    """Read and check a job file, and list the files to upload."""
    spec = options.applied(load_job(file, overrides))
    return Submission(file, spec, survey(Path(spec.workdir), secret_file(spec)))


def prepare_wrapped(
    text: str, overrides: Sequence[str], options: JobOptions = NO_OPTIONS
) -> Submission:
    """Return the `command` job that lets a shell run a text in the current folder."""
    fields, _ = job_of_command(shell_command(text))
    table = with_overrides(fields, overrides) if overrides else fields
    spec = options.applied(checked(convert(JobSpec, table, Path("--wrap")), Path.cwd()))
    return Submission(Path("command"), spec, survey(Path(spec.workdir), secret_file(spec)))


def snapshot_line(one: Submission) -> str:
    """Describe the upload of a job: its size, its number of files, and the largest files."""
    if one.stored:
        return f"{one.stored[:12]}, stored in the cluster by an earlier job"
    count = len(one.uploads)
    line = f"{byte_count(one.size)} in {count} file{'s' * (count != 1)} of {one.spec.workdir}"
    largest = ", ".join(f"{name} {byte_count(size)}" for name, size in one.largest)
    return f"{line} ({'largest: ' * (count > 1)}{largest})" if largest else line


def library_note(one: Submission) -> str:
    """Return a remark if neither the script nor its modules use the library, else "".

    The remark on a batch script of Slurm names the options that have no effect.
    """
    spec, folder = one.spec, Path(one.spec.workdir)
    if spec.rigid and spec.argv[0] == BASH and one.file.is_file():
        return job_of_batch_script(one.file.read_text(errors="replace"), one.file.name)[1]
    if spec.stated_sweep is not None or one.stored or spec.rigid:
        return ""
    uploads = [folder / file.path for file in one.uploads if file.path.endswith(".py")]
    if _uses_library(folder / spec.script, uploads):
        return ""
    return (
        f"{spec.script} does not use elastic.ScalingAgent, and would fail on several slots: "
        f'`ones init {spec.script}` shows what to change; unchanged it runs as kind = "torchrun" '
        'or "command"'
    )


def _uses_library(script: Path, files: Sequence[Path]) -> bool:
    """True if a script contains the library's name, or imports one of `files` that contains it."""
    seen: set[Path] = set()
    left = {script}
    while left:
        path = left.pop()
        seen.add(path)
        try:
            source = path.read_bytes()
            homes = {script.parent / part for part in _first_parts(ast.parse(source))}
        except (OSError, SyntaxError, ValueError):  # reported elsewhere
            return True
        if LIBRARY in source:
            return True
        left |= {
            file
            for file in files
            if file not in seen and not homes.isdisjoint((file.with_suffix(""), *file.parents))
        }
    return False


def _first_parts(tree: ast.Module) -> set[str]:
    """Return the first part of each imported module name, or "" for a relative import."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("" if node.level else (node.module or "").partition(".")[0])
    return names


def fit_terminal(line: str, stream: TextIO) -> str:
    """Cut a line to the width of the terminal; leave it unchanged if the width is unknown."""
    width = width_of(stream)
    return line if width is None else cut(line, width)


SCRIPT_FIELDS: Final = frozenset({"script", "batch_size", "max_batch_size", "sweep"})
REPLY_TIMEOUT_S: Final = 3.0  # for the request of the controller's notes


def print_dry_run(ready: Sequence[Submission], common: Common, *, when: bool = False) -> None:
    """Print what would be submitted, with the controller's notes if it replies.

    If `when`, also print when each job would start, if it were the only one.
    """
    notes, why_not = _asked(ready, common, lambda client, one: client.check(one.spec))
    rows = [_dry_run_row(one) | {"notes": said} for one, said in zip(ready, notes, strict=True)]
    starts: Sequence[ExpectedStart | None] = [None] * len(ready)
    if when and why_not is None:
        starts, why_not = _asked(
            ready, common, lambda client, one: client.expected_start(one.spec, project=one.project)
        )
    if when:
        rows = [row | {"start": start} for row, start in zip(rows, starts, strict=True)]
    lines = []
    each = zip(ready, notes, starts, strict=True) if common.output == "table" else ()
    for one, said, start in each:
        lines.append(f"{one.file} can be submitted")
        lines += [f"  {name:15s} {value}" for name, value in _stated_fields(one.spec).items()]
        lines.append(fit_terminal(f"  {'snapshot':15s} {snapshot_line(one)}", sys.stdout))
        shown = filter(None, (library_note(one), *(said or ())))
        lines += [f"  {'note':15s} {note}" for note in shown]
        if start is not None:
            lines.append(f"  {'start':15s} {start_text(start, time.time())}")
    say(common, rows[0] if len(rows) == 1 else rows, *lines)
    if why_not and common.output == "table":
        sys.stderr.write(f"the controller was not asked: {why_not}\n")


def start_text(start: ExpectedStart, now: float) -> str:
    """Return a predicted start in words, in local time."""

    def at(time_s: float | None) -> str:
        if time_s is None:
            return "an unknown time"
        form = "%H:%M" if abs(time_s - now) < HALF_DAY_S else "%Y-%m-%d %H:%M"
        return datetime.fromtimestamp(time_s).astimezone().strftime(form)

    if start.starts == "now":
        return "now"
    behind = f"behind {start.ahead} job{'s' * (start.ahead != 1)}" if start.ahead else ""
    if start.at is None:
        return "; ".join(filter(None, ("unknown", behind, start.reason)))
    ends = f"{start.after} is expected to end at {at(start.after_ends_at)}" if start.after else ""
    text = f"about {at(start.at)} (80%: {at(start.earliest)} to {at(start.latest)})"
    return "; ".join(filter(None, (text, behind, ends)))


def _asked(
    ready: Sequence[Submission],
    common: Common,
    ask: Callable[[BlockingClient, Submission], Answer],
) -> tuple[list[Answer | None], OnesError | None]:
    """Return the controller's answer about each job, and the error if it cannot be asked.

    The answer is None if the controller was not asked about a job.
    """
    try:
        with BlockingClient(common.home, REPLY_TIMEOUT_S) as client:
            return [None if one.stored else ask(client, one) for one in ready], None
    except BadFieldError:
        raise
    except SettingsError:  # no cluster was named
        return [None] * len(ready), None
    except OnesError as error:
        return [None] * len(ready), error


def _dry_run_row(one: Submission) -> dict[str, Any]:
    largest = [{"path": name, "bytes": size} for name, size in one.largest]
    snapshot = {"bytes": one.size, "files": len(one.uploads), "largest": largest}
    return {"job": None, "state": "valid", "spec": one.spec, "snapshot": snapshot}


def _stated_fields(spec: JobSpec) -> dict[str, str]:
    """Return the required fields, the slots, and the fields that differ from their defaults."""
    found = {}
    sweep = spec.stated_sweep
    for field in msgspec.structs.fields(spec):
        if (sweep is not None or spec.rigid) and field.name in SCRIPT_FIELDS:
            continue
        value = getattr(spec, field.name)
        if field.required or field.name == "slots" or value != field.default:
            found[field.encode_name] = _text(plain(value))
    if spec.rigid:
        found["command"] = command_line(spec.argv)
    least, most = spec.slots
    found["slots"] = str(least) if least == most else f"{least} to {most}"
    if sweep is not None:
        found |= _stated_search(sweep)
    return {name: text for name, text in found.items() if text}


def _stated_search(sweep: SweepSpec) -> dict[str, str]:
    search = sweep.search
    options = plain(search.searcher)
    kind = options.pop("type")
    chosen = ", ".join(f"{name}={value}" for name, value in options.items())
    return {
        "functions": " ".join(filter(None, sweep.functions.values())),
        "searcher": f"{kind} {chosen}".strip(),
        "epochs": f"at most {search.epochs} each",
        "metric": f"{search.mode} of {search.metric}",
        "partitions": str(sweep.partitions),
        **{f"space.{name}": describe_parameter(one) for name, one in search.space.items()},
    }


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items() if v is not None)
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
