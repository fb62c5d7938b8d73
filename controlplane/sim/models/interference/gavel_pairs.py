"""Slow-downs that were measured: pairs of jobs that share a GPU, published with Gavel.

`simulation_throughputs.json` of https://github.com/stanford-futuredata/gavel (MIT; Narayanan et
al., OSDI '20) has steps per second alone and beside every other job, for K80, P100 and V100. They
share a *GPU*, so pairs that compete for it alone are slowed down, too: the harshest neighbours.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from controlplane.sim.models.interference.demands import KNOWN_AS
from controlplane.sim.models.interference.rule import TrainingJobs
from controlplane.sim.simulator_errors import TraceError
from schemas.ids import JobId, NodeId

USUAL_GPU: Final = "v100"
LEAST_SPEED: Final = 0.01  # that anybody keeps
# Which of the measured jobs stands for a model that is not among them: by kind, middle batches.
NEAREST: Final[Mapping[str, str]] = {
    "resnet50": "ResNet-50 (batch size 32)", "vgg16": "ResNet-50 (batch size 64)",
    "alexnet": "ResNet-50 (batch size 16)", "inception": "ResNet-50 (batch size 128)",
    "resnext110": "ResNet-18 (batch size 128)", "googlenet": "ResNet-18 (batch size 64)",
    "seq2seq": "Transformer (batch size 64)", "bert": "Transformer (batch size 32)",
    "wlm": "LM (batch size 20)", "ctc": "LM (batch size 5)", "speech": "LM (batch size 80)",
    "recommendation": "Recommendation (batch size 2048)", "yolo": "CycleGAN",
}  # fmt: skip
OTHERS: Final = "A3C"  # stands for whatever nobody knows

Pairs = Mapping[str, Mapping[str, float]]  # job -> neighbour -> share of its speed that is left


def read_pairs(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    """GPU type -> job -> neighbour -> the share of its speed that the job keeps, in (0, 1].

    Pairs that did not fit into the memory of one GPU have a speed of 0 there; for them the worst of
    the job's other neighbours counts.

    Raises:
        TraceError: if it cannot be read, or is another file.
    """
    try:
        table = msgspec.json.decode(path.expanduser().read_bytes())
    except OSError as error:
        raise _refused(path, error.strerror or "cannot be read") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(path, f"is no JSON ({error})") from None
    if not isinstance(table, dict):
        raise _refused(path, "is no table by GPU type")
    found = {
        gpu: _pairs(path, gpu, rows)
        for gpu, rows in table.items()
        if not gpu.endswith("_unconsolidated")
    }
    if USUAL_GPU not in found or OTHERS not in found[USUAL_GPU]:
        raise _refused(path, f"has no pairs of {OTHERS} on {USUAL_GPU}")
    return found


def _pairs(path: Path, gpu: str, rows: Any) -> dict[str, dict[str, float]]:
    if not isinstance(rows, dict):
        raise _refused(path, f"has no table of {gpu}")
    found: dict[str, dict[str, float]] = {}
    for key, row in rows.items():
        name = _single(key)
        if name is None:
            continue
        try:
            alone = float(row["null"])
            beside = {
                other: float(speeds[0])
                for label, speeds in row.items()
                if (other := _single(label)) is not None
            }
        except (KeyError, IndexError, TypeError, ValueError, OverflowError):
            raise _refused(path, f"{gpu}, {name}: no steps per second") from None
        good = [speed for speed in (alone, *beside.values()) if math.isfinite(speed)]
        if alone <= 0.0 or min(good) < 0.0 or len(good) <= len(beside):
            raise _refused(path, f"{gpu}, {name}: a speed is no number from 0 on")
        worst = min((speed for speed in beside.values() if speed > 0.0), default=alone)
        found[name] = {
            other: min(1.0, max(LEAST_SPEED, (speed or worst) / alone))
            for other, speed in beside.items()
        }
    return found


def _single(key: str) -> str | None:
    """The job of a key such as `('A3C', 1)`, if it has one GPU."""
    try:
        name, gpus = ast.literal_eval(key)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return str(name) if gpus == 1 else None


def _refused(path: Path, what: str) -> TraceError:
    hint = "give simulation_throughputs.json as Gavel publishes it"
    return TraceError(f"interference {path}: {what}", hint, "interference")


@dataclass(slots=True)
class MeasuredInterference:
    """The worst neighbour counts, on the worst node, as measured on GPUs of that node's type."""

    pairs: Mapping[str, Pairs]
    jobs: TrainingJobs
    _names: dict[str, str] = field(default_factory=dict)

    def remaining_speed(self, job: JobId, at: Mapping[NodeId, Mapping[JobId, int]]) -> float:
        """What the worst neighbour leaves."""
        mine = self._name(job)
        return min(
            (
                self._kept(self.jobs.gpu(node), mine, self._name(other))
                for node, here in at.items()
                for other in here
                if other != job
            ),
            default=1.0,
        )

    def _kept(self, gpu: str, mine: str, other: str) -> float:
        table = self.pairs.get(gpu) or self.pairs[USUAL_GPU]
        row = table.get(mine, {})
        return row.get(other, min(row.values(), default=1.0))

    def _name(self, job: JobId) -> str:
        family = self.jobs.family(job)
        known = self._names.get(family)
        if known is None:
            known = self._names[family] = measured_name(family, self.pairs[USUAL_GPU])
        return known


def measured_name(family: str, known: Pairs) -> str:
    """The measured job that stands for a family: itself, or the nearest by `NEAREST`.

    Args:
        family: of jobs; traces may call theirs as the file does.
    """
    if family in known:
        return family
    part = next((KNOWN_AS[part] for part in KNOWN_AS if part in family.lower()), "")
    near = NEAREST.get(part, OTHERS)
    return near if near in known else OTHERS
