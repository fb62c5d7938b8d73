"""A group refuses what it cannot train exactly; closures are exact."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.training.groups import LOOP, PLAIN, Alone, alone, crew, furthest, script

pytestmark = pytest.mark.slow
STEP = """\
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""
CLOSURE = """\
        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss
        assert optimizer.step(closure).shape == ()
"""
MODEL = PLAIN[: PLAIN.index("def build_optimizer")]
LBFGS = MODEL + textwrap.dedent("""
    def build_optimizer(parameters):
        return torch.optim.LBFGS(parameters, lr=0.1)
    """)
ACCUMULATED = """\
        nn.functional.mse_loss(model(x), y).backward()
        if agent.step % 2:
            optimizer.step()
            optimizer.zero_grad()
"""
SECOND = (
    """\
        second = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
"""
    + STEP
    + """\
        second.step()
"""
)


OUTSIDE_OF_BACKWARD = """\
        parameters = list(model.parameters())
        loss = nn.functional.mse_loss(model(x), y)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
            parameter.grad = gradient
        optimizer.step()
"""
STEP_IN_HOOK = """\
        if not agent.step:
            last = list(model.parameters())[0]
            last.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
"""


WEIGHTS = "1.0 + 2.0 * (x[:, :1] > 0.3)"  # of the samples: as if they had so many tokens
WEIGHED = f"""\
        weights = {WEIGHTS}
        loss = (weights * (model(x) - y).square()).sum() / weights.sum()
        agent.weight(weights.sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


class Weighed(Alone):
    def step(self, ids: Sequence[int]) -> None:
        x, y = self.inputs[ids], self.targets[ids]
        weights = 1.0 + 2.0 * (x[:, :1] > 0.3)
        self.optimizer.zero_grad()
        loss = (weights * (self.model(x) - y).square()).sum() / weights.sum()
        loss.backward()
        self.optimizer.step()


REFUSED = {
    "closures that are evaluated several times": (LBFGS, CLOSURE, "unlike LBFGS"),
    "accumulation by hand": (PLAIN, ACCUMULATED, "accumulates gradients over several batches"),
    "weights for some batches only": (
        PLAIN,
        WEIGHED.replace("agent.weight", "agent.rank or agent.step or agent.weight"),
        "called for some batches",
    ),
    "a loss that is a sum": (
        PLAIN,
        STEP.replace("(model(x), y)", '(model(x), y, reduction="sum")'),
        r"the loss is a sum over the batch; divide it by len\(inputs\)",
    ),
    "gradients of torch.autograd.grad": (
        PLAIN,
        OUTSIDE_OF_BACKWARD,
        r"an optimizer \(SGD\) steps on gradients that are not summed",
    ),
    "a step in a hook of the gradients": (
        PLAIN,
        STEP_IN_HOOK,
        r"an optimizer \(SGD\) steps on gradients that are not summed",
    ),
    "a second optimizer": (PLAIN, SECOND, r"an optimizer \(SGD\) steps in the loop"),
}


@pytest.mark.parametrize(("source", "step", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_an_inexact_loop_is_refused_at_once(
    tmp_path: Path, source: str, step: str, text: str
) -> None:
    with crew(tmp_path, script(source, LOOP.replace(STEP, step))) as job:
        assert re.search(text, job.refusal(6, 6))


UNCLEAR = """\
        optimizer.zero_grad()
        shares = torch.full((len(x), 1), 1.0 / len(x), device=x.device)
        (shares * nn.functional.mse_loss(model(x), y, reduction="none")).sum().backward()
        optimizer.step()
"""


def test_a_possible_sum_is_logged_once_and_trained(tmp_path: Path) -> None:
    with crew(tmp_path, script(PLAIN, LOOP.replace(STEP, UNCLEAR))) as job:
        job.through((6, 6))

        logs = [(worker.folder / "log").read_text() for worker in job.workers.values()]
        assert [log.count("[ones] the loss ends in a sum") for log in logs] == [1, 0]
        assert furthest(job.final(), alone(PLAIN, job.epochs()[-1].epoch, 12)) < 1e-9


PASSED_OVER = "        if agent.rank == 0 and agent.step == 2:\n            continue\n" + STEP


class PassedOver(Alone):
    def step(self, ids: Sequence[int]) -> None:
        self.steps = getattr(self, "steps", 0) + 1
        taken = ids[6:] if self.steps == 3 else ids
        self.optimizer.zero_grad()
        loss = (self.model(self.inputs[taken]) - self.targets[taken]).square().mean()
        (loss * len(taken) / len(ids)).backward()
        self.optimizer.step()


BESIDE = (
    """\
        if not agent.step:
            import threading
            other, runs = nn.Linear(64, 64), threading.Event()
            def train_another():
                while True:
                    other(torch.randn(64, 64)).square().mean().backward()
                    runs.set()
            threading.Thread(target=train_another, daemon=True).start()
            runs.wait()
"""
    + STEP
)


EXACT: dict[str, tuple[str, int, list[Any], type[Alone]]] = {
    "a closure, evaluated in every pass": (CLOSURE, 4, [(12,), (7, 5), 1], Alone),
    "a loss over tokens of the global batch": (WEIGHED, 5, [(12,), (4, 8), (3, 3, 6), 1], Weighed),
    "a thread of the script that trains another model": (BESIDE, 1000, [(6, 6), 1], Alone),
    "a batch that one worker skips": (PASSED_OVER, 1000, [(6, 6), 1], PassedOver),
}


@pytest.mark.parametrize(("step", "bound", "events", "kind"), EXACT.values(), ids=EXACT.keys())
def test_an_exact_loop_trains_as_one_process(
    tmp_path: Path, step: str, bound: int, events: list[Any], kind: type[Alone]
) -> None:
    with crew(tmp_path, script(PLAIN, LOOP.replace(STEP, step)), bound=bound) as job:
        last = job.through(*events)[-1].epoch

        assert furthest(job.final(), alone(PLAIN, last, 12, kind=kind)) < 1e-9


def test_an_epoch_left_early_is_logged(tmp_path: Path) -> None:
    left = LOOP.replace(STEP, STEP + "        if agent.step == 3:\n            break\n")
    with crew(tmp_path, script(PLAIN, left)) as job:
        job.through((12,))

        assert "epoch 1 ends with 48 of 61 samples: the script left its loop" in job.said()
