"""State of one worker's training."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.swa_utils import AveragedModel

from elastic.collectives.process_group import ProcessGroup
from elastic.metrics import LossMeter, NoiseMeter, RecentSteps, StopState, UsageMeter
from elastic.sample_stream import (
    RECENT_STEPS,
    DealtStep,
    SampleStream,
    Schedule,
    ScheduleRow,
    TrainingPosition,
)
from elastic.state.carried_state import CarriedState
from elastic.state.learning_rates import LrState
from elastic.state.portions import decode_metadata, encode_metadata
from elastic.state.random_state import random_state, restore_random_state, seed_by_rank
from elastic.state.state_tensors import TensorState, load_optimizer_states, optimizer_states
from elastic.state.tracked_states import TrackedStates, copy_to_host
from elastic.state.transfer import IncomingState, OutgoingState, broadcast_state
from elastic.training_errors import CancelledError, CheckpointError, UsageError
from schemas.jobs import StopRule
from schemas.wire.worker import Assignment

UNTRACKED_AVERAGE: Final = (
    "an AveragedModel is not part of the state: create it between load() and epochs(), of modules "
    "that the job trains, on their device"
)


class TrainingState:
    """State that is sent to newcomers and stored in checkpoints, and the meters of training."""

    def __init__(self, schedule: Schedule, *, stop_rule: StopRule | None) -> None:
        self.position = TrainingPosition()
        self.schedule = schedule
        self.stream = SampleStream(0, 0)
        self.stop_rule = stop_rule
        self.stop = StopState()
        self.why_done = ""
        self.script_schedule_batch: int | None = None  # for schedulers created before `load`
        self.stop_request = ""  # reason why the script ends the job with this epoch
        self.epoch_open = False  # an epoch has started and is not reported yet
        self.unreported: list[dict[str, Any]] = []  # epochs with reports that might be unsent
        self.reported: list[dict[str, Any]] = []  # latest epochs, even if not received
        self.recent: deque[DealtStep] = deque(maxlen=RECENT_STEPS)  # records might miss these
        self.epoch_summary = b""  # rank 0's latest summary of an epoch
        self.lr_state = LrState()
        self.carried: CarriedState | None = None  # None: the script carries no state
        self.transfer: OutgoingState | IncomingState | None = None  # the running transfer
        self.losses = LossMeter()
        self.noise = NoiseMeter()
        self.usage = UsageMeter()
        self.recent_steps = RecentSteps(time.monotonic())
        self.partial_skips = 0  # batches of the epoch that some ranks skipped
        self._tensors: TensorState | None = None
        self._tracked = TrackedStates()
        self._averaged: list[AveragedModel] = []
        self.averages_are_fixed = False  # training began: members must have the same averages
        self._scalers = 0  # number of scalers detected
        self._resumed_groups: list[dict[str, Any]] = []  # parameter groups of the optimizers
        self._loaded: dict[str, Any] | None = None  # the checkpoint, until training starts

    def set_tensors(self, tensors: TensorState, stream: SampleStream) -> None:
        """Set the tensors to train and the stream of samples."""
        self._tensors, self.stream = tensors, stream

    def set_seed(self, seed: int) -> None:
        """Set the seed of the order of samples to the seed of rank 0 or of the checkpoint."""
        self.stream = replace(self.stream, seed=seed)

    def divide_passes(self, epoch_steps: int) -> None:
        """Let an epoch have `epoch_steps` steps of `schedule_batch` samples."""
        if epoch_steps < 1 or not self.stream.shuffled:
            problem = f"epoch_steps {epoch_steps} is below 1"
            if epoch_steps >= 1:
                problem = "epoch_steps was given for data that is not shuffled"
            hint = "give at least one step, and a map-style dataset without columns"
            raise UsageError(problem, hint, "epoch_steps")
        size, data = epoch_steps * self.schedule_batch, self.stream.size
        self.stream = replace(self.stream, size=size, pass_size=data)

    @property
    def is_loaded(self) -> bool:
        """True after `set_tensors`."""
        return self._tensors is not None

    def tensors(self) -> TensorState:
        """Return the tensors to train; before `set_tensors`, raise UsageError."""
        if self._tensors is None:
            raise UsageError("nothing is loaded yet", "call agent.load(...) first")
        return self._tensors

    # --- steps

    def begin_timing(self) -> None:
        """Start to measure the next step and epoch now."""
        self.recent_steps.begin_epoch(time.monotonic())

    @property
    def global_batch(self) -> int:
        """Number of samples of the next or running step, over all workers."""
        return self.schedule.at(self.position.step + 1).batch

    @property
    def epoch_is_over(self) -> bool:
        """True if the running epoch has no further step."""
        left = self.stream.size - self.position.cursor
        if left <= 0 or not self.stream.drop_last:
            return left <= 0
        batch = max(1, self.global_batch)  # 0 if a suspended job is about to leave
        return not self.stream.taken(self.position.cursor, batch)

    def left_early(self) -> str:
        """Return a warning if the script ends an epoch before its last sample, else ""."""
        position, limit = self.position, self.stop_rule.samples if self.stop_rule else None
        if self.epoch_is_over or (limit is not None and position.samples_done >= limit):
            return ""
        of = f"{position.cursor} of {self.stream.size} samples"
        return f"epoch {position.epoch} ends with {of}: the script left its loop"

    def skip_notes(self) -> list[str]:
        """Return notes about batches of the epoch without a backward pass, and forget them.

        Raises:
            UsageError: if the job ends after a number of samples and the epoch trained none.
        """
        notes, at, rule = [], self.position, self.stop_rule
        if 0 < at.skipped < at.cursor:  # `loss_warning` describes an epoch that trained nothing
            notes.append(
                f"{at.skipped} of {at.cursor} samples were in batches without a backward(): these "
                "batches took no step and do not count as trained"
            )
        if self.partial_skips:
            notes.append(
                f"{self.partial_skips} batches were skipped by some workers: the gradients of the "
                "others were applied, and rank 0's state was sent to all"
            )
        self.partial_skips = 0
        if at.skipped and at.skipped == at.cursor and rule is not None and rule.samples is not None:
            problem = f"epoch {at.epoch} trained no sample, and the job ends after {rule.samples}"
            raise UsageError(problem, "call backward() in the loop, or end the job after epochs")
        return notes

    def loss_warning(self, loss: float | None) -> str:
        """Return a warning if an epoch's mean loss (None: not seen) shows no training, else ""."""
        if loss is None:
            return (
                "no backward() of a scalar loss was seen: a loop without one trains nothing; "
                "use report(loss=...) for a loss that backward() does not show"
            )
        remedy = "lower lr, clip gradients, or check for such values in the data"
        return "" if math.isfinite(loss) else f"the training loss is {loss:g}: {remedy}"

    @property
    def schedule_batch(self) -> int:
        """Samples per step for which the script's rate is meant, and in a scheduler's step."""
        return self.script_schedule_batch or max(1, self.lr_state.base_batch)

    def schedule_steps(self, cursor_before: int, cursor_after: int) -> int:
        """Return the number of scheduler steps for the training step that is running.

        A scheduler steps once for each `schedule_batch` samples, so if training steps have half as
        many samples, the scheduler steps in every second one.
        """
        stream, base = self.stream, self.schedule_batch
        following = max(1, self.schedule.at(self.position.step + 2).batch)
        if not stream.taken(cursor_after, following):
            cursor_after = stream.size  # a dropped remainder of the epoch counts as done
        return stream.steps(cursor_after, base) - stream.steps(cursor_before, base)

    def commit_step(
        self, step: int, cursor: int, version: int, passes: int = 1, *, trained: bool = True
    ) -> bool:
        """Record a finished step; return True if the job continues.

        `cursor` is the number of samples of the epoch that are done after the step. `passes` is the
        number of passes that this worker ran in it. `trained` is False if no rank ran backward.
        """
        before = self.position
        self.position = before.after_step(step, cursor, trained=trained)
        samples, row = self.position.samples_done - before.samples_done, self.schedule.at(step)
        self.recent_steps.step_over(
            time.monotonic(),
            version=version,
            shares=row.local_batches,
            rank=row.rank,
            samples=samples,
            passes=passes,
        )
        limit = self.stop_rule.samples if self.stop_rule is not None else None
        return limit is None or self.position.samples_done < limit

    def await_sent(self, cancelled: threading.Event) -> None:
        """Wait until the current portion of the state is sent, and may change."""
        if isinstance(self.transfer, OutgoingState):
            with contextlib.suppress(CancelledError):  # the transfer is no longer needed
                self.transfer.await_sent(cancelled)

    def before_update(self, cancelled: threading.Event, optimizer: torch.optim.Optimizer) -> float:
        """Wait until the current portion is sent; return the factor for the optimizer's rates."""
        self.await_sent(cancelled)
        places = [id(each) for each in self.tensors().optimizers]
        return self.lr_state.at(self.position.step + 1, places.index(id(optimizer)))

    def learning_rate(self) -> float:
        """Return the rate in force for the first optimizer's first group; 0.0 before loading."""
        if self._tensors is None:
            return 0.0
        rate = float(self._tensors.optimizer.param_groups[0]["lr"])
        return rate * self.lr_state.at(self.position.step + 1)

    # --- what the script tracks: schedulers, scalers

    def track(self, stateful: dict[str, Any]) -> None:
        """Track more objects, and restore their states in a resumed job.

        An object with the name `scaler` provides the scale of the losses.
        """
        for name, thing in stateful.items():
            self._tracked.add(name, thing)
        if self._resumed_groups:  # a scheduler's constructor resets the rates
            self.tensors().load_hyperparameters(self._resumed_groups)
        if (scaler := stateful.get("scaler")) is not None:
            self.losses.scale = scaler.get_scale

    def track_scaler(self, scaler: GradScaler) -> None:
        """Track a scaler that is about to scale a loss."""
        if scaler in self._tracked:
            return
        self._scalers += 1
        self._tracked.add(f"scaler {self._scalers}", scaler)
        if self._scalers == 1:
            self.losses.scale = scaler.get_scale

    def track_averaged(self, averaged: AveragedModel, source: nn.Module) -> bool:
        """Track an AveragedModel of `source`, and restore it in a resumed job.

        If it averages other parameters, has them on another device, or is created after the start
        of training, a log line says that it is not tracked.
        """
        if self.averages_are_fixed or not self.tensors().add_averaged(averaged, source):
            sys.stderr.write(f"[ones] {UNTRACKED_AVERAGE}\n")
            return False
        states, place = (self._loaded or {}).get("averaged", ()), len(self._averaged)
        if place < len(states):
            averaged.load_state_dict(states[place])
        self._averaged.append(averaged)
        return True

    @property
    def tracks_weights(self) -> bool:
        """True if a tracked object has as many tensors as the model, as averages of its weights."""
        return self._tracked.most_tensors() >= len(self.tensors().parameters())

    @property
    def rates_may_differ(self) -> bool:
        """True if learning rates may follow from metrics that differ between workers."""
        return self._tracked.follow_metrics

    def snapshot(self) -> dict[str, Any]:
        """Return copies of schedulers, scalers and rates, with which a step can be rolled back."""
        hyper = copy_to_host(self.tensors().hyperparameters())
        return {"tracked": self._tracked.states(), "hyper": hyper}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Restore the result of `snapshot`."""
        self._tracked.load(snapshot["tracked"])
        self.tensors().load_hyperparameters(snapshot["hyper"])

    # --- metadata: travels to newcomers

    def metadata(self) -> dict[str, Any]:
        """Return all state except tensors."""
        tensors = self.tensors()
        tensors.check_groups()
        return {
            "structure": copy_to_host(tensors.structure(tensors.parameters()[0].device)),
            "hyper": copy_to_host(tensors.hyperparameters()),
            "random": random_state(),
            "unreported": [dict(values) for values in self.unreported],
            "recent": msgspec.to_builtins(list(self.recent)),
            "report": self.epoch_summary.decode("latin-1"),  # the decoder refuses bytes
            **self._facts(),
        }

    def _facts(self) -> dict[str, Any]:
        position = self.position
        return {
            "epoch": position.epoch - 1,
            "cursor": position.cursor,
            "step": position.step,
            "samples_done": position.samples_done,
            "epoch_step": position.epoch_step,
            "skipped": position.skipped,
            "batch_size": self.global_batch,
            "seed": self.stream.seed,
            "stop": msgspec.to_builtins(self.stop),
            "why_done": self.why_done,
            "ramp": self.lr_state.state_list(),
            "tracked": self._tracked.states(),
            # a new epoch starts all columns again, so it needs no carried state
            "carried": self.carried.state() if self.carried and not self.epoch_is_over else {},
            "reported": [dict(values) for values in self.reported],
        }

    def load_metadata(self, metadata: dict[str, Any], rank: int) -> None:
        """Load another member's metadata, except step and batch; tensors arrive separately.

        The random numbers of each `rank` of the group differ. The join plan assumed that the steps
        up to the boundary were trained.
        """
        if metadata["step"] == self.position.step:
            counts = {name: metadata[name] for name in ("samples_done", "skipped", "epoch_step")}
            self.position = replace(self.position, **counts)
        self.epoch_summary = metadata["report"].encode("latin-1")
        self.unreported = list(metadata["unreported"])
        self.recent.clear()
        self.recent.extend(msgspec.convert(metadata["recent"], list[DealtStep]))
        self._load_facts(metadata)
        self.tensors().load_hyperparameters(metadata["hyper"])
        seed_by_rank(metadata["random"]["torch"], rank)

    def _load_facts(self, facts: dict[str, Any]) -> None:
        """Load the result of `_facts`, except position and batch; old checkpoints have gaps."""
        self.set_seed(facts.get("seed", self.stream.seed))
        self.stop = msgspec.convert(facts["stop"], StopState)
        self.reported = list(facts.get("reported", []))
        if "ramp" in facts:
            self.lr_state.load_state_list(facts["ramp"])
        self._tracked.load(facts["tracked"])
        if self.carried is not None:
            self.carried.load(facts.get("carried", {}))

    def broadcast(
        self, group: ProcessGroup, source: int, cancel: threading.Event
    ) -> dict[str, Any] | None:
        """Broadcast the state of rank `source`; return its metadata, or None on rank `source`.

        If `cancel` is set, tensors can be partly overwritten.
        """
        own = encode_metadata(self.metadata()) if group.rank == source else b""
        metadata = broadcast_state(self.tensors(), group, source, own, cancel)
        return None if group.rank == source else decode_metadata(metadata)

    def check_metadata(self) -> None:
        """Check that all tracked state can be decoded without executing code."""
        if _is_transferable(self.metadata()):
            return
        tracked = self._tracked.states()
        names = [name for name, state in tracked.items() if not _is_transferable(state)]
        found = ", ".join(names) or "the optimizer"
        hint = "return only tensors, numbers, text and their containers from state_dict()"
        raise UsageError(f"the tracked state of {found} cannot be transferred", hint)

    # --- checkpoints

    def checkpoint(self) -> dict[str, Any]:
        """Return all state including tensors, copied to the host."""
        tensors = self.tensors()
        states = {
            "model": tensors.model.state_dict(),
            "outside": tensors.outside(),
            "averaged": [averaged.state_dict() for averaged in self._averaged],
            **optimizer_states(tensors.named),
        }
        return {**self._facts(), "random": random_state(), **copy_to_host(states)}

    def load_checkpoint(self, content: dict[str, Any]) -> None:
        """Load the result of `checkpoint`.

        If an object is not tracked yet, its state is loaded when `track` is called with the object.
        """
        tensors = self.tensors()
        self._load_tensors(content)
        self._resumed_groups = tensors.hyperparameters()
        self._loaded = content
        cursor = content.get("cursor", 0)
        self.position = TrainingPosition(
            epoch=content["epoch"] + 1,
            cursor=0 if cursor >= self.stream.size > 0 else cursor,
            step=content["step"],
            samples_done=content["samples_done"],
            epoch_step=content.get("epoch_step", 0),
            skipped=content.get("skipped", 0) if cursor < self.stream.size else 0,
        )
        self.why_done = content["why_done"]
        self._load_facts(content)
        restore_random_state(content["random"])

    def restore_loaded(self) -> bool:
        """Load model and optimizer from the checkpoint again; return True if the model had changed.

        A script that sets initial weights after `load` also does so in a resumed job.
        """
        content, self._loaded = self._loaded, None
        if content is None:
            return False
        tensors, loaded = self.tensors(), content["model"]
        pairs = [(value, loaded[name]) for name, value in tensors.model.state_dict().items()]
        pairs += zip(tensors.outside(), content.get("outside", ()), strict=True)
        if all(
            not isinstance(value, torch.Tensor) or torch.equal(value.cpu(), before)
            for value, before in pairs
        ):
            return False
        groups = tensors.hyperparameters()
        self._load_tensors(content)
        tensors.load_hyperparameters(groups)
        return True

    def _load_tensors(self, content: Mapping[str, Any]) -> None:
        tensors, outside = self.tensors(), content.get("outside", ())
        if len(outside) != len(tensors.outside()):
            had, has = len(outside), len(tensors.outside())
            problem = f"the checkpoint has {had} parameters outside of the model, the script {has}"
            raise CheckpointError(problem, "resume with the optimizers that the job began with")
        tensors.model.load_state_dict(content["model"])
        for parameter, value in zip(tensors.outside(), outside, strict=True):
            parameter.data.copy_(value)
        load_optimizer_states(tensors.named, content)


def _is_transferable(state: Any) -> bool:
    try:
        decode_metadata(encode_metadata({"state": state}))
    except Exception:  # noqa: BLE001 - a state_dict may hold anything
        return False
    return True


def initial_training_state(assignment: Assignment | None) -> TrainingState:
    """Return the initial state of a worker; without an assignment, `load` sets the batch."""
    if assignment is None:
        return TrainingState(Schedule(ScheduleRow(1, (1,), 0)), stop_rule=None)
    shares = tuple(member.local_batch for member in assignment.group.members)
    return TrainingState(
        Schedule(ScheduleRow(1, shares, assignment.rank)), stop_rule=assignment.spec.stop
    )
