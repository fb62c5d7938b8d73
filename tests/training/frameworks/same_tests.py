"""Tests that every adapter passes; a module that imports them has a fixture `framework`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.frameworks.jobs import (
    BATCH,
    IN_FLOAT32,
    STEPS,
    PlainLoop,
    batches,
    computing_in,
    dies_of,
    each_sample_once,
    example,
    fork_with,
    job,
    runs_alone,
    toy_data,
)  # fmt: skip
from tests.training.groups import Crew, furthest

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


@dataclass(frozen=True)
class Framework:
    """A framework, the script of its jobs, and the comparison with one plain loop."""

    module: str  # its adapter
    heading: str  # of the page on frameworks
    script: str
    narrow: str  # the script with autocast and loader processes, which says `narrow`
    plain_narrow: Callable[[], nn.Module]  # model of a plain loop with autocast
    ends: Callable[[Crew], Any]
    before: str  # of the example on the page
    after: str
    printed: str
    dies_at: int = 10  # step in which a worker is killed
    refused: dict[str, tuple[str, str, str]] = field(default_factory=dict)  # old, new, text


@pytest.fixture(scope="module", autouse=True)
def server(framework: Framework) -> None:
    fork_with(framework.module)


def build_plain(dtype: torch.dtype = torch.float64) -> PlainLoop:
    """Train one plain loop; in float32 with autocast."""
    names: dict[str, Any] = {"torch": torch, "nn": nn, "STEPS": STEPS}
    with computing_in(dtype):
        exec(BUILD, names)  # noqa: S102 - the part of the script that builds
        inputs, targets = (values.to(dtype) for values in toy_data())

        def loss(model: nn.Module, ids: list[int]) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
                made = model(inputs[ids])
            return nn.functional.mse_loss(made.to(dtype), targets[ids])

        one = PlainLoop(*names["build"](), loss)
        for ids in batches():
            one.train([ids])
            with torch.no_grad():
                one.errors.append(float(loss(one.model, ids)))
        return one


def test_a_shrinking_batch_gives_epochs_more_steps_than_planned(
    tmp_path: Path, framework: Framework
) -> None:
    with job(tmp_path, framework.script, gates=(4, 12)) as made:
        made.through((BATCH,), (2, 2), (3, 4))

        each_sample_once(made)
        ended = [word for word in made.words() if "rate" in word]
        assert [word["rate"] for word in ended] == [pytest.approx(0)] * 2
        assert [word["step"] > STEPS for word in ended] == [True] * 2


def test_a_killed_worker_costs_no_step_and_no_count(tmp_path: Path, framework: Framework) -> None:
    faults = f"reduce:rank=2:step={framework.dies_at}:version=1=kill"
    with job(tmp_path, framework.script, faults=faults) as made:
        made.through((4, 4, 4), "loss")

        framework.ends(made)


def test_autocast_and_loader_processes_train_as_one_loop(
    tmp_path: Path, framework: Framework
) -> None:
    source = IN_FLOAT32 + framework.narrow + "say(narrow=list(narrow))\n"
    with job(tmp_path, source, gates=(4, 15)) as made:
        made.through((BATCH,), (6, 6), (3, 3, 6))

        each_sample_once(made)
        assert furthest(made.final(), framework.plain_narrow().state_dict()) < 1e-3
        narrow = [word["narrow"] for word in made.words() if "narrow" in word]
        assert narrow == [["torch.bfloat16"]] * 3


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "refusal" in metafunc.fixturenames:
        refused = metafunc.module.FRAMEWORK.refused
        metafunc.parametrize("refusal", refused.values(), ids=refused.keys())


def test_inexact_options_are_refused_with_a_remedy(
    tmp_path: Path, framework: Framework, refusal: tuple[str, str, str]
) -> None:
    old, new, text = refusal
    source = framework.script.replace(old, new, 1)
    assert source != framework.script
    with job(tmp_path, source, epochs=1) as made:
        assert text in dies_of(made, BATCH)


def test_the_example_on_the_page_runs_without_a_cluster(
    tmp_path: Path, framework: Framework
) -> None:
    source = framework.before + example(framework.heading) + framework.after

    assert framework.printed in runs_alone(tmp_path, source)


GROWN_AND_SHRUNK = ((BATCH,), (6, 6), (3, 3, 3, 3), (5, 7))
