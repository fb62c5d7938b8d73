"""State that a script changes differently in each worker: made equal, or refused by name."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from schemas.wire.agent import ScriptFailed
from tests.training.groups import LOOP, PLAIN, Alone, alone, crew, furthest, script

pytestmark = pytest.mark.slow
SIZE = 60  # all steps are whole
MODEL = PLAIN[: PLAIN.index("def build_optimizer")]


def loop(before_step: str = "", after_step: str = "") -> str:
    """Return the loop, with lines before the optimizer's step and at the end of the batch."""
    parts = [textwrap.indent(textwrap.dedent(part), " " * 8) for part in (before_step, after_step)]
    step = "        optimizer.step()\n"
    return LOOP.replace(step, parts[0] + step + parts[1])


# --- learning rates and steps

OWN_COUNTER = loop("""
    steps = globals().get("steps", 0) + 1
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (1 + 0.2 * steps)
""")
SHARED_COUNTER = OWN_COUNTER.replace('globals().get("steps", 0) + 1', "agent.step + 1")
GUARD = """\
        if agent.step % 2 or agent.rank == 0:
            optimizer.step()
"""
GUARDED = LOOP.replace("        optimizer.step()\n", GUARD)


class Decaying(Alone):
    """One process whose rate falls with each step."""

    steps = 0

    def step(self, ids: Any) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + 0.2 * self.steps)
        super().step(ids)


def test_rates_from_a_counter_of_the_script_are_refused_when_a_worker_joins(
    tmp_path: Path,
) -> None:
    with crew(tmp_path, script(PLAIN, OWN_COUNTER, size=SIZE)) as job:
        job.start(12)
        job.trains_on(2)
        job.begin_change(6, 6)
        job.until(lambda: bool(job.reported(ScriptFailed)), "the newcomer refuses")

        error = job.reported(ScriptFailed)[0].error
        assert re.search(r"rank 1 had another state than rank 0: lr of group 0 0\.\d+", error)
        assert "set rates by a scheduler of torch, or from agent.step" in error
        assert "it has rank 0's state now" in job.said()


def test_rates_from_the_jobs_step_are_exact_through_changes(tmp_path: Path) -> None:
    with crew(tmp_path, script(PLAIN, SHARED_COUNTER, size=SIZE)) as job:
        last = job.through((12,), 1, (6, 6), 1, (4, 4, 4), 1, (12,), 1)[-1].epoch

        assert furthest(job.final(), alone(PLAIN, last, 12, SIZE, Decaying)) < 1e-9


def test_a_step_that_some_workers_skip_is_refused_the_second_time(tmp_path: Path) -> None:
    with crew(tmp_path, script(PLAIN, GUARDED, size=SIZE)) as job:
        error = job.refusal(6, 6)

        assert "rank 1 had another state than rank 0" in error
        assert "decide whether to step by the gradients" in error


NOISE = """
class Langevin(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter), alpha=1e-2)

def build_optimizer(parameters):
    return Langevin(parameters, lr=0.05)
"""


def test_noise_in_the_optimizers_step_is_refused_by_the_parameters_name(tmp_path: Path) -> None:
    with crew(tmp_path, script(MODEL, NOISE, LOOP, size=SIZE)) as job:
        job.start(12)
        job.trains_on(1)
        job.begin_change(6, 6)
        job.until(lambda: bool(job.reported(ScriptFailed)), "a worker refuses")

        error = job.reported(ScriptFailed)[0].error
        assert re.search(r"rank 1 had another state than rank 0: 0\.weight by 0\.\d+", error)
        assert "no random numbers, counters or objects of the script's own" in error


# --- buffers

CENTRED = """
SCALING = "none"

class Centre(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(7))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.centre.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.seen += len(x)
        return x - self.centre

def build_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 7), Centre(), nn.Tanh(), nn.Linear(7, 1))

def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
"""
SAY_BUFFERS = "digest=digest(model) + str(model[1].centre.tolist()) + str(int(model[1].seen))"


def test_buffers_follow_rank_0_through_changes_and_losses(tmp_path: Path) -> None:
    said = LOOP.replace("digest=digest(model)", SAY_BUFFERS)
    faults = "reduce:rank=1:step=40:version=1=kill"
    with crew(tmp_path, script(CENTRED, said, size=SIZE), faults=faults) as job:
        last = job.through((6, 6), "loss", 1, (6, 6), 1, (4, 4, 4), 2)[-1].epoch

        assert [len(found) for found in job.digests().values()] == [1] * last
        assert job.samples() == {epoch: list(range(SIZE)) for epoch in range(1, last + 1)}


COUNTED = CENTRED.replace("self.seen += len(x)", "self.seen += 1")
SAY_SEEN = "digest=str(int(model[1].seen) - agent.step)"


@pytest.mark.parametrize("point", ["reduce", "reduced"])
def test_a_dropped_step_leaves_no_trace_in_buffers(tmp_path: Path, point: str) -> None:
    said = LOOP.replace("digest=digest(model)", SAY_SEEN)
    faults = f"{point}:rank=1:step=13:version=1=kill"
    with crew(tmp_path, script(COUNTED, said, size=SIZE), faults=faults) as job:
        job.through((4, 4, 4), "loss", 2)

        assert set().union(*job.digests().values()) == {"0"}


# --- embeddings with max_norm

LIMITED = """
SCALING = "none"

class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(97, 4, max_norm=0.5, norm_type=2.0)
        self.head = nn.Linear(24, 1)

    def forward(self, x):
        return self.head(self.rows((x.abs() * 31).long() % 97).flatten(1))

def build_model():
    torch.manual_seed(3)
    return Digits()

def build_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=0.02)
"""


def test_rows_of_a_limited_embedding_are_those_of_one_process(tmp_path: Path) -> None:
    with crew(tmp_path, script(LIMITED, LOOP, size=SIZE), bound=5) as job:
        last = job.through((12,), 1, (6, 6), 1, (4, 4, 4), 1, (12,), 1, (2, 4, 6), 1)[-1].epoch

        assert furthest(job.final(), alone(LIMITED, last, 12, SIZE)) < 1e-9
        assert [len(found) for found in job.digests().values()] == [1] * last
        assert "another state" not in job.said()


# --- random numbers of the processes that load data

AUGMENTED = """
class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return len(inputs)

    def __getitem__(self, place):
        return inputs[place], targets[place], torch.rand(())

data = Augmented()
"""
DRAWING = """
model, optimizer, loader = agent.load(
    build_model, build_optimizer, data, batch_size=1, lr_scaling=SCALING, num_workers=1,
    multiprocessing_context="fork",
)
for epoch in agent.epochs(1000):
    drawn = []
    for x, y, noise in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        drawn += noise.tolist()
    say(epoch=epoch + 1, step=agent.step, digest=digest(model), drawn=drawn)
    agent.report(enough=enough())
"""


def test_loaders_of_newcomers_draw_numbers_of_their_own(tmp_path: Path) -> None:
    with crew(tmp_path, script(PLAIN, AUGMENTED, DRAWING, size=SIZE)) as job:
        job.through((12,), 1, (4, 4, 4), 3)

        drawn = [(word["worker"], number) for word in job.words() for number in word["drawn"]]
        assert len({worker for worker, _ in drawn}) == 3
        assert len({number for _, number in drawn}) == len(drawn)
