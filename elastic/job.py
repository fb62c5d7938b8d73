"""The handle that a training script holds."""

from __future__ import annotations

import atexit
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import torch
from torch import nn
from torch.utils.data import Dataset

from elastic import checkpoint
from elastic.channel import Channel
from elastic.errors import UsageError
from elastic.files import AppendFile
from elastic.loader import ElasticLoader
from elastic.losses import LossMeter
from elastic.progress import Speed, StopState, stop_reason
from elastic.sampler import SampleStream
from schemas.codec import ASSIGNMENT
from schemas.groups import ResumePoint
from schemas.jobs import StopRule
from schemas.messages.agent import (
    EpochReported,
    GroupFormed,
    ScriptReport,
    StepsReported,
    TrainingFinished,
    WorkerReady,
)
from schemas.messages.worker import Assignment

WORKER: Final = "ONES_WORKER"  # the worker's folder, when an agent started the process
R = TypeVar("R", bound=ScriptReport)


@dataclass(slots=True)
class _Standing:
    """Where training stands; everything that a checkpoint has to bring back."""

    epoch: int = 1  # the running one
    cursor: int = 0  # samples of it that are done
    step: int = 0  # optimizer steps since the job began
    samples_done: int = 0
    local_batches: tuple[int, ...] = (1,)
    rank: int = 0


class ScalingAgent:
    """One worker of a job: under a cluster what the job file says, else what the script says."""

    def __init__(self, assignment: Assignment | None, folder: Path | None) -> None:
        self._assignment = assignment
        self._folder = folder
        self._channel = Channel(assignment, folder) if assignment and folder else None
        if self._channel is not None:
            atexit.register(self._channel.close)
        self._standing = _Standing(rank=assignment.rank if assignment else 0)
        self._rule: StopRule | None = assignment.spec.stop if assignment else None
        self._stop = StopState()
        self._tracked: dict[str, Any] = {}
        self._losses = LossMeter()
        self._speed = Speed(time.monotonic())
        self._why_done = ""
        self._epoch_open = False
        self._writer: checkpoint.Writer | None = None
        self._samples: AppendFile | None = None
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._stream = SampleStream(0, 0)
        self._seed = 0
        self._resumed_tracked: dict[str, Any] = {}
        self._resumed_groups: list[dict[str, Any]] = []  # of the optimizer

    @classmethod
    def from_env(cls, seed: int = 0) -> ScalingAgent:
        """The agent of this process, with all random generators seeded.

        Args:
            seed: stand-alone; under a cluster the job file's.
        """
        folder = Path(os.environ[WORKER]) if os.environ.get(WORKER) else None
        assignment = None
        if folder is not None:
            assignment = ASSIGNMENT.decode((folder / "assignment").read_bytes())
            seed = assignment.spec.seed
        agent = cls(assignment, folder)
        agent._seed = seed
        torch.manual_seed(seed)
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % 2**32)
        return agent

    # --- what a script may ask

    @property
    def rank(self) -> int:
        """This worker's place in its group; 0 prints and saves."""
        return self._standing.rank

    @property
    def world_size(self) -> int:
        """How many workers the group has."""
        return len(self._standing.local_batches)

    @property
    def device(self) -> torch.device:
        """Where model and batches live: the slot's GPU, or the CPU."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def batch_size(self) -> int:
        """The global batch, samples per step."""
        return sum(self._standing.local_batches)

    # --- load

    def load(
        self,
        build_model: Callable[[], nn.Module],
        build_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        train_set: Dataset[Any],
        *,
        batch_size: int,
        lr: float | None = None,
        **loader_options: Any,
    ) -> tuple[nn.Module, torch.optim.Optimizer, ElasticLoader]:
        """Build model, optimizer and loader; under a cluster, join the job's group.

        Args:
            build_model: makes the module.
            build_optimizer: makes the optimizer of its parameters.
            train_set: map-style dataset.
            batch_size: global, samples per step; the job file's wins.
            lr: learning rate at that batch; the job file's wins. Groups of parameters keep the
                ratios that `build_optimizer` gave them. None keeps the optimizer's own.
            loader_options: of torch's DataLoader.

        Returns:
            Model and optimizer, from the last finished epoch if there is one, and the loader.

        Raises:
            UsageError: if the dataset has no length or an option chooses samples.
            CheckpointError: if the job should resume and cannot.
        """
        size = _size_of(train_set)
        model = build_model().to(self.device)
        optimizer = build_optimizer(model.parameters())
        self._model, self._optimizer = model, optimizer
        self._choose_batch_and_rate(optimizer, batch_size, lr)
        self._stream = SampleStream(self._seed, size)
        loader = ElasticLoader(
            train_set,
            stream=self._stream,
            position=self._standing,
            device=self.device,
            done=self._batch_done,
            options=loader_options,
        )
        resumed = self._resume(model, optimizer)
        self._losses.listen()
        optimizer.register_step_post_hook(lambda *_: self._stepped())
        if self._channel is not None:
            self._join(model, size, resumed)
        self._speed = Speed(time.monotonic())
        return model, optimizer, loader

    def track(self, **stateful: Any) -> None:
        """Keep these in checkpoints too: schedulers, scalers, anything with a `state_dict`.

        Call it after `load`; in a resumed job they have their state back when it returns.
        """
        self._tracked.update(stateful)
        for name, state in self._resumed_tracked.items():
            if name in stateful:
                stateful[name].load_state_dict(state)
        if self._optimizer is not None and self._resumed_groups:
            for group, was in zip(self._optimizer.param_groups, self._resumed_groups, strict=True):
                group.update(was)  # a scheduler's constructor sets rates as if it were new
        scaler = stateful.get("scaler")
        if scaler is not None:
            self._losses.scale = scaler.get_scale

    def _choose_batch_and_rate(
        self, optimizer: torch.optim.Optimizer, batch_size: int, lr: float | None
    ) -> None:
        assignment = self._assignment
        if assignment is None:
            if batch_size < 1:
                raise UsageError(f"batch_size {batch_size} is below 1", "raise it", "batch_size")
            self._standing.local_batches = (batch_size,)
        else:
            group = assignment.group
            self._standing.local_batches = tuple(m.local_batch for m in group.members)
            self._say_wins("batch_size", batch_size, group.global_batch)
            if group.lr is not None:
                self._say_wins("lr", lr, group.lr)
                lr = group.lr
        if lr is not None:
            own = float(optimizer.defaults["lr"])
            for group_ in optimizer.param_groups:
                group_["lr"] = lr * (float(group_["lr"]) / own if own else 1.0)

    def _say_wins(self, name: str, script: Any, job: Any) -> None:
        if script is not None and script != job:
            self._say(f"{name} {job} of the job file wins over the script's {script}")

    def _resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        point = self._assignment.group.resume if self._assignment else None
        if self._assignment is None or point is None:
            return 0
        folder = Path(self._assignment.checkpoints)
        content = checkpoint.load(checkpoint.find(folder, point))
        rates = [group["lr"] for group in optimizer.param_groups]
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        if self._assignment.group.global_batch != content["batch_size"]:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        self._resumed_groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        standing = self._standing
        standing.epoch, standing.cursor = content["epoch"] + 1, 0
        standing.step, standing.samples_done = content["step"], content["samples_done"]
        self._stop = msgspec.convert(content["stop"], StopState)
        self._why_done = content["why_done"]
        self._resumed_tracked = content["tracked"]
        checkpoint.restore_random_state(content["random"])
        self._say(f"resumes after epoch {content['epoch']}, step {content['step']}")
        return int(content["epoch"])

    def _join(self, model: nn.Module, size: int, resumed: int) -> None:
        assignment, channel = self._assignment, self._channel
        if assignment is None or channel is None or self._folder is None:
            return
        self._writer = checkpoint.Writer(Path(assignment.checkpoints))
        atexit.register(checkpoint.drain)  # for scripts that leave their loop
        if assignment.spec.record_samples:
            self._samples = AppendFile(self._folder / "samples")
        parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self._report(
            WorkerReady,
            epoch_samples=size,
            resumed_epoch=resumed,
            parameters=parameters,
        )
        channel.await_switch()
        self._report(GroupFormed, epoch=self._standing.epoch - 1, step=self._standing.step)
        channel.tell_steps(self._steps)

    # --- the loop

    def epochs(self, count: int) -> Iterator[int]:
        """Run up to `count` epochs, counted from 0 as `range` does; the job file's stop rule wins.

        A resumed job begins with the first epoch that is not finished.
        """
        if self._model is None:
            raise UsageError("epochs() before load()", "call agent.load(...) first")
        if self._rule is None:
            self._rule = StopRule(epochs=count)
        elif self._rule.epochs != count:
            self._say(f"stop {_told(self._rule)} of the job file wins over the script's {count}")
        while not self._why_done:
            self._epoch_open = True
            self._losses.take()
            self._speed.begin_epoch(time.monotonic())
            yield self._standing.epoch - 1
            if self._epoch_open:
                self.report()
        self._finish()

    def report(self, **metrics: float) -> None:
        """End the epoch with what it achieved.

        Args:
            metrics: numbers, or tensors with one element; `loss` replaces the training loss that
                the agent saw in `backward()`.

        Raises:
            UsageError: outside of an epoch, or if a metric is no number.
            MissingMetricError: if the stop rule looks at a metric that is not there.
        """
        if not self._epoch_open:
            raise UsageError("report() outside of an epoch", "call it once in each epoch")
        now = time.monotonic()
        self._epoch_open = False
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        loss = numbers.pop("loss", self._losses.take())
        standing = self._standing
        epoch, standing.epoch, standing.cursor = standing.epoch, standing.epoch + 1, 0
        rule = self._rule or StopRule(epochs=epoch)
        self._why_done = stop_reason(rule, self._stop, epoch, standing.samples_done, numbers)
        if self._writer is None or self._assignment is None:
            return
        samples_per_s, seconds = self._speed.of_epoch(now)
        values: dict[str, Any] = {
            "epoch": epoch,
            "step": standing.step,
            "samples_done": standing.samples_done,
            "epoch_samples": self._stream.size,
            "epochs": rule.epochs,
            "samples_per_s": samples_per_s,
            "duration_s": seconds,
            "train_loss": loss if loss is not None and math.isfinite(loss) else None,
            "metrics": {k: v for k, v in numbers.items() if math.isfinite(v)},
            "global_batch": self.batch_size,
            "lr": self._lr(),
        }
        point = ResumePoint(epoch=epoch, version=self._assignment.version)
        self._writer.write(
            point, self._content(epoch), lambda: self._report(EpochReported, **values)
        )

    def _content(self, epoch: int) -> dict[str, Any]:
        if self._model is None or self._optimizer is None:
            return {}
        states = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "tracked": {name: thing.state_dict() for name, thing in self._tracked.items()},
        }
        return {
            "epoch": epoch,
            "step": self._standing.step,
            "samples_done": self._standing.samples_done,
            "batch_size": self.batch_size,
            "stop": msgspec.to_builtins(self._stop),
            "why_done": self._why_done,
            "random": checkpoint.random_state(),
            **checkpoint.copied(states),
        }

    def _finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._report(TrainingFinished, why=self._why_done)
        self._losses.deafen()

    # --- steps

    def _stepped(self) -> None:
        self._standing.step += 1

    def _batch_done(self, cursor: int, ids: list[int]) -> bool:
        """The script is through with a batch; whether it should go on."""
        if not self._epoch_open:
            return False
        standing = self._standing
        samples = cursor - standing.cursor
        standing.cursor, standing.samples_done = cursor, standing.samples_done + samples
        self._speed.add(samples, time.monotonic())
        if self._samples is not None:
            record = {
                "epoch": standing.epoch, "step": standing.step, "rank": standing.rank, "ids": ids,
            }  # fmt: skip
            self._samples.append(json.dumps(record).encode() + b"\n")
        limit = self._rule.samples if self._rule is not None else None
        return limit is None or standing.samples_done < limit

    def _steps(self) -> StepsReported | None:
        assignment = self._assignment
        if assignment is None or not self._epoch_open:
            return None
        standing = self._standing
        return StepsReported(
            job=assignment.job,
            version=assignment.version,
            rank=assignment.rank,
            epoch=standing.epoch,
            step=standing.step,
            samples_done=standing.samples_done,
            samples_per_s=self._speed.recent(time.monotonic()),
            train_loss=self._losses.mean(),
            global_batch=self.batch_size,
            lr=self._lr(),
        )

    # --- helpers

    def _lr(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"]) if self._optimizer else 0.0

    def _report(self, kind: type[R], **values: Any) -> None:
        assignment, channel = self._assignment, self._channel
        if assignment is None or channel is None:
            return
        job, version, rank = assignment.job, assignment.version, assignment.rank
        channel.report(
            lambda index: kind(job=job, version=version, rank=rank, index=index, **values)
        )

    def _say(self, text: str) -> None:
        if self.rank == 0:
            sys.stderr.write(f"[ones] {text}\n")
            sys.stderr.flush()


def _size_of(dataset: Dataset[Any]) -> int:
    try:
        size = len(dataset)  # type: ignore[arg-type] # a map-style dataset has a length
    except TypeError:
        hint = "give a map-style dataset, with __len__ and __getitem__"
        raise UsageError("train_set has no length", hint, "train_set") from None
    if size < 1:
        raise UsageError("train_set is empty", "give at least one sample", "train_set")
    return size


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        what = f"report({name}=...) got {type(value).__name__}"
        raise UsageError(what, "give a number or a tensor with one element", name) from None


def _told(rule: StopRule) -> str:
    said = {k: v for k, v in msgspec.to_builtins(rule).items() if v is not None}
    if rule.metric is None or rule.consecutive == 1:
        said.pop("consecutive", None)
    return ", ".join(f"{key} {value}" for key, value in said.items())
