"""Reports of epochs, sent once the epoch's checkpoint is durable, and telemetry between epochs."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from elastic.metrics import cpu_seconds, stop_reason
from elastic.reporting import Report, identity
from elastic.state.checkpoints import CheckpointWriter, find_checkpoint, load_checkpoint
from elastic.state.training_state import TrainingState
from schemas.epochs import EpochFacts
from schemas.ids import Version
from schemas.jobs import StopRule
from schemas.nodes import ResumePoint
from schemas.wire.agent import EpochReported, StepsReported, Suspended
from schemas.wire.worker import Assignment

# Number of epochs whose reports a checkpoint repeats, because earlier reports may be lost.
MAX_KEPT_REPORTS: Final = 50


class EpochSummary(msgspec.Struct, frozen=True):
    """A worker's results of an epoch. The summary of rank 0 is broadcast."""

    metrics: dict[str, float]
    loss: float | None
    durable: int = 0  # last epoch that this worker knows to be reported
    stop: str = ""  # reason why the script ends the job with this epoch


class EpochReports:
    """Checkpoints and reports of one worker's epochs."""

    def __init__(self, training: TrainingState, report: Report) -> None:
        self._training = training
        self._report = report
        self._writer: CheckpointWriter | None = None
        self._durable = 0  # last epoch with a checkpoint that this worker wrote and reported
        self._missing_reports: list[dict[str, Any]] = []

    def summary(self, metrics: dict[str, float], loss: float | None) -> bytes:
        """Return this worker's encoded summary; `loss` is None if no loss was seen."""
        wish = self._training.stop_request
        return msgspec.msgpack.encode(EpochSummary(metrics, loss, self._durable, wish))

    def open(self, folder: Path) -> None:
        """Write checkpoints to `folder` from now on; the first checkpoint creates the folder."""
        self._writer = CheckpointWriter(folder)

    def close(self) -> bool:
        """Wait until all checkpoints are written; return False if `open` was not called."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        return writer is not None

    def resume(self, folder: Path, point: ResumePoint, version: int) -> int:
        """Load the checkpoint of `point`, or the latest one after it; return the loaded epoch."""
        content = load_checkpoint(find_checkpoint(folder, point, version))
        self._training.load_checkpoint(content)
        self._missing_reports = [
            r for r in self._training.reported if r["facts"]["epoch"] > point.epoch
        ]
        return int(content["epoch"])

    def report_missing_epochs(self) -> None:
        """Report the epochs before the resumed point that the controller did not receive."""
        for values in self._missing_reports:
            self._report_epoch(values)
        self._missing_reports = []

    def end_epoch(
        self, summary: bytes, now: float, *, version: int, first: bool
    ) -> dict[str, float]:
        """End the running epoch with rank 0's encoded `summary`; return rank 0's metrics.

        `now` is in monotonic seconds. `first` is True on rank 0, which writes the checkpoint and
        reports the epoch. If the stop rule's metric is missing, it raises MissingMetricError.
        """
        agreed = msgspec.msgpack.decode(summary, type=EpochSummary)
        training = self._training
        training.epoch_summary = summary
        epoch = training.position.epoch
        trained = training.position.cursor - training.position.skipped
        left_early = bool(training.left_early())
        training.position = position = training.position.next_epoch()
        rule = training.stop_rule or StopRule(epochs=epoch)
        why_done = stop_reason(rule, training.stop, epoch, position.samples_done, agreed.metrics)
        training.why_done = why_done or agreed.stop
        samples_per_s, seconds = training.recent_steps.epoch_speed(now)
        loss = agreed.loss if agreed.loss is not None and math.isfinite(agreed.loss) else None
        facts = EpochFacts(
            epoch=epoch,
            step=position.step,
            samples_done=position.samples_done,
            epoch_samples=training.stream.size,
            samples_per_s=samples_per_s,
            train_loss=loss,
            metrics={k: v for k, v in agreed.metrics.items() if math.isfinite(v)},
            global_batch=training.global_batch,
            lr=training.learning_rate(),
            noise_scale=training.noise.scale(),
            trained_samples=trained,
            left_early=left_early,
            loss_is_not_finite=agreed.loss is not None and not math.isfinite(agreed.loss),
            step_times=training.recent_steps.over_epoch(),
        )
        values = {
            "stated_epochs": rule.epochs,
            "duration_s": seconds,
            "facts": msgspec.to_builtins(facts),
        }
        waiting = [
            known for known in training.unreported if known["facts"]["epoch"] > agreed.durable
        ]
        training.unreported = [*waiting, values]
        training.reported = [*training.reported, {**values, "group": version}][-MAX_KEPT_REPORTS:]
        if first:
            self._write([values], version)
        return agreed.metrics

    def report_again(self, version: int) -> None:
        """Repeat the reports that the previous rank 0 might not have sent, with one checkpoint."""
        self._write(self._training.unreported, version)

    def _write(self, reports: list[dict[str, Any]], version: int) -> None:
        if self._writer is None or not reports:
            return
        reports = [dict(values, group=Version(version)) for values in reports]
        last = reports[-1]["facts"]["epoch"]

        def durable() -> None:
            for values in reports:
                self._report_epoch(values)
            self._durable = max(self._durable, last)

        point = ResumePoint(epoch=last, version=Version(version))
        self._writer.write(point, self._training.checkpoint(), durable)

    def _report_epoch(self, values: dict[str, Any]) -> None:
        facts = msgspec.convert(values["facts"], EpochFacts)
        self._report(EpochReported, **{**values, "facts": facts})

    def suspend(self, version: int) -> None:
        """Write a checkpoint of the current step, wait until it is durable, and report it."""
        if self._writer is None:
            return
        position = self._training.position
        durable = threading.Event()
        point = ResumePoint(epoch=position.epoch - 1, version=Version(version))
        self._writer.write(point, self._training.checkpoint(), durable.set)
        while not durable.wait(timeout=0.2):
            self._writer.check()
        self._report(
            Suspended,
            group=Version(version),
            epoch=position.epoch - 1,
            step=position.step,
            samples_done=position.samples_done,
        )


def steps_report(training: TrainingState, assignment: Assignment, group: Version) -> StepsReported:
    """Return rank 0's telemetry of recent steps, outside of the training thread.

    So the values can belong to two successive steps.
    """
    position = training.position
    usage = training.usage.usage(cpu_seconds(), time.monotonic())
    means, row = training.recent_steps.means, training.schedule.at(position.step + 1)
    if means is not None and (means.version, means.shares) != (group, row.local_batches):
        means = None  # the means are of the previous group or batch
    return StepsReported(
        **identity(assignment),
        group=group,
        epoch=position.epoch,
        step=position.step,
        samples_done=position.samples_done,
        samples_per_s=0.0 if means is None else means.samples_per_s,
        train_loss=training.losses.mean(),
        global_batch=row.batch,
        lr=training.learning_rate(),
        noise_scale=training.noise.scale(),
        cpu_cores=None if usage is None else usage.cpu_cores,
        sent_bytes_per_s=None if usage is None else usage.sent_bytes_per_s,
        group_steps=0 if means is None else training.recent_steps.steps,
        step_times=None if means is None else means.times,
    )
