"""Training by steps instead of epochs: the passes go on from epoch to epoch, through all changes."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic.sample_stream import SampleStream
from schemas.wire.agent import EpochReported
from tests.training.groups import PLAIN, SEED, SIZE, Alone, Crew, alone, crew, furthest, script

pytestmark = pytest.mark.slow
BATCH, EPOCH_STEPS = 12, 4
EPOCH = BATCH * EPOCH_STEPS  # samples; the data set has SIZE
LOOP = """
model, optimizer, loader = agent.load(
    build_model, build_optimizer, data, batch_size=1, lr_scaling=SCALING, epoch_steps=4
)
for x, y in agent.steps(10**6, lambda: {"enough": enough(), "weight": model[0].weight[0, 0]}):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
if agent.rank == 0:
    torch.save(model.state_dict(), HOME / "final.pt")
"""


class ByEpochsOfSteps(Alone):
    """One process that takes the same parts of the passes."""

    def __init__(self, source: str, batch: int, size: int) -> None:
        super().__init__(source, batch, size)
        self.stream = SampleStream(SEED, EPOCH, pass_size=size)


def trained_passes(job: Crew) -> list[list[int]]:
    """Return the sorted ids of each whole pass, in the order in which committed steps took them."""
    steps = {(e["epoch"], e["step"], e["rank"]): e["ids"] for e in job.records()}
    ids = [each for place in sorted(steps) for each in steps[place]]
    return [sorted(ids[at : at + SIZE]) for at in range(0, len(ids) - SIZE + 1, SIZE)]


def metrics(reports: Sequence[EpochReported]) -> set[str]:
    return {name for report in reports for name in report.facts.metrics}


def test_a_job_of_steps_trains_as_one_process_through_all_changes(tmp_path: Path) -> None:
    faults = "reduce:rank=1:step=50:version=1=kill"
    with crew(tmp_path, script(PLAIN, LOOP), faults=faults) as job:
        events: list[Any] = [(6, 6), "loss", (6, 6), 2, "pause", (12,), 2, (4, 4, 4), 2]
        reports = job.through(*events)

        last = reports[-1].epoch
        assert furthest(job.final(), alone(PLAIN, last, BATCH, SIZE, ByEpochsOfSteps)) < 1e-9
        passes = trained_passes(job)
        assert passes == [list(range(SIZE))] * (last * EPOCH // SIZE)
        assert {report.facts.epoch_samples for report in reports} == {EPOCH}
        assert metrics(reports) == {"enough", "weight"}


# --- a script that draws windows of a text at random

ORIGINAL = """
import math, torch
from torch import nn
block_size, batch_size, accumulation, max_iters, eval_interval = 8, 4, 3, 60, 20
text = torch.arange(300) * 7 % 31
device = "cpu"
model = nn.Sequential(nn.Embedding(31, 16), nn.Linear(16, 31)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def get_batch():
    places = torch.randint(len(text) - block_size, (batch_size,))
    x = torch.stack([text[i : i + block_size] for i in places])
    y = torch.stack([text[i + 1 : i + 1 + block_size] for i in places])
    return x.to(device), y.to(device)

def get_lr(it):
    return 1e-2 * min(1.0, (it + 1) / 10) * 0.5 * (1 + math.cos(math.pi * it / max_iters))

X, Y = get_batch()
iter_num = 0
while True:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    for micro_step in range(accumulation):
        logits = model(X)
        loss = nn.functional.cross_entropy(logits.view(-1, 31), Y.view(-1))
        loss = loss / accumulation
        X, Y = get_batch()
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > max_iters:
        break
"""
WINDOWS = """
agent = ScalingAgent.from_env()
class Windows(torch.utils.data.Dataset):
    def __len__(self): return len(text) - block_size
    def __getitem__(self, i): return text[i : i + block_size], text[i + 1 : i + 1 + block_size]
model, optimizer, _ = agent.load(lambda: model, lambda _: optimizer, Windows(), batch_size=batch_size * accumulation, max_local_batch=batch_size, epoch_steps=eval_interval)
"""
PORTED = (
    ORIGINAL.replace("from torch import nn\n", "from torch import nn\nfrom elastic import ScalingAgent\n")
    .replace("\nX, Y = get_batch()\niter_num = 0\nwhile True:\n", WINDOWS + "for X, Y in agent.steps(max_iters):\n    iter_num = agent.step\n")
    .replace("        loss = loss / accumulation\n        X, Y = get_batch()\n", "")
    .replace("range(accumulation)", "range(1)")
)  # fmt: skip
REPORT = """
say = lambda: (pathlib.Path(os.environ["CREW_HOME"]) / f"end.{agent.rank}").write_text(
    f"{agent.step} {agent.progress.job} {model[1].weight.sum().item()!r}")
say()
"""


def test_a_loop_over_random_windows_is_ported_with_ten_lines(tmp_path: Path) -> None:
    changed = [
        line
        for line in difflib.unified_diff(ORIGINAL.splitlines(), PORTED.splitlines(), n=0)
        if line.startswith("+") and not line.startswith("+++")
    ]
    source = "import os, pathlib\n" + PORTED + textwrap.dedent(REPORT)

    with crew(tmp_path, source, stop=None, bound=4) as job:
        job.start(6, 6)
        job.until(lambda: not any(worker.alive for worker in job.workers.values()), "the end")

        ends = [(tmp_path / f"end.{rank}").read_text().split() for rank in range(2)]
    assert len(changed) <= 10
    assert ends == [["60", "1.0", ends[0][2]]] * 2
