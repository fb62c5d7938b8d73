"""Inputs that a fuzzer found, made few: `python -m tests.fuzz.keep_enough TARGET FOLDER`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

from tests.fuzz.corpus_files import inputs_of, keep
from tests.fuzz.line_coverage import files_of, reached
from tests.fuzz.registry import TARGETS

MOST_BYTES: Final = 40_000  # of a target's inputs
MOST_S: Final = 120.0  # that are looked at
REPLAY_S: Final = 0.35  # that those which are kept take together when they are run again


def main() -> None:
    """Write the corpus file again: findings stay, of the others those that reach more."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    target, known = TARGETS[name], inputs_of(name)
    run, files = target.load(), frozenset(files_of(target.about).values())
    run(b"")
    kept = {data: note for data, note in known.items() if note}
    seen, room, room_s = set(), MOST_BYTES, REPLAY_S
    inputs = {path.read_bytes() for path in folder.iterdir()} - set(kept)
    end = time.monotonic() + MOST_S
    for data in sorted(inputs, key=lambda one: (one not in known, len(one), one)):
        fresh = reached(run, data, files)
        if fresh <= seen or len(data) > room or room_s < 0 or time.monotonic() > end:
            continue
        seen |= fresh
        began = time.perf_counter()
        try:
            run(data)
        except Exception:  # noqa: BLE001, S112 - a finding, which is told elsewhere
            continue
        room, room_s = room - len(data), room_s - (time.perf_counter() - began)
        kept[data] = ""
    keep(name, kept)


if __name__ == "__main__":
    main()
