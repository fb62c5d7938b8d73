"""Model hopping: order of visits, transfer of states, real trainings in several ways, and faults.

`--only order|transfer|trainings|curves|faults` measures one part; a whole run takes half an hour on two cores.
`--figures DIR` also draws the Cerebro paper's figures anew: makespans of plays in virtual time, what the ways
of training cost, and learning curves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from controlplane.sim.analysis.plot_style import COLOURS, new_figure, save, tidy
from tests.bench import report
from tests.bench.hopper_faults import fault_figures
from tests.bench.hopper_order import CONFIGURATIONS, SLOTS, makespans, order_figures
from tests.bench.hopper_trainings import WAYS, Curves, Way, learning_curves, training_figures
from tests.bench.hopper_transfer import transfer_figures

Draw = Callable[[Axes], None]


def main() -> None:
    parts = ("order", "transfer", "trainings", "curves", "faults")
    given = report.arguments(
        __doc__,
        "two configurations of digits, each fault once",
        only=(report.some_of(parts), list(parts), f"some of {', '.join(parts)}"),
        ways=(report.some_of(WAYS), list(WAYS), f"of training: some of {', '.join(WAYS)}"),
        figures=(Path, None, "folder of pictures"),
    )
    quick: bool = given.quick
    chosen = list(dict.fromkeys([WAYS[0], *given.ways]))
    trained: dict[str, dict[str, Way]] = {}
    learnt: dict[str, Curves] = {}
    measured: dict[str, Callable[[], dict[str, float]]] = {
        "order": lambda: order_figures(quick=quick),
        "transfer": lambda: transfer_figures(quick=quick),
        "trainings": lambda: training_figures(trained, quick=quick, chosen=chosen),
        "curves": lambda: learning_curves(learnt, trained, quick=quick),
        "faults": lambda: fault_figures(quick=quick),
    }
    figures: dict[str, float] = {}
    for name in given.only:
        report.now(name)
        figures |= measured[name]()
        report.write(figures, given.json)
    if given.figures is not None:
        draw(given.figures, trained, learnt, quick=quick)


def draw(
    folder: Path, trained: Mapping[str, Mapping[str, Way]], learnt: Mapping[str, Curves], *,
    quick: bool,
) -> None:  # fmt: skip
    """Draw a picture of each part that was measured, a panel for each training or setting."""
    kinds = {"all alike": True, "different configurations and slots": False}
    orders = {
        kind: lambda axes, alike=alike: draw_makespans(axes, alike=alike, quick=quick)
        for kind, alike in kinds.items()
    }
    costs = {name: lambda axes, ways=ways: draw_costs(axes, ways) for name, ways in trained.items()}
    curves = {name: lambda axes, one=one: draw_curves(axes, one) for name, one in learnt.items()}
    panels: dict[str, Mapping[str, Draw]] = {"makespans": orders, "costs": costs, "curves": curves}
    for name, drawn in panels.items():
        if drawn:
            figure = new_figure(9.0, 3.8)
            every = figure.subplots(1, len(drawn), squeeze=False, sharey=name == "makespans")[0]
            for axes, (title, panel) in zip(every, drawn.items(), strict=True):
                panel(axes)
                axes.set_title(title, fontsize=10)
                tidy(axes)
            every[-1].legend(frameon=False, fontsize=9)
            save(figure, folder / f"hopper-{name}.png")


def draw_makespans(axes: Axes, *, alike: bool, quick: bool) -> None:
    """Lines are means, the shade reaches to the worst seed."""
    for colour, (name, cells) in zip(
        COLOURS, makespans(alike=alike, quick=quick).items(), strict=False
    ):
        means, worst = zip(*cells, strict=True)
        axes.plot(CONFIGURATIONS, means, color=colour, marker="o", markersize=3, label=name)
        axes.fill_between(CONFIGURATIONS, means, worst, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel(f"configurations on {SLOTS} slots")
    axes.set_ylabel("makespan over the bound")


def draw_costs(axes: Axes, ways: Mapping[str, Way]) -> None:
    """Draw two bars for each way: bytes on the nodes' disks, and over the network."""
    both: dict[str, Sequence[float]] = {
        "data on disks": [way.data_bytes for way in ways.values()],
        "over the network": [way.network_bytes for way in ways.values()],
    }
    for aside, colour, (label, sizes) in zip((-0.2, 0.2), COLOURS, both.items(), strict=False):
        bars = [max(1e-3, size / 1e6) for size in sizes]
        places = [at + aside for at in range(len(bars))]
        axes.bar(places, bars, width=0.38, color=colour, label=label)
    axes.set_yscale("log")
    axes.set_xticks(range(len(ways)), [name.replace(" ", "\n") for name in ways], fontsize=8)
    axes.set_ylabel("MB")


def draw_curves(axes: Axes, found: Curves) -> None:
    for style, (name, curves) in zip(("-", "--"), found.by_way.items(), strict=True):
        for number, (colour, values) in enumerate(zip(COLOURS, curves, strict=False)):
            label = name if number == 0 else None
            epochs = range(1, len(values) + 1)
            axes.plot(epochs, values, color=colour, linestyle=style, linewidth=1, label=label)
    axes.set_xlabel("epoch")
    axes.set_ylabel(found.metric)


if __name__ == "__main__":
    main()
