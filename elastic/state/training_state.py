"""What a job's training consists of beside its tensors, and how it is handed on or kept."""

from __future__ import annotations

import hashlib
import math
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from elastic.metrics.loss_meter import LossMeter
from elastic.metrics.noise_scale import NoiseMeter
from elastic.metrics.speed import SpeedMeter
from elastic.metrics.stop_rule import StopState, stop_reason
from elastic.reporting.reporter import Report
from elastic.samples.position import TrainingPosition
from elastic.samples.sample_stream import SampleStream
from elastic.state.checkpoint_files import find_checkpoint, load_checkpoint
from elastic.state.checkpoint_writer import CheckpointWriter
from elastic.state.host_copy import copy_to_host
from elastic.state.learning_rate import LrRamp, LrScaling, lr_factor
from elastic.state.metadata import decode_metadata, encode_metadata
from elastic.state.random_state import random_state, restore_random_state
from elastic.state.tensors import TensorState
from elastic.training_errors import UsageError
from schemas.groups import ResumePoint
from schemas.ids import Version
from schemas.jobs import StopRule
from schemas.messages.agent import EpochReported, Suspended
from schemas.messages.worker import Assignment

DIVIDES_BY_GRADIENT = frozenset(
    {"Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "SparseAdam"}
)


class TrainingState:
    """Standing, schedulers, rates, stop rule, checkpoints: one job's, in one worker."""

    def __init__(self, assignment: Assignment | None, report: Report) -> None:
        self.assignment = assignment
        self.position = TrainingPosition()
        self.epoch_open = False  # the script is in the loop of an epoch
        self.losses = LossMeter()
        self.noise = NoiseMeter()
        self.speed = SpeedMeter(time.monotonic())
        self.rule: StopRule | None = assignment.spec.stop if assignment else None
        self.stop = StopState()
        self.why_done = ""
        self.tracked: dict[str, Any] = {}
        self.stream = SampleStream(0, 0)
        self.state: TensorState | None = None
        self.ramp = LrRamp()
        self.lr_rule: LrScaling = "linear"
        self.base_batch = 1
        self.batch: Callable[[], int] = lambda: 1
        self.group: Callable[[], int] = lambda: 0  # version of the present group
        self._timed = -1  # version of the group whose speed is measured
        self._report = report
        self._writer: CheckpointWriter | None = None
        self._resumed: dict[str, Any] = {}  # states of what is tracked later
        self._resumed_groups: list[dict[str, Any]] = []  # of the optimizer
        self._said = b""  # what rank 0 said last at the end of an epoch
        self._last: dict[str, Any] = {}  # the last epoch's report

    def tensors(self) -> TensorState:
        """What is trained.

        Raises:
            UsageError: if nothing is loaded yet.
        """
        if self.state is None:
            raise UsageError("nothing to train yet", "call agent.load(...) first")
        return self.state

    def commit_step(self, step: int, cursor: int, version: int) -> bool:
        """A step is done; whether the job goes on behind it.

        Args:
            step: 1-based, of all epochs.
            cursor: samples of the epoch that are done with it.
            version: of the group that did it.
        """
        before, self.position = self.position, self.position.after_step(step, cursor)
        now = time.monotonic()
        if version != self._timed:
            self._timed = version
            self.speed.regroup(now)
        self.speed.add(self.position.samples_done - before.samples_done, now)
        limit = self.rule.samples if self.rule is not None else None
        return limit is None or self.position.samples_done < limit

    # --- learning rate

    def set_rate(self, lr: float | None) -> None:
        """Give the optimizer this rate at the job's first batch, keeping ratios of its groups."""
        if lr is None or self.state is None:
            return
        optimizer = self.state.optimizer
        own = float(optimizer.defaults["lr"])
        for group in optimizer.param_groups:
            group["lr"] = lr * (float(group["lr"]) / own if own else 1.0)

    def follow_batch(self, batch: int, step: int) -> None:
        """The global batch changes after `step`: the rate follows (ONES section 3.3.2)."""
        to = lr_factor(self.lr_rule, batch, self.base_batch)
        self.ramp = self.ramp.towards(to, step)

    def lr_state(self) -> bytes:
        """How far the rate has followed the batch."""
        ramp = self.ramp
        return msgspec.msgpack.encode([ramp.begin, ramp.to, ramp.since, ramp.doubling])

    def load_lr_state(self, said: bytes) -> None:
        """The reverse."""
        begin, to, since, doubling = msgspec.msgpack.decode(said)
        self.ramp = LrRamp(begin, to, since, doubling)

    def lr_factor(self) -> float:
        """What rates are multiplied with in the step that is under way."""
        return self.ramp.at(self.position.step + 1)

    def lr(self) -> float:
        """The rate in force, of the optimizer's first group."""
        if self.state is None:
            return 0.0
        return float(self.state.optimizer.param_groups[0]["lr"]) * self.lr_factor()

    # --- what travels, or lies in a checkpoint

    def metadata(self) -> dict[str, Any]:
        """All state that is no tensor; part of a handover."""
        state = self.state
        if state is None:
            return {}
        return {
            "structure": copy_to_host(state.structure(state.parameters()[0].device)),
            "hyper": copy_to_host(state.hyperparameters()),
            "random": random_state(),
            "report": self._said.decode("latin-1"),  # bytes would not be read back
            **self._facts(),
        }

    def _facts(self) -> dict[str, Any]:
        position = self.position
        return {
            "epoch": position.epoch - 1,
            "cursor": position.cursor,
            "step": position.step,
            "samples_done": position.samples_done,
            "batch_size": self.batch(),
            "stop": msgspec.to_builtins(self.stop),
            "why_done": self.why_done,
            "ramp": [self.ramp.begin, self.ramp.to, self.ramp.since, self.ramp.doubling],
            "tracked": copy_to_host(
                {name: thing.state_dict() for name, thing in self.tracked.items()}
            ),
        }

    def load_metadata(self, metadata: dict[str, Any]) -> None:
        """Take over what the others have; tensors come beside it."""
        if self.state is None:
            return
        self.stop = msgspec.convert(metadata["stop"], StopState)
        self._said = metadata["report"].encode("latin-1")
        begin, to, since, doubling = metadata["ramp"]
        self.ramp = LrRamp(begin, to, since, doubling)
        self._take_tracked(metadata["tracked"])
        self.state.take_hyperparameters(metadata["hyper"])
        _seed_apart(metadata["random"]["torch"], self.assignment.rank if self.assignment else 0)

    def check_metadata(self) -> None:
        """See to it that what is tracked can be handed over.

        Raises:
            UsageError: if a `state_dict` holds what cannot be read back without executing it.
        """
        try:
            decode_metadata(encode_metadata(self.metadata()))
        except Exception as error:  # noqa: BLE001 - a state_dict may hold anything
            first = str(error).strip().splitlines()[-1][:300]
            what = f"a tracked state cannot be handed over: {first}"
            raise UsageError(
                what, "track only tensors, numbers, text and their containers"
            ) from None

    def _take_tracked(self, states: dict[str, Any]) -> None:
        for name, state in states.items():
            if name in self.tracked:
                self.tracked[name].load_state_dict(state)
            else:
                self._resumed[name] = state

    def snapshot(self) -> dict[str, Any]:
        """Schedulers, scalers and rates as they are."""
        tracked = {name: thing.state_dict() for name, thing in self.tracked.items()}
        hyper = self.state.hyperparameters() if self.state else []
        return {"tracked": copy_to_host(tracked), "hyper": copy_to_host(hyper)}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """The reverse."""
        self._take_tracked(snapshot["tracked"])
        if self.state is not None:
            self.state.take_hyperparameters(snapshot["hyper"])

    def track(self, stateful: dict[str, Any]) -> None:
        """Keep these too; in a resumed job they have their state back when this returns."""
        self.tracked.update(stateful)
        for name, thing in stateful.items():
            if name in self._resumed:
                thing.load_state_dict(self._resumed.pop(name))
        if self.state is not None and self._resumed_groups:
            # a scheduler's constructor sets rates as if it were new
            self.state.take_hyperparameters(self._resumed_groups)
        scaler = stateful.get("scaler")
        if scaler is not None:
            self.losses.scale = scaler.get_scale

    # --- checkpoints

    def resume(self) -> int:
        """Go back to the assignment's checkpoint, if it names one; returns its epoch.

        Raises:
            CheckpointError: if it cannot be used.
        """
        point = self.assignment.group.resume if self.assignment else None
        if self.assignment is None or point is None or self.state is None:
            return 0
        content = load_checkpoint(find_checkpoint(Path(self.assignment.checkpoints), point))
        self.state.model.load_state_dict(content["model"])
        self.state.optimizer.load_state_dict(content["optimizer"])
        self._resumed_groups = self.state.hyperparameters()
        cursor = content.get("cursor", 0)
        self.position = TrainingPosition(
            epoch=content["epoch"] + 1,
            cursor=0 if cursor >= self.stream.size > 0 else cursor,
            step=content["step"],
            samples_done=content["samples_done"],
        )
        self.stop = msgspec.convert(content["stop"], StopState)
        self.why_done = content["why_done"]
        if "ramp" in content:
            begin, to, since, doubling = content["ramp"]
            self.ramp = LrRamp(begin, to, since, doubling)
        self._resumed = dict(content["tracked"])
        restore_random_state(content["random"])
        return int(content["epoch"])

    def open_writer(self, folder: Path) -> None:
        """Checkpoints go to `folder`."""
        self._writer = CheckpointWriter(folder)

    def close_writer(self) -> bool:
        """Wait for what is under way; whether there was a writer."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        return writer is not None

    def _content(self) -> dict[str, Any]:
        if self.state is None:
            return {}
        facts = self._facts()
        states = {
            "model": self.state.model.state_dict(),
            "optimizer": self.state.optimizer.state_dict(),
        }
        return {**facts, "random": random_state(), **copy_to_host(states)}

    # --- epochs

    def concluded(self, numbers: dict[str, float], loss: float | None) -> bytes:
        """What this worker would say of the epoch that ends; rank 0's word is everybody's."""
        return msgspec.msgpack.encode({"metrics": numbers, "loss": loss})

    def end_epoch(self, said: bytes, now: float, *, first: bool) -> None:
        """Take in what rank 0 said of the epoch; if this is rank 0, keep and report it.

        Raises:
            MissingMetricError: if the stop rule looks at a metric that is not there.
        """
        word = msgspec.msgpack.decode(said)
        numbers, loss = word["metrics"], word["loss"]
        self._said = said
        epoch = self.position.epoch
        self.position = position = self.position.next_epoch()
        rule = self.rule or StopRule(epochs=epoch)
        self.why_done = stop_reason(rule, self.stop, epoch, position.samples_done, numbers)
        samples_per_s, seconds = self.speed.of_epoch(now)
        self._last = {
            "epoch": epoch,
            "step": position.step,
            "samples_done": position.samples_done,
            "epoch_samples": self.stream.size,
            "epochs": rule.epochs,
            "samples_per_s": samples_per_s,
            "duration_s": seconds,
            "train_loss": loss if loss is not None and math.isfinite(loss) else None,
            "metrics": {k: v for k, v in numbers.items() if math.isfinite(v)},
            "global_batch": self.batch(),
            "lr": self.lr(),
            "noise_scale": self.noise.scale(),
        }
        if first:
            self.report_again()

    def report_again(self) -> None:
        """Write a checkpoint of the present state, and report the last epoch when it is durable."""
        if self._writer is None or not self._last:
            return
        values = dict(self._last, group=Version(self.group()))
        point = ResumePoint(epoch=values["epoch"], version=Version(self.group()))
        self._writer.write(point, self._content(), lambda: self._report(EpochReported, **values))

    def suspend(self, version: int) -> None:
        """Write a checkpoint of this very step, wait until it is durable, and say so."""
        if self._writer is None:
            return
        position = self.position
        durable = threading.Event()
        point = ResumePoint(epoch=position.epoch - 1, version=Version(version))
        self._writer.write(point, self._content(), durable.set)
        while not durable.wait(timeout=0.2):
            self._writer.check()
        facts = {
            "group": Version(version),
            "epoch": position.epoch - 1,
            "step": position.step,
            "samples_done": position.samples_done,
        }
        self._report(Suspended, **facts)


def rule_for(optimizer: torch.optim.Optimizer, asked: str) -> LrScaling:
    """How the learning rate follows the batch; `auto`: by the kind of optimizer.

    Raises:
        UsageError: if `asked` is no rule.
    """
    if asked == "auto":
        kinds = {kind.__name__ for kind in type(optimizer).__mro__}
        return "sqrt" if kinds & DIVIDES_BY_GRADIENT else "linear"
    if asked not in {"linear", "sqrt", "none"}:
        what = f"lr_scaling {asked!r} is no rule"
        raise UsageError(what, 'choose "auto", "linear", "sqrt" or "none"', "lr_scaling")
    return asked  # type: ignore[return-value] # it is one of the rule's literals


def _seed_apart(state: torch.Tensor, rank: int) -> None:
    """Random numbers that follow from rank 0's at the handover, and differ from rank to rank."""
    digest = hashlib.blake2b(bytes(state.tolist()) + rank.to_bytes(4, "big"), digest_size=8)
    seed = int.from_bytes(digest.digest(), "big") >> 1
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
