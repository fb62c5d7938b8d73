"""A group carries state from batch to batch as one process does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic import ScalingAgent
from elastic.sample_stream import SampleStream
from elastic.state.carried_state import CarriedState
from elastic.training_errors import UsageError
from tests.training.groups import LOOP, SEED, Alone, Crew, alone, crew, furthest, script
from tests.training.test_group_changes import all_ranks_equal, every_sample_once

CPU = torch.device("cpu")
COLUMNS = 20
BATCH = 12  # so columns meet other ranks, and other columns, in every step

RECURRENT = """
SCALING = "none"

def build_model():
    torch.manual_seed(3)
    return nn.ModuleDict({"memory": nn.LSTM(6, 5, num_layers=2), "head": nn.Linear(5, 1)})

def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
"""
LINES = """\
        features, agent.carried = model["memory"](x[None], agent.carried)
        nn.functional.mse_loss(model["head"](features[0]), y).backward()
"""
CARRYING = LOOP.replace("batch_size=1", f"batch_size=1, columns={COLUMNS}").replace(
    "        nn.functional.mse_loss(model(x), y).backward()\n", LINES
)
assert LINES in CARRYING


class Carrying(Alone):
    def __init__(self, source: str, batch: int, size: int) -> None:
        super().__init__(source, batch, size)
        self.stream = SampleStream(SEED, size, shuffled=False)
        self.states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def step(self, ids: Sequence[int]) -> None:
        nothing = (torch.zeros(2, 5), torch.zeros(2, 5))
        before = [self.states.get(i - COLUMNS, nothing) if i >= COLUMNS else nothing for i in ids]
        hidden = tuple(torch.stack(parts, dim=1) for parts in zip(*before, strict=True))
        self.optimizer.zero_grad()
        model: Any = self.model
        features, (h, c) = model["memory"](self.inputs[ids][None], hidden)
        nn.functional.mse_loss(model["head"](features[0]), self.targets[ids]).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        for place, i in enumerate(ids):
            self.states[i] = (h[:, place].detach(), c[:, place].detach())


def as_one_process(job: Crew) -> None:
    every_sample_once(job)
    all_ranks_equal(job)
    last = job.epochs()[-1].epoch
    assert furthest(job.final(), alone(RECURRENT, last, BATCH, kind=Carrying)) < 1e-9


@pytest.mark.slow
def test_columns_move_between_workers_with_their_state(tmp_path: Path) -> None:
    with crew(tmp_path, script(RECURRENT, CARRYING)) as job:
        job.through((12,), (6, 6), (3, 3, 3, 3), (7, 5), 1, "pause", (4, 4, 4), (12,))

        as_one_process(job)


LOSSES = {
    "before rows are summed": "carry:rank=0:step=9:version=1=kill",
    "when others have the step": "carried:rank=1:step=10:version=1=kill;carried:rank=0:step=10:version=1=fail",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("faults", LOSSES.values(), ids=LOSSES.keys())
def test_a_lost_worker_loses_no_carried_state(tmp_path: Path, faults: str) -> None:
    with crew(tmp_path, script(RECURRENT, CARRYING), faults=faults) as job:
        job.through((4, 4, 4), "loss", (3, 3, 3, 3), 1)

        as_one_process(job)


@pytest.mark.slow
def test_passes_carry_their_own_state(tmp_path: Path) -> None:
    with crew(tmp_path, script(RECURRENT, CARRYING), bound=4) as job:
        job.through((12,), (7, 5), 1)

        as_one_process(job)


REFUSED = {
    "forgets to carry": ("features, agent.carried =", "features, _ =", "in every batch"),
    "carries in another dimension": (f"columns={COLUMNS}", "columns=20, carried_dim=0", "dimensio"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("said", "instead", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_a_loop_with_a_wrong_carried_state_is_refused(
    tmp_path: Path, said: str, instead: str, text: str
) -> None:
    with crew(tmp_path, script(RECURRENT, CARRYING.replace(said, instead))) as job:
        assert text in job.refusal(6, 6)


def test_samples_at_the_start_of_a_column_get_zeros() -> None:
    state = CarriedState(3, 1, CPU)
    assert state.state_before([0, 1, 2]) is None
    state.store(0, state.pack(torch.tensor([[1.0, 2.0, 3.0]]), 3))

    assert state.state_before([3, 5]).tolist() == [[1.0, 3.0]]
    assert state.state_before([2, 3]).tolist() == [[0.0, 1.0]]
    state.store(3, state.pack(torch.tensor([[4.0, 5.0]]), 2))
    assert state.state_before([5, 6]).tolist() == [[3.0, 4.0]]
    assert state.state_before([0, 2]) is None


def test_carried_state_keeps_its_types_and_containers() -> None:
    carried = {
        "flags": torch.tensor([[True], [False]]),
        "sums": [torch.arange(6, dtype=torch.float64).reshape(3, 2).T],
        "narrow": (torch.tensor([[0.5], [-0.0]], dtype=torch.bfloat16),),
    }
    here, there = CarriedState(2, 0, CPU), CarriedState(2, 0, CPU)
    here.store(0, here.pack(carried, 2))
    there.load(here.state())
    came = there.state_before([2, 3])

    assert str(came) == str({**carried, "sums": [carried["sums"][0].contiguous()]})
    assert here.state_before([3])["sums"][0].tolist() == [[1.0, 3.0, 5.0]]


@pytest.mark.parametrize(("given", "text"), [
    (torch.zeros(1, 3), r"shape \(1, 3\) for 2 samples"),
    ("state", "got str"),
    ((), "no tensor"),
    (torch.zeros(1, 2, 5), "before it was"),
])  # fmt: skip
def test_carried_state_needs_one_row_per_sample(given: Any, text: str) -> None:
    state = CarriedState(2, 1, CPU)
    state.pack(torch.zeros(1, 2, 4), 2)

    with pytest.raises(UsageError, match=text):
        state.pack(given, 2)


def agent_with(columns: int | None) -> tuple[ScalingAgent, Any]:
    agent = ScalingAgent.from_env()
    data = [(torch.zeros(6), torch.zeros(1))] * 8
    _, _, loader = agent.load(
        lambda: nn.Linear(6, 1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data,  # type: ignore[arg-type]
        batch_size=4,
        columns=columns,
    )
    return agent, loader


def test_carried_state_needs_the_loop_and_columns() -> None:
    agent, _ = agent_with(4)
    with pytest.raises(UsageError, match="outside of the loop"):
        _ = agent.carried
    agent, _ = agent_with(None)
    with pytest.raises(UsageError, match="without columns"):
        agent.carried = torch.zeros(1, 4)
    with pytest.raises(UsageError, match="batches may have 4 samples, the data has 3 columns"):
        agent_with(3)


def test_columns_keep_the_order_of_the_data() -> None:
    agent, loader = agent_with(4)
    ids = [list(micro.ids) for _ in agent.epochs(1) for micro in _given(agent, loader)]

    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7]]


def _given(agent: ScalingAgent, loader: Any) -> Any:
    for _ in loader:
        yield agent._executor.micro_batch
        agent.carried = torch.zeros(1, 4)
