"""Steps that are dropped after the loss of a worker, and repeated: they leave no trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

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
KILL = "reduce:rank=1:step=9:version=1=kill"
BEHIND = "reduced:rank=1:step=9:version=1=fail"
STEP = """\
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""
DECAYED = f"""{STEP}\
        for parameter in model.parameters():
            parameter.data.mul_(0.99)
"""
RATED = f"""\
        schedule.step()
{STEP}"""
RATES = f"""{PLAIN}
def schedules(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), None, None
"""
RATED_LOOP = LOOP.replace(STEP, RATED).replace(
    "for epoch in", "schedule, _, _ = schedules(optimizer)\nfor epoch in", 1
)
FOLLOWED = f"""\
        with torch.no_grad():
            for own, other in zip(model[0].parameters(), model[2].parameters()):
                own.lerp_(other, 0.1)
{STEP}"""
FOLLOWING = """
SCALING = "none"

def build_model():
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 1))
    made[0].requires_grad_(False)
    return made

def build_optimizer(parameters):
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9)
"""


class Decayed(Alone):
    """One process that decays its parameters by hand, after the optimizer's step."""

    def step(self, ids: Sequence[int]) -> None:
        super().step(ids)
        for parameter in self.model.parameters():
            parameter.data.mul_(0.99)


class Rated(Alone):
    """One process that steps its scheduler before the backward pass."""

    def __init__(self, source: str, batch: int, size: int) -> None:
        super().__init__(source, batch, size)
        schedules: Any = self.schedules
        self.schedule, self.schedules = schedules[0], None

    def step(self, ids: Sequence[int]) -> None:
        self.schedule.step()
        super().step(ids)


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("fault", [KILL, BEHIND])
@pytest.mark.parametrize(
    ("model", "loop", "kind"),
    [(PLAIN, LOOP.replace(STEP, DECAYED), Decayed), (RATES, RATED_LOOP, Rated)],
    ids=["decay by hand", "early schedule"],
)
def test_changes_of_the_script_in_a_dropped_step_are_undone(
    tmp_path: Path, model: str, loop: str, kind: type[Alone], fault: str
) -> None:
    with crew(tmp_path, script(model, loop), faults=fault) as job:
        last = job.through((4, 4, 4), "loss", 1)[-1].epoch

        assert furthest(job.final(), alone(model, last, 12, SIZE, kind)) < 1e-9
        assert [len(found) for found in job.digests().values()] == [1] * last


def test_nobody_has_the_state_after_parameters_changed_before_the_lost_reduction(
    tmp_path: Path,
) -> None:
    source = script(FOLLOWING, LOOP.replace(STEP, FOLLOWED))
    with crew(tmp_path, source, faults=KILL) as job, pytest.raises(NobodyIsFullError):
        job.through((4, 4, 4), "loss", 1)


# --- a loss right after a step that one worker skipped

SKIPPED = """
import time
finish = agent._executor.finish

def late(batch):
    proceed = finish(batch)
    if batch.step == 11 and agent.world_size == 3:
        (HOME / f"did{agent.rank}").touch()
        while agent.rank == 0 and not all((HOME / f"did{rank}").exists() for rank in (1, 2)):
            time.sleep(0.01)
        if agent.rank == 0:
            os.kill(os.getpid(), 9)
        agent._executor.cancelled.wait()
    return proceed

agent._executor.finish = late
"""
CLIPPED = """\
        if agent.rank == 2 and agent.step == 10 and agent.world_size == 3:
            continue
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
"""


def test_workers_are_equal_after_a_loss_that_follows_a_skipped_share(tmp_path: Path) -> None:
    source = script(PLAIN, SKIPPED, LOOP.replace(STEP, CLIPPED))
    with crew(tmp_path, source) as job:
        last = job.through((4, 4, 4), "loss", 1)[-1].epoch

        assert [len(found) for found in job.digests().values()] == [1] * last


# --- a second loss, in the broadcast of the state that is furthest ahead

WIDE = PLAIN.replace("nn.Linear(6, 7)", "nn.Linear(6, 400)").replace(
    "nn.Linear(7, 1)", "nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 1)"
)
BOTH = "reduced:rank=0:step=9=fail;reduced:rank=1:step=9=fail;restore:rank=2:version=2=kill"


def test_nobody_has_the_state_if_the_source_is_lost_while_it_sends_its_state(
    tmp_path: Path,
) -> None:
    with (
        crew(tmp_path, script(WIDE, LOOP), faults=BOTH) as job,
        pytest.raises(NobodyIsFullError),
    ):
        job.through((4, 4, 4), "loss", 1)
