"""`bin/fuzz`: all targets in turn or one, each for its part of the time."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.fuzz.corpus_files import FOLDER, inputs_of, unpack
from tests.fuzz.registry import TARGETS

ROOT: Final = Path(__file__).parents[2]


def main() -> int:
    """Fuzz, keep what reached something new, and say what was found; 1 if anything was."""
    parser = argparse.ArgumentParser(prog="bin/fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="of all targets together")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="default: all")
    parser.add_argument(
        "--seed", type=int, default=0, help="of what is tried; 0: another each time"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--keep", action="store_true", help="write the corpus again, minimised")
    parser.add_argument("--findings", type=Path, default=Path("findings"), help="a folder")
    parser.add_argument("--coverage", action="store_true", help="only tell what the corpus reaches")
    chosen = parser.parse_args()
    names = chosen.target or list(TARGETS)
    if chosen.coverage:
        for name in names:
            print(json.dumps({"target": name, **_coverage(name)}), flush=True)
        return 0
    shares = sum(TARGETS[name].share for name in names)
    one = partial(_fuzz, chosen=chosen, second_s=60.0 * chosen.minutes / shares)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        found = sum(pool.map(one, names))
    return 1 if found else 0


def _fuzz(name: str, chosen: argparse.Namespace, second_s: float) -> int:
    """One target; returns how much was found."""
    with tempfile.TemporaryDirectory(prefix=f"fuzz-{name}-") as temporary:
        folder = Path(temporary)
        unpack(inputs_of(name), folder / "inputs")
        seconds = max(1, round(TARGETS[name].share * second_s))
        arguments = name, str(seconds), str(folder), str(chosen.seed)
        said = _child("tests.fuzz.one_run", *arguments)
        found = _findings(name, folder / "findings", chosen.findings)
        if chosen.keep:
            _child("tests.fuzz.keep_enough", name, str(folder / "inputs"))
    print(json.dumps({"target": name, "seconds": seconds, **said, "findings": found}), flush=True)
    return found


def _child(module: str, *arguments: str) -> dict[str, Any]:
    """What libFuzzer said at the end: executions, edges that were reached, the rate."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    edges = re.findall(r"\bcov: (\d+)", done.stderr)
    runs = re.findall(r"stat::number_of_executed_units:\s+(\d+)", done.stderr)
    memory = re.findall(r"stat::peak_rss_mb:\s+(\d+)", done.stderr)
    said: dict[str, Any] = {"runs": int(runs[-1]) if runs else None}
    said["edges"] = int(edges[-1]) if edges else None
    said["peak_mb"] = int(memory[-1]) if memory else None
    if done.returncode:
        said["ended"] = done.returncode
        said["said"] = done.stderr[-2000:]
    return said


def _findings(name: str, found: Path, into: Path) -> int:
    inputs = [path for path in found.glob("*") if path.suffix != ".txt"]
    for path in inputs:
        into.mkdir(parents=True, exist_ok=True)
        words = path.with_name(f"{path.name}.txt")
        (into / f"{name}-{path.name}").write_bytes(path.read_bytes())
        if words.exists():
            (into / f"{name}-{path.name}.txt").write_text(words.read_text("utf-8"), "utf-8")
    return len(inputs)


def _coverage(name: str) -> dict[str, Any]:
    """Lines of the modules that a target is about, and how many of them its corpus reaches."""
    from tests.fuzz.line_coverage import files_of, lines_in, reached

    run, files = TARGETS[name].load(), files_of(TARGETS[name].about)
    run(b"")
    wanted = frozenset(files.values())
    hit = {(file, line) for one in inputs_of(name) for file, _, line in reached(run, one, wanted)}
    every = {(file, line) for file in files.values() for line in lines_in(file)}
    return {
        "inputs": len(inputs_of(name)),
        "bytes": (FOLDER / f"{name}.txt").stat().st_size,
        "lines": len(every),
        "reached": len(hit & every),
    }


if __name__ == "__main__":
    sys.exit(main())
