"""All figures that some results can fill, into a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from controlplane.sim.analysis import gantt, loss_plots, plots
from controlplane.sim.analysis.loss_series import has_losses
from controlplane.sim.analysis.results_by_policy import by_size
from controlplane.sim.simulation_result import SimulationResult


def draw(results: Sequence[SimulationResult], folder: Path, ours: str = "ones") -> list[Path]:
    """Draw all figures that these results can fill.

    Args:
        results: of any policies, seeds and settings.
        folder: to draw into; made if it is not there.
        ours: label of the policy whose gains are drawn.

    Returns:
        The files.

    Raises:
        ResultsError: if matplotlib is missing, or the disk does not take a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn: list[Path] = []
    sizes = by_size(results)
    for size, here in sizes.items():
        mine = [result for many in here.values() for result in many]
        for name, plot in (("boxes", plots.box_plots), ("cdf", plots.cumulative),
                           ("averages", plots.averages)):  # fmt: skip
            file = folder / f"{name}-{size}.png"
            plot(mine, file)
            drawn.append(file)
        if all(has_losses(result) for result in mine):
            for name, plot in (("losses", loss_plots.normalised_loss),
                               ("loss-slots", loss_plots.slots_by_loss),
                               ("loss-times", loss_plots.times_to_reductions)):  # fmt: skip
                file = folder / f"{name}-{size}.png"
                plot(mine, file)
                drawn.append(file)
    if len(sizes) > 1:
        plots.scaling(results, folder / "scaling.png", ours)
        drawn.append(folder / "scaling.png")
    for result in results:
        if any(job.allocations for job in result.jobs):
            file = folder / f"slots-{result.policy}-{result.slots}-{result.seed}.png"
            gantt.gantt(result, file)
            gantt.utilisation([result], file.with_name(f"utilisation-{file.stem[6:]}.png"))
            drawn.append(file)
    return drawn
