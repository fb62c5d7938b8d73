"""Accelerate's loop as an elastic job: real workers, against one plain loop of torch."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from tests.training.frameworks.jobs import BATCH, EPOCHS, STEPS, each_sample_once, job
from tests.training.frameworks.same_tests import *  # noqa: F403
from tests.training.frameworks.same_tests import BUILD, GROWN_AND_SHRUNK, Framework, build_plain
from tests.training.groups import Crew, furthest

pytestmark = pytest.mark.slow

SCRIPT = """
from elastic.accelerate import ElasticAccelerator

STEPS, EPOCHS, PASSES = 36, 6, 1
"""

LOOP = """
accelerator = ElasticAccelerator(
    agent=agent, gradient_accumulation_steps=PASSES, lr_scaling="none"
)
model, optimizer, scheduler = build()
held_out = torch.utils.data.DataLoader(data, batch_size=7)
loader = torch.utils.data.DataLoader(data, batch_size=12 // PASSES, shuffle=True)
model, optimizer, loader, scheduler, held_out = accelerator.prepare(
    model, optimizer, loader, scheduler, held_out
)
losses = {}  # by step: one that is dropped is taken anew
for epoch in accelerator.epochs(EPOCHS):
    for x, y in loader:
        wait_at_gate(agent.step)
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        each = (model(x) - y).detach().square().reshape(-1)
        if PASSES == 1:
            whole = accelerator.gather({"errors": each})["errors"]
            mean = accelerator.reduce(each.mean(), "mean")
            losses[agent.step + 1] = [whole.mean().item(), mean.item(), len(whole)]
    with torch.no_grad():
        found = [accelerator.gather_for_metrics((model(x), y)) for x, y in held_out]
    error = sum((made - y).square().sum() for made, y in found) / sum(len(y) for _, y in found)
    accelerator.report(error=error)
say(
    losses=losses, rate=scheduler.get_last_lr()[0], rank=agent.rank, step=agent.step,
    digest=digest(accelerator.unwrap_model(model)), main=accelerator.is_main_process,
)
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), HOME / "final.pt")
"""


plain = functools.cache(build_plain)


def ends_as_one_loop(made: Crew) -> None:
    each_sample_once(made)
    assert furthest(made.final(), plain().model.state_dict()) < 1e-9
    ended = made.words()
    assert len({word["digest"] for word in ended}) == 1
    assert [word["main"] for word in ended] == [word["rank"] == 0 for word in ended]
    for word in ended:
        assert (word["step"], word["rate"]) == (STEPS, pytest.approx(0))
        for step, (gathered, reduced, samples) in word["losses"].items():
            assert samples == (BATCH if int(step) % 6 else 1)
            assert (gathered, reduced) == (pytest.approx(plain().errors[int(step) - 1]),) * 2


PROCESSES = "shuffle=True, num_workers=2, persistent_workers=True, multiprocessing_context='fork'"
NARROW = """
narrow = set()
build_wide = build
def build():
    made = build_wide()
    made[0][0].register_forward_hook(lambda module, inputs, output: narrow.add(str(output.dtype)))
    return made
"""


NARROW_LOOP = LOOP.replace("agent=agent,", 'agent=agent, mixed_precision="bf16",')
REFUSED = {
    "kept states": ("accelerator.report(error=error)", "accelerator.save_state('x')", "saved at each epoch's end"),
    "skipped batches": ("in loader:", "in accelerator.skip_first_batches(loader):", "automatically"),
    "another order": ("shuffle=True", "shuffle=False", "shuffled by the job's seed"),
    "a trigger": ("accelerator.report(error=error)", "accelerator.check_trigger()", "stop(why)"),
    "an optimizer alone": (
        "model, optimizer, loader, scheduler, held_out = accelerator.prepare(",
        "accelerator.prepare(optimizer) and (",
        "give all in one call",
    ),
}  # fmt: skip


BEFORE = """
import torch
from torch import nn

data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.randint(0, 2, (20,)))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
held_out = torch.utils.data.DataLoader(data, batch_size=8)
model, loss_fn = nn.Linear(4, 2), nn.functional.cross_entropy
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)

def evaluate(accelerator, model, held_out):
    hits = [accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in held_out]
    return torch.cat(hits).float().mean()
"""


FRAMEWORK = Framework(
    module="elastic.accelerate",
    heading="Accelerate",
    script=SCRIPT + BUILD + LOOP,
    narrow=SCRIPT + BUILD + NARROW + NARROW_LOOP.replace("shuffle=True", PROCESSES),
    plain_narrow=lambda: build_plain(torch.float32).model,
    ends=ends_as_one_loop,
    before=BEFORE,
    after="print('ended', accelerator.agent.step, round(scheduler.get_last_lr()[0], 6))",
    printed="ended 9 0.0",
    refused=REFUSED,
)


@pytest.fixture(scope="module")
def framework() -> Framework:
    return FRAMEWORK


def test_a_loop_in_a_changing_group_trains_as_one_process(tmp_path: Path) -> None:
    with job(tmp_path, SCRIPT + BUILD + LOOP, gates=(4, 15, 26)) as made:
        epochs = made.through(*GROWN_AND_SHRUNK)

        ends_as_one_loop(made)
        assert [list(epoch.facts.metrics) for epoch in epochs] == [["error"]] * EPOCHS


def test_accumulated_gradients_are_passes_through_a_pause(tmp_path: Path) -> None:
    source = (SCRIPT + BUILD + LOOP).replace("PASSES = 36, 6, 1", "PASSES = 36, 6, 3")
    with job(tmp_path, source, gates=(9,), bound=4) as made:
        made.through((5, 7), "pause", (12,))

        ends_as_one_loop(made)
