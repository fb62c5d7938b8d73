"""Style shared by all figures: colours of policies, units of time, legends, saving."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from controlplane.sim.cluster import ResultsError
from controlplane.sim.results import SimulationResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito (2008): distinct for the colour-blind; their yellow is too pale for lines.
COLOURS: Final = (
    "#d55e00",
    "#0072b2",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
    "#4d4d4d",
)
DASHES: Final = ("-", "--", ":", "-.")
HATCHES: Final = ("", "//", "..", "xx")
# A policy has one style in all figures; policies often drawn together come first.
POLICIES: Final = (
    "ones",
    "tiresias",
    "optimus",
    "drl",
    "goodput",
    "fifo",
    "srtf",
    "ones-paper",
    "gittins",
    "fair",
    "slaq",
    "harmony",
    "oasis",
    "harmony-drl",
)
SUFFIXES: Final = (".svg", ".png", ".pdf")
GRID: Final = "#d9d9d9"
MINUTE: Final = 60.0
HOUR: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Style:
    """Colour of a policy, and its dash and hatch where colour is missing."""

    colour: str
    dash: str
    hatch: str


def grouped(results: Sequence[SimulationResult]) -> dict[str, list[SimulationResult]]:
    """Group results by policy, in order of appearance.

    A policy's label is its name followed by those options in which its results differ.

    Raises:
        ResultsError: if there are no results.
    """
    if not results:
        raise ResultsError("there are no results to draw", "run a simulation first")
    groups: dict[str, list[SimulationResult]] = {}
    for result in results:
        groups.setdefault(_label(result, results), []).append(result)
    return groups


def _label(result: SimulationResult, results: Sequence[SimulationResult]) -> str:
    same = [other.options for other in results if other.policy == result.policy]
    names = dict.fromkeys(name for options in same for name in options)
    telling = [
        name for name in names if any(options.get(name) != same[0].get(name) for options in same)
    ]
    given = [f"{name}={result.options[name]}" for name in telling if name in result.options]
    return f"{result.policy} {' '.join(given)}".strip()


def styles(labels: Sequence[str]) -> dict[str, Style]:
    """Return a style for each label of `grouped`; two labels of one policy get different styles."""
    found: dict[str, Style] = {}
    for label in labels:
        policy = label.partition(" ")[0]
        known = policy in POLICIES
        begin = POLICIES.index(policy) if known else zlib.crc32(policy.encode())
        found[label] = next(
            style
            for index in itertools.count(begin)
            if (style := _style(index)) not in found.values() or index > begin + len(_ALL)
        )
    return found


_ALL: Final = tuple(itertools.product(zip(DASHES, HATCHES, strict=True), COLOURS))


def _style(index: int) -> Style:
    (dash, hatch), colour = _ALL[index % len(_ALL)]
    return Style(colour, dash, hatch)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure that needs no display.

    Raises:
        ResultsError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional dependency
    except ImportError:
        hint = "in a checkout of ONES: pip install '.[sim]'"
        raise ResultsError("figures need matplotlib", hint) from None
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's suffix; equal figures give equal bytes.

    Raises:
        ResultsError: if the format is unknown, or the file cannot be written.
    """
    if path.suffix.lower() not in SUFFIXES:
        hint = f"end its name with {', '.join(SUFFIXES)}"
        raise ResultsError(f"{path}: unknown format of a figure", hint)
    import matplotlib as mpl  # noqa: PLC0415 - installed, since the figure exists

    # Reproducible bytes; a PNG contains no date.
    kept: Any = {"svg.hashsalt": "ones", "svg.fonttype": "none"}
    dates = {".svg": "Date", ".pdf": "CreationDate"}
    date = dates.get(path.suffix.lower())
    try:
        with mpl.rc_context(kept):
            figure.savefig(path, metadata={date: None} if date else None)
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}", "choose another file") from None


def tidy(axes: Axes, *, along: str = "y") -> None:
    """Draw a light grid behind the data along the x, y or both axes, and remove the box."""
    axes.grid(visible=True, axis=along, color=GRID, linewidth=0.6)  # type: ignore[arg-type] # x, y or both
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def caption(figure: Figure, text: str) -> None:
    """Write below a figure how to read it."""
    figure.supxlabel(text, x=0.01, ha="left", fontsize="small", color="#444444")


def policy_legend(figure: Figure, axes: Axes, count: int) -> None:
    """Place one legend above all panels, where it covers no data."""
    handles, labels = axes.get_legend_handles_labels()
    columns = min(count, 6)
    figure.legend(
        handles, labels, loc="outside upper center", ncols=columns, frameon=False, fontsize="small"
    )


def time_unit(longest_s: float) -> tuple[float, str]:
    """Return the unit of time for an axis up to `longest_s`, in seconds, and its name.

    Hours above 5 hours, minutes above 10 minutes.
    """
    if longest_s > 5.0 * HOUR:
        return HOUR, "hours"
    return (MINUTE, "minutes") if longest_s > 10.0 * MINUTE else (1.0, "seconds")
