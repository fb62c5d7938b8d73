"""Style shared by all figures: colours of policies, units, legends, slots over time, saving.

matplotlib is optional. A function that cannot draw or save raises `ResultsError`.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from controlplane.sim.cluster import ResultsError
from controlplane.sim.results import SimulationResult
from schemas.errors import install_hint
from schemas.ids import SlotId, node_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito (2008): distinct for the colour-blind; without yellow, which is too pale for lines.
COLOURS: Final = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4d4d4d")
DASHES: Final = ("-", "--", ":", "-.")
HATCHES: Final = ("", "//", "..", "xx")
# The position defines a policy's style in all figures; policies often drawn together are first.
POLICIES: Final = (
    "ones", "tiresias", "optimus", "drl", "goodput", "fifo", "srtf", "ones-paper", "gittins",
    "fair", "slaq", "harmony", "oasis", "harmony-drl", "pollux",
)  # fmt: skip
SUFFIXES: Final = (".svg", ".png", ".pdf")
GRID: Final = "#d9d9d9"
UNITS: Final = ((5.0, 3600.0, "hours"), (10.0, 60.0, "minutes"))  # minimum, seconds, name


@dataclass(frozen=True, slots=True)
class Style:
    """Colour, dash and hatch of a policy; dash and hatch distinguish policies without colour."""

    colour: str
    dash: str
    hatch: str

    @property
    def line(self) -> dict[str, Any]:
        """Style of a curve, as keyword arguments of matplotlib."""
        return {"color": self.colour, "linestyle": self.dash, "linewidth": 1.6}

    @property
    def area(self) -> dict[str, Any]:
        """Style of a bar, as keyword arguments of matplotlib."""
        return {"facecolor": self.colour, "hatch": self.hatch, "alpha": 0.9}


STYLES: Final = tuple(
    Style(colour, dash, hatch)
    for (dash, hatch), colour in itertools.product(zip(DASHES, HATCHES, strict=True), COLOURS)
)


def grouped(results: Sequence[SimulationResult]) -> dict[str, list[SimulationResult]]:
    """Group results by the label of their policy: its name and the options that differ."""
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


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """Return a style for each label of `grouped`; labels of one policy have different styles."""
    found: dict[str, Style] = {}
    for label in labels:
        policy = label.partition(" ")[0]
        known = policy in POLICIES
        begin = POLICIES.index(policy) if known else zlib.crc32(policy.encode())
        found[label] = next(
            style
            for index in itertools.count(begin)
            if (style := STYLES[index % len(STYLES)]) not in found.values()
            or index > begin + len(STYLES)
        )
    return found


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of `width` and `height` inches; no display is needed."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional dependency
    except ImportError:
        raise ResultsError("figures need matplotlib", install_hint("sim")) from None
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def save(figure: Figure, path: Path, kind: str = "") -> None:
    """Write a figure to a file, in the format `kind` (".png") or of the suffix of `path`.

    Equal figures produce equal bytes.
    """
    kind = kind or path.suffix.lower()
    if kind not in SUFFIXES:
        hint = f"end its name with {', '.join(SUFFIXES)}"
        raise ResultsError(f"{path}: unknown format of a figure", hint)
    import matplotlib as mpl  # noqa: PLC0415 - matplotlib made the figure

    # Reproducible bytes; a PNG contains no date.
    kept: Any = {"svg.hashsalt": "ones", "svg.fonttype": "none"}
    date = {".svg": "Date", ".pdf": "CreationDate"}.get(kind)
    try:
        with mpl.rc_context(kept):
            figure.savefig(path, format=kind[1:], metadata={date: None} if date else None)
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}", "choose another file") from None


def tidy(axes: Axes, *, along: str = "y") -> None:
    """Draw a light grid behind the data along the x, y or both axes, and hide two borders."""
    axes.grid(visible=True, axis=along, color=GRID, linewidth=0.6)  # type: ignore[arg-type] # x, y or both
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def caption(figure: Figure, text: str) -> None:
    """Write an explanation below a figure."""
    figure.supxlabel(text, x=0.01, ha="left", fontsize="small", color="#444444")


def policy_legend(figure: Figure, axes: Axes, count: int) -> None:
    """Place one legend of `count` labels above all panels, where it covers no data."""
    handles, labels = axes.get_legend_handles_labels()
    look: dict[str, Any] = {"frameon": False, "fontsize": "small", "ncols": min(count, 6)}
    figure.legend(handles, labels, loc="outside upper center", **look)


def time_unit(longest_s: float) -> tuple[float, str]:
    """Return a unit of time in seconds, and its name, for an axis up to `longest_s` seconds."""
    fitting = ((unit, name) for least, unit, name in UNITS if longest_s > least * unit)
    return next(fitting, (1.0, "seconds"))


# --- slots over time

IDLE: Final = "#f3f3f3"
NODE_LINE: Final = "#b0b0b0"
MAX_LABELLED_SLOTS: Final = 48  # largest number of rows that each have a label
LETTER_WIDTH: Final = 0.008  # width of a letter in a bar, as a share of the axis
DARK_LUMA: Final = 140.0  # white text is easier to read below this luma; found by eye


class Bar(NamedTuple):
    """Interval in which a job used a slot, in units of the axis."""

    slot: str
    job: str
    begin: float
    end: float


def slot_axes(axes: Axes, slots: Sequence[SlotId], length: float) -> None:
    """Prepare axes with a row per slot, labels for slots or nodes, and lines between nodes."""
    axes.set_xlim(0.0, length)
    axes.set_ylim(max(len(slots), 1) - 0.5, -0.5)
    axes.set_facecolor(IDLE)
    nodes = [
        (node, [row for row, _ in rows])
        for node, rows in itertools.groupby(enumerate(slots), lambda item: node_of(item[1]))
    ]
    for _, rows in nodes[1:]:
        axes.axhline(rows[0] - 0.5, color=NODE_LINE, linewidth=0.5, zorder=0.5)
    if len(slots) <= MAX_LABELLED_SLOTS:
        axes.set_yticks(range(len(slots)), slots)
    else:
        named = nodes[:: math.ceil(len(nodes) / MAX_LABELLED_SLOTS)]
        axes.set_yticks(
            [(rows[0] + rows[-1]) / 2 for _, rows in named], [node for node, _ in named]
        )
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def draw_bars(
    axes: Axes, bars: Iterable[Bar], slots: Sequence[str], looks: Mapping[str, Mapping[str, Any]]
) -> None:
    """Draw bars in the rows of their slots, in the style of their job, if `looks` has one."""
    from matplotlib.collections import PolyCollection  # noqa: PLC0415 - the axes exist

    rows = {slot: row for row, slot in enumerate(slots)}
    half = 0.4 if len(slots) <= MAX_LABELLED_SLOTS else 0.5
    boxes: defaultdict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    for slot, job, left, right in bars:
        if slot in rows:
            low, high = rows[slot] - half, rows[slot] + half
            boxes[job].append([(left, low), (right, low), (right, high), (left, high)])
    for job, look in looks.items():
        axes.add_collection(PolyCollection(boxes[job], **{"linewidths": 0, **look}))


def name_bars(
    axes: Axes, bars: Iterable[Bar], slots: Sequence[str], colours: Mapping[str, str], length: float
) -> None:
    """Write the name of a job into its bars that are wide enough, unless rows are too low.

    Adjacent rows with overlapping bars of a job show its name once.
    """
    if len(slots) > MAX_LABELLED_SLOTS:
        return
    rows = {slot: row for row, slot in enumerate(slots)}
    letter = length * LETTER_WIDTH
    named: defaultdict[tuple[int, str], list[Bar]] = defaultdict(list)
    for bar in bars:
        if bar.slot in rows and bar.end - bar.begin > letter * (len(bar.job) + 1):
            named[rows[bar.slot], bar.job].append(bar)
    look: dict[str, Any] = {"fontsize": "small", "va": "center", "clip_on": True}
    for (row, job), here in named.items():
        above = named.get((row - 1, job), [])
        ink = "white" if is_dark(colours[job]) else "black"
        for bar in here:
            if not any(other.begin < bar.end and bar.begin < other.end for other in above):
                axes.text(bar.begin + letter / 2, row, job, color=ink, **look)


def is_dark(colour: str) -> bool:
    """True if white text is easier to read on `colour` (#rrggbb) than black text."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < DARK_LUMA
