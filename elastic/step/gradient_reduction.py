"""Reduction of one step: gradients and control words, summed over the group.

The gradients of a step are packed into one flat bucket, which is reduced inside `backward()`. After
`loss.backward()` every parameter has the gradient of the global batch, so the script needs no
changes. DistributedDataParallel is not used, because it cannot change its group (see the README).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import nn

from elastic import fault_points
from elastic.collectives.control_words import (
    DIGEST_BYTES,
    FIXED_WORDS,
    AgreedWords,
    ControlWords,
    read_agreed_words,
)
from elastic.collectives.process_group import ProcessGroup
from elastic.group.transitions import NO_TERMS, ReductionTerms
from elastic.hooks import listen, unlisten
from elastic.metrics import MEASURE_INTERVAL
from elastic.sample_stream import MicroBatch
from elastic.state.state_tensors import dense_strides
from elastic.state.training_state import TrainingState
from elastic.training_errors import UsageError
from elastic.usage_checks import SPARSE_REMEDY

MAX_SAMPLED: Final = 1 << 20  # numbers by which a worker that trains alone measures the noise
SPARSE: Final = ("the model has sparse gradients", SPARSE_REMEDY)


class Reducer:
    """Collector of the gradients of some parameters in one bucket."""

    def __init__(self, parameters: Iterable[nn.Parameter], finished: Callable[[], None]) -> None:
        """Hook `parameters`; call `finished` after each outermost pass that reached one of them."""
        self.parameters = [p for p in parameters if p.requires_grad]
        self._scalars = sum(p.numel() for p in self.parameters)
        self._finished = finished
        self._fired = [False] * len(self.parameters)
        self._any = False
        self._prior: dict[int, torch.Tensor] = {}  # gradients that the script kept, by index
        # Sum over the step's passes, and the parameters used in them, by `place`.
        self._kept: dict[int, tuple[torch.Tensor, list[bool]]] = {}
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []  # gradients that the script gets, parts of `_flat`
        self._unshared: tuple[int, int] = (0, 0)  # result of `_references` for a new bucket
        self.active = False  # False in a group of one with a single pass
        self.watch_kept = False  # look for nonzero gradients that the script kept
        self.found_kept = False
        self.found_sparse = False  # a pass had sparse gradients
        self.losses: list[torch.Tensor] = []  # losses of this step on which backward() ran
        self.check_loss: Callable[[torch.Tensor], None] | None = None  # called before a pass
        for index, parameter in enumerate(self.parameters):
            parameter.register_hook(partial(self._before, index))  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._after, index)
            )
        listen(self)

    def close(self) -> None:
        """Stop collecting gradients."""
        self.active = False
        unlisten(self)

    def _before(self, index: int, _: torch.Tensor) -> None:
        kept = self.parameters[index].grad
        if self.watch_kept and not self.found_kept and kept is not None:
            self.found_kept = bool(kept.any())
        if self.active and not self._fired[index]:
            self._set_aside(index)

    def _set_aside(self, index: int) -> None:
        """Set aside a gradient that the script kept, because it is not part of this step."""
        parameter = self.parameters[index]
        kept = parameter.grad
        if kept is not None:
            self._prior[index] = kept.clone() if self._owns(kept) else kept
            parameter.grad = None

    def _after(self, index: int, _: torch.Tensor) -> None:
        self._any = True
        self._fired[index] = self.active
        grad = self.parameters[index].grad
        if grad is not None and grad.layout is not torch.strided:
            self.found_sparse = True

    def _owns(self, tensor: torch.Tensor) -> bool:
        flat = self._flat
        return (
            flat is not None
            and tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        )

    def backward_finished(self) -> None:
        """Call `finished` if the outermost backward pass reached a parameter."""
        if self._any:
            self._any = False
            self._finished()

    def stop_watching(self) -> bool:
        """Unset `watch_kept`; return True if kept gradients were found while it was set."""
        found, self.found_kept, self.watch_kept = self.found_kept, False, False
        return found

    def sample(self) -> torch.Tensor:
        """Return a copy of some numbers of all gradients, shape (numbers,)."""
        stride, parts = max(1, self._scalars // MAX_SAMPLED), []
        for parameter in self.parameters:
            whole = parameter.grad
            if whole is None or whole.layout is not torch.strided:
                whole = torch.zeros_like(parameter)
            parts.append(whole.detach().reshape(-1)[::stride].float())
        return torch.cat(parts)

    # --- calls of a step's reduction

    def accumulate(self, weight: float, place: int = 0) -> torch.Tensor:
        """Add this pass's gradients, times `weight`, to the sum of `place` in the step.

        The optimizer finds zeros. Returns this pass's gradients times `weight`, shape (scalars,),
        which are valid until the next pass.
        """
        flat = self._filled(weight)
        if place in self._kept:
            gradients, before = self._kept[place]
            self._kept[place] = gradients.add_(flat), self._used(before)
        else:
            self._kept[place] = flat.clone(), [*self._fired]
        self._empty_grads()
        return flat[: self._scalars]

    def _used(self, before: Sequence[bool]) -> list[bool]:
        return [a or b for a, b in zip(before, self._fired, strict=True)]

    @property
    def has_kept(self) -> bool:
        """True if some accumulated gradients are not packed yet."""
        return bool(self._kept)

    def pack(
        self, weight: float, extra: int, place: int = 0, *, counts: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bucket with the step's gradients, and a view of its tail.

        The bucket has the gradients of this pass, times `weight`, plus those that `accumulate`
        summed for `place`. Its shape is (scalars + extra + parameters,); the tail has the last
        `extra + parameters` numbers. If `counts` is True, the pass belongs to the step even with
        weight 0, so its zeros are gradients; the default is True if the weight is not 0.
        """
        flat = self._filled(weight, extra)
        nothing = [False] * len(self.parameters)
        gradients, before = self._kept.pop(place, (None, nothing))
        if gradients is not None:
            flat[: gradients.numel()].add_(gradients)
        counted = any(before) or (weight != 0 if counts is None else counts)
        used = self._used(before) if counted else nothing
        end = self._scalars
        flat[end + extra :].copy_(torch.tensor([float(u) for u in used], dtype=flat.dtype))
        return flat, flat[end:]

    def pack_nothing(self, extra: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a new bucket of zeros with the shape of `pack`, and its tail."""
        flat = torch.zeros_like(self._allocated(extra))
        return flat, flat[self._scalars :]

    def unpack(self, used: Sequence[bool], scale: float = 1.0) -> None:
        """Set each used parameter's gradient to its part of the reduced bucket, times `scale`."""
        if scale != 1.0 and self._flat is not None:
            self._flat[: self._scalars].mul_(scale)
        for index, parameter in enumerate(self.parameters):
            if not used[index]:
                parameter.grad = self._prior.get(index)
                continue
            view = self._views[index]
            grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
            if index in self._prior:
                grad = grad + self._prior[index]
            parameter.grad = grad
        self._clear()

    def discard(self) -> None:
        """Discard the gradients and the bucket, to which an abandoned operation may still write."""
        self._kept, self._flat, self._views = {}, None, []
        self._empty_grads()

    def _clear(self) -> None:
        self._prior = {}
        self._fired = [False] * len(self.parameters)

    def _empty_grads(self) -> None:
        """Set gradients to zeros, not None, because a scaler needs gradients in a skipped step."""
        for index, parameter in enumerate(self.parameters):
            if index in self._prior:
                parameter.grad = self._prior[index]
            elif parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter)
        self._clear()

    def _filled(self, weight: float, extra: int = 0) -> torch.Tensor:
        for index in range(len(self.parameters)):
            if not self._fired[index]:
                self._set_aside(index)  # before the bucket's part for it is overwritten
        if self._flat is not None and self._references(self._flat) != self._unshared:
            self._flat = None  # the script kept a gradient, which must not change
        flat = self._allocated(extra)
        sources, targets = [], []
        for index, parameter in enumerate(self.parameters):
            grad = parameter.grad
            if weight and self._fired[index] and grad is not None:
                if grad.layout is not torch.strided:
                    raise UsageError(*SPARSE)
                sources.append(grad)
                targets.append(self._views[index])
            else:
                self._views[index].zero_()
        if sources:
            torch._foreach_copy_(targets, sources)
            if weight != 1.0:
                torch._foreach_mul_(targets, weight)
        return flat

    def _allocated(self, extra: int) -> torch.Tensor:
        size = self._scalars + extra + len(self.parameters)
        flat = self._flat
        if flat is None or flat.numel() < size:
            first = self.parameters[0]
            wide = torch.float64 if any(p.dtype is torch.float64 for p in self.parameters) else None
            flat = torch.zeros(size, dtype=wide or torch.float32, device=first.device)
            self._flat, self._views, start = flat, [], 0
            for parameter in self.parameters:
                strides = dense_strides(parameter)
                self._views.append(flat.as_strided(parameter.shape, strides, start))
                start += parameter.numel()
            self._unshared = self._references(flat)
        return flat

    def _references(self, flat: torch.Tensor) -> tuple[int, int]:
        """Return the numbers of references to the views, and of tensors that share their memory."""
        storage = flat.untyped_storage()
        shared: int = torch._C._storage_Use_Count(storage._cdata)  # noqa: SLF001
        return sum(map(sys.getrefcount, self._views)), shared


FAULT_POINTS: Final = (("reduce", "reduced"), ("reduce.later", "reduced.later"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """Contribution of a worker's backward pass to a step, in addition to the gradients."""

    micro_batch: MicroBatch
    items: float | None  # items that this pass's losses are averaged over, if set
    place: int  # number of the backward pass in its batch, from 0
    held: int  # samples that this batch holds, 0 if it only keeps the loop running
    samples: int = 0  # samples of this worker in the step so far, including this batch
    step_held: int = 0  # samples that its batches hold
    step_items: float = 0.0  # sum of `items` over all passes of the step
    skipped: bool = False  # the script skipped the batch
    terms: ReductionTerms = NO_TERMS
    has_full_state: bool = False  # if True, the checksum of the state is included
    stepped: Sequence[bool] = ()  # per optimizer: True if it stepped after the last reduction

    @property
    def counts(self) -> bool:
        """True if this pass has samples and was not skipped, whatever the weight of the samples."""
        return self.micro_batch.count > 0 and not self.skipped

    @property
    def is_mean(self) -> bool:
        """True if the gradients are the mean over the samples of the first loss."""
        whole = self.held == self.micro_batch.count
        return self.items is None and not self.place and self.counts and whole

    @property
    def measures_noise(self) -> bool:
        """True if the gradients are used to estimate the noise scale, unless of a single pass."""
        return self.is_mean and self.micro_batch.step % MEASURE_INTERVAL == 0

    @property
    def weight(self) -> float:
        """Weight of the gradients, 0 without samples: `items`, or samples / global batch.

        With `items`, the summed gradients are divided by all workers' items after the reduction. If
        batches hold fewer samples than they should, they are divided by the part that they hold.
        """
        if not self.counts:
            return 0.0
        return self.held / self.micro_batch.total if self.items is None else self.items


class StepReduction:
    """Reduction of one worker's gradients and control words with those of its peers."""

    def __init__(
        self, reducer: Reducer, training: TrainingState, cancelled: threading.Event
    ) -> None:
        self._reducer = reducer
        self._training = training
        self._cancelled = cancelled
        self._lap = (0.0, 0.0)  # time of the last reduction, last result of `_step_s`
        self._loss_sum: torch.Tensor | float | None = None  # sum over samples or items so far

    def accumulate(self, contribution: Contribution, *, measures: bool) -> None:
        """Accumulate a pass that is not the step's last; `measures`: measure the noise scale."""
        micro_batch = contribution.micro_batch
        self._add_loss(contribution)
        gradients = self._reducer.accumulate(contribution.weight, contribution.place)
        if measures and contribution.measures_noise:
            self._measure_pass(gradients, micro_batch)

    def _measure_pass(self, gradients: torch.Tensor, micro_batch: MicroBatch) -> None:
        noise = self._training.noise
        if micro_batch.first:
            noise.begin()
        noise.add_pass(gradients, micro_batch.count, micro_batch.total)

    def _add_loss(self, contribution: Contribution) -> None:
        """Add the losses of the pass at place 0. These losses are means over samples or items."""
        loss = self._training.losses.pass_loss(self._reducer.losses)
        self._reducer.losses.clear()
        count, items = contribution.micro_batch.count, contribution.items
        weight = contribution.held if items is None else items
        if loss is not None and count and contribution.place == 0:
            total = loss * weight if weight else torch.zeros_like(loss)  # a mean over 0 is NaN
            self._loss_sum = total if self._loss_sum is None else self._loss_sum + total

    def run(self, group: ProcessGroup, contribution: Contribution) -> AgreedWords:
        """Reduce over `group`, set the parameters' gradients, and return the agreed words.

        If the ranks are not in the same step, it raises OutOfStepError.
        """
        if not contribution.skipped:
            self._add_loss(contribution)
        loss_sum, self._loss_sum = self._loss_sum, None
        seconds = 0.0 if contribution.place else self._step_s(time.monotonic())
        if group.size == 1:
            return self._finish_alone(contribution, loss_sum, seconds)
        measured = group.rank == 0 and contribution.measures_noise
        words = self._words(contribution, seconds, group.size)
        bucket, gradients, tail = self._pack(contribution, words, loss_sum)
        micro_batch = contribution.micro_batch
        if measured and micro_batch.first:  # otherwise only the earlier passes are measured
            self._measure_pass(gradients, micro_batch)
        step, points = micro_batch.step, FAULT_POINTS[contribution.place > 0]
        fault_points.reach(points[0], rank=group.rank, step=step, version=group.version)
        began = time.monotonic()  # the device is idle now: copying the words waited for it
        group.all_reduce(bucket, self._cancelled)
        self._training.recent_steps.add_reduction(time.monotonic() - began)
        self._training.usage.count_all_reduce(bucket.nbytes, group.size)
        fault_points.reach(points[1], rank=group.rank, step=step, version=group.version)
        agreed = read_agreed_words(tail.tolist(), group.size)
        agreed.check_in_step(group.size, step)
        if contribution.place == 0:
            agreed.check_shares(micro_batch.total)
        if measured and not agreed.skipped:
            self._training.noise.add_total(gradients, micro_batch.total)
        self._unpack(contribution, agreed)
        if agreed.samples and contribution.place == 0 and not agreed.skipped:
            self._training.losses.add(agreed.loss_sum / (agreed.items or agreed.held or 1))
        return agreed

    def _step_s(self, now: float) -> float:
        """Return the seconds since the last reduction, at most twice the previous result."""
        then, before = self._lap
        took = now - then if then else 0.0
        self._lap = now, min(took, 2 * before) if before else took
        return self._lap[1]

    def _words(self, contribution: Contribution, seconds: float, ranks: int) -> ControlWords:
        micro_batch, terms = contribution.micro_batch, contribution.terms
        compares = terms.compare_checksums and contribution.has_full_state and ranks > 1
        rates, tensors = terms.compare_rates and ranks > 1, self._training.tensors()
        return ControlWords(
            contribution.samples,
            terms.ready,
            seconds,
            tensors.digest() if compares else bytes(DIGEST_BYTES),
            tensors.rates_digest(contribution.stepped) if rates else bytes(DIGEST_BYTES),
            step=micro_batch.step,
            skipped=contribution.skipped,
            items=contribution.step_items,
            held=contribution.step_held,
        )

    def _pack(
        self, contribution: Contribution, words: ControlWords, loss_sum: torch.Tensor | float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the bucket, and views of its gradients and of its tail."""
        weight, place, counts = contribution.weight, contribution.place, contribution.counts
        bucket, tail = self._reducer.pack(weight, FIXED_WORDS, place, counts=counts)
        tail[0] = 0.0 if loss_sum is None else loss_sum
        tail[1:FIXED_WORDS] = torch.tensor(words.encode(), dtype=tail.dtype)
        return bucket, bucket[: bucket.numel() - tail.numel()], tail

    def _unpack(self, contribution: Contribution, agreed: AgreedWords) -> None:
        """Set the parameters' gradients; those of weighted losses are divided by all items."""
        weighted = agreed.items > 0.0
        if weighted and contribution.counts and contribution.items is None:
            problem = "agent.weight(n) was called for some batches of a step and not for others"
            raise UsageError(problem, "call it for every batch, before backward()")
        scale = 1.0 / agreed.items if weighted else agreed.samples / (agreed.held or 1)
        self._reducer.unpack(agreed.used, scale)

    def _finish_alone(
        self, contribution: Contribution, loss_sum: torch.Tensor | float | None, seconds: float
    ) -> AgreedWords:
        """Finish a step without peers; gradients of a single pass stay in place."""
        micro_batch, words = contribution.micro_batch, self._words(contribution, seconds, 1)
        if self._reducer.active:
            _, gradients, tail = self._pack(contribution, words, None)
            if contribution.measures_noise:
                self._training.noise.add_total(gradients, micro_batch.total)
            self._unpack(contribution, read_agreed_words(tail.tolist(), 1))
        elif contribution.is_mean and micro_batch.step % MEASURE_INTERVAL in {0, 1}:
            self._training.noise.add_alone(
                self._reducer.sample(), micro_batch.step, micro_batch.total
            )
        if loss_sum is not None:
            weight = contribution.step_items or max(1, contribution.step_held)
            self._training.losses.add(loss_sum / weight)
        return read_agreed_words([0.0, *words.encode()], 1)

    def end_epoch(self, group: ProcessGroup) -> None:
        """Check that all ranks of the current group have finished the epoch."""
        if group.size == 1:
            return
        marker, tail = self._reducer.pack_nothing(FIXED_WORDS)
        tail[1:FIXED_WORDS] = torch.tensor(ControlWords(ends=True).encode(), dtype=tail.dtype)
        group.all_reduce(marker, self._cancelled)
        read_agreed_words(tail.tolist(), group.size).check_in_step(group.size, None)
