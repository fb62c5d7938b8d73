"""Execution of training steps in the worker's current group.

The loader hands out a micro-batch (`begin`) and reports when the script has finished it (`finish`);
between two steps the group may change. In between the hooks call `backward_finished`, where
gradients are reduced, and `before_optimizer_step`, where parameters change. All of it runs on the
training thread.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Final

import torch

from elastic import fault_points
from elastic.group.membership import Membership
from elastic.group.transitions import GroupTransitions, ReductionTerms
from elastic.reporting import SampleRecords
from elastic.sample_stream import MicroBatch, StepOutcome
from elastic.state.carried_state import CarriedRows
from elastic.state.training_state import TrainingState
from elastic.step.gradient_reduction import SPARSE, Contribution, Reducer, StepReduction
from elastic.step.optimizer_turns import OptimizerTurns
from elastic.training_errors import BrokenGroupError, CancelledError, UsageError
from elastic.usage_checks import SumCertainty, sum_certainty

UNCLEAR_SUM: Final = (
    "the loss ends in a sum; if it sums over the batch, without weights that add up to one, "
    "divide it by the number of its terms: a group takes it as a mean (docs/exactness.md)"
)


class StepExecutor:
    """Executor of micro-batches; between steps and on failures it calls the transitions."""

    def __init__(
        self,
        membership: Membership,
        transitions: GroupTransitions,
        training: TrainingState,
        records: SampleRecords,
    ) -> None:
        self._membership = membership
        self._transitions = transitions
        self._training = training
        self._records = records
        self._reducer: Reducer | None = None
        self._reduction: StepReduction | None = None
        self._turns: OptimizerTurns | None = None  # None: one optimizer
        self.carried: CarriedRows | None = None  # None: no carried state
        self._micro_batch: MicroBatch | None = None  # micro-batch that the script has
        self._workers = membership.workers  # members when the micro-batch was handed out
        self._outcome = StepOutcome.COMMITTED  # of the step under way
        self._skip_steps = False
        self._reduced = False
        self._items: float | None = None  # that the current batch's losses are means over
        self._step_items: dict[int, float] = {}  # the same for the step's earlier passes, by place
        self._pass_items: dict[int, float] = {}  # the same for the current pass, by place
        self._passes = 0  # passes of the step under way, so far
        self._stepped = True  # the optimizer stepped since the last backward pass
        self._undo: dict[str, Any] | None = None  # schedulers and scalers before a pass
        self._checks_losses = True  # check losses, until the first batch of two samples
        self.counts_steps = True  # schedulers count steps; False: epochs
        self._sum_warned = False  # a loss ended in a sum
        self._warned: set[str] = set()  # warnings already printed

    def set_reducer(
        self, reducer: Reducer, depth: int, turns: OptimizerTurns | None = None
    ) -> None:
        """Set what is trained; `depth`: prefetched steps; `turns`: None with one optimizer."""
        self._reducer, self._turns = reducer, turns
        self._reduction = StepReduction(reducer, self._training, self._transitions.cancelled)
        self._transitions.set_prefetch_depth(depth)

    def check_trained(self) -> None:
        """Check at the start of an epoch that the trained parameters are those that are reduced.

        Raises:
            UsageError: if they are not.
        """
        if self._reducer is None:
            return
        trained = [id(p) for p in self._training.tensors().trained()]
        summed = [id(p) for p in self._reducer.parameters]
        temporarily_frozen = self._turns is not None and set(trained) <= set(
            summed
        )  # temporarily frozen for another optimizer
        if trained != summed and not temporarily_frozen:
            problem = "the trained parameters changed after load()"
            self._refuse_in_group(problem, "freeze, unfreeze and add parameters in build_model")

    def check_tracked(self) -> None:
        """Check at the start of training that all tracked state can be transferred.

        Raises:
            UsageError: if it cannot, unless this worker always trains alone.
        """
        try:
            self._training.check_metadata()
        except UsageError as error:
            if self._membership.own_id:
                raise
            self._warn("a cluster", error.message, error.hint)

    # --- what a framework's own loop asks

    @property
    def current_batch(self) -> MicroBatch | None:
        """Micro-batch that the script has and has not finished."""
        return self._micro_batch

    @property
    def cancelled(self) -> threading.Event:
        """Event that cancels waits for peers."""
        return self._transitions.cancelled

    @property
    def is_dropped(self) -> bool:
        """True if no worker finished the step under way, which is rolled back and repeated."""
        return self._outcome is StepOutcome.ROLLED_BACK

    # --- the loader

    def begin(self, micro_batch: MicroBatch) -> None:
        """Prepare for `micro_batch`, which the script gets next."""
        self._micro_batch, self._outcome = micro_batch, StepOutcome.COMMITTED
        if self.carried is not None:
            self.carried.begin(micro_batch)
        self._reduced, self._workers = False, self._membership.workers
        self._items = None
        self._passes = 1 if micro_batch.first else self._passes + 1
        if micro_batch.first:
            self._training.losses.last = None
            self._step_items.clear()
            self._pass_items.clear()
        for place, items in self._pass_items.items():
            self._step_items[place] = self._step_items.get(place, 0.0) + items
        self._pass_items.clear()
        grouped = self._membership.group.size > 1
        if self._reducer is not None:
            several = not (micro_batch.first and micro_batch.last)
            self._reducer.active = grouped or several
            self._reducer.losses.clear()
            self._reducer.watch_kept = (
                micro_batch.first and not self._stepped and self._turns is None
            )
            checks = self._checks_losses and len(micro_batch.ids) > 1
            self._reducer.check_loss = self._check_loss if checks else None
        if self._turns is not None:
            full = self._membership.has_full_state
            self._turns.begin(micro_batch, may_break=grouped and full)
        if not micro_batch.last:
            self._undo = self._training.snapshot()  # the script steps its schedulers in every pass

    def finish(self, micro_batch: MicroBatch) -> bool:
        """Conclude `micro_batch`; True if the script should continue.

        False if the epoch is over: the script reported it, the group is in another epoch by now, or
        the job has all its samples.
        """
        outcome = self._conclude(micro_batch)
        training = self._training
        if self.carried is not None:
            self.carried.conclude(micro_batch, outcome)
        if not training.epoch_open or micro_batch.epoch != training.position.epoch:
            return False
        if outcome is StepOutcome.ROLLED_BACK or not micro_batch.last:
            return True
        version = self._membership.version
        return training.commit_step(
            micro_batch.step, micro_batch.cursor_after, version, self._passes
        )

    def _conclude(self, micro_batch: MicroBatch) -> StepOutcome:
        if not self._reduced and micro_batch.last and self._membership.group.size > 1:
            self._contribute_nothing(micro_batch)
        self._skip_steps, self._micro_batch = False, None
        if self._reducer is not None:
            self._reducer.active = False  # gradients between batches are not reduced
        if self._undo is not None:
            self._training.restore(self._undo)
            self._undo = None
        if self._turns is not None:
            unused = micro_batch.last and self._reducer is not None and self._reducer.has_kept
            if unused and self._reducer is not None:
                self._reducer.discard()
            self._turns.conclude(micro_batch, unused=unused)
        outcome, self._outcome = self._outcome, StepOutcome.COMMITTED
        if outcome is not StepOutcome.ROLLED_BACK and micro_batch.last:
            self._records.add(micro_batch, self._workers)
            if self._membership.group.size == 1:
                self._records.write()
        return outcome

    def _contribute_nothing(self, micro_batch: MicroBatch) -> None:
        """Take part in the reduction of a batch that the script skipped, for which the peers wait.

        The agreed gradients are then applied here too, because the script skipped the optimizer's
        step. The state is broadcast afterwards, because the script's clipping and scaling was
        skipped, too.
        """
        reducer = self._reducer
        if reducer is None:
            return
        reducer.active = True
        for parameter in reducer.parameters:
            parameter.grad = None  # the peers cleared the previous batch's gradients
        self._reduce(micro_batch, 0, skipped=True)
        if self._turns is not None:
            return  # no worker had gradients, or an error was raised
        gradients = any(parameter.grad is not None for parameter in reducer.parameters)
        if self._outcome is StepOutcome.COMMITTED and gradients:
            optimizer = self._training.tensors().optimizer
            optimizer.step()
            optimizer.zero_grad()

    def set_items(self, items: float) -> None:
        """Set what the current batch's losses are means over: `items` instead of samples.

        Raises:
            UsageError: outside of the loop over the loader, or if `items` is below 0.
        """
        micro_batch = self._micro_batch
        if micro_batch is None or not items >= 0.0:
            problem = f"weight({items}) was called outside of the loop, or is negative"
            raise UsageError(problem, "call it in the loop over the loader, before backward()")
        if micro_batch.count:
            self._items = items

    # --- the hooks

    def backward_finished(self) -> None:
        """Reduce or accumulate gradients after an outermost backward pass over the model."""
        micro_batch, reduction = self._micro_batch, self._reduction
        if micro_batch is None or reduction is None:
            return
        if self._outcome is not StepOutcome.COMMITTED:
            if self._reducer is not None:
                self._reducer.discard()  # the group broke in an earlier pass of this batch
            return
        self._refuse_accumulation()
        if self._reducer is not None and not self._reducer.active and self._reducer.is_sparse():
            self._refuse_in_group(*SPARSE)
        self._skip_steps = not micro_batch.last
        place = self._turns.backward_finished(micro_batch) if self._turns is not None else 0
        if micro_batch.last:
            self._reduce(micro_batch, place)
        else:
            self._pass_items[place] = self._items or 0.0
            measures = self._membership.rank == 0
            reduction.accumulate(micro_batch, self._items, place, measures=measures)

    def must_skip(self) -> bool:
        """Return True if the optimizer must skip its step in the current batch."""
        if self._turns is not None:
            self._turns.note_step()
        return self._skip_steps

    def schedule_steps(self) -> int:
        """Return how many steps a scheduler takes; in the loop, by the samples of the batch."""
        micro_batch = self._micro_batch
        if micro_batch is None or not micro_batch.last or not self.counts_steps:
            return 1  # counts epochs, or is undone after the pass
        return self._training.schedule_steps(micro_batch.cursor_before, micro_batch.cursor_after)

    def refuse(self, problem: str, remedy: str) -> None:
        """Raise for something in the loop that a group cannot do exactly.

        Raises:
            UsageError: unless this worker always trains alone, which warns once.
        """
        if self._micro_batch is None:
            return
        if self._membership.own_id:
            raise UsageError(problem, remedy)
        self._warn("a cluster", problem, remedy)

    def _refuse_in_group(self, problem: str, remedy: str) -> None:
        """Raise a UsageError in a group of several workers; warn once in a group of one."""
        if self._membership.group.size > 1:
            raise UsageError(problem, remedy)
        self._warn("a group of workers", problem, remedy)

    def _warn(self, context: str, problem: str, remedy: str) -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            sys.stderr.write(f"[ones] {context} refuses this: {problem}; {remedy}\n")

    def _check_loss(self, loss: torch.Tensor) -> None:
        """Refuse losses that are sums: they weigh a worker's samples more, the more it has.

        Checked in the first batch of two samples or more: of one sample, a sum is a mean. Uncertain
        cases are logged.
        """
        micro_batch = self._micro_batch
        if micro_batch is None:
            return
        self._checks_losses = False  # only the first batch is checked
        found = sum_certainty(loss, len(micro_batch.ids), self._training.losses.scale())
        if found is SumCertainty.CERTAIN:
            problem = "the loss is a sum over the batch"
            remedy = "divide it by len(inputs), or by the number that agent.weight gets"
            self.refuse(problem, f"{remedy}; with SGD, multiply the learning rate by batch_size")
        if found is SumCertainty.POSSIBLE and not self._sum_warned and self._membership.rank == 0:
            sys.stderr.write(f"[ones] {UNCLEAR_SUM}\n")
            self._sum_warned = True

    def _refuse_accumulation(self) -> None:
        """Refuse gradients of earlier batches, which joining or recovering workers cannot have."""
        self._stepped = False
        reducer = self._reducer
        if reducer is not None and reducer.watch_kept and reducer.stop_watching():
            self.refuse(
                "the script accumulates gradients over several batches",
                "raise batch_size (`max_local_batch` is the device's limit: larger shares are "
                "taken in passes), and step and zero the gradients in every batch",
            )

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> float:
        """Wait until parameters may change; return the factor of the learning rates.

        Raises:
            UsageError: if one of several optimizers uses gradients of earlier batches.
        """
        self._stepped = True
        factor = self._training.before_update(self._transitions.cancelled, optimizer)
        turns = self._turns
        if turns is not None and self._micro_batch is not None:
            if turns.uses_earlier_gradients(optimizer):
                self.refuse(
                    f"an optimizer ({type(optimizer).__name__}) steps on gradients of earlier "
                    "batches",
                    "zero its gradients in every batch, step it after a backward pass of the "
                    "same batch, and raise batch_size instead of accumulating",
                )
            turns.save_copy(optimizer)
        return factor

    def _reduce(self, micro_batch: MicroBatch, place: int, *, skipped: bool = False) -> None:
        reducer, reduction, membership = self._reducer, self._reduction, self._membership
        if reducer is None or reduction is None:
            return
        self._reduced = True
        terms = ReductionTerms(
            ready=False, compare_checksums=False
        )  # later reductions of a step have no terms
        if place == 0:
            terms = self._transitions.before_reduction(micro_batch.step)
        contribution = Contribution(
            micro_batch,
            terms,
            membership.has_full_state,
            skipped,
            self._items,
            self._step_items.get(place, 0.0) + (self._items or 0.0),
            place,
        )
        try:
            agreed = reduction.run(membership.group, contribution)
        except (CancelledError, BrokenGroupError, fault_points.InjectedError) as error:
            reducer.discard()
            self._recover(micro_batch, error)
            return
        if self._turns is not None:
            self._turns.check_skipped(agreed.skipped, membership.group.size)
        if place:
            return
        try:
            if self.carried is not None:
                cancelled, skipped = self._transitions.cancelled, agreed.skipped > 0
                self.carried.exchange(membership.group, cancelled, skipped=skipped)
            self._transitions.after_reduction(micro_batch, terms, agreed)
        except (CancelledError, BrokenGroupError, fault_points.InjectedError) as error:
            self._recover(micro_batch, error)

    def _recover(self, micro_batch: MicroBatch, error: Exception) -> None:
        """Recover after the group broke in the step of `micro_batch`; adopt or drop the step."""
        self._skip_steps = True
        recovered = self._transitions.recover(error, self._roll_back)
        if micro_batch.step <= recovered.step:
            self._outcome = StepOutcome.ADOPTED
            if self._turns is not None:
                self._turns.adopt()
        else:
            self._outcome = StepOutcome.ROLLED_BACK
            self._undo = self._training.snapshot()

    def _roll_back(self) -> None:
        """Restore the state of the last finished step, or note that this worker's is incomplete."""
        if self._turns is not None and not self._turns.roll_back():
            self._membership.has_full_state = False

    # --- the end of an epoch

    def end_epoch(self, summary: bytes) -> bytes:
        """Return rank 0's summary of the epoch on every rank, whatever is lost meanwhile."""
        membership, reduction = self._membership, self._reduction
        while True:
            self._transitions.check_left()
            try:
                fault_points.reach("report", rank=membership.rank, version=membership.version)
                if reduction is not None:
                    reduction.end_epoch(membership.group)
                first = membership.group.broadcast_bytes(summary, self._transitions.cancelled)
            except (CancelledError, BrokenGroupError, fault_points.InjectedError) as error:
                metadata = self._transitions.recover(error).metadata
                if metadata is not None and metadata["epoch"] >= self._training.position.epoch:
                    return str(metadata["report"]).encode("latin-1")
            else:
                fault_points.reach("agreed", rank=membership.rank, version=membership.version)
                self._records.write()
                if membership.rank == 0:  # its checkpoint may soon be the only state
                    self._records.write_last_step(membership.own_id)
                return first
