"""Patterns of training loops: a group trains each as one process does, or refuses it at once.

The table of docs/exactness/patterns.md has a row for each pattern.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
from torch import nn

from schemas.jobs import StopRule
from tests.training.groups import (
    LOOP,
    PLAIN,
    SIZE,
    WIDE,
    Alone,
    NobodyIsFullError,
    alone,
    crew,
    furthest,
    script,
)

STEP: Final = """\
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""
TRAIN: Final = LOOP.replace(STEP, "        train(model, optimizer, x, y)\n")
MODEL: Final = PLAIN[: PLAIN.index("def build_optimizer")]

TWO_LOSSES = """
def train(model, optimizer, x, y):
    out = model(x)
    optimizer.zero_grad()
    nn.functional.mse_loss(out, y).backward(retain_graph=True)
    (0.1 * out.square().mean()).backward()
    optimizer.step()
"""
SURGERY = """
def train(model, optimizer, x, y):
    out, gradients = model(x), []
    for loss in (nn.functional.mse_loss(out, y), (out + 1).square().mean()):
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        gradients.append([parameter.grad for parameter in model.parameters()])
    inner = sum((a * b).sum() for a, b in zip(*gradients))
    square = sum((b * b).sum() for b in gradients[1])
    for parameter, a, b in zip(model.parameters(), *gradients):
        parameter.grad = a + b - inner.clamp(max=0) / square.clamp(min=1e-30) * b
    optimizer.step()
"""
KEPT = """
last = []

def train(model, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    for parameter, before in zip(model.parameters(), last or gradients):
        parameter.grad = parameter.grad + 0.5 * before
    last[:] = gradients
    optimizer.step()
"""
TWO_STEPS = """
def train(model, optimizer, x, y):
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""
COMPILED = """
@torch.compile(backend="aot_eager")
def train(model, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
"""
ADAPTERS = """
SCALING = "none"

class Adapted(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.requires_grad_(False)
        self.down = nn.Linear(sizes[0], 2, bias=False)
        self.up = nn.Linear(2, sizes[1], bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return super().forward(x) + self.up(self.down(x))

def build_model():
    torch.manual_seed(3)
    return nn.Sequential(Adapted(6, 7), nn.Tanh(), Adapted(7, 1))

def build_optimizer(parameters):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.02)

def train(model, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
"""
ONE_ITERATOR = LOOP.replace("    for x, y in loader:\n", """\
    batches = iter(loader)
    for _ in range(len(loader)):
        x, y = next(batches)
""")  # fmt: skip
EVALUATED = LOOP.replace(STEP, """\
        if agent.step % 3 == 2:
            with torch.no_grad():
                model(x)
            continue
""" + STEP)  # fmt: skip


GUARDED = LOOP.replace(STEP, """\
        if (x[:, 0] > 1.2).any():
            continue
""" + STEP)  # fmt: skip


class Trained(Alone):
    """One process that calls the script's `train`."""

    def __init__(self, source: str, batch: int, size: int) -> None:
        super().__init__(source, batch, size)
        names: dict[str, Any] = {"torch": torch, "nn": nn}
        exec(textwrap.dedent(source), names)  # noqa: S102 - the part of the script that trains
        self.function = names["train"]

    def step(self, ids: Sequence[int]) -> None:
        self.function(self.model, self.optimizer, self.inputs[ids], self.targets[ids])


class SomeEvaluated(Alone):
    steps = 0

    def step(self, ids: Sequence[int]) -> None:
        self.steps += 1
        if self.steps % 3:
            super().step(ids)


class Guarded(Alone):
    """One process that skips the same passes of three samples."""

    def step(self, ids: Sequence[int]) -> None:
        self.optimizer.zero_grad()
        for start in range(0, len(ids), 3):
            x, y = self.inputs[ids[start : start + 3]], self.targets[ids[start : start + 3]]
            if not (x[:, 0] > 1.2).any():
                loss = nn.functional.mse_loss(self.model(x), y) * len(x) / len(ids)
                loss.backward()  # type: ignore[no-untyped-call]
        if any(parameter.grad is not None for parameter in self.model.parameters()):
            self.optimizer.step()


LEAVING_OUT = """
def collate(samples):
    kept = [sample for sample in samples if sample[0][0] < 1.8]
    return torch.utils.data.default_collate(kept or samples[:1])
"""
LEFT_OUT = LOOP.replace("lr_scaling=SCALING", "lr_scaling=SCALING, collate_fn=collate")


class LeftOut(Alone):
    """One process that leaves out the same samples."""

    def step(self, ids: Sequence[int]) -> None:
        super().step([i for i in ids if self.inputs[i][0] < 1.8] or ids[:1])


class Exact(NamedTuple):
    source: str
    loop: str
    bound: int  # samples that a worker takes at once
    events: list[Any]
    kind: type[Alone]


EXACT: Final[dict[str, tuple[Any, ...]]] = {
    "several backward passes of a batch": (PLAIN + TWO_LOSSES, TRAIN, 4, [(12,), (7, 5), (4, 4, 4), 1], Trained),
    "gradient surgery": (PLAIN + SURGERY, TRAIN, 4, [(12,), (7, 5), 1], Trained),
    "gradients kept from step to step": (PLAIN + KEPT, TRAIN, 1000, [(6, 6), 2], Trained),
    "several steps of one optimizer in a batch": (PLAIN + TWO_STEPS, TRAIN, 1000, [(12,), (7, 5), 1], Trained),
    "a compiled training step": (PLAIN + COMPILED, TRAIN, 4, [(12,), (6, 6), 1], Alone),
    "adapters on a frozen base": (ADAPTERS, TRAIN, 4, [(12,), (7, 5), 1], Trained),
    "shares in uneven passes": (PLAIN, LOOP, 5, [(12,), (7, 5), 1], Alone),
    "one iterator in an epoch": (PLAIN, ONE_ITERATOR, 1000, [(6, 6), 2], Alone),
    "evaluation in the loop": (PLAIN, EVALUATED, 4, [(12,), (7, 5), (4, 4, 4), 1], SomeEvaluated),
    "samples that collate_fn leaves out": (PLAIN + LEAVING_OUT, LEFT_OUT, 4, [(12,), (8, 4), (4, 4, 4), 1], LeftOut),
    "passes and shares that are skipped": (PLAIN, GUARDED, 3, [(12,), (6, 6), (3, 3, 3, 3), 1], Guarded),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_a_group_trains_this_pattern_as_one_process(tmp_path: Path, name: str) -> None:
    pattern = Exact(*EXACT[name])
    with crew(tmp_path, script(pattern.source, pattern.loop), bound=pattern.bound) as job:
        epochs = job.through(*pattern.events)
        trained = {epoch.facts.trained_samples for epoch in epochs}

        assert "had another state" not in job.said()
        assert trained == {SIZE} or pattern.kind in {SomeEvaluated, Guarded}
        one = alone(pattern.source, epochs[-1].epoch, 12, kind=pattern.kind)
        assert furthest(job.final(), one) < 1e-9


BY_HAND = """\
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        with torch.no_grad():
            pushes = [0.01 * p.grad for p in model.parameters()]
            for p, push in zip(model.parameters(), pushes):
                p.add_(push)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for p, push in zip(model.parameters(), pushes):
                p.sub_(push)
        optimizer.step()
"""
SAM = """

class Sharp(torch.optim.SGD):
    def step(self, closure):
        parameters = self.param_groups[0]["params"]
        with torch.no_grad():
            before = [p.clone() for p in parameters]
            torch._foreach_add_(parameters, [0.01 * p.grad for p in parameters])
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            torch._foreach_copy_(parameters, before)
        super().step()

def build_optimizer(parameters):
    return Sharp(parameters, lr=0.05)
"""
CLOSURE = """\
        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss
        optimizer.step(closure)
"""
RESTED = """\
        nn.functional.mse_loss(model(x), y).backward()
        if agent.step % 4 == 3 or agent.view.ends_epoch:
            optimizer.step()
            optimizer.zero_grad()
"""
SPARSE = """
SCALING = "none"

def build_model():
    return nn.Sequential(nn.EmbeddingBag(40, 4, sparse=True), nn.Linear(4, 1))

def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05)
"""
SPARSE_FUNCTION = """
SCALING = "none"

class Table(nn.Linear):
    def forward(self, x):
        rows = nn.functional.embedding(x.long().abs(), self.weight, sparse=True)
        return rows.mean(dim=(1, 2)).unsqueeze(1)

def build_model():
    return Table(6, 9)

def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05)
"""
HEAD_ONLY = LOOP.replace("    for x, y in loader:\n", """\
    model[0].requires_grad_(epoch > 0)
    for x, y in loader:
""")  # fmt: skip
GROUP_ADDED = LOOP.replace("    for x, y in loader:\n", """\
    if epoch == 0:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1), requires_grad=False)]})
    for x, y in loader:
""")  # fmt: skip
OUTSIDE = LOOP.replace("    for x, y in loader:\n", """\
    for _ in range(5):
        x, y = next(iter(loader))
""")  # fmt: skip
NO_EPOCHS = LOOP.replace("for epoch in agent.epochs(1000):", "for epoch in range(3):")
UNEVEN = (
    "        nn.functional.mse_loss(model(x), y).backward()\n" + STEP
).replace("        nn", "        if len(x) > 4: nn", 1)  # fmt: skip
SKIPPED = "        if agent.rank and agent.step == 2:\n            continue\n        train(model, optimizer, x, y)\n"


class Refused(NamedTuple):
    source: str
    loop: str
    bound: int
    start: tuple[int, ...]
    text: str


REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "parameters that change between two passes": (PLAIN, LOOP.replace(STEP, BY_HAND), 1000, (12,), "changes parameters between two backward passes of a batch, as SAM does"),
    "data of parameters that changes between two passes": (PLAIN, LOOP.replace(STEP, BY_HAND.replace("p.add_", "p.data.add_")), 1000, (12,), "changes parameters between two backward passes of a batch, as SAM does"),
    "an optimizer that changes parameters for its closure": (MODEL + SAM, LOOP.replace(STEP, CLOSURE), 1000, (12,), "changes parameters before it evaluates its closure, as SAM does"),
    "accumulation over batches, with a rest": (PLAIN, LOOP.replace(STEP, RESTED), 1000, (6, 6), "accumulates gradients over several batches"),
    "several steps in a batch, in passes": (PLAIN + TWO_STEPS, TRAIN, 4, (12,), "an optimizer steps between two backward passes of a batch"),
    "passes that differ in their backward passes": (PLAIN, LOOP.replace(STEP, UNEVEN), 5, (9, 3), r"call backward\(\) a different number of times"),
    "a skipped batch of several backward passes": (PLAIN + TWO_LOSSES, TRAIN.replace("        train(model, optimizer, x, y)\n", SKIPPED), 1000, (6, 6), r"1 of 2 workers skipped a batch of several backward\(\)"),
    "layers with sparse gradients": (SPARSE, LOOP, 1000, (12,), r"layer '0' of the model \(EmbeddingBag\) has sparse gradients; use sparse=False"),
    "sparse gradients of a function": (SPARSE_FUNCTION, LOOP, 1000, (12,), "the model has sparse gradients; use sparse=False"),
    "layers that are unfrozen": (PLAIN, HEAD_ONLY, 1000, (12,), r"the trained parameters changed after load\(\); freeze, unfreeze and add"),
    "a parameter group that is added": (PLAIN, GROUP_ADDED, 1000, (12,), r"the optimizer's parameter groups changed after load\(\): 1 with 4 parameters became 2 with 5; create all groups in build_optimizer"),
    "a batch of an iterator that is dropped": (PLAIN, OUTSIDE, 1000, (6, 6), r"outside of the loop over the loader; write `for batch in loader`"),
    "a loop without epochs": (PLAIN, NO_EPOCHS, 1000, (12,), "loader used outside of an epoch"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_this_pattern_is_refused_at_once(tmp_path: Path, name: str) -> None:
    pattern = Refused(*REFUSED[name])
    with crew(tmp_path, script(pattern.source, pattern.loop), bound=pattern.bound) as job:
        assert re.search(pattern.text, job.refusal(*pattern.start))
        assert job.epochs() == []


@pytest.mark.slow
def test_a_loss_between_two_steps_of_a_batch_returns_to_the_checkpoint(tmp_path: Path) -> None:
    faults = "reduce.later:rank=1:step=10:version=1=kill"
    with (
        crew(tmp_path, script(PLAIN, TWO_STEPS, TRAIN), faults=faults) as job,
        pytest.raises(NobodyIsFullError),
    ):
        job.through((6, 6), "loss")


@pytest.mark.slow
def test_batches_without_backward_are_not_counted_as_trained(tmp_path: Path) -> None:
    loop = EVALUATED.replace("agent.step % 3 == 2", "agent.step % 2").replace(
        "digest(model)", "str(agent._training.position)"
    )
    with crew(tmp_path, script(PLAIN, loop)) as job:
        epochs = job.through((6, 6), 1, (4, 4, 4), 2, "pause", (12,), 1, (6, 6), 1)
        counts = [(e.facts.samples_done, e.facts.trained_samples) for e in epochs]

        assert counts == [(36 * (number + 1), 36) for number in range(len(epochs))]
        assert {len(ids) for ids in job.samples().values()} == {36}
        assert {len(positions) for positions in job.digests().values()} == {1}
        assert "25 of 61 samples were in batches without a backward()" in job.said()
        assert "skipped by some workers" not in job.said()


@pytest.mark.slow
@pytest.mark.parametrize("number", [9, 10], ids=["trained", "evaluated"])
def test_a_worker_that_adopts_a_step_knows_whether_it_was_trained(
    tmp_path: Path, number: int
) -> None:
    loop = EVALUATED.replace("agent.step % 3 == 2", "agent.step % 2").replace(
        "digest(model)", "str(agent._training.position)"
    )
    place = f"step={number}:version=1"
    faults = f"reduced:rank=1:{place}=kill;reduced:rank=0:{place}=fail"
    with crew(tmp_path, script(PLAIN, loop), faults=faults) as job:
        epochs = job.through((4, 4, 4), "loss", 1)

        assert {len(positions) for positions in job.digests().values()} == {1}
        assert {epoch.facts.trained_samples for epoch in epochs} == {36}


@pytest.mark.slow
def test_batches_that_some_workers_skip_are_counted_once_an_epoch(tmp_path: Path) -> None:
    loop = LOOP.replace(STEP, "        if agent.rank and agent.step % 6 < 4: continue\n" + STEP)
    with crew(tmp_path, script(PLAIN, loop)) as job:
        epochs = job.through((6, 6), 2)
        logs = [(worker.folder / "log").read_text() for worker in job.workers.values()]
        lines = re.findall(r"\[ones\] (.*skipped by some|workers have different)", "".join(logs))

        assert lines == [f"epoch {e.epoch}: 4 batches were skipped by some" for e in epochs]
        assert [e.facts.trained_samples for e in epochs] == [61] * len(epochs)


NAN = "        if agent.step >= 3: y = y * float('nan')\n"
GUARD = """\
        loss = nn.functional.mse_loss(model(x), y)
        if not torch.isfinite(loss):
            continue
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "said", "trained"),
    [
        (NAN + STEP, "epoch 1: the training loss is nan", 61),
        (NAN + GUARD + STEP, "epoch 1: 25 of 61 samples were in batches without a backward()", 36),
    ],
    ids=["trained", "skipped"],
)
def test_losses_that_are_not_finite_are_reported(
    tmp_path: Path, step: str, said: str, trained: int
) -> None:
    with crew(tmp_path, script(PLAIN, LOOP.replace(STEP, step))) as job:
        first, *_, last = (epoch.facts for epoch in job.through((6, 6), 2))

        assert said in job.said()
        assert (first.trained_samples, last.train_loss) == (trained, None)


@pytest.mark.slow
def test_a_job_that_ends_after_samples_does_not_wait_for_samples_that_are_never_trained(
    tmp_path: Path,
) -> None:
    loop = LOOP.replace(STEP, "        model(x)\n")
    with crew(tmp_path, script(PLAIN, loop), stop=StopRule(samples=100)) as job:
        assert "epoch 1 trained no sample, and the job ends after 100" in job.refusal(6, 6)


AVERAGES = """
def averages(model):
    every = torch.optim.swa_utils
    return every.AveragedModel(model, multi_avg_fn=every.get_ema_multi_avg_fn(0.9), use_buffers=True)
"""
OWN_AVERAGES = """
import copy

class Average(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module = copy.deepcopy(model)
        self.register_buffer("n_averaged", torch.tensor(0))

    def update_parameters(self, model):
        own, new = self.module.parameters(), [p.detach() for p in model.parameters()]
        with torch.no_grad():
            torch._foreach_lerp_(list(own), new, 0.1 if self.n_averaged else 1.0)
        self.n_averaged += 1

def averages(model):
    made = Average(model)
    agent.track(average=made)
    return made
"""
AVERAGED = (
    LOOP.replace("for epoch in", "averaged = averages(model)\nfor epoch in")
    .replace(STEP, STEP + "        averaged.update_parameters(model)\n")
    .replace("digest(model)", "digest(averaged) + str(averaged.n_averaged)")
    .replace("model.state_dict()", "averaged.state_dict()")
)


class Averaged(Alone):
    def __init__(self, source: str, batch: int, size: int) -> None:
        super().__init__(source, batch, size)
        names: dict[str, Any] = {"torch": torch}
        exec(AVERAGES, names)  # noqa: S102
        self.averaged = names["averages"](self.model)

    def step(self, ids: Sequence[int]) -> None:
        super().step(ids)
        self.averaged.update_parameters(self.model)

    def train(self) -> None:
        super().train()
        self.after[-1] = {name: t.clone() for name, t in self.averaged.state_dict().items()}


GROWTHS = [(12,), (6, 6), (6, 3, 3), "pause", (7, 5), 2]
AVERAGINGS: Final[dict[str, tuple[Any, ...]]] = {
    "in passes": (PLAIN, AVERAGES, 4, "", GROWTHS),
    "in portions": (WIDE, AVERAGES, 1000, "", GROWTHS),
    "after a loss": (PLAIN, AVERAGES, 4, "reduce:rank=1:step=10:version=1=kill", [(6, 6), "loss", 1]),
    "of another class, in passes": (PLAIN, OWN_AVERAGES, 4, "", GROWTHS),
    "of another class, in portions": (WIDE, OWN_AVERAGES, 1000, "", GROWTHS),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", AVERAGINGS)
def test_averages_are_those_of_one_process(tmp_path: Path, name: str) -> None:
    source, averages, bound, faults, events = AVERAGINGS[name]
    with crew(tmp_path, script(source, averages, AVERAGED), bound=bound, faults=faults) as job:
        last = job.through(*events)[-1].epoch

        assert {len(found) for found in job.digests().values()} == {1}
        assert "had another state" not in job.said()
        assert furthest(job.final(), alone(source, last, 12, kind=Averaged)) < 1e-9


@pytest.mark.slow
def test_an_average_created_in_the_loop_is_logged(tmp_path: Path) -> None:
    loop = AVERAGED.replace("averaged = averages(model)\n", "").replace(
        "    for x, y in", "    averaged = averages(model)\n    for x, y in", 1
    )
    with crew(tmp_path, script(PLAIN, AVERAGES, loop)) as job:
        job.through((12,), 1)

        assert "an AveragedModel is not part of the state: create it between" in job.said()


def test_the_documentation_has_a_row_for_each_pattern() -> None:
    table = (Path(__file__).parents[2] / "docs/exactness/patterns.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|(]*?) (?:\([^|]*\) )?\| (exact|refused)", table, re.MULTILINE)

    assert sorted(rows) == sorted(
        [*((name, "exact") for name in EXACT), *((name, "refused") for name in REFUSED)]
    )
