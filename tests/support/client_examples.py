"""Jobs and sweeps as a client receives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from controlplane.client import ASHA, Choice, LogUniform, Sweep
from schemas.ids import JobId, NodeId, Seconds, SlotId
from schemas.sweeps import SweepSpec
from schemas.wire.client import JobSummary, Ledger, LedgerUnit, SweepDetail, TrialInfo
from tests.support.builders import A


def summary(job: JobId, **changes: Any) -> JobSummary:
    """A queued job of ann's, but for `changes`."""
    fields = {
        "type": "client.job_summary.1", "job": job, "name": job[:1], "user": "ann",
        "state": "queued", "reason": "", "slots": 0, "global_batch": 0, "lr": None, "epoch": 0,
        "samples_per_s": 0.0, "progress": 0.0, "train_loss": None, "metrics": {},
        "submitted_at": 0.0, "queued_s": 0.0, "running_s": 0.0, "rescales": 0, "batch_changes": 0,
    }  # fmt: skip
    return msgspec.convert({**fields, **changes}, JobSummary)


PARTITIONS = 4


def sweep(**changes: Any) -> Sweep:
    """ASHA over a rate and a width, but for `changes`."""
    fields: dict[str, Any] = {
        "input_fn": "train:load", "model_fn": "train:build", "train_fn": "train:train",
        "eval_fn": "train:evaluate",
        "space": {"lr": LogUniform(1e-4, 1e-1), "width": Choice(16, 64)}, "searcher": ASHA(9),
        "metric": "accuracy", "partitions": PARTITIONS,
    }  # fmt: skip
    return Sweep(**{**fields, **changes})


def trial(number: int, *accuracies: float, **changes: Any) -> TrialInfo:
    """A trial that trained so many epochs and waits for its rung, but for `changes`."""
    began_at = changes.get("start_epochs", 0)
    top = max(accuracies, default=None)
    fields: dict[str, Any] = {
        "first_epoch": began_at + 1, "best_score": top,
        "best_epoch": 0 if top is None else began_at + accuracies.index(top) + 1,
        "values": {"lr": 0.01 * (number + 1), "width": 16}, "state": "waiting",
        "epochs": len(accuracies) + began_at, "granted": max(1, len(accuracies)),
        "metrics": tuple({"loss": 1.0 - one, "accuracy": one} for one in accuracies),
        "ended_at": tuple(Seconds(100.0 * (at + 1)) for at in range(len(accuracies))),
    }  # fmt: skip
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
        trial=trial, values_of=trial if by is None else by, version=version,
        epoch=(version - 1) // PARTITIONS + 1, partition=(version - 1) % PARTITIONS,
        digest=digest or f"{trial}-{version}", node=NodeId("n1"), slot=SlotId("n1/0"),
        ended=Seconds(float(version)), seconds=1.0, metrics={"loss": 0.5}, samples=48,
    )  # fmt: skip


def ledger(units: Sequence[LedgerUnit], spec: SweepSpec | None = None) -> Ledger:
    """Of these units."""
    return Ledger(
        job=JobId("a-1"), spec=spec or sweep().sweep_spec(), snapshot="5ca1ab1e",
        units=tuple(units), units_total=len(units),
    )  # fmt: skip
