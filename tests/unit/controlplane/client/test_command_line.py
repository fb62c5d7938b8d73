"""Jobs from command lines."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.client.command_line import job_of_command, shell_command
from schemas.errors import BadFieldError

SCRIPT = ["python", "-u", "train.py"]
LINES: list[tuple[str, dict[str, Any], str]] = [
    ("make all", {"name": "make", "kind": "command", "command": ["make", "all"]}, ""),
    ("python -u prep/rows.py --n 3", {"name": "rows", "kind": "command", "command": ["python", "-u", "prep/rows.py", "--n", "3"]}, ""),
    ("./a.b+c.sh", {"name": "a-b-c", "kind": "command", "command": ["./a.b+c.sh"]}, ""),
    ("torchrun --nproc-per-node 2 train.py --lr 0.1", {"name": "train", "kind": "torchrun", "command": [*SCRIPT, "--lr", "0.1"], "slots": 2, "retries": 0}, ""),
    ("torchrun --nproc_per_node=4 --nnodes=2 --max-restarts=3 train.py", {"name": "train", "kind": "torchrun", "command": SCRIPT, "slots": 8, "retries": 3}, ""),
    ("torchrun --standalone --rdzv-backend c10d train.py --standalone", {"name": "train", "kind": "torchrun", "command": [*SCRIPT, "--standalone"], "slots": 1, "retries": 0},
     "--rdzv-backend, --standalone: left out, because the cluster decides it"),
    ("python3 -m torch.distributed.run --nproc-per-node=2 -m pkg.train -x", {"name": "pkg", "kind": "torchrun", "command": ["python", "-u", "-m", "pkg.train", "-x"], "slots": 2, "retries": 0}, ""),
    ("/opt/bin/torchrun --no-python ./run.sh", {"name": "run", "kind": "torchrun", "command": ["./run.sh"], "slots": 1, "retries": 0}, ""),
    ("python -m http.server", {"name": "http", "kind": "command", "command": ["python", "-m", "http.server"]}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("line", "fields", "remark"), LINES, ids=[line for line, *_ in LINES])
def test_a_command_line_becomes_a_job(line: str, fields: dict[str, Any], remark: str) -> None:
    assert job_of_command(line.split()) == (fields, remark)


def test_a_shell_runs_a_text() -> None:
    fields, _ = job_of_command(shell_command("cat *.txt | wc -l"))

    assert (fields["command"], fields["name"]) == (["/bin/sh", "-c", "cat *.txt | wc -l"], "cat")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "command: is missing"),
        ("torchrun --nproc-per-node gpu train.py", "--nproc-per-node=gpu is not a number"),
        ("torchrun --nnodes 1:4 train.py", "--nnodes=1:4 is not a number"),
        ("torchrun --max-restarts no train.py", "argument --max-restarts"),
        ("torchrun --frobnicate train.py", "unrecognized arguments"),
        ("torchrun", "the following arguments are required: script"),
    ],
)
def test_a_wrong_command_line_is_refused_with_a_remedy(line: str, problem: str) -> None:
    with pytest.raises(BadFieldError) as refused:
        job_of_command(line.split())

    assert refused.value.field == "command"
    assert problem in refused.value.message
    assert refused.value.hint
