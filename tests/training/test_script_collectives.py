"""Collectives of the script: exact through changes of the group and losses of workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.groups import (
    LOOP,
    PLAIN,
    SIZE,
    Alone,
    NobodyIsFullError,
    alone,
    crew,
    furthest,
    script,
)

pytestmark = pytest.mark.slow
MODEL = """
SCALING = "none"

def build_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4))

def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
"""
STEP = """\
        nn.functional.mse_loss(model(x), y).backward()
"""


# --- in a step: a contrastive loss over the global batch

CONTRASTIVE = """\
        first = nn.functional.normalize(model(x), dim=1)
        second = nn.functional.normalize(model(x * 0.9 + 0.1), dim=1)
        others = agent.all_gather(second)
        scores = first @ others.T / 0.5
        labels = torch.arange(len(x), device=x.device) + agent.batch_offset
        nn.functional.cross_entropy(scores, labels).backward()
"""


class Contrastive(Alone):
    """One process with InfoNCE over the whole batch."""

    def step(self, ids: Sequence[int]) -> None:
        self.optimizer.zero_grad()
        x = self.inputs[ids]
        first = nn.functional.normalize(self.model(x), dim=1)
        second = nn.functional.normalize(self.model(x * 0.9 + 0.1), dim=1)
        loss = nn.functional.cross_entropy(first @ second.T / 0.5, torch.arange(len(x)))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


CENTRED = """\
        total = agent.all_reduce(model(x).sum(dim=0))
        count = agent.all_reduce(float(len(x)))
        (model(x) - total / count).square().mean().backward()
"""


class Centred(Alone):
    """One process whose loss is the variance over the whole batch."""

    def step(self, ids: Sequence[int]) -> None:
        self.optimizer.zero_grad()
        found = self.model(self.inputs[ids])
        (found - found.mean(dim=0)).square().mean().backward()
        self.optimizer.step()


@pytest.mark.parametrize(
    ("step", "kind"), [(CONTRASTIVE, Contrastive), (CENTRED, Centred)], ids=["gather", "sum"]
)
def test_losses_over_the_global_batch_are_those_of_one_process(
    tmp_path: Path, step: str, kind: type[Alone]
) -> None:
    source = script(MODEL, LOOP.replace(STEP, step))
    faults = "reduce:rank=1:step=40:version=1=kill"
    with crew(tmp_path, source, faults=faults) as job:
        events: list[Any] = [(4, 4, 4), "loss", 1, (3, 3, 3, 3), 1, (12,), 1, (6, 6), 1]
        last = job.through(*events)[-1].epoch

        assert furthest(job.final(), alone(MODEL, last, 12, SIZE, kind)) < 1e-9
        assert [len(found) for found in job.digests().values()] == [1] * last


# --- in a step: a collective after the reduction, whose step the others may have finished

CLIPPED = f"""{STEP}\
        part = agent.all_reduce(float(len(x))) / 12
        for parameter in model.parameters():
            parameter.grad.mul_(part)
"""


class Clipped(Alone):
    """One process that changes its gradients by the size of the batch."""

    def step(self, ids: Sequence[int]) -> None:
        self.optimizer.zero_grad()
        found = self.model(self.inputs[ids])
        nn.functional.mse_loss(found, self.targets[ids]).backward()  # type: ignore[no-untyped-call]
        for parameter in self.model.parameters():
            parameter.grad.mul_(len(ids) / 12)
        self.optimizer.step()


DECAYED = f"""{STEP}\
        optimizer.step()
        part = agent.all_reduce(float(len(x))) / 12
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 - 0.01 * part)
"""


class Decayed(Alone):
    """One process that decays its parameters by the size of the batch."""

    def step(self, ids: Sequence[int]) -> None:
        super().step(ids)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 - 0.01 * len(ids) / 12)


DECAYING = LOOP.replace(STEP + "        optimizer.step()\n", DECAYED)


@pytest.mark.parametrize(
    "fault", ["collect:rank=1:step=9:version=1=kill", "collected:rank=1:step=9:version=1=fail"]
)
def test_a_step_whose_gradients_cannot_be_changed_together_is_repeated(
    tmp_path: Path, fault: str
) -> None:
    with crew(tmp_path, script(PLAIN, LOOP.replace(STEP, CLIPPED)), faults=fault) as job:
        last = job.through((4, 4, 4), "loss", 1)[-1].epoch

        assert furthest(job.final(), alone(PLAIN, last, 12, SIZE, Clipped)) < 1e-9
        assert [len(found) for found in job.digests().values()] == [1] * last


def test_a_worker_that_cannot_change_its_new_parameters_goes_on_with_nothing(
    tmp_path: Path,
) -> None:
    fault = "collected:rank=0:step=9:version=1=fail"
    with crew(tmp_path, script(PLAIN, DECAYING), faults=fault) as job:
        last = job.through((4, 4, 4), "loss", 1)[-1].epoch

        assert [member.worker for member in job.group.members] == ["toy-1.v1.r1", "toy-1.v1.r2"]
        assert furthest(job.final(), alone(PLAIN, last, 12, SIZE, Decayed)) < 1e-9


def test_nobody_has_the_state_if_none_could_change_its_new_parameters(tmp_path: Path) -> None:
    fault = "collect:rank=1:step=9:version=1=kill"
    with (
        crew(tmp_path, script(PLAIN, DECAYING), faults=fault) as job,
        pytest.raises(NobodyIsFullError),
    ):
        job.through((4, 4, 4), "loss", 1)


PASSES = STEP.replace("        nn", "        agent.all_gather(x)\n        nn")


def test_a_collective_in_a_share_that_is_taken_in_passes_is_refused(tmp_path: Path) -> None:
    with crew(tmp_path, script(PLAIN, LOOP.replace(STEP, PASSES)), bound=3) as job:
        error = job.refusal(6, 6)

        assert "agent.all_gather was called in a batch that is taken in several passes" in error


EARLY = LOOP.replace("for epoch in", "agent.barrier()\nfor epoch in", 1)


def test_a_collective_before_the_first_epoch_is_refused(tmp_path: Path) -> None:
    with crew(tmp_path, script(PLAIN, EARLY)) as job:
        assert "agent.barrier was used before the first epoch" in job.refusal(6, 6)


# --- between epochs: an evaluation that the workers share

EVALUATED = """    read, right = [], 0.0
    for x, place in agent.evaluate_loader(TensorDataset(inputs, torch.arange(SIZE)), 4):
        read += place.tolist()
        right += float(model(x).sum())
        FAULT
    counted, whole = agent.all_reduce(len(read)), agent.all_reduce(right)
    agent.barrier()
    say(epoch=epoch + 1, read=read, counted=int(counted), digest=f"{float(whole):.9f}")
    agent.report(enough=enough())
"""
EVALUATING = (
    LOOP[: LOOP.index("    if agent._membership.has_full_state")]
    + EVALUATED.replace("SIZE", str(SIZE))
    + LOOP[LOOP.index("if agent.rank == 0") :]
)
KILL = 'os.kill(os.getpid(), 9) if agent.rank == 1 and epoch == 2 and agent.world_size == 3 else ""'


def test_workers_share_an_evaluation_through_all_changes(tmp_path: Path) -> None:
    with crew(tmp_path, script(PLAIN, EVALUATING.replace("FAULT", ""))) as job:
        last = job.through((12,), 1, (6, 6), 1, (4, 4, 4), 2, (12,), 1)[-1].epoch

        read: dict[int, list[int]] = {}
        for word in job.words():
            read.setdefault(word["epoch"], []).extend(word["read"])
        assert {epoch: sorted(ids) for epoch, ids in read.items()} == {
            epoch: list(range(SIZE)) for epoch in range(1, last + 1)
        }
        assert {word["counted"] for word in job.words()} == {SIZE}
        assert [len(found) for found in job.digests().values()] == [1] * last


def test_the_part_of_a_lost_worker_is_evaluated_by_the_others(tmp_path: Path) -> None:
    source = script(PLAIN, EVALUATING.replace("FAULT", "import os; " + KILL))
    with crew(tmp_path, source) as job:
        last = job.through((4, 4, 4), "loss", 2)[-1].epoch

        assert {word["counted"] for word in job.words()} == {SIZE}
        assert [len(found) for found in job.digests().values()] == [1] * last


BEHIND = "reduced:rank=0:step=6=fail"  # in the last step of an epoch
DIES_FIRST = f"{BEHIND};collect:rank=1:step=7:version=1=kill"
DIES_LATER = "collected:rank=0:step=7:version=1=fail"


@pytest.mark.parametrize(
    ("fault", "there"), [(DIES_FIRST, '""'), (DIES_LATER, KILL.replace("2 and", "0 and"))]
)
def test_an_evaluation_that_not_all_have_begun_is_divided_equally(
    tmp_path: Path, fault: str, there: str
) -> None:
    source = script(PLAIN, EVALUATING.replace("FAULT", "import os; " + there))
    with crew(tmp_path, source, faults=fault) as job:
        last = job.through((4, 4, 4), "loss", 2)[-1].epoch

        assert {word["counted"] for word in job.words()} == {SIZE}
        assert [len(found) for found in job.digests().values()] == [1] * last


SUMMED = """\
    whole, own = agent.all_reduce(model(inputs.to(agent.device)).sum().detach()), agent.world_size
    whole /= own
    whole *= agent.all_reduce(1.0)
    assert whole.device == agent.device
    right = model(inputs.to(agent.device)).sum() * own
    assert abs(float(whole - right)) < 1e-9, (epoch, float(whole), float(right))
    if agent._membership"""
SUMMING = LOOP.replace("    if agent._membership", SUMMED)


def test_a_result_that_the_script_changed_is_given_to_others_unchanged(tmp_path: Path) -> None:
    fault = "collected:rank=0:step=7=fail"
    with crew(tmp_path, script(PLAIN, SUMMING), faults=fault) as job:
        last = job.through((4, 4, 4), "loss", 2)[-1].epoch

        assert [len(found) for found in job.digests().values()] == [1] * last


def test_results_of_the_epoch_before_are_given_to_nobody(tmp_path: Path) -> None:
    fault = "reduced:rank=1:step=3=fail"
    with crew(tmp_path, script(PLAIN, SUMMING, size=12), faults=fault) as job:
        last = job.through((4, 4, 4), "loss", 2)[-1].epoch

        assert furthest(job.final(), alone(PLAIN, last, 12, 12)) < 1e-9
        assert [len(found) for found in job.digests().values()] == [1] * last
