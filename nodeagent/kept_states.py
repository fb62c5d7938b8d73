"""Which states of a sweep stay on the node's disk, and which are missing; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from schemas.messages.hopping import StateRef, SweepDelta, WantedState
from schemas.state_files import StateFile


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is wanted beside what is there."""

    doomed: tuple[StateFile, ...]  # of which neither a file nor a part of one is needed
    present: tuple[WantedState, ...]
    missing: tuple[WantedState, ...]


def compare(
    delta: SweepDelta, files: Iterable[StateFile], digests: Mapping[StateFile, str]
) -> Comparison:
    """Hold the files of a job against what is wanted of them.

    What an attempt leaves that is under way, or that the delta cannot know of, stays.

    Args:
        files: on the node's disk, finished or not.
    """
    wanted = {_key(one.state) for one in delta.wanted}
    attempts = {unit.attempt for unit in delta.units}
    named = {(file.trial, file.version, digest) for file, digest in digests.items()}
    doomed = tuple(
        file
        for file in files
        if (file.trial, file.version, digests.get(file)) not in wanted
        and file.attempt not in attempts
        and file.attempt <= delta.attempts
        and not (file.attempt == 0 and file not in digests and _is_coming(file, delta))
    )
    present = tuple(one for one in delta.wanted if _key(one.state) in named)
    missing = tuple(one for one in delta.wanted if _key(one.state) not in named)
    return Comparison(doomed, present, missing)


def _key(state: StateRef) -> tuple[int, int, str]:
    return state.trial, state.version, state.digest


def _is_coming(file: StateFile, delta: SweepDelta) -> bool:
    """Whether a part of a file is one that is being fetched."""
    return any(
        (one.state.trial, one.state.version) == (file.trial, file.version) for one in delta.wanted
    )
