"""Execution of training steps in the worker's current group.

The loader calls `begin` before it yields a micro-batch, and `finish` when the script has processed
it. Between two steps the group can change. During a step the hooks call `backward_finished`, where
gradients are reduced, and `before_optimizer_step`, where parameters change. All of it runs on the
training thread.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.optim.swa_utils import AveragedModel

from elastic import fault_points
from elastic.collectives.backends import is_capturing
from elastic.group.membership import Membership
from elastic.group.transitions import NO_TERMS, GroupTransitions
from elastic.hooks import CHANGED_BETWEEN, parameter_marks, train_here
from elastic.reporting import SampleRecords
from elastic.sample_stream import MicroBatch, StepOutcome
from elastic.state.carried_state import CarriedRows
from elastic.state.training_state import TrainingState
from elastic.step.forward_state import ForwardState
from elastic.step.gradient_reduction import SPARSE, Contribution, Reducer, StepReduction
from elastic.step.optimizer_turns import OptimizerTurns
from elastic.training_errors import BrokenGroupError, CancelledError, UsageError
from elastic.usage_checks import SumCertainty, sum_certainty
from schemas.jobs import StopRule

UNCLEAR_SUM: Final = (
    "the loss ends in a sum; if it sums over the batch, without weights that add up to one, "
    "divide it by the number of its terms: a group takes it as a mean (docs/exactness/loops.md)"
)
SEVERAL_PASSES: Final = "call backward() equally often for each batch of the loader"


class ParameterMarks:
    """Marks by which a change of parameters between two backward passes of a batch is found.

    They are versions and addresses of the parameters. A write into `p.data` changes neither, so
    the first element of each parameter is compared too, in the first batch only: reading it waits
    for the device. Further marks are taken only if a batch had several passes.
    """

    def __init__(self) -> None:
        self._taken: tuple[list[tuple[int, int]], torch.Tensor | None] | None = None
        self._first = True  # no batch is over yet
        self._several = False  # a batch had several backward passes

    def clear(self) -> None:
        """Forget the marks: a batch begins, or an optimizer steps."""
        self._first = self._first and self._taken is None
        self._taken = None

    def take(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Mark the parameters after a backward pass, if another one may follow."""
        if self._first or self._several:
            self._taken = (
                parameter_marks(parameters),
                _first_elements(parameters) if self._first else None,
            )

    def differ(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether marked parameters have changed since `take`."""
        self._several = True
        if self._taken is None:
            return False
        marks, elements = self._taken
        changed = elements is not None and not torch.equal(elements, _first_elements(parameters))
        return changed or marks != parameter_marks(parameters)


def _first_elements(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    found = [parameter.detach().reshape(-1)[:1].float() for parameter in parameters]
    return torch.cat(found).nan_to_num() if found else torch.empty(0)


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
        self.cancelled = transitions.cancelled  # event that cancels waits for peers
        self._training = training
        self._records = records
        self._reducer: Reducer  # set with the next three by `set_reducer`
        self._reduction: StepReduction
        self._forward_state: ForwardState
        self._turns: OptimizerTurns | None = None  # None with a single optimizer
        self.carried: CarriedRows | None = None  # None: no carried state
        self.micro_batch: MicroBatch | None = None  # micro-batch that the script works on
        self._workers = membership.workers  # members when the micro-batch was handed out
        self.outcome = StepOutcome.COMMITTED  # outcome of the running step
        self.in_loop = True  # False in a worker that joins, until it gets its first batch
        self._skip_steps = False
        self._failed: Exception | None = None  # error of a collective of the script in the step
        self._reduced = False
        self._trained = False  # a rank has used gradients in the running step
        self._samples = 0  # samples of this worker in the running step so far
        self._held = self._step_held = 0  # samples that the batch holds, and the step's batches
        self._backwards = 0  # backward passes of the current batch
        self._outside = False  # a backward pass ran outside of the loop since the last batch
        self._stepped_between = False  # an optimizer stepped in the current batch
        self._marks = ParameterMarks()
        self._marked: list[torch.nn.Parameter] = []  # parameters that only optimizers may change
        self._owned: list[torch.Tensor] = []  # the same, and those that nobody trains
        self._at_start: list[tuple[int, int]] = []  # marks of `_owned` before the batch
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters of a recovery
        self._averaged = False  # the script updated averages of parameters in the current batch
        self._skipped_by = 0  # ranks that skipped the current batch
        self._reductions = 0  # number of backward passes whose gradients were reduced
        self._stepped_at: dict[int, int] = {}  # reductions at the last step, by id of the optimizer
        self._step_began_at = 0  # number of reductions before the last step's first
        self._items: float | None = None  # items that the current batch's losses are averaged over
        self._step_items: dict[tuple[int, int], float] = {}  # by micro-batch and place
        self._passes = 0  # passes of the running step so far
        self._stepped = True  # the optimizer stepped since the last backward pass
        self._undo: dict[str, Any] | None = None  # schedulers and scalers before a pass
        self._unscheduled: dict[str, Any] | None = None  # the same before an early schedule
        self._checks_losses = True  # False after the first batch of two samples was checked
        self.counts_steps = True  # True if schedulers count steps, False if they count epochs
        self._sum_warned = False  # the warning about a loss that ends in a sum is printed
        self._warned: set[str] = set()  # warnings already printed

    def set_reducer(
        self, reducer: Reducer, depth: int, turns: OptimizerTurns | None = None
    ) -> None:
        """Set the reducer, the number of prefetched steps, and the turns of several optimizers."""
        self._reducer, self._turns = reducer, turns
        self._reduction = StepReduction(reducer, self._training, self.cancelled)
        tensors = self._training.tensors()
        self._forward_state = ForwardState(tensors)
        limited = {id(each.weight) for each in tensors.limited_embeddings()}  # of forward passes
        self._marked = [each for each in reducer.parameters if id(each) not in limited]
        self._owned = [each for each in tensors.parameters() if id(each) not in limited]
        self._membership.prefetched_steps = depth

    def check_trained(self) -> None:
        """Check before a loop that exactly the parameters and groups of `load` are trained."""
        trained = [id(p) for p in self._training.tensors().trained()]
        summed = [id(p) for p in self._reducer.parameters]
        frozen = self._turns is not None and set(trained) <= set(summed)  # another optimizer steps
        if trained != summed and not frozen:
            problem = "the trained parameters changed after load()"
            remedy = "freeze, unfreeze and add parameters in build_model"
            self._refuse_under_cluster(problem, f"{remedy}: a worker that joins runs only that")
        try:
            self._training.tensors().check_groups()
        except UsageError as error:
            self._refuse_under_cluster(error.message, error.hint)

    def check_size(self, size: int) -> None:
        """Check at the start of an epoch that the data set still has the samples of `load`."""
        if size != (before := self._training.stream.data_size):
            problem = f"the data set has {size} samples, and had {before} at load()"
            self._refuse_under_cluster(problem, "give it all samples before load()")

    def check_tracked(self) -> None:
        """Check at the start of training that all tracked state can be transferred."""
        self._training.averages_are_fixed = True
        try:
            self._training.check_metadata()
        except UsageError as error:
            self._refuse_under_cluster(error.message, error.hint)

    # --- the loader

    def begin(self, micro_batch: MicroBatch, held: int | None = None) -> None:
        """Prepare for `micro_batch`, which the script gets next.

        It holds `held` samples, which are fewer than it should have if some were left out.
        """
        self.micro_batch, self.outcome = micro_batch, StepOutcome.COMMITTED
        self.in_loop = True
        train_here()
        if self.carried is not None:
            self.carried.begin(micro_batch)
        self._reduced, self._workers = False, self._membership.workers
        self._items = None
        self._outside = self._stepped_between = self._averaged = False
        self._backwards = self._skipped_by = 0
        self._marks.clear()
        self._passes = 1 if micro_batch.first else self._passes + 1
        if micro_batch.first:
            self._failed = None
            self._training.losses.last = None
            self._step_items.clear()
            self._samples, self._step_held, self._trained = 0, 0, False
            if self._reducer.has_kept:
                self._reducer.discard()  # the script left its loop between two passes of a step
            if self._membership.group.size > 1:
                self._forward_state.begin()
        self._held = micro_batch.count if held is None or not micro_batch.count else held
        self._samples += micro_batch.count
        self._step_held += self._held
        grouped, reducer = self._membership.group.size > 1, self._reducer
        self._at_start = parameter_marks(self._owned) if grouped else []
        self._unscheduled = None
        reducer.active = grouped or not (micro_batch.first and micro_batch.last)
        reducer.losses.clear()
        reducer.watch_kept = micro_batch.first and not self._stepped and self._turns is None
        checks = self._checks_losses and len(micro_batch.ids) > 1
        reducer.check_loss = self._check_loss if checks else None
        if self._turns is not None:
            full = self._membership.has_full_state
            self._turns.begin(micro_batch, may_break=grouped and full)
        if not micro_batch.last:
            self._undo = self._training.snapshot()  # the script steps its schedulers in every pass

    def finish(self, micro_batch: MicroBatch) -> bool:
        """Conclude `micro_batch`; return True if the script should continue.

        Returns False if the epoch is over, or the job has trained all its samples, or the
        micro-batch is concluded already.
        """
        if self.micro_batch is not micro_batch:
            return False
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
            micro_batch.step,
            micro_batch.cursor_after,
            version,
            self._passes,
            trained=self._trained,
        )

    def finish_last(self) -> None:
        """Conclude the last batch if the script reports the epoch before it asks for another."""
        if self.micro_batch is not None:
            self.finish(self.micro_batch)

    def _conclude(self, micro_batch: MicroBatch) -> StepOutcome:
        peers_wait = self._membership.group.size > 1
        if not self._reduced and micro_batch.last and (peers_wait or self._reducer.has_kept):
            self._contribute_nothing(micro_batch)
        if self._failed is not None and micro_batch.last:
            self._recover(micro_batch, self._failed)
        self._skip_steps, self.micro_batch = False, None
        self._reducer.active = False  # gradients between batches are not reduced
        if self._undo is not None:
            self._training.restore(self._undo)
            self._undo = None
        for parameter, kept in self._kept:
            parameter.data.copy_(kept)
        self._kept = []
        if micro_batch.last:
            self._forward_state.conclude()
        if self._turns is not None:
            self._turns.conclude(micro_batch)
        if micro_batch.last and self._reducer.has_kept:
            self._reducer.discard()
            problem = "the passes of a step call backward() a different number of times"
            raise UsageError(problem, SEVERAL_PASSES)
        outcome, self.outcome = self.outcome, StepOutcome.COMMITTED
        if outcome is not StepOutcome.ROLLED_BACK and micro_batch.last:
            if self._trained:
                self._records.add(micro_batch, self._workers)
            if self._membership.group.size == 1:
                self._records.write()
        return outcome

    def _contribute_nothing(self, micro_batch: MicroBatch) -> None:
        """Join the reduction of a batch that the script skipped, because the peers wait for it.

        The reduction includes gradients of the step's earlier passes. The agreed gradients are then
        applied here, because the script skipped its optimizer step. If a peer did not skip the
        batch, the state is broadcast afterwards, because the script also skipped its clipping and
        scaling.
        """
        reducer = self._reducer
        if self._turns is not None and reducer.has_kept:
            return  # refused by `_conclude`: an optimizer would have to step between two passes
        reducer.active = True
        for parameter in reducer.parameters:
            parameter.grad = None  # the peers cleared the previous batch's gradients
        self._reduce(micro_batch, 0, skipped=True)
        if self._turns is not None:
            return  # no worker had gradients, or an error was raised
        gradients = any(parameter.grad is not None for parameter in reducer.parameters)
        if self.outcome is StepOutcome.COMMITTED and gradients:
            optimizer = self._training.tensors().optimizer
            optimizer.step()
            optimizer.zero_grad()

    @property
    def loss_weight(self) -> float:
        """Samples, or items, over which the loss of the current batch is a mean."""
        held = self._held if self.micro_batch is not None else 1
        return float(held if self._items is None else self._items)

    def set_items(self, items: float) -> None:
        """Record that the losses of the current batch are means over `items` items."""
        if self.micro_batch is None:
            problem = f"weight({items}) was called outside of the loop"
            raise UsageError(problem, "call it in the loop over the loader, before backward()")
        if not items >= 0.0:
            raise UsageError(f"weight({items}) is negative or not a number", "give the items, >= 0")
        if self.micro_batch.count:
            self._items = items

    # --- the hooks

    def backward_finished(self) -> None:
        """Reduce or accumulate the gradients after an outermost backward pass over the model."""
        micro_batch = self.micro_batch
        if micro_batch is None:
            self._outside = True
            return
        if self.outcome is not StepOutcome.COMMITTED:
            self._reducer.discard()  # the group broke in an earlier pass of this batch
            return
        self._refuse_accumulation()
        if self._reducer.found_sparse:
            self._refuse_under_cluster(*SPARSE)
        if is_capturing(self._membership.device):
            self._refuse_under_cluster(
                "a CUDA graph captures backward(), and its replays are not reduced",
                "capture forward passes only, or use torch.compile",
            )
        self._skip_steps = not micro_batch.last
        if self._stepped_between and not (micro_batch.first and micro_batch.last):
            raise UsageError(
                "an optimizer steps between two backward passes of a batch, and this worker takes "
                "its share of the batch in several passes: the later gradients would be those of "
                "parameters that have not stepped yet",
                "lower batch_size or raise max_local_batch, so that shares fit the device at once; "
                "or step all optimizers after the last backward pass",
            )
        place, self._backwards = self._backwards, self._backwards + 1
        if place:
            self._check_further_pass()
        if self._turns is not None:
            self._turns.backward_finished()
        if micro_batch.last:
            self._reduce(micro_batch, place)
        else:
            self._step_items[self._passes, place] = self._items or 0.0
            contribution = Contribution(
                micro_batch=micro_batch,
                items=self._items,
                place=place,
                held=self._held,
                samples=self._samples,
            )
            self._reduction.accumulate(contribution, measures=self._membership.rank == 0)
        if self._turns is None:
            self._marks.take(self._marked)

    def _check_further_pass(self) -> None:
        """Check that the batch may have another backward pass."""
        if self._skipped_by:
            ranks = self._membership.group.size
            problem = f"{self._skipped_by} of {ranks} workers skipped a batch of several backward()"
            raise UsageError(problem, f"{SEVERAL_PASSES}; multiply the loss by 0 to skip one")
        if self._marks.differ(self._marked):
            self.refuse(
                "the script changes parameters between two backward passes of a batch, as SAM does",
                CHANGED_BETWEEN,
            )

    def collective_failed(self, error: Exception) -> None:
        """Drop the step after a failed collective, which has no result.

        The next reduction of the step does it, unless the gradients are reduced already. A backward
        pass may run in a thread of the engine, so the end of the pass or of the batch does it.
        """
        in_backward = torch._C._current_graph_task_id() >= 0  # noqa: SLF001 - no public name
        if self.micro_batch is not None and self._reduced and not in_backward:
            self._recover(self.micro_batch, error)
        else:
            self._failed = error

    def must_skip(self) -> bool:
        """Return True if the optimizer must skip its step in the current batch."""
        self._stepped_between = True
        self._marks.clear()  # the optimizer may change parameters
        return self._skip_steps

    def schedule_steps(self) -> int:
        """Return how many steps a scheduler makes now. In the loop, the batch decides."""
        micro_batch = self.micro_batch
        if micro_batch is None or not micro_batch.last or not self.counts_steps:
            return 1  # the scheduler counts epochs, or its step is undone after the pass
        if not self._reduced and self._unscheduled is None and self._membership.group.size > 1:
            self._unscheduled = self._training.snapshot()
        return self._training.schedule_steps(micro_batch.cursor_before, micro_batch.cursor_after)

    def refuse(self, problem: str, remedy: str) -> None:
        """Refuse an operation in the loop that a group cannot do exactly.

        A worker that always trains alone only gets a warning.
        """
        if self.micro_batch is not None:
            self._refuse_under_cluster(problem, remedy)

    def _refuse_under_cluster(self, problem: str, remedy: str) -> None:
        if self._membership.may_have_peers:
            raise UsageError(problem, remedy)
        if problem not in self._warned:
            self._warned.add(problem)
            sys.stderr.write(f"[ones] a cluster refuses this: {problem}; {remedy}\n")

    def _check_loss(self, loss: torch.Tensor) -> None:
        """Refuse losses that are sums, because they give workers with more samples a higher weight.

        Only the first batch of at least two samples is checked. Uncertain cases are logged.
        """
        micro_batch = self.micro_batch
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
        """Refuse gradients of earlier batches, because joining or recovering workers lack them."""
        self._stepped = False
        if self._reducer.watch_kept and self._reducer.stop_watching():
            self.refuse(
                "the script accumulates gradients over several batches",
                "raise batch_size (`max_local_batch` is the device's limit: larger shares are "
                "taken in passes), and step and zero the gradients in every batch",
            )

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> float:
        """Wait until parameters may change; return the factor for the learning rates."""
        self._stepped = True
        self._trained |= self._membership.group.size == 1
        self._check_reduced(optimizer)
        factor = self._training.before_update(self.cancelled, optimizer)
        turns = self._turns
        if turns is not None and self.micro_batch is not None:
            if turns.origins.include_earlier(optimizer):
                self.refuse(
                    f"an optimizer ({type(optimizer).__name__}) steps on gradients of earlier "
                    "batches",
                    "zero its gradients in every batch, step it after a backward pass of the "
                    "same batch, and raise batch_size instead of accumulating",
                )
            turns.save_copy(optimizer)
        return factor

    def track_averaged(self, averaged: AveragedModel, source: torch.nn.Module) -> bool:
        """Track an AveragedModel of `source`; return False if it is not part of the state."""
        return self._training.track_averaged(averaged, source)

    def before_average(self) -> bool:
        """Wait until averages may change; return False if the batch takes no optimizer step."""
        if self._skip_steps:
            return False
        self._training.await_sent(self.cancelled)
        self._averaged = self.micro_batch is not None
        return True

    def _check_reduced(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step if no backward pass was reduced since the optimizer's last step."""
        if self.micro_batch is None and self._outside:
            self._refuse_under_cluster(
                f"an optimizer ({type(optimizer).__name__}) steps on gradients of a backward pass "
                "outside of the loop over the loader",
                "write `for batch in loader`, or keep one iterator in an epoch: next(iter(loader)) "
                "leaves the loop at once",
            )
        if self._stepped_at.get(id(optimizer), 0) == self._reductions:
            self.refuse(
                f"an optimizer ({type(optimizer).__name__}) steps on gradients that are not summed "
                "over the workers, or a second time on the same ones",
                "compute them by loss.backward() instead of torch.autograd.grad(), and step once "
                "after it instead of in a hook",
            )
        self._stepped_at[id(optimizer)] = self._reductions

    def _reduce(self, micro_batch: MicroBatch, place: int, *, skipped: bool = False) -> None:
        membership = self._membership
        self._reduced = True
        before, self._reductions = self._reductions, self._reductions + 1
        last, optimizers = self._step_began_at, self._training.tensors().optimizers
        stepped = [self._stepped_at.get(id(each), 0) > last for each in optimizers]
        if place == 0:
            self._step_began_at = before
        terms = self._transitions.before_reduction(micro_batch.step) if place == 0 else NO_TERMS
        earlier = [items for (_, at), items in self._step_items.items() if at == place]
        contribution = Contribution(
            micro_batch=micro_batch,
            items=self._items,
            place=place,
            held=self._held,
            samples=self._samples,
            step_held=self._step_held,
            step_items=sum(earlier) + (self._items or 0.0),
            skipped=skipped,
            terms=terms,
            has_full_state=membership.has_full_state,
            stepped=stepped,
        )
        batches = micro_batch.row.local_batches
        source = next((rank for rank, batch in enumerate(batches) if batch), 0)
        try:
            if self._failed is not None:
                raise self._failed
            self._forward_state.exchange(membership.group, source, self.cancelled)
            agreed = self._reduction.run(membership.group, contribution)
            self._trained |= membership.group.size == 1 or any(agreed.used)
            self._skipped_by = agreed.skipped
        except (CancelledError, BrokenGroupError, fault_points.InjectedError) as error:
            self._reducer.discard()
            self._recover(micro_batch, error)
            return
        if self._turns is not None:
            self._turns.check_skipped(agreed.skipped, membership.group.size)
        if place:
            return
        try:
            if self.carried is not None:
                skipped = agreed.skipped > 0
                self.carried.exchange(membership.group, self.cancelled, skipped=skipped)
            self._transitions.after_reduction(micro_batch, terms, agreed)
            if not contribution.has_full_state:
                self._forward_state.limit_arrived()
        except (CancelledError, BrokenGroupError, fault_points.InjectedError) as error:
            self._recover(micro_batch, error)

    def _recover(self, micro_batch: MicroBatch, error: Exception) -> None:
        """Recover from a broken group. Adopt the step if peers finished it, or else drop it."""
        self._skip_steps, self._failed = True, None
        recovered = self._transitions.recover(error, self._roll_back)
        self._forward_state.recovered()
        self._keep_parameters()
        if micro_batch.step <= recovered.step:
            self.outcome = StepOutcome.ADOPTED
            state = recovered.metadata
            if state is not None:
                self._trained = state["samples_done"] > self._training.position.samples_done
            if self._turns is not None:
                self._turns.adopt()
        else:
            self.outcome = StepOutcome.ROLLED_BACK
            if self._unscheduled is not None:
                self._training.restore(self._unscheduled)
            self._undo = self._training.snapshot()

    def _roll_back(self) -> None:
        """Restore the state of the last finished step, or set `has_full_state` to False."""
        self._forward_state.roll_back()
        changed = parameter_marks(self._owned) != self._at_start  # by the script, or by a step
        if self._turns is None:
            kept = not changed and not self._stepped_between
        else:
            kept = self._turns.roll_back() and (self._stepped_between or not changed)
        if not kept or self._averaged:
            self._membership.has_full_state = False

    def _keep_parameters(self) -> None:
        """Keep the parameters of a recovered group on the host until the batch is concluded.

        The script may change them after the step, for example to decay them.
        """
        self._kept = [(each, each.detach().to("cpu", copy=True)) for each in self._owned]

    # --- the end of an epoch

    def end_epoch(self, summary: bytes) -> bytes:
        """Return rank 0's summary of the epoch on every rank, even if members are lost."""
        membership = self._membership
        while True:
            self._transitions.check_left()
            try:
                fault_points.reach("report", rank=membership.rank, version=membership.version)
                self._reduction.end_epoch(membership.group)
                first = membership.group.broadcast_bytes(summary, self.cancelled)
            except (CancelledError, BrokenGroupError, fault_points.InjectedError) as error:
                metadata = self._transitions.recover(error).metadata
                if metadata is not None and metadata["epoch"] >= self._training.position.epoch:
                    return str(metadata["report"]).encode("latin-1")
            else:
                fault_points.reach("agreed", rank=membership.rank, version=membership.version)
                self._records.write()
                if membership.rank == 0:  # rank 0's checkpoint may soon be the only state
                    self._records.write_last_step(membership.own_id)
                return first


class StepView:
    """Read-only view of the running step, for the training loop of a framework."""

    def __init__(
        self, training: TrainingState, membership: Membership, executor: StepExecutor
    ) -> None:
        self._training = training
        self._membership = membership
        self._executor = executor

    @property
    def batch(self) -> MicroBatch | None:
        """Batch that the loop over the loader works on; None outside of the loop."""
        return self._executor.micro_batch

    @property
    def is_dropped(self) -> bool:
        """True if the group broke during the step, which is rolled back and will be repeated."""
        return self._executor.outcome is StepOutcome.ROLLED_BACK

    @property
    def has_state(self) -> bool:
        """True if this worker has the full state after this step. Newcomers need several steps."""
        transfer = self._training.transfer
        if self._membership.has_full_state:
            return True
        return transfer is not None and transfer.is_over(self._training.position.step + 2)

    def gather(self, data: bytes) -> list[bytes]:
        """Return the `data` of all workers in the current batch, by rank; all ranks must call it.

        Workers without samples in the batch contribute nothing. The list is empty outside of the
        loop over the loader. If a member is lost meanwhile, or was lost earlier in the batch, the
        list has only this worker's `data`, and the step is repeated or ends without the member.
        `data` must not be empty.
        """
        batch, group = self.batch, self._membership.group
        if batch is None:
            return []
        if self._executor.outcome is not StepOutcome.COMMITTED:
            return [data]  # peers may be in another batch
        own = data if batch.count else b""
        try:
            found = group.gather_bytes(own, self._executor.cancelled)
        except (BrokenGroupError, CancelledError) as error:
            self._executor.collective_failed(error)
            found = [data]
        return [part for part in found if part]

    @property
    def loss(self) -> torch.Tensor | float | None:
        """Loss of the running step over all workers, once reduced; a tensor has one element.

        It is the mean over the samples of the global batch, or over the items that the script
        passed to `agent.weight`.
        """
        return self._training.losses.last

    @property
    def rate_factor(self) -> float:
        """Factor for the first optimizer's learning rates in the running step."""
        return self._training.lr_state.at(self._training.position.step + 1)

    @property
    def epochs_done(self) -> float:
        """Number of finished epochs of the job, as a fraction that includes the running step."""
        position, batch = self._training.position, self.batch
        cursor = batch.cursor_after if batch is not None else position.cursor
        return position.epoch - 1 + cursor / max(1, self._training.stream.size)

    @property
    def stop_rule(self) -> StopRule | None:
        """Stop rule of the job. Without a cluster the rule is None until `epochs` starts."""
        return self._training.stop_rule

    @property
    def schedule_batch(self) -> int:
        """Number of samples in a scheduler's step."""
        return self._training.schedule_batch

    @property
    def epoch_steps(self) -> int:
        """Number of steps of the running epoch, if the batch size does not change from now on."""
        position = self._training.position
        left = self._training.stream.steps_left(position.cursor, self._training.global_batch)
        return position.epoch_step + left

    @property
    def ends_epoch(self) -> bool:
        """True if the current batch is the last batch of the epoch or of the job."""
        batch, position = self.batch, self._training.position
        if batch is None or not batch.last:
            return False
        rule = self.stop_rule
        limit = rule.samples if rule is not None else None
        done = position.samples_done + batch.cursor_after - position.cursor
        if limit is not None and done >= limit:
            return True
        following = max(1, self._training.schedule.at(batch.step + 1).batch)
        return not self._training.stream.taken(batch.cursor_after, following)

    @contextlib.contextmanager
    def counting_steps(self, counts: bool) -> Iterator[None]:  # noqa: FBT001
        """Let schedulers that step in this context count training steps or epochs.

        Args:
            counts: if True, a scheduler steps once per `schedule_batch` samples. If False, a
                scheduler counts epochs and steps once.
        """
        self._executor.counts_steps = counts
        try:
            yield
        finally:
            self._executor.counts_steps = True

    @property
    def epoch_is_open(self) -> bool:
        """True if an epoch has started and is not reported yet."""
        return self._training.epoch_open

    def planned_steps(self, rule: StopRule) -> int | None:
        """Return the length of the whole job, in steps of `schedule_batch` samples.

        Returns:
            None if the rule sets neither epochs nor samples.
        """
        stream, base = self._training.stream, self._training.schedule_batch
        whole = stream.steps(stream.size, base)
        ends = []
        if rule.epochs is not None:
            ends.append(rule.epochs * whole)
        if rule.samples is not None:
            epochs, rest = divmod(rule.samples, stream.size)
            ends.append(epochs * whole + stream.steps(rest, base))
        return min(ends, default=None)

    def remaining_steps(self) -> int | None:
        """Return the number of steps after the running one, at the current batch size.

        Returns None if the stop rule sets neither epochs nor samples.
        """
        rule, stream, position = self.stop_rule, self._training.stream, self._training.position
        if rule is None or (rule.epochs is None and rule.samples is None):
            return None
        batch = self.batch
        cursor = batch.cursor_after if batch is not None else position.cursor
        size = max(1, self._training.schedule.at(position.step + 2).batch)
        whole, in_epoch = stream.steps_left(0, size), stream.steps_left(cursor, size)
        ends = []
        if rule.epochs is not None:
            ends.append(in_epoch + max(0, rule.epochs - position.epoch) * whole)
        if rule.samples is not None:
            left = rule.samples - position.samples_done - (cursor - position.cursor)
            beyond = left - (stream.size - cursor)
            if beyond <= 0:
                ends.append(max(0, -(-left // size)))
            else:
                epochs, rest = divmod(beyond, stream.size)
                ends.append(in_epoch + epochs * whole + -(-rest // size))
        return min(ends)
