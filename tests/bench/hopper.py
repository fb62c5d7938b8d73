"""Model hopping: order of visits, transfer of states, real trainings in several ways, and faults.

`--only order|transfer|trainings|curves|faults` measures one part; a whole run takes half an hour on two cores.
`--curves FILE` keeps what `bin/bench hopper_figures` draws.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from tests.bench import report
from tests.bench.hopper_faults import fault_figures
from tests.bench.hopper_order import order_figures
from tests.bench.hopper_trainings import WAYS, Way, learning_curves, training_figures
from tests.bench.hopper_transfer import transfer_figures


def main() -> None:
    parser = report.parser(__doc__ or "", "two configurations of digits, each fault once")
    parser.add_argument("--curves", type=Path, help="write what figures are drawn from here")
    parser.add_argument("--only", choices=["order", "transfer", "trainings", "curves", "faults"])
    said = "of trainings, with commas: fixed order, random order, task-parallel, elastic jobs"
    parser.add_argument("--ways", type=named, default=WAYS, help=f"{said}; beside hopping")
    given = parser.parse_args()
    quick: bool = given.quick
    trained: dict[str, dict[str, Way]] = {}
    parts: dict[str, Callable[[], dict[str, float]]] = {
        "order": lambda: order_figures(quick=quick),
        "transfer": lambda: transfer_figures(quick=quick),
        "trainings": lambda: training_figures(
            trained, quick=quick, curves=given.curves, chosen=given.ways
        ),
        "curves": lambda: learning_curves(trained, quick=quick, curves=given.curves),
        "faults": lambda: fault_figures(quick=quick),
    }
    figures: dict[str, float] = {}
    for name, measure in parts.items():
        if given.only in {None, name}:
            report.now(name)
            figures |= measure()
            report.write(figures, given.json)


def named(text: str) -> list[str]:
    found = list(dict.fromkeys(["hopping", *(name.strip() for name in text.split(","))]))
    for name in found:
        if name not in WAYS:
            raise argparse.ArgumentTypeError(f"no way {name!r}; there are {', '.join(WAYS)}")
    return found


if __name__ == "__main__":
    main()
