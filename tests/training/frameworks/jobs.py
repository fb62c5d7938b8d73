"""Jobs of frameworks: crews whose scripts use an adapter, and one plain loop of torch.

A framework is imported once, in a server that all workers are forked from. Scripts wait at gates
until the change that a test ordered is ready, so that it happens in the intended epoch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from elastic.sample_stream import SampleStream
from schemas.jobs import StopRule
from schemas.wire.agent import ScriptFailed
from tests.support.sample_steps import steps_of
from tests.training import peers
from tests.training.groups import SEED, SIZE, Crew, crew, script

BATCH: Final = 12
EPOCHS: Final = 6
STEPS: Final = EPOCHS * 6  # of one process: 61 samples in batches of 12

GATES: Final = """
import socket
import time

class Closed(socket.socket):  # loopback and files only: nothing is looked up or downloaded
    def connect(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] != "127.0.0.1":
            raise AssertionError(f"a connection to {address}")
        return super().connect(address)

socket.socket = Closed
gates = list(map(int, filter(None, os.environ["GATES"].split(","))))
held_from = dict(enumerate(gates, 2))  # version of the group that comes: step
joined = agent._assignment.kind == "join" or agent._assignment.group.resume is not None
seen = None

def wait_at_gate(step):
    global seen
    version = agent._membership.version
    fresh, seen = version != seen, version  # newcomers count with the first step that they take part in
    if fresh or joined or step < held_from.get(version + 1, step + 1):
        return
    while agent._membership.version == version and not ready_to_switch():
        time.sleep(0.002)

def ready_to_switch():
    pending = agent._listener.pending
    return pending is not None and (
        not pending.needs_build or agent._listener.built(pending.version) is not None
    )
"""

IN_FLOAT32: Final = """
torch.set_default_dtype(torch.float32)  # what autocast narrows
inputs, targets = inputs.float(), targets.float()
data = TensorDataset(inputs, targets)
"""


def fork_with(module: str) -> None:
    """Fork workers from a server that has `module` imported."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    peers.fork_with(module)


@contextlib.contextmanager
def job(
    home: Path,
    source: str,
    *,
    gates: Sequence[int] = (),
    size: int = SIZE,
    epochs: int = EPOCHS,
    **options: Any,
) -> Iterator[Crew]:
    head = f'import os\nos.environ["GATES"] = "{",".join(map(str, gates))}"\n'
    text = head + script(GATES, source, size=size)
    with crew(home, text, stop=StopRule(epochs=epochs), **options) as made:
        yield made


def batches(epochs: int = EPOCHS, size: int = SIZE, batch: int = BATCH) -> list[list[int]]:
    stream = SampleStream(SEED, size)
    return [
        ids for epoch in range(1, epochs + 1) for _, ids in steps_of(stream, epoch, 0, [batch], 0)
    ]


def toy_data(size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return inputs, inputs.sum(dim=1, keepdim=True).sin()


@contextlib.contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_default_dtype(dtype)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)


def each_sample_once(made: Crew, size: int = SIZE, epochs: int = EPOCHS) -> None:
    assert [report.epoch for report in made.epochs()] == list(range(1, epochs + 1))
    assert made.samples() == {epoch: list(range(size)) for epoch in range(1, epochs + 1)}


def dies_of(made: Crew, *local: int) -> str:
    """Return the error that ends the script, before training or in it."""
    with contextlib.suppress(AssertionError):  # of the crew, which hears of it
        made.start(*local)
        made.ended()
    return made.reported(ScriptFailed)[0].error


class PlainLoop:
    """One loop of torch over the same batches, with gradients that are clipped."""

    def __init__(
        self, model: Any, optimizer: Any, scheduler: Any, loss: Any, *,
        clip: float = 0.3, within: float = 1e-9,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.scheduler, self.loss = model, optimizer, scheduler, loss
        self.clip = clip
        self.within = within  # what a job may differ by
        self.losses: list[float] = []
        self.errors: list[float] = []  # losses of the same batches after each step
        self.rates: list[float] = []

    def train(self, steps: Sequence[list[int]]) -> None:
        for ids in steps:
            self.optimizer.zero_grad()
            loss = self.loss(self.model, ids)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            self.optimizer.step()
            self.scheduler.step()
            self.losses.append(loss.item())


def example(heading: str) -> str:
    page = (Path(__file__).parents[3] / "docs" / "frameworks.md").read_text()
    return page.partition(f"## {heading}\n")[2].partition("```python\n")[2].partition("```")[0]


def runs_alone(home: Path, source: str) -> str:
    code = peers.run_forked(_run_alone, home, source, limit_s=120.0)
    printed = (home / "printed").read_text()
    assert code == 0, printed
    return printed


def _run_alone(home: Path, source: str) -> None:
    os.chdir(home)
    for stream, name in ((1, "printed"), (2, "printed")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    os.environ.pop("ONES_WORKER", None)
    torch.set_num_threads(1)
    exec(compile(source, "example", "exec"), {"__name__": "__main__"})  # noqa: S102 - of our page
