"""One training step after the other, in whatever group the worker is in at the time.

The loader gives out a micro-batch (`begin`) and says when the script is through with it
(`finish`); between two steps the group may change. In between the hooks call: `backward_over` where
gradients are summed, `before_optimizer_step` where parameters change. All of it runs on the
training thread.
"""

from __future__ import annotations

from typing import Any

from elastic import fault_points
from elastic.group.group_changes import GroupTransitions
from elastic.group.membership import Membership
from elastic.reporting.sample_id_records import SampleRecords
from elastic.samples.micro_batch import MicroBatch, StepOutcome
from elastic.state.training_state import TrainingState
from elastic.step.gradient_bucket import Reducer
from elastic.step.gradient_reduction import Contribution, StepReduction
from elastic.training_errors import BrokenGroupError, CancelledError, UsageError


class StepExecutor:
    """Carries micro-batches through a step; between steps and in trouble the transitions act."""

    def __init__(
        self,
        membership: Membership,
        transitions: GroupTransitions,
        training: TrainingState,
        records: SampleRecords,
    ) -> None:
        """Begin with nothing to train.

        Args:
            membership: whose samples and peers the step has.
            transitions: change the group.
            training: what is trained.
            records: of samples.
        """
        self._membership = membership
        self._transitions = transitions
        self._training = training
        self._records = records
        self._reducer: Reducer | None = None
        self._reduction: StepReduction | None = None
        self._micro_batch: MicroBatch | None = None  # that the script has
        self._outcome = StepOutcome.COMMITTED  # of the step that is under way
        self._skips = False
        self._reduced = False
        self._items: float | None = None  # that the present batch's losses are means over
        self._step_items = 0.0  # the same, of all passes of the step
        self._updated = True  # the optimizer stepped since the last batch that counted
        self._undo: dict[str, Any] | None = None  # schedulers and scalers before a pass

    def use(self, reducer: Reducer, depth: int) -> None:
        """From now on there is something to train.

        Args:
            reducer: sees the gradients.
            depth: steps that a loader draws ahead.
        """
        self._reducer = reducer
        self._reduction = StepReduction(reducer, self._training, self._transitions.called_off)
        self._transitions.use(depth)

    def check_trained(self) -> None:
        """An epoch begins: what is trained must be what gradients are summed for.

        Raises:
            UsageError: if it is not.
        """
        if self._reducer is None or self._membership.group.size == 1:
            return
        trained = self._training.tensors().trained()
        if [id(p) for p in trained] != [id(p) for p in self._reducer.parameters]:
            what = "the parameters that are trained changed after load()"
            raise UsageError(what, "freeze, unfreeze and add parameters in build_model")

    # --- the loader

    def begin(self, micro_batch: MicroBatch) -> None:
        """The script gets `micro_batch`.

        Args:
            micro_batch: of the step that is under way.
        """
        self._micro_batch, self._outcome = micro_batch, StepOutcome.COMMITTED
        self._reduced = False
        self._items, self._step_items = None, 0.0 if micro_batch.first else self._step_items
        if self._reducer is not None:
            several = not (micro_batch.first and micro_batch.last)
            self._reducer.active = self._membership.group.size > 1 or several
            self._reducer.losses.clear()
            self._reducer.watches = micro_batch.first and not self._updated
        if not micro_batch.last:
            self._undo = self._training.snapshot()  # a script steps its schedulers in every pass

    def finish(self, micro_batch: MicroBatch) -> bool:
        """The script is through with `micro_batch`; whether it should go on.

        Args:
            micro_batch: what `begin` got last.

        Returns:
            False where the epoch is over: the script reported, the group is in another epoch by
            now, or the job has all its samples.
        """
        outcome = self._conclude(micro_batch)
        training = self._training
        if not training.epoch_open or micro_batch.epoch != training.position.epoch:
            return False
        if outcome is StepOutcome.ROLLED_BACK or not micro_batch.last:
            return True
        return training.commit_step(
            micro_batch.step, micro_batch.cursor_after, self._membership.version
        )

    def _conclude(self, micro_batch: MicroBatch) -> StepOutcome:
        if not self._reduced and micro_batch.last and self._membership.group.size > 1:
            self._contribute_nothing(micro_batch)
        self._skips, self._micro_batch = False, None
        if self._reducer is not None:
            self._reducer.active = False  # what the script does between batches is its own
        if self._undo is not None:
            self._training.restore(self._undo)
            self._undo = None
        outcome, self._outcome = self._outcome, StepOutcome.COMMITTED
        if outcome is not StepOutcome.ROLLED_BACK and micro_batch.last:
            self._records.add(micro_batch)
            if self._membership.group.size == 1:
                self._records.write()
        return outcome

    def _contribute_nothing(self, micro_batch: MicroBatch) -> None:
        """The script passed over its batch, and the others wait for this worker's gradients.

        What they agree on is then applied here too, as the optimizer's step was passed over; the
        state is sent again to all, because the script's clipping and scaling was passed over too.
        """
        reducer = self._reducer
        if reducer is None:
            return
        reducer.active = True
        self._reduce(micro_batch, skipped=True)
        gradients = any(parameter.grad is not None for parameter in reducer.parameters)
        if self._outcome is StepOutcome.COMMITTED and gradients:
            optimizer = self._training.tensors().optimizer
            optimizer.step()
            optimizer.zero_grad()

    def weigh(self, items: float) -> None:
        """The losses of the present batch are means over `items`, not over its samples.

        Args:
            items: 0 or more.

        Raises:
            UsageError: outside of the loop over the loader, or if `items` is below 0.
        """
        micro_batch = self._micro_batch
        if micro_batch is None or not items >= 0.0:
            what = f"weight({items}) outside of the loop, or no number of items"
            raise UsageError(what, "call it in the loop over the loader, before backward()")
        if micro_batch.count:
            self._step_items += items - (self._items or 0.0)
            self._items = items

    # --- the hooks

    def backward_over(self) -> None:
        """An outermost backward pass reached the model."""
        micro_batch, reduction = self._micro_batch, self._reduction
        if micro_batch is None or reduction is None:
            return
        self._refuse_accumulation()
        self._skips = not micro_batch.last
        if micro_batch.last:
            self._reduce(micro_batch)
        else:
            reduction.accumulate(micro_batch, self._items)

    @property
    def skips(self) -> bool:
        """Whether the optimizer must pass over the present batch."""
        return self._skips

    def schedule_steps(self) -> int:
        """How often a scheduler's step is one: in the loop, as its batch of samples says."""
        micro_batch = self._micro_batch
        if micro_batch is None or not micro_batch.last:
            return 1  # one that counts epochs; or of a pass, undone behind it
        return self._training.schedule_steps(micro_batch.cursor_before, micro_batch.cursor_after)

    def refuse(self, what: str, remedy: str) -> None:
        """The script does what a group cannot do exactly, in the loop.

        Args:
            what: it does.
            remedy: what it may do instead.

        Raises:
            UsageError: unless this worker is alone for ever.
        """
        if self._micro_batch is not None and self._membership.me:
            raise UsageError(what, remedy)

    def _refuse_accumulation(self) -> None:
        """Gradients of earlier batches are no state that workers who join or recover could have."""
        self._updated = False
        reducer = self._reducer
        if reducer is not None and reducer.watches and reducer.stop_watching():
            self.refuse(
                "the script accumulates gradients over several batches",
                "raise batch_size (`max_local_batch` is what fits a device: larger shares are "
                "taken in passes), and step and empty the gradients in every batch",
            )

    def before_optimizer_step(self) -> float:
        """Wait until parameters may change; what the learning rates are multiplied with."""
        self._updated = True
        return self._training.before_update(self._transitions.called_off)

    def _reduce(self, micro_batch: MicroBatch, *, skipped: bool = False) -> None:
        reducer, reduction, membership = self._reducer, self._reduction, self._membership
        if reducer is None or reduction is None:
            return
        self._reduced = True
        terms = self._transitions.before_reduction(micro_batch.step)
        contribution = Contribution(
            micro_batch, terms, membership.has_full_state, skipped, self._items, self._step_items
        )
        try:
            agreed = reduction.run(membership.group, contribution)
        except (CancelledError, BrokenGroupError, fault_points.InjectedError) as error:
            reducer.discard()
            self._recover(micro_batch, error)
            return
        try:
            self._transitions.after_reduction(micro_batch, terms, agreed)
        except (CancelledError, BrokenGroupError) as error:
            self._recover(micro_batch, error)

    def _recover(self, micro_batch: MicroBatch, error: Exception) -> None:
        """The group broke in the step of `micro_batch`, which the others finished or nobody did."""
        self._skips = True
        recovered = self._transitions.recover(error)
        if micro_batch.step <= recovered.step:
            self._outcome = StepOutcome.ADOPTED
        else:
            self._outcome = StepOutcome.ROLLED_BACK
            self._undo = self._training.snapshot()

    # --- the end of an epoch

    def end_epoch(self, summary: bytes) -> bytes:
        """What rank 0 says at the end of an epoch, on every rank, whatever is lost meanwhile.

        Args:
            summary: what this worker would say.
        """
        membership, reduction = self._membership, self._reduction
        while True:
            self._transitions.check_left()
            try:
                fault_points.reach("report", rank=membership.rank, version=membership.version)
                if reduction is not None:
                    reduction.end_epoch(membership.group)
                first = membership.group.broadcast_bytes(summary, self._transitions.called_off)
            except (CancelledError, BrokenGroupError, fault_points.InjectedError) as error:
                metadata = self._transitions.recover(error).metadata
                if metadata is not None and metadata["epoch"] >= self._training.position.epoch:
                    return str(metadata["report"]).encode("latin-1")
            else:
                self._records.write()
                return first
