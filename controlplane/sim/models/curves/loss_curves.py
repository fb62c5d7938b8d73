"""Loss curves of real trainings as values, and the file that keeps them."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from controlplane.sim.simulator_errors import TraceError

FILE: Final = "recorded_curves.json"  # ships beside this module
REMEDY: Final = "write it anew: ones sim record-curves FILE"

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Convergence = Literal["sublinear", "linear", "non-convex"]


class LossCurve(msgspec.Struct, frozen=True, kw_only=True):
    """What one training lost, iteration by iteration."""

    name: Text  # unique: family, data set and what tells it from its siblings
    family: Text  # the algorithm
    convergence: Convergence  # as SLAQ section 2 sorts algorithms; linear: superlinear too
    data: Text  # the data set
    settings: dict[str, str | float]  # of the algorithm
    losses: tuple[float, ...]  # before the first iteration, then after each one

    @property
    def iterations(self) -> int:
        """That the training took."""
        return len(self.losses) - 1

    @property
    def least(self) -> float:
        """Smallest loss that it reached."""
        return min(self.losses)

    def normalised(self, iteration: int) -> float:
        """The share of its loss reduction that is still to come: 1 at first, 0 at the least.

        SLAQ, figure 4: "when a new job arrives, its initial loss is 1.0".

        Args:
            iteration: finished ones; beyond the last one it is that of the last.

        Returns:
            Above 1 where it has lost more than at first.
        """
        least = self.least
        value = self.losses[min(iteration, self.iterations)]
        return (value - least) / (self.losses[0] - least)


class RecordedCurves(msgspec.Struct, frozen=True, kw_only=True):
    """All curves of one recording, and how they came about."""

    command: str
    date: str  # ISO 8601, of the day
    seed: int
    versions: dict[str, str]  # of the libraries that trained
    curves: tuple[LossCurve, ...]

    def by_name(self) -> dict[str, LossCurve]:
        """The curves, each under its name."""
        return {curve.name: curve for curve in self.curves}


def encode(recorded: RecordedCurves) -> bytes:
    """As a JSON document, each curve on a line of its own.

    Args:
        recorded: to write down.
    """
    head = msgspec.json.encode(msgspec.structs.replace(recorded, curves=()))
    lines = b",\n".join(msgspec.json.encode(curve) for curve in recorded.curves)
    return head.removesuffix(b"[]}") + b"[\n" + lines + b"\n]}\n"


def decode(text: bytes, source: str) -> RecordedCurves:
    """The curves that `encode` wrote.

    Args:
        text: a JSON document.

    Raises:
        TraceError: if it is none, or a curve cannot be replayed.
    """
    try:
        recorded = msgspec.json.decode(text, type=RecordedCurves)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{source}: {error}", REMEDY) from None
    names = [curve.name for curve in recorded.curves]
    if not names or len(set(names)) < len(names):
        raise TraceError(f"{source}: curves need names, each its own", REMEDY, "name")
    for curve in recorded.curves:
        if curve.iterations < 1 or not curve.least < curve.losses[0]:
            what = f"{source}: curve {curve.name!r} lowers no loss"
            raise TraceError(what, "give a loss before the first iteration, and lower ones after")
    return recorded


def read_curves(path: Path) -> RecordedCurves:
    """The curves of a file that `ones sim record-curves` wrote.

    Raises:
        TraceError: if it cannot be read, or is none.
    """
    try:
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", REMEDY, "curves") from None


@cache
def shipped_curves() -> RecordedCurves:
    """The curves that ship with the simulator.

    Raises:
        TraceError: if somebody changed the file, and it cannot be read any more.
    """
    text = resources.files(__package__).joinpath(FILE).read_bytes()
    return decode(text, FILE)
