"""Sweeps as a client is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from controlplane.client import ASHA, Choice, LogUniform, Sweep
from schemas.ids import JobId, NodeId, Seconds, SlotId
from schemas.sweeps import SweepSpec
from schemas.wire.client import Ledger, LedgerUnit, SweepDetail, TrialInfo
from tests.support.builders import A
from tests.support.summaries import summary

PARTITIONS = 4


def sweep(**changes: Any) -> Sweep:
    """ASHA over a rate and a width, but for `changes`."""
    fields: dict[str, Any] = {
        "input_fn": "train:load",
        "model_fn": "train:build",
        "train_fn": "train:train",
        "eval_fn": "train:evaluate",
        "space": {"lr": LogUniform(1e-4, 1e-1), "width": Choice(16, 64)},
        "searcher": ASHA(9),
        "metric": "accuracy",
        "partitions": PARTITIONS,
    }
    return Sweep(**{**fields, **changes})


def trial(number: int, *accuracies: float, **changes: Any) -> TrialInfo:
    """A trial that trained so many epochs and waits for its rung, but for `changes`."""
    start_epochs = changes.get("start_epochs", 0)
    top = max(accuracies, default=None)
    fields: dict[str, Any] = {
        "first_epoch": start_epochs + 1,
        "best_score": top,
        "best_epoch": 0 if top is None else start_epochs + accuracies.index(top) + 1,
        "values": {"lr": 0.01 * (number + 1), "width": 16},
        "state": "waiting",
        "epochs": len(accuracies) + start_epochs,
        "granted": max(1, len(accuracies)),
        "metrics": tuple({"loss": 1.0 - one, "accuracy": one} for one in accuracies),
        "ended_at": tuple(Seconds(100.0 * (at + 1)) for at in range(len(accuracies))),
    }
    return TrialInfo(number=number, **{**fields, **changes})


def detail(*trials: TrialInfo, spec: SweepSpec | None = None, **changes: Any) -> SweepDetail:
    """A running sweep with these trials, but for `changes`."""
    best = max(
        (
            (max(one["accuracy"] for one in each.metrics), -each.number)
            for each in trials
            if each.metrics
        ),
        default=None,
    )
    fields: dict[str, Any] = {
        "best": None if best is None else -best[1],
        "summary": summary(A, state="running", reason="trains on 2 slots", slots=2),
        "spec": spec or sweep().sweep_spec(),
        "trials": trials,
        "trials_total": len(trials),
    }
    return SweepDetail(**{**fields, **changes})


def unit(trial: int, version: int, *, by: int | None = None, digest: str = "") -> LedgerUnit:
    """A unit that counts: visit `version` of `trial`, over the partitions in their order."""
    return LedgerUnit(
        trial=trial,
        values_of=trial if by is None else by,
        version=version,
        epoch=(version - 1) // PARTITIONS + 1,
        partition=(version - 1) % PARTITIONS,
        digest=digest or f"{trial}-{version}",
        node=NodeId("n1"),
        slot=SlotId("n1/0"),
        ended=Seconds(float(version)),
        seconds=1.0,
        metrics={"loss": 0.5},
        samples=48,
    )


def ledger(units: Sequence[LedgerUnit], spec: SweepSpec | None = None) -> Ledger:
    """Of these units."""
    return Ledger(
        job=JobId("a-1"),
        spec=spec or sweep().sweep_spec(),
        snapshot="5ca1ab1e",
        units=tuple(units),
        units_total=len(units),
    )
