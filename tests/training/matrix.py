"""Matrix of trainings, each through every kind of change, against one plain process.

Models of all kinds train side by side in one job, which goes through all kinds of changes one after
the other. A job stands for a cell of optimizer x scheduler x loader. `bin/soak matrix` runs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from tests.training.mixed_trainings import LOOPS, OPTIMIZERS, SCHEDULES, Shares, Training, replayed
from tests.training.random_changes import EXACT, STRIDE, Change, Plan, StormyCrew

SIZE: Final = 133
LOADERS: Final = {
    "no loader workers": ((0,) * 9, 1000),
    "as many as the rank": ((0, 1, 2, 3, 0, 1, 2, 3, 0), 1000),
    "passes": ((0,) * 9, 4),
}
CHANGES: Final = (  # shares, and who dies where
    ("grow", (6, 6), ""),
    ("grow to uneven shares", (5, 4, 3), ""),
    ("another batch", (7, 7, 6), ""),
    ("shrink", (6, 6), ""),
    ("pause", (4, 4, 4), ""),
    ("rank 0 dies before a sum", (3, 3, 3, 3), "reduce:rank=0"),
    ("a rank dies after a sum", (4, 4, 4), "reduced:rank=1"),
    ("a newcomer dies in the handover", (3, 3, 3, 3), "handover.receive:rank=3"),
    ("back to one", (12,), ""),
)


def changes() -> tuple[Change, ...]:
    return tuple(
        Change(
            number, shares, kind="pause" if name == "pause" else "resize",
            fault=f"{dies}:version={STRIDE * number}=kill" if dies else "", epochs=1,
        )
        for number, (name, shares, dies) in enumerate(CHANGES, start=1)
    )  # fmt: skip


def cells() -> list[Training]:
    found = []
    names = itertools.product(OPTIMIZERS, SCHEDULES, LOADERS, (False, True))
    loops = itertools.cycle(LOOPS)
    for optimizer, schedule, loader, narrow in names:
        loop = next(loops)
        if narrow and loop == "scaled and clipped":  # torch scales no gradients of 2 bytes
            loop = "plain"
        if loader == "passes" and loop == "turns":  # which is refused
            loop = "closure"
        model = "every kind, narrow" if narrow else "every kind"
        workers, bound = LOADERS[loader]
        stream = len(found) % 8 in {2, 7}  # every fourth
        leave = _left_out(optimizer, schedule, loader)
        found.append(
            Training(model, optimizer, schedule, loop, workers, bound, SIZE, stream, leave)
        )
    return found


def _left_out(optimizer: str, schedule: str, loader: str) -> tuple[str, ...]:
    leave = []
    if optimizer == "SGD fused":
        leave.append("unused parameters that change")  # which torch itself cannot do
    if loader == "as many as the rank" or (loader == "passes" and schedule != "none"):
        leave.append("compiled")  # whose processes take seconds to start, and no loader sees it
    return tuple(leave)


def apart(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, kept in theirs.items():
        kind = name.split(".")[1]
        far = float((ours[name].double() - kept.double()).abs().max())
        found[kind] = max(found.get(kind, 0.0), far)
    return found


def wrong(training: Training, home: Path) -> tuple[dict[str, str], float]:
    plan = Plan(training, (12,), changes())
    crew = StormyCrew(home, training, plan.faults)
    try:
        crew.start(*plan.first)
        for change in plan.changes:
            crew.carry_out(change)
        crew.finish()
        recorded = crew.recorded()
        final = crew.final()
        every = {epoch: sorted(range(SIZE)) for epoch in recorded}
        found = {} if crew.samples() == every else {"samples": "lost or repeated"}
        if any(len(seen) != 1 for seen in crew.digests().values()):
            found["ranks"] = "not equal"
    finally:
        crew.close()
    far, allowed = _compared(training, final, recorded)
    found |= {k: f"{far[k]:.1e} > {allowed[k]:.1e}" for k in far if not far[k] <= allowed[k]}
    return found, max(far.values())


def _compared(
    training: Training,
    final: Mapping[str, torch.Tensor],
    recorded: Mapping[int, Mapping[int, Shares]],
) -> tuple[dict[str, float], dict[str, float]]:
    """Distances from one process by kind, and what they may be.

    Narrow types may be as far as a process that adds its batches up in the same pieces is from one
    that does not.
    """
    control = replayed(training, recorded, whole="narrow" not in training.model)
    far = apart(final, control)
    if "narrow" not in training.model:
        return far, dict.fromkeys(far, EXACT)
    rounding = apart(replayed(training, recorded, whole=True), control)
    return far, {kind: 2.0 * rounding[kind] + 1e-6 for kind in far}
