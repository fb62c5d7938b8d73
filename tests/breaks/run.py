"""Break a copy of the project in one place after the other, and see whether its tests notice.

.venv/bin/python -m tests.breaks.run [--room ROOM] [--only ID] [--json FILE] [-j N]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Final, Literal

import msgspec

ROOT: Final = Path(__file__).resolve().parents[2]
BREAKS: Final = Path(__file__).with_name("breaks.toml")
LIMIT_S: Final = 150.0  # tests that take longer were broken, too
PYTEST: Final = ("-m", "pytest", "-x", "-q", "--no-header", "--tb=line")
Colour = Literal["red", "green", "error"]
COLOURS: Final[dict[int, Colour]] = {0: "green", 1: "red", 2: "red"}  # by pytest's exit code


class Break(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault, to be put in on purpose."""

    id: str
    room: str  # the folder it is in: core, elastic, ...
    file: str  # path in the repository
    old: str  # occurs once in `file`
    new: str
    tests: list[str]  # arguments of pytest: the narrowest tests that should fail


class Result(msgspec.Struct, frozen=True):
    """What the tests said of one break."""

    result: Colour  # red: they noticed; error: they could not be run
    s: float  # seconds that they took
    failed: list[str]  # tests
    last: str  # line of the output


def read_breaks() -> list[Break]:
    """The list, in its order."""
    return msgspec.convert(tomllib.loads(BREAKS.read_text("utf-8"))["break"], list[Break])


def copy_project(target: Path) -> None:
    """Copy what belongs to the project, and link its environment."""
    command = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0"):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    (target / ".venv").symlink_to(ROOT / ".venv")


@contextmanager
def broken(copy: Path, fault: Break) -> Iterator[None]:
    """Have `fault` in a copy of the project.

    Args:
        copy: of the project.
        fault: to put in, and to take out at the end.

    Raises:
        ValueError: if the text to replace is not there exactly once.
    """
    path = copy / fault.file
    whole = path.read_text("utf-8")
    if whole.count(fault.old) != 1:
        raise ValueError(f"{fault.file} has the text {whole.count(fault.old)} times, not once")
    try:
        _write(path, whole.replace(fault.old, fault.new))
        yield
    finally:
        _write(path, whole)


def _write(path: Path, text: str) -> None:
    """Replace a module, and the bytecode that would hide it: clocks of files are coarse."""
    path.write_text(text, "utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def try_break(copy: Path, fault: Break) -> Result:
    """Put a fault into a copy of the project and run its tests there.

    Args:
        copy: of the project; as it was when this returns.
        fault: to try.
    """
    try:
        with broken(copy, fault):
            return run_tests(copy, fault.tests)
    except (OSError, ValueError) as error:
        return Result("error", 0.0, [], str(error))


def run_tests(copy: Path, tests: list[str]) -> Result:
    """Run tests of a copy, with the modules of that copy.

    Args:
        copy: of the project.
        tests: arguments of pytest.

    Returns:
        Red if one fails or they take longer than `LIMIT_S`.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        [copy / ".venv/bin/python", *PYTEST, *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    colour: Colour = "red"
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        colour = COLOURS.get(process.returncode, "error")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += f"\nlonger than {LIMIT_S:.0f} s"
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    last = next(iter(reversed(output.strip().splitlines())), "")
    return Result(colour, round(time.monotonic() - began, 1), failed, last)


def try_all(faults: list[Break], known: dict[str, Result], path: Path | None, copies: int) -> None:
    """Try every fault of which is not known whether it is noticed, some at a time.

    Args:
        faults: to try.
        known: results by id; new ones are added.
        path: of a file that is written after each; None: none is.
        copies: of the project, in each of which one fault is tried at a time.
    """
    lock = Lock()
    free: SimpleQueue[Path] = SimpleQueue()

    def one(fault: Break) -> None:
        copy = free.get()
        try:
            result = try_break(copy, fault)
        finally:
            free.put(copy)
        with lock:
            known[fault.id] = result
            sys.stdout.write(f"{result.result:6} {result.s:6.1f} s  {fault.room:10} {fault.id}\n")
            sys.stdout.flush()
            if path is not None:
                write(path, known)

    with (
        tempfile.TemporaryDirectory(prefix="breaks-") as folder,
        ThreadPoolExecutor(copies) as threads,
    ):
        for number in range(copies):
            copy = Path(folder) / str(number)
            copy_project(copy)
            free.put(copy)
        tried = {name for name, result in known.items() if result.result != "error"}
        list(threads.map(one, [fault for fault in faults if fault.id not in tried]))


def read(path: Path | None) -> dict[str, Result]:
    """Results of an earlier run, by id."""
    if path is None or not path.exists():
        return {}
    return msgspec.convert(json.loads(path.read_text("utf-8")), dict[str, Result])


def write(path: Path, results: dict[str, Result]) -> None:
    """Keep results; a run that is ended leaves a whole file."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(msgspec.to_builtins(results), indent=1) + "\n", "utf-8")
    fresh.replace(path)


def main() -> int:
    """Try those that were asked for; 1 if one is not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.breaks.run", description=__doc__)
    parser.add_argument("--room", help="those of one room")
    parser.add_argument("--only", metavar="ID", help="this one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="what it has is not tried again")
    parser.add_argument("-j", type=int, default=1, metavar="N", help="so many at a time")
    chosen = parser.parse_args()
    faults = [
        fault
        for fault in read_breaks()
        if chosen.room in {None, fault.room} and chosen.only in {None, fault.id}
    ]
    if not faults:
        parser.error("no such break")
    known = read(chosen.json)
    try_all(faults, known, chosen.json, max(1, chosen.j))
    results = {fault.id: known[fault.id] for fault in faults}
    for name, result in results.items():
        if result.result != "red":
            sys.stdout.write(f"not noticed: {name} ({result.result}): {result.last}\n")
    counts = Counter(result.result for result in results.values())
    sys.stdout.write(f"{len(results)} breaks, {counts['red']} red\n")
    return int(counts["red"] < len(results))


if __name__ == "__main__":
    sys.exit(main())
