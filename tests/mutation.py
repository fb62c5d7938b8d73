"""Mutation testing of one room with mutmut, in a copy of the checkout: `bin/mutate ROOM`."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from mutmut.stats import status_by_exit_code

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("schemas", "controlplane", "nodeagent", "elastic")
TRAINING: Final = "tests/unit/elastic\n    tests/training"
ROOMS: Final = {  # code, and the tests that should notice
    "core": ("controlplane/core", "tests/unit/controlplane/core"),
    "journal": ("controlplane/journal", "tests/unit/controlplane/journal"),
    "ones": ("controlplane/policy/ones", "tests/unit/controlplane/policy"),
    "step": ("elastic/step", TRAINING),
    "group": ("elastic/group", TRAINING),
}
SETTINGS: Final = """[mutmut]
source_paths=
    {packages}
only_mutate={code}/*
also_copy=
    {others}
pytest_add_cli_args=
    -p
    no:xdist
    -m
    not slow and not root and not gpu
    --hypothesis-profile=quick
pytest_add_cli_args_test_selection={tests}
"""
NOTHING: Final = "no-such-mutant"  # mutants are made, and none is tried
NOTICED: Final = {"killed", "timeout", "segfault", "suspicious"}


def main() -> int:
    """Try a sample of the room's mutants and print how many were noticed."""
    parser = argparse.ArgumentParser(prog="bin/mutate", description=__doc__)
    parser.add_argument("room", choices=sorted(ROOMS))
    parser.add_argument("--sample", type=int, default=300, help="mutants to try; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    chosen = parser.parse_args()
    code, tests = ROOMS[chosen.room]
    with tempfile.TemporaryDirectory(prefix="ones-mutants-") as folder:
        copy = Path(folder)
        files = copy_checkout(copy)
        others = [name for name in files if not name.startswith("tests/") and not is_code(name)]
        for name in others:
            (copy / "mutants" / name).parent.mkdir(parents=True, exist_ok=True)
        text = SETTINGS.format(
            packages="\n    ".join(PACKAGES), code=code, tests=tests, others="\n    ".join(others)
        )
        (copy / "setup.cfg").write_text(text, encoding="utf-8")
        mutmut(copy, NOTHING)
        names = sorted(results(copy))
        if chosen.sample:
            draw = random.Random(chosen.seed)  # noqa: S311 - a sample, no secret
            names = draw.sample(names, min(chosen.sample, len(names)))
        mutmut(copy, *names)
        found = results(copy)
    ends = Counter(found[name] for name in names)
    noticed = sum(ends[status] for status in NOTICED)
    for name in names:
        if found[name] == "survived":
            sys.stdout.write(f"survived: {name}\n")
    sys.stdout.write(
        f"{chosen.room}: {noticed} of {len(names)} mutants noticed "
        f"({noticed / max(1, len(names)):.0%}); {ends['survived']} survived, "
        f"{ends['no tests']} in functions that no test runs; {len(found)} exist\n"
    )
    return 0


def is_code(name: str) -> bool:
    """Return whether mutmut copies the file by itself."""
    return name.endswith(".py") and name.split("/", maxsplit=1)[0] in PACKAGES


def copy_checkout(target: Path) -> list[str]:
    """Copy what git knows or would add, and link the environment; return the files' names."""
    command = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    names = [name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)
    (target / ".venv").symlink_to(ROOT / ".venv")
    return names


def mutmut(copy: Path, *names: str) -> None:
    """Run mutmut on mutants of these names; its progress goes to stderr."""
    command = [sys.executable, "-m", "mutmut", "run", *names]
    temporary = copy / "tmp"  # of the runs, most of which fail and keep their folders
    temporary.mkdir(exist_ok=True)
    env = {**os.environ, "TMPDIR": str(temporary)}
    subprocess.run(command, cwd=copy, env=env, stdout=sys.stderr, check=False)


def results(copy: Path) -> dict[str, str]:
    """Return how the trial of each mutant ended, in mutmut's words."""
    codes: dict[str, int | None] = {}
    for path in (copy / "mutants").rglob("*.meta"):
        codes |= json.loads(path.read_text("utf-8"))["exit_code_by_key"]
    return {name: status_by_exit_code[code] for name, code in codes.items()}


if __name__ == "__main__":
    sys.exit(main())
