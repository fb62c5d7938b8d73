"""One target in a process of its own, with libFuzzer choosing bytes by what they reach.

`python -m tests.fuzz.one_run TARGET SECONDS FOLDER`: inputs are in FOLDER/inputs, findings come into
FOLDER/findings, each with the words of its error. A finding does not end the run; an input that
hangs, or that takes too much memory, does, and lies in FOLDER/findings then, too.
"""

from __future__ import annotations

import hashlib
import resource
import sys
import traceback
from pathlib import Path
from typing import Any, Final

TIMEOUT_S: Final = 20
MEMORY_MB: Final = 1536  # of the process; its modules take a quarter
ROOMS: Final = ("schemas", "controlplane", "nodeagent", "elastic", "tests.fuzz")
DEPTH: Final = 3  # innermost frames that tell one finding from another


class Watched:
    """Runs a target, and writes down what it finds."""

    def __init__(self, run: Any, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._known: set[str] = set()

    def __call__(self, data: bytes) -> None:
        """One input."""
        try:
            self._run(data)
        except Exception as error:  # noqa: BLE001 - all that is raised is a finding
            frames = traceback.extract_tb(error.__traceback__)[-DEPTH:]
            places = [f"{frame.filename}:{frame.lineno}" for frame in frames]
            name = hashlib.sha256(repr((type(error), places)).encode()).hexdigest()[:16]
            if name not in self._known:
                self._known.add(name)
                (self._folder / name).write_bytes(data)
                words = "".join(traceback.format_exception(error))
                (self._folder / f"{name}.txt").write_text(words, "utf-8", "backslashreplace")


def main() -> None:
    """Fuzz until the time is over."""
    name, seconds, folder, seed = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    import atheris  # type: ignore[import-not-found,unused-ignore]

    with atheris.instrument_imports(include=list(ROOMS)):
        from tests.fuzz.registry import TARGETS

        target = TARGETS[name]
        run = target.load()
    limit = 4 * MEMORY_MB << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    findings = folder / "findings"
    findings.mkdir(exist_ok=True)
    options = (
        f"-max_total_time={seconds}", f"-max_len={target.longest}", f"-timeout={TIMEOUT_S}",
        f"-rss_limit_mb={MEMORY_MB}", f"-artifact_prefix={findings}/", "-print_final_stats=1",
        "-reload=0", "-len_control=0", f"-seed={seed}",
    )  # fmt: skip
    atheris.Setup([sys.argv[0], str(folder / "inputs"), *options], Watched(run, findings))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
