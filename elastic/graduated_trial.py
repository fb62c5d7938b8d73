"""Trial of a sweep that continues as an elastic job over all partitions at once.

The job uses the user functions of the sweep and starts with the state that the sweep left.
`unit.loader` returns the elastic loader of all partitions together, so `train_fn` trains one epoch
of the whole data set, in a group that grows and shrinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from elastic.agent import ScalingAgent
from elastic.state.random_state import seed_generators
from elastic.sweep_worker.unit import (
    EvalFunction,
    Unit,
    UserFunctions,
    from_frames,
    import_functions,
    keyed_seed,
)
from elastic.sweep_worker.unit_runner import Trained, UnitRunner, as_trained
from elastic.training_errors import UsageError
from schemas.host.state_files import read_frames
from schemas.sweeps import TrialSpec
from schemas.transport.state_transfer import MemoryTarget, fetch_state
from schemas.wire.agent import START
from schemas.wire.files import AskState
from schemas.wire.worker import Assignment

LOADED: Final = frozenset({"model", "optimizer"})  # handled by `load`; others are tracked


@dataclass(frozen=True, slots=True)
class WholeUnit(Unit):
    """An epoch over all partitions, as passed to `train_fn` and `eval_fn`."""

    elastic_loader: Any = None

    def loader(
        self, data: Any, batch_size: int, *, shuffle: bool = True, **options: Any
    ) -> DataLoader[Any]:
        """Return the loader of the job, which covers all partitions and has the job's batch.

        `shuffle` has no effect: the job's samples have an order of their own.
        """
        return self.elastic_loader  # type: ignore[no-any-return]


def train_graduated(assignment: Assignment, trial: TrialSpec) -> None:
    """Train a trial to its last epoch, as a member of its job's group.

    Raises:
        UsageError: if a function cannot be imported, or its result cannot be trained this way.
        UnitFailedError: if `input_fn` raised.
        StateUnavailableError: if no node has the trial's state any more.
    """
    functions = import_functions(trial.functions)
    runner = UnitRunner(functions, trial.partitions, torch.device("cpu"))
    data = _all_partitions(runner, trial.partitions)
    trained = _build_trained(functions, trial)
    if assignment.kind == START and assignment.rank == 0 and assignment.group.resume is None:
        trained.load(_fetch_trial_state(trial))  # others receive rank 0's, or a checkpoint
    agent = ScalingAgent.from_env()
    batch = assignment.spec.batch_size
    _, _, loader = agent.load(
        lambda: trained.model,
        lambda _: trained.optimizer,
        data,
        batch_size=batch,
        schedule_batch=batch,
    )
    agent.track(**{name: getattr(trained, name) for name in trained if name not in LOADED})
    for epoch in agent.epochs(trial.epochs - trial.epochs_done):
        unit = WholeUnit(
            config=str(trial.trial),
            values=trial.values,
            epoch=trial.epochs_done + 1 + epoch,
            partition=0,
            partitions=trial.partitions,
            sweep_seed=trial.seed,
            device=agent.device,
            elastic_loader=loader,
        )
        metrics = dict(functions.train_fn(trained, data, unit) or {})
        if functions.eval_fn is not None:
            metrics |= _evaluate(functions.eval_fn, trained, runner.data(None), unit)
        agent.report(**{name: float(value) for name, value in metrics.items()})


def _build_trained(functions: UserFunctions, trial: TrialSpec) -> Trained:
    seed_generators(keyed_seed(trial.seed, str(trial.trial)))
    trained = as_trained(functions.model_fn(dict(trial.values)))
    if "optimizer" not in list(trained):
        hint = "return (model, optimizer): a trial that continues as a job needs both"
        raise UsageError("model_fn returned no optimizer", hint, "model_fn")
    return trained


def _evaluate(
    eval_fn: EvalFunction, trained: Trained, held_out: Any, unit: WholeUnit
) -> dict[str, float]:
    trained.model.eval()
    with torch.no_grad():
        found = dict(eval_fn(trained, held_out, unit))
    trained.model.train()
    return found


def _all_partitions(runner: UnitRunner, partitions: int) -> ConcatDataset[Any]:
    parts = [runner.data(partition) for partition in range(partitions)]
    for part in parts:
        if not isinstance(part, Dataset):
            problem = f"input_fn returned a {type(part).__name__}"
            raise UsageError(
                problem,
                "return a torch Dataset: a trial that continues as a job needs one",
                "input_fn",
            )
    return ConcatDataset(parts)


def _fetch_trial_state(trial: TrialSpec) -> dict[str, Any]:
    target = MemoryTarget()
    asked = AskState(
        job=trial.sweep, trial=trial.trial, version=trial.version, digest=trial.digest, offset=0
    )

    def check() -> None:
        read_frames(target.content, trial.digest)

    fetch_state(trial.sources, asked, target, check)
    return from_frames(read_frames(target.content, trial.digest))
