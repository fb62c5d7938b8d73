"""A job file, ready to go: what travels with it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, TextIO

from controlplane.cli.job_lines import cut
from controlplane.cli.output import byte_count
from controlplane.cli.terminal import width_of
from controlplane.client import JobSpec
from controlplane.client.jobfile import load_job
from controlplane.client.workdir_archive import PackedFile, survey

NAMED: Final = 3  # of the largest files
LIBRARY: Final = b"elastic"


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


def library_note(one: Submission) -> str:
    """Return a remark if neither the script nor the modules beside it use the library."""
    spec, folder = one.spec, Path(one.spec.workdir)
    if spec.stated_sweep is not None or one.stored:
        return ""
    travels = [folder / file.path for file in one.travels if file.path.endswith(".py")]
    if _uses_library(folder / spec.script, travels):
        return ""
    return (
        f"{spec.script} does not use elastic.ScalingAgent: on one slot it runs once, as it is, "
        f"on several it fails; `ones init {spec.script}` says what to change"
    )


def _uses_library(script: Path, files: Sequence[Path]) -> bool:
    """True if a script names the library, or one of `files` does that it may import."""
    seen: set[Path] = set()
    left = {script}
    while left:
        path = left.pop()
        seen.add(path)
        try:
            source = path.read_bytes()
            homes = {script.parent / part for part in _first_parts(ast.parse(source))}
        except (OSError, SyntaxError, ValueError):  # said elsewhere
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
    """The first parts of all modules that are imported; an empty one for a relative import."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("" if node.level else (node.module or "").partition(".")[0])
    return names


def on_screen(line: str, stream: TextIO) -> str:
    """A line, cut to the width of a terminal."""
    width = width_of(stream)
    return line if width is None else cut(line, width)
