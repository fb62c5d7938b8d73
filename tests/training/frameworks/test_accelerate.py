"""Accelerate's loop as an elastic job: real workers, against one plain loop of torch."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.training.frameworks.jobs import (
    BATCH,
    EPOCHS,
    IN_FLOAT32,
    STEPS,
    PlainLoop,
    batches,
    computing_in,
    dies_of,
    each_sample_once,
    example,
    fork_with,
    in_float64,
    job,
    runs_alone,
    toy_data,
)
from tests.training.groups import Crew, furthest

pytestmark = pytest.mark.slow

BUILD = """
def build():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    every = torch.optim.lr_scheduler
    warm = every.LinearLR(optimizer, 0.2, total_iters=5)
    falling = every.CosineAnnealingLR(optimizer, STEPS - 5)
    return model, optimizer, every.SequentialLR(optimizer, [warm, falling], [5])
"""

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


@pytest.fixture(scope="module", autouse=True)
def _server() -> None:
    fork_with("elastic.accelerate")


@functools.cache
def plain() -> PlainLoop:
    names = {"torch": torch, "nn": nn, "STEPS": STEPS}
    with in_float64():
        exec(BUILD, names)  # noqa: S102 - the part of the script that builds
        inputs, targets = toy_data()

        def loss(model: nn.Module, ids: list[int]) -> torch.Tensor:
            return nn.functional.mse_loss(model(inputs[ids]), targets[ids])

        model, optimizer, scheduler = names["build"]()  # type: ignore[operator]
        one = PlainLoop(model, optimizer, scheduler, loss)
        errors = []
        for ids in batches():
            one.train([ids])
            with torch.no_grad():
                errors.append(float(loss(model, ids)))
        one.losses = errors  # behind each step
        return one


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
            assert (gathered, reduced) == (pytest.approx(plain().losses[int(step) - 1]),) * 2


def test_a_loop_in_a_group_that_changes_trains_as_one_process_would(tmp_path: Path) -> None:
    with job(tmp_path, SCRIPT + BUILD + LOOP, gates=(4, 15, 26)) as made:
        made.start(BATCH)
        made.change(6, 6)
        made.change(3, 3, 3, 3)
        made.change(5, 7)
        epochs = made.ended()

        ends_as_one_loop(made)
        assert [list(epoch.facts.metrics) for epoch in epochs] == [["error"]] * EPOCHS


def test_a_batch_that_shrinks_gives_epochs_more_steps_than_were_planned(tmp_path: Path) -> None:
    with job(tmp_path, SCRIPT + BUILD + LOOP, gates=(4, 12)) as made:
        made.start(BATCH)
        made.change(2, 2)
        made.change(3, 4)
        made.ended()

        each_sample_once(made)
        ended = [word for word in made.words() if "rate" in word]
        assert [word["rate"] for word in ended] == [pytest.approx(0)] * 2
        assert [word["step"] > STEPS for word in ended] == [True] * 2


def test_a_killed_worker_costs_no_step(tmp_path: Path) -> None:
    faults = "reduce:rank=2:step=10:version=1=kill"
    with job(tmp_path, SCRIPT + BUILD + LOOP, faults=faults) as made:
        made.start(4, 4, 4)
        made.until(made.broken, "a member is lost")
        made.recover()
        made.ended()

        ends_as_one_loop(made)


def test_accumulated_gradients_are_passes_through_a_pause(tmp_path: Path) -> None:
    source = (SCRIPT + BUILD + LOOP).replace("PASSES = 36, 6, 1", "PASSES = 36, 6, 3")
    with job(tmp_path, source, gates=(9,), bound=4) as made:
        made.start(5, 7)
        point = made.suspend()
        made.start(12, resume=point)
        made.ended()

        ends_as_one_loop(made)


@functools.cache
def plain_autocast() -> PlainLoop:
    names = {"torch": torch, "nn": nn, "STEPS": STEPS}
    with computing_in(torch.float32):
        exec(BUILD, names)  # noqa: S102 - the part of the script that builds
        inputs, targets = (values.float() for values in toy_data())

        def loss(model: nn.Module, ids: list[int]) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                made = model(inputs[ids])
            return nn.functional.mse_loss(made.float(), targets[ids])

        one = PlainLoop(*names["build"](), loss)  # type: ignore[operator]
        one.train(batches())
        return one


PROCESSES = "shuffle=True, num_workers=2, persistent_workers=True, multiprocessing_context='fork'"
NARROW = """
narrow = set()
build_wide = build
def build():
    made = build_wide()
    made[0][0].register_forward_hook(lambda module, inputs, output: narrow.add(str(output.dtype)))
    return made
"""


def test_autocast_and_processes_that_load_train_as_one_loop_would(tmp_path: Path) -> None:
    loop = LOOP.replace("agent=agent,", 'agent=agent, mixed_precision="bf16",')
    loop = loop.replace("shuffle=True", PROCESSES) + "say(narrow=list(narrow))\n"
    with job(tmp_path, IN_FLOAT32 + SCRIPT + BUILD + NARROW + loop, gates=(4, 15)) as made:
        made.start(BATCH)
        made.change(6, 6)
        made.change(3, 3, 6)
        made.ended()

        each_sample_once(made)
        assert furthest(made.final(), plain_autocast().model.state_dict()) < 1e-3
        narrow = [word["narrow"] for word in made.words() if "narrow" in word]
        assert narrow == [["torch.bfloat16"]] * 3


REFUSED = {
    "kept states": (
        "accelerator.report(error=error)",
        "accelerator.save_state('x')",
        "saved at each epoch's end",
    ),
    "skipped batches": (
        "in loader:",
        "in accelerator.skip_first_batches(loader):",
        "automatically",
    ),
    "another order": ("shuffle=True", "shuffle=False", "shuffled by the job's seed"),
    "a trigger": ("accelerator.report(error=error)", "accelerator.check_trigger()", "stop(why)"),
    "an optimizer alone": (
        "model, optimizer, loader, scheduler, held_out = accelerator.prepare(",
        "accelerator.prepare(optimizer) and (",
        "give all in one call",
    ),
}


@pytest.mark.parametrize(("old", "new", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_exact_is_refused_with_the_remedy(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    loop = LOOP.replace(old, new)
    assert loop != LOOP
    with job(tmp_path, SCRIPT + BUILD + loop, epochs=1) as made:
        assert said in dies_of(made, BATCH)


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


def test_the_example_of_the_page_runs_without_a_cluster(tmp_path: Path) -> None:
    after = "print('ended', accelerator.agent.step, round(scheduler.get_last_lr()[0], 6))"

    assert "ended 9 0.0" in runs_alone(tmp_path, BEFORE + example("Accelerate") + after)
