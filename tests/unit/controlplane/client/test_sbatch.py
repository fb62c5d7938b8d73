"""Batch scripts of Slurm: the options that people use, and those that are refused or named."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from controlplane.cli.job_options import JobOptions
from controlplane.client.job_file import load_job
from controlplane.client.sbatch import PRELUDE, is_batch_script, job_of_batch_script, memory_bytes
from schemas.errors import BadFieldError

# From the documentation of a public cluster, shortened.
SCRIPT = """#!/bin/bash
#SBATCH --job-name=my_gpu_job
#SBATCH --output=slurm-%j.out   # a comment
#SBATCH --partition=gpu
#SBATCH --ntasks=2
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:a100:2
#SBATCH --time=1-02:30:00
#SBATCH --mail-type=END,FAIL

module purge
#SBATCH --nodes=4
srun python train.py
"""


def test_a_batch_script_of_a_public_cluster_is_a_command() -> None:
    fields, remark = job_of_batch_script(SCRIPT, "job.sh")

    assert fields == {
        "name": "my_gpu_job", "kind": "command", "slots": 2, "max_run_s": 95_400.0,
        "gpu_type": "a100", "cpus": 8.0,
        "command": ["/bin/bash", "-c", PRELUDE, "job.sh"],
        "env": {
            "SLURM_JOB_NAME": "my_gpu_job", "SLURM_NTASKS": "2", "SLURM_NNODES": "1",
            "SLURM_JOB_NUM_NODES": "1",
        },
    }  # fmt: skip
    assert remark == "--output, --partition, --mail-type: no effect here"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("-J a.b -t 30", {"name": "a-b", "max_run_s": 1800.0}),
        ("-t 2:30", {"max_run_s": 150.0}),
        ("-t 2-12", {"max_run_s": 216_000.0}),
        ("--deadline=now+1days", {"deadline": "+1d"}),
        ("--signal=USR1@90", {"warn": {"signal": "USR1", "before_s": 90.0, "to": "others"}}),
        ("--signal=B:SIGTERM", {"warn": {"signal": "TERM", "before_s": 60.0, "to": "first"}}),
        ("--gpus=4", {"slots": 4}),
        ("-G v100:3", {"slots": 3, "gpu_type": "v100"}),
        ("--gres=gpu", {"slots": 1}),
        ("--gres=gpu:2", {"slots": 2}),
        ("--gres=gpu:a100", {"slots": 1, "gpu_type": "a100"}),
        ("-n 2 --gpus-per-task=a100:2", {"slots": 4, "gpu_type": "a100"}),
        ("-n 4 -c 8 --gpus 2", {"slots": 2, "cpus": 16.0}),  # 32 cores for two slots
        ("--cpus-per-gpu=6 --gpus 2", {"cpus": 6.0}),
        ("--mem=64G --gpus 4", {"memory_bytes": 16 << 30}),
        ("--mem=512", {"memory_bytes": 512 << 20}),
        ("-c 4 --mem-per-cpu=2G", {"cpus": 4.0, "memory_bytes": 8 << 30}),
        ("--mem-per-gpu 20G --gpus 2", {"memory_bytes": 20 << 30}),
        ("--exclusive", {"exclusive": True}),
        ("-C 'nvlink&zone=a'", {"constraints": {"nvlink": "yes", "zone": "a"}}),
        ("-n 3 --gpus-per-task 2", {"slots": 6}),
        ("-N 1 --ntasks-per-node=4", {"slots": 4}),
        ("--requeue", {"on_loss": "restart"}),
        ("--no-requeue", {"on_loss": "fail"}),
        ("-D sub/dir", {"workdir": "sub/dir"}),
        ("-a 0-9%3", {"array": "0-9%3"}),
        ("--begin=now+2hours", {"not_before": "+2h"}),
        ("-d afterok:a-1:b-2,afterany:c-3", {"after": ["ok:a-1", "ok:b-2", "any:c-3"]}),
        ("--comment=nightly", {"labels": {"comment": "nightly"}}),
    ],
)
def test_an_option_becomes_a_field(options: str, expected: dict[str, Any]) -> None:
    fields, _ = job_of_batch_script(f"#!/bin/bash\n#SBATCH {options}\ntrue\n", "run.sh")

    assert expected.items() <= fields.items()


@pytest.mark.parametrize(
    ("text", "size"), [("16G", 16 << 30), ("1.5GiB", 3 << 29), ("512m", 512 << 20), ("4096", 4096)]
)
def test_memory_is_stated_with_a_unit_or_in_bytes(text: str, size: int) -> None:
    assert memory_bytes(text) == size


def test_options_of_commands_are_the_fields_of_a_job_file() -> None:
    options = JobOptions(
        gpu_type="a100", cpus=2.0, memory="1G", constraint=["zone=a"], exclusive=True
    )

    assert options.fields() == {
        "gpu_type": "a100", "cpus": 2.0, "memory_bytes": 1 << 30, "exclusive": True,
        "constraints": {"zone": "a"},
    }  # fmt: skip
    with pytest.raises(BadFieldError) as refused:
        JobOptions(memory="much").fields()
    assert refused.value.message == "memory: 'much' is not an amount of memory"


def test_all_memory_of_a_node_is_no_request() -> None:
    """Slurm's --mem=0 has no counterpart that works on each node; a slot has its share."""
    fields, _ = job_of_batch_script("#!/bin/bash\n#SBATCH --mem=0 -c 2\ntrue\n", "run.sh")

    assert "memory_bytes" not in fields


def test_exported_variables_are_those_with_values() -> None:
    fields, _ = job_of_batch_script("#!/bin/bash\n#SBATCH --export=ALL,MODE=fast\n", "run.sh")

    assert fields["env"]["MODE"] == "fast"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--nodes=2", "sbatch: --nodes=2: a batch script runs on one node"),
        (
            "--switches=2 --licenses=a",
            "sbatch: options without a counterpart: --switches, --licenses",
        ),
        ("-t soon", "sbatch: argument -t/--time: 'soon' is not a time"),
        ("-d singleton", "'singleton' is not afterok, afterany or afternotok with names of jobs"),
        ("-n 0", "sbatch: argument -n/--ntasks: '0' is not a number of 1 or more"),
        ("--gres=tpu:a:1", "'tpu:a:1' is not a number of GPUs"),
        ("--mem=lots", "'lots' is not memory, such as 16G"),
        ("-C 'a|b'", "'a|b' has more than names of labels joined by &"),
        ("--export=HOME", "HOME: variables of your shell do not travel; write NAME=VALUE"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(options: str, problem: str) -> None:
    with pytest.raises(BadFieldError) as refused:
        job_of_batch_script(f"#!/bin/bash\n#SBATCH {options}\n", "run.sh")

    assert problem in refused.value.message
    assert refused.value.hint


def test_a_file_with_sbatch_lines_can_be_submitted(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(SCRIPT)

    spec = load_job(tmp_path / "job.sh")

    assert (spec.kind, spec.slots, spec.name, spec.argv[-1]) == (
        "command",
        (2, 2),
        "my_gpu_job",
        "job.sh",
    )
    assert spec.workdir == str(tmp_path)
    assert is_batch_script(SCRIPT.encode())
    assert not is_batch_script(b"name = 'a'  # SBATCH\n")


@pytest.mark.slow
def test_srun_starts_its_tasks_and_returns_a_failure(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(
        "srun -n 2 bash -c 'echo \"task $SLURM_PROCID of $SLURM_NTASKS in $SLURM_JOB_ID\"'\n"
        "srun --ntasks=1 false\necho code $?\nsrun true && echo fine\n"
    )
    env = {"PATH": os.environ["PATH"], "ONES_JOB": "my-job-7", "SLURM_NTASKS": "3"}

    done = subprocess.run(
        ["/bin/bash", "-c", PRELUDE, "job.sh"], cwd=tmp_path, env=env, capture_output=True, text=True,
        check=True,
    )  # fmt: skip

    assert sorted(done.stdout.splitlines()) == [
        "code 1",
        "fine",
        "task 0 of 2 in 7",
        "task 1 of 2 in 7",
    ]


def test_a_qos_becomes_the_class_of_the_job() -> None:
    fields, remark = job_of_batch_script("#!/bin/bash\n#SBATCH --qos=urgent\ntrain\n", "a.sh")

    assert fields["class"] == "urgent"
    assert not remark
