"""A job's losses, the curve that is fitted to them, and where it goes: reckoned, and as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from controlplane.prediction.convergence_curves import KEPT_REPORTS, Form, job_curve
from schemas.ids import JobId
from schemas.jobs import ENDED
from schemas.messages.client import EpochInfo, JobDetail

LEAST_AHEAD: Final = 10  # epochs
FIT_POINTS: Final = 200
FORMS: Final = {Form.SUBLINEAR: "sublinear", Form.EXPONENTIAL: "exponential"}
SHAPES: Final = {  # the same in plain words
    "sublinear": "falls ever more slowly",
    "exponential": "falls by the same share in each epoch",
}


class LossPoint(msgspec.Struct, frozen=True):
    """A loss somewhere in training."""

    epoch: float  # finished epochs
    loss: float


class LossCurve(msgspec.Struct, frozen=True, kw_only=True):
    """What one job reported, and what a fit makes of it."""

    job: JobId
    state: str
    reported: tuple[LossPoint, ...]  # at the ends of epochs; those that are numbers
    left_out: int  # losses that are none
    running: LossPoint | None  # mean of the epoch that runs, in the middle of what is done of it
    batches: tuple[tuple[int, int], ...] = ()  # epoch and global batch at its end
    form: str = ""  # sublinear or exponential; empty: there is no curve
    why: str = ""  # there is none
    error: float | None = None  # root mean square of weighted residuals, a loss
    limit: float | None = None  # that the curve never goes below
    fitted: tuple[LossPoint, ...] = ()  # over the reports that it is made of
    predicted: tuple[LossPoint, ...] = ()  # one for each epoch to come; empty once it has ended


def loss_curve(detail: JobDetail) -> LossCurve:
    """The losses of a job with their fit, whatever the policy.

    The fit is that of policy `slaq` (SLAQ section 2), here over the epochs' losses alone.
    """
    known = {e.epoch: e.train_loss for e in detail.epochs if e.train_loss is not None}
    reported = tuple(
        LossPoint(float(epoch), loss)
        for epoch, loss in sorted(known.items())
        if math.isfinite(loss)
    )
    curve = LossCurve(
        job=detail.summary.job,
        state=detail.summary.state,
        reported=reported,
        left_out=len(known) - len(reported),
        running=_running(detail),
        batches=tuple((e.epoch, e.global_batch) for e in detail.epochs),
    )
    return msgspec.structs.replace(curve, **_fit(reported, _epochs_to_come(detail)))


def in_words(curve: LossCurve) -> list[str]:
    """The same for people: what was reported, the fit, what it foretells."""
    lines = [f"{curve.job}  {curve.state}"]
    if curve.reported:
        last, lowest = curve.reported[-1], min(point.loss for point in curve.reported)
        lines.append(
            f"  loss       {last.loss:.4g} after epoch {last.epoch:.0f}, lowest {lowest:.4g}"
        )
    if curve.running is not None:
        epoch = math.floor(curve.running.epoch) + 1
        lines.append(f"  now        {curve.running.loss:.4g}, mean of epoch {epoch} so far")
    if curve.left_out:
        none = "1 loss that is no number"
        many = none if curve.left_out == 1 else f"{curve.left_out} losses that are no numbers"
        lines.append(f"  left out   {many}")
    if not curve.form:
        return [*lines, f"  curve      none: {curve.why}"]
    used = min(len(curve.reported), KEPT_REPORTS)
    lines.append(
        f"  curve      {SHAPES[curve.form]}, never below {curve.limit:.4g}; fitted to the last "
        f"{used} losses, off by {curve.error:.2g} (root mean square)"
    )
    if curve.predicted:
        next_one, far = curve.predicted[0], curve.predicted[-1]
        text = f"{next_one.loss:.4g} after epoch {next_one.epoch:.0f}"
        if far is not next_one:
            text += f", {far.loss:.4g} after epoch {far.epoch:.0f}"
        lines.append(f"  predicted  {text}")
    return lines


def _fit(reported: Sequence[LossPoint], ahead: int) -> dict[str, object]:
    """The fields of a `LossCurve` that a fit gives, or why there is none."""
    positions, losses = [p.epoch for p in reported], [p.loss for p in reported]
    curves = job_curve(positions, losses)
    form = Form(int(curves.forms[0]))
    if form not in FORMS:
        return {"why": _why_none(form, len(reported))}

    def points(epochs: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[LossPoint, ...]:
        along = curves.at(epochs[None, :])[0]
        return tuple(
            LossPoint(float(at), float(loss)) for at, loss in zip(epochs, along, strict=True)
        )

    first, last = positions[-KEPT_REPORTS:][0], positions[-1]
    return {
        "form": FORMS[form],
        "error": float(curves.error[0]),
        "limit": float(curves.limit[0]),
        "fitted": points(np.linspace(first, last, FIT_POINTS)),
        "predicted": points(last + np.arange(1.0, ahead + 1.0)) if ahead else (),
    }


def _why_none(form: Form, count: int) -> str:
    if form is Form.FLAT:
        return "its losses do not fall"
    return f"a curve needs 3 losses, it has reported {count or 'none'}"


def _epochs_to_come(detail: JobDetail) -> int:
    """As many epochs as were seen, 10 at least, no more than its stop leaves."""
    if detail.summary.state in ENDED:
        return 0
    seen = detail.summary.epoch
    ahead, stop = max(LEAST_AHEAD, len(detail.epochs)), detail.spec.stop
    return ahead if stop is None or stop.epochs is None else max(0, min(ahead, stop.epochs - seen))


def _running(detail: JobDetail) -> LossPoint | None:
    """What telemetry says of the epoch that runs; None if that is older than its begin."""
    loss = detail.summary.train_loss
    last: EpochInfo | None = detail.epochs[-1] if detail.epochs else None
    if loss is None or not math.isfinite(loss) or detail.summary.state in ENDED:
        return None
    if last is None:
        return LossPoint(0.5, loss)
    done = detail.samples_done - last.samples_done
    if done <= 0 or not last.samples_done or not last.epoch_samples:
        return None
    return LossPoint(last.epoch + min(done / last.epoch_samples, 1.0) / 2, loss)
