"""Reduction of one step: gradients and control words, summed over the group."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final

import torch

from elastic import fault_points
from elastic.batches import MicroBatch
from elastic.collectives.control_words import (
    DIGEST_BYTES,
    FIXED_WORDS,
    STEP_MODULUS,
    AgreedWords,
    ControlWords,
    read_agreed_words,
)
from elastic.collectives.process_group import ProcessGroup
from elastic.group.transitions import ReductionTerms
from elastic.metrics import MEASURE_INTERVAL, StepTimer
from elastic.state.training_state import TrainingState
from elastic.step.gradient_bucket import Reducer
from elastic.training_errors import UsageError

FAULT_POINTS: Final = (("reduce", "reduced"), ("reduce.later", "reduced.later"))


@dataclass(frozen=True, slots=True)
class Contribution:
    """Contribution of this worker to a reduction, beside its gradients."""

    micro_batch: MicroBatch  # last micro-batch of the step
    terms: ReductionTerms
    has_full_state: bool  # include its checksum
    skipped: bool = False  # the script skipped the batch
    items: float | None = None  # that this pass's losses are means over, if stated
    step_items: float = 0.0  # sum over all passes of the step
    place: int = 0  # number of the backward pass in its batch, from 0

    @property
    def counts(self) -> bool:
        """True if it has samples of the step, whatever their weight."""
        return self.micro_batch.count > 0 and not self.skipped

    @property
    def measures_noise(self) -> bool:
        """True if its gradients can be used to estimate the noise scale."""
        return not self.skipped and _measures_noise(self.micro_batch, self.items, self.place)

    @property
    def weight(self) -> float:
        """Weight of the gradients; 0 excludes them."""
        return 0.0 if self.skipped else pass_weight(self.micro_batch, self.items)


def pass_weight(micro_batch: MicroBatch, items: float | None) -> float:
    """Return the weight of a pass's gradients: `items`, or its samples over the global batch.

    With `items`, the sum is divided by all items after the reduction.
    """
    if items is None or not micro_batch.count:
        return micro_batch.weight
    return items


class StepReduction:
    """Reduction of one worker's gradients and words with those of its peers."""

    def __init__(
        self, reducer: Reducer, training: TrainingState, cancelled: threading.Event
    ) -> None:
        self._reducer = reducer
        self._training = training
        self._called_off = cancelled
        self._timer = StepTimer()
        self._loss_sum: torch.Tensor | float | None = None  # sum over samples or items so far
        self._samples = 0  # samples of the step's earlier passes

    def accumulate(
        self, micro_batch: MicroBatch, items: float | None, place: int = 0, *, measures: bool
    ) -> None:
        """Accumulate a pass that is not the step's last one.

        `place` numbers the backward pass in its batch; `measures`: this worker measures noise.
        """
        self._add_loss(micro_batch, items, place)
        if place == 0:
            self._samples = micro_batch.count + (0 if micro_batch.first else self._samples)
        gradients = self._reducer.accumulate(pass_weight(micro_batch, items), place)
        if measures and _measures_noise(micro_batch, items, place):
            if micro_batch.first:
                self._training.noise.begin()
            self._training.noise.add_pass(gradients, micro_batch.count, micro_batch.total)

    def _add_loss(self, micro_batch: MicroBatch, items: float | None, place: int) -> None:
        """Add the losses of a pass, means over samples or `items`; only of the first place."""
        loss = self._training.losses.pass_loss(self._reducer.losses)
        self._reducer.losses.clear()
        weight = micro_batch.count if items is None else items
        if loss is not None and micro_batch.count and place == 0:
            total = (
                loss * weight if weight else torch.zeros_like(loss)
            )  # a mean over nothing is NaN
            self._loss_sum = total if self._loss_sum is None else self._loss_sum + total

    def run(self, group: ProcessGroup, contribution: Contribution) -> AgreedWords:
        """Reduce over `group`, set the parameters' gradients, and return the agreed words.

        Raises:
            BrokenGroupError: if a peer is lost.
            CancelledError: if the wait was cancelled.
            OutOfStepError: if the ranks are not in the same step.
            UsageError: if some workers weigh their losses and others do not.
        """
        if not contribution.skipped:
            self._add_loss(contribution.micro_batch, contribution.items, contribution.place)
        loss_sum, self._loss_sum = self._loss_sum, None
        seconds = 0.0 if contribution.place else self._timer.lap(time.monotonic())
        if group.size == 1:
            return self._finish_alone(contribution, loss_sum, seconds)
        measured = group.rank == 0 and contribution.measures_noise
        bucket, tail = self._fill(contribution, loss_sum, seconds)
        gradients = bucket[: bucket.numel() - tail.numel()]
        micro_batch, noise = contribution.micro_batch, self._training.noise
        if measured and micro_batch.first:  # else its earlier passes were measured
            noise.begin()
            noise.add_pass(gradients, micro_batch.count, micro_batch.total)
        step, points = micro_batch.step, FAULT_POINTS[contribution.place > 0]
        fault_points.reach(points[0], rank=group.rank, step=step, version=group.version)
        began = time.monotonic()  # copying the words waited for the device
        group.all_reduce(bucket, self._called_off)
        self._training.recent_steps.add_reduction(time.monotonic() - began)
        self._training.usage.count_all_reduce(bucket.nbytes, group.size)
        fault_points.reach(points[1], rank=group.rank, step=step, version=group.version)
        agreed = read_agreed_words(tail.tolist(), group.size)
        agreed.check_in_step(group.size, step)
        if contribution.place == 0:
            agreed.check_shares(micro_batch.total)
        if measured and not agreed.skipped:
            noise.add_total(gradients, micro_batch.total)
        scale = _scale(contribution, agreed) if agreed.items > 0.0 else 1.0
        self._reducer.unpack(agreed.used, scale)
        if agreed.samples and contribution.place == 0:
            self._training.losses.add(agreed.loss_sum / (agreed.items or agreed.samples))
        return agreed

    def _fill(
        self, contribution: Contribution, loss_sum: torch.Tensor | float | None, seconds: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        micro_batch = contribution.micro_batch
        digest = bytes(DIGEST_BYTES)
        if contribution.terms.compare_checksums and contribution.has_full_state:
            digest = self._training.tensors().digest()
        weight, place, counts = contribution.weight, contribution.place, contribution.counts
        bucket, tail = self._reducer.pack(weight, FIXED_WORDS, place, counts=counts)
        earlier = 0 if micro_batch.first else self._samples
        words = ControlWords(
            earlier + micro_batch.count,
            contribution.terms.ready,
            seconds,
            digest,
            step=micro_batch.step,
            skipped=contribution.skipped,
            items=contribution.step_items,
        )
        tail[0] = 0.0 if loss_sum is None else loss_sum
        tail[1:FIXED_WORDS] = torch.tensor(words.encode(), dtype=tail.dtype)
        return bucket, tail

    def _finish_alone(
        self, contribution: Contribution, loss_sum: torch.Tensor | float | None, seconds: float
    ) -> AgreedWords:
        """Finish a step without peers; gradients of a single pass stay in place."""
        micro_batch = contribution.micro_batch
        if self._reducer.active:
            bucket, tail = self._fill(contribution, None, seconds)
            if contribution.measures_noise:
                gradients = bucket[: bucket.numel() - tail.numel()]
                self._training.noise.add_total(gradients, micro_batch.total)
            agreed = read_agreed_words(tail.tolist(), 1)
            scale = _scale(contribution, agreed) if agreed.items > 0.0 else 1.0
            self._reducer.unpack(agreed.used, scale)
        if loss_sum is not None:
            weight = contribution.step_items or max(1, micro_batch.total)
            self._training.losses.add(loss_sum / weight)
        return AgreedWords(
            loss_sum=0.0,
            samples=micro_batch.count,
            ready=int(contribution.terms.ready),
            seconds=seconds,
            same=True,
            step=micro_batch.step % STEP_MODULUS,
            ends=0,
            skipped=0,
            items=contribution.step_items,
            used=(),
        )

    def end_epoch(self, group: ProcessGroup) -> None:
        """Check that all ranks of the current group have finished the epoch.

        Raises:
            BrokenGroupError: if a peer is lost.
            CancelledError: if the wait was cancelled.
            OutOfStepError: if some ranks are in a step instead.
        """
        if group.size == 1:
            return
        marker, tail = self._reducer.pack_nothing(FIXED_WORDS)
        tail[1:FIXED_WORDS] = torch.tensor(ControlWords(ends=True).encode(), dtype=tail.dtype)
        group.all_reduce(marker, self._called_off)
        read_agreed_words(tail.tolist(), group.size).check_in_step(group.size, None)


def _scale(contribution: Contribution, agreed: AgreedWords) -> float:
    """Return the factor of the summed gradients of weighted losses.

    Raises:
        UsageError: if this worker's losses have no weights, but others' have.
    """
    if contribution.counts and contribution.items is None:
        problem = "agent.weight(n) was called for some batches of a step and not for others"
        raise UsageError(problem, "call it for every batch, before backward()")
    return 1.0 / agreed.items


def _measures_noise(micro_batch: MicroBatch, items: float | None, place: int) -> bool:
    if items is not None or place:
        return False  # weighted differently, or of another loss
    return micro_batch.count > 0 and micro_batch.step % MEASURE_INTERVAL == 0
