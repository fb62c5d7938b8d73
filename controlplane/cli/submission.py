"""A job file, ready to go: what travels with it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, TextIO

from controlplane.cli.job_lines import cut
from controlplane.cli.output import byte_count
from controlplane.client import JobSpec
from controlplane.client.jobfile import load_job
from controlplane.client.workdir_archive import PackedFile, survey

NAMED: Final = 3  # of the largest files


class Submission(NamedTuple):
    """One job file, ready to go."""

    file: Path
    spec: JobSpec
    travels: tuple[PackedFile, ...]
    stored: str = ""  # digest of the archive that the cluster should have already; nothing travels
    project: str = ""  # whose members see it; empty: the first of the key's

    @property
    def size(self) -> int:
        """Bytes of all files that travel, before they are packed."""
        return sum(file.size for file in self.travels)

    @property
    def largest(self) -> list[PackedFile]:
        """The files that make most of it, largest first."""
        return sorted(self.travels, key=lambda file: -file.size)[:NAMED]


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


def snapshot_line(one: Submission) -> str:
    """What travels with a job, for people: how much, how many files, the largest of them."""
    if one.stored:
        return f"{one.stored[:12]}, which the cluster has from an earlier job"
    many = len(one.travels)
    line = f"{byte_count(one.size)} in {many} file{'s' * (many != 1)} of {one.spec.workdir}"
    largest = ", ".join(f"{name} {byte_count(size)}" for name, size in one.largest)
    return f"{line} ({'largest: ' * (many > 1)}{largest})" if largest else line


def on_screen(line: str, stream: TextIO) -> str:
    """A line, cut to the width of a terminal.

    Args:
        line: of any length.
        stream: where it is printed.
    """
    return cut(line, shutil.get_terminal_size().columns) if stream.isatty() else line
