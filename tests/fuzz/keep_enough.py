"""Inputs that a fuzzer found, made few: `python -m tests.fuzz.keep_enough TARGET FOLDER`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from tests.fuzz.corpus_files import inputs_of, keep
from tests.fuzz.line_coverage import Line, files_of, reached
from tests.fuzz.registry import TARGETS

MAX_BYTES: Final = 40_000  # of a target's inputs
MAX_S: Final = 25.0  # for looking at them
REPLAY_S: Final = 0.1  # of a processor, times its share: all that are kept, run again


class Looked(NamedTuple):
    """An input, what it reaches, and what it costs."""

    data: bytes
    lines: set[Line]
    seconds: float


def main() -> None:
    """Write the corpus file again: findings stay, of the others those that reach most."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    target, known = TARGETS[name], inputs_of(name)
    run, files = target.load(), frozenset(files_of(target.about).values())
    run(b"")
    found = {path.read_bytes() for path in folder.iterdir()}
    inputs = sorted(found, key=lambda one: (one not in known, len(one), one))
    kept = {data: note for data, note in known.items() if note}
    chosen = _chosen(_looked(run, inputs, files), REPLAY_S * target.share)
    keep(name, kept | dict.fromkeys(chosen, ""))


def _looked(
    run: Callable[[bytes], None], inputs: list[bytes], files: frozenset[str]
) -> list[Looked]:
    """As many of them as there is time for, evenly."""
    looked, end = [], time.monotonic() + MAX_S
    for data in [*inputs[::4], *inputs[1::4], *inputs[2::4], *inputs[3::4]]:
        if time.monotonic() > end:
            break
        began = time.process_time()
        try:
            run(data)
        except Exception:  # noqa: BLE001, S112 - a finding, which is told elsewhere
            continue
        seconds = time.process_time() - began
        looked.append(Looked(data, reached(run, data, files), seconds))
    return looked


def _chosen(looked: list[Looked], room_s: float) -> list[bytes]:
    """One after the other that which reaches most that is new, for what it costs."""
    chosen: list[bytes] = []
    seen: set[Line] = set()
    room = MAX_BYTES
    while looked:
        best = max(looked, key=lambda one: len(one.lines - seen) / (0.001 + one.seconds))
        looked.remove(best)
        if best.lines <= seen:
            break
        if len(best.data) <= room and best.seconds <= room_s:
            chosen.append(best.data)
            seen |= best.lines
            room, room_s = room - len(best.data), room_s - best.seconds
    return chosen


if __name__ == "__main__":
    main()
