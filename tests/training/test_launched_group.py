"""Without a cluster, a script trains in the group of the launcher that started it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastic.group.launched_group import LaunchedGroup, launched_group
from elastic.training_errors import UsageError
from tests.training.groups import SIZE, Alone, alone, furthest

ROOT = Path(__file__).parents[2]
TORCHRUN = {
    "MASTER_ADDR": "h",
    "MASTER_PORT": "7",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
}


@pytest.mark.parametrize(
    ("variables", "group"),
    [
        ({}, None),
        ({**TORCHRUN, "WORLD_SIZE": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # a batch script without srun
        (TORCHRUN, LaunchedGroup(3, 8, 1, "h", 7)),
        (
            {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            LaunchedGroup(3, 8, 1, "h", 7, attempt=2, serves=False),
        ),
        (
            {
                "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "1",
                "SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "gpu[003-004,009]-a,other",
            },
            LaunchedGroup(5, 6, 1, "gpu003-a", 24_622),
        ),
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "a1,b[2-3]"},
            LaunchedGroup(1, 2, 0, "a1", 23_495),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "MASTER_PORT": "9",
            },
            LaunchedGroup(1, 2, 1, "127.0.0.1", 9),
        ),
    ],
)  # fmt: skip
def test_launchers_are_recognised_by_their_variables(
    variables: dict[str, str], group: LaunchedGroup | None
) -> None:
    assert launched_group(variables) == group


def test_a_launcher_on_several_hosts_that_names_no_first_host_is_refused() -> None:
    variables = {
        "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }  # fmt: skip

    with pytest.raises(UsageError, match=r"OMPI_COMM_WORLD_SIZE is 4.*set MASTER_ADDR"):
        launched_group(variables)


SCRIPT = """
import atexit, os, pathlib, signal, torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic import ScalingAgent

def names_of_threads():
    return [each.read_text().strip() for each in pathlib.Path("/proc/self/task").glob("*/comm")]

@atexit.register  # called after what elastic registers
def say_threads():
    pathlib.Path(f"threads{agent.rank}").write_text(" ".join(names_of_threads()))

torch.set_default_dtype(torch.float64)
agent = ScalingAgent.from_env(seed=11)
generator = torch.Generator().manual_seed(5)
inputs = torch.randn(61, 6, generator=generator)
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())

def build_model():
    torch.manual_seed(3 + agent.rank)  # rank 0's parameters count
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))

model, optimizer, loader = agent.load(
    build_model, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), data, batch_size=13
)
for epoch in agent.epochs(4):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if os.environ.get("DIES") == str(agent.rank) and agent.step == 7:
            os.kill(os.getpid(), signal.SIGKILL)
torch.save(model.state_dict(), f"rank{agent.rank}of{agent.world_size}.pt")
"""


def torchrun(folder: Path, workers: int, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(workers), "--log-dir", str(folder), "train.py",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, timeout=120,
        check=False,
    )  # fmt: skip


def srun(folder: Path, workers: int) -> list[int]:
    """Start the processes with the variables of Slurm, and return their exit codes."""
    (folder / "train.py").write_text(SCRIPT)
    common = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SLURM_STEP_NUM_TASKS": str(workers),
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost",
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, "train.py"], cwd=folder, env={**common, "SLURM_PROCID": str(rank)}
        )
        for rank in range(workers)
    ]
    return [process.wait(120) for process in started]


PLAIN_SCRIPT = """
def build_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))

def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_a_script_under_torchrun_trains_one_model_in_its_group(
    tmp_path: Path, workers: int
) -> None:
    done = torchrun(tmp_path, workers)

    assert done.returncode == 0, done.stderr
    whole = alone(PLAIN_SCRIPT, 4, 13, SIZE, Alone)
    found = [torch.load(tmp_path / f"rank{rank}of{workers}.pt") for rank in range(workers)]
    assert [furthest(each, whole) < 1e-9 for each in found] == [True] * workers


@pytest.mark.slow
def test_a_script_under_srun_trains_one_model_in_its_group(tmp_path: Path) -> None:
    codes = srun(tmp_path, 2)

    found = [torch.load(tmp_path / f"rank{rank}of2.pt") for rank in range(2)]
    assert codes == [0, 0]
    assert furthest(found[0], found[1]) == 0.0
    # gloo's threads have ended before the interpreter does, which they could abort
    assert ["gloo" in (tmp_path / f"threads{rank}").read_text() for rank in range(2)] == [False] * 2


@pytest.mark.slow
def test_a_lost_process_ends_the_job_of_torchrun(tmp_path: Path) -> None:
    done = torchrun(tmp_path, 3, DIES="1")

    assert done.returncode == 1
    assert "BrokenGroupError" in done.stderr or "SIGKILL" in done.stderr
    assert not list(tmp_path.glob("*.pt"))
