"""Job files become specs that can be submitted, or name what to change."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from controlplane.client.job_file import checked, load_job
from schemas.errors import BadFieldError, SettingsError
from schemas.host.settings import convert, example_of
from schemas.jobs import JobSpec, StopRule
from tests.support.builders import job_spec
from tests.support.client_examples import sweep

SHELL_REMEDY = (
    "write a job file with `ones init` for the Python file that it runs; its arguments go into "
    "args, its exports into [env], the number of its tasks into slots"
)

JOB = """
name = "digits"
script = "train.py"
batch_size = 64
slots = [1, 4]
workdir = "code"
python = "venv/bin/python"
env = { MODE = "fast" }

[stop]
epochs = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("")
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def test_paths_of_a_job_file_are_relative_to_the_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")

    assert load_job(file) == JobSpec(
        name="digits",
        script="train.py",
        batch_size=64,
        slots=(1, 4),
        workdir=str(tmp_path / "code"),
        python=str(tmp_path / "venv" / "bin" / "python"),
        env={"MODE": "fast"},
        stop=StopRule(epochs=3),
    )


def test_an_interpreter_without_a_slash_is_looked_up_on_the_node(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")

    spec = checked(job_spec(python="python3.11"), tmp_path)

    assert (spec.python, spec.workdir) == ("python3.11", str(tmp_path))


@pytest.mark.parametrize(
    ("line", "field", "hint"),
    [
        ("batch_sise = 1", "batch_sise", "did you mean batch_size?"),
        ('batch_size = "many"', "batch_size", "write batch_size = 64"),
        ("slots = [1]", "slots", "write slots = [1, 8] (least, most) or slots = 4"),
        ("[stop]\nepochs = []", "stop.epochs", "write epochs = 30"),
        ("[stop]\nepoch = 3", "stop.epoch", "did you mean epochs?"),
    ],
)
def test_a_key_that_is_unknown_or_of_the_wrong_type_is_named(
    file: Path, line: str, field: str, hint: str
) -> None:
    replaced = line.split(" =", maxsplit=1)[0].split("\n", maxsplit=1)[0]
    kept = [text for text in JOB.split("[stop]", maxsplit=1)[0].split("\n") if replaced not in text]
    file.write_text("\n".join([*kept, line]))

    with pytest.raises(SettingsError) as refused:
        load_job(file)

    assert (refused.value.field, refused.value.hint) == (field, hint)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file"),
        ("", "is empty; give at least"),
        ("x =", "correct the TOML"),
        ('name = "digits"\nscript = "train.py"\n', "batch_size: is missing"),
    ],
)
def test_an_unusable_file_states_the_reason(tmp_path: Path, text: str | None, why: str) -> None:
    if text is not None:
        (tmp_path / "job.toml").write_text(text)

    with pytest.raises(SettingsError, match=why):
        load_job(tmp_path / "job.toml")


def test_a_script_that_is_missing_or_not_python_is_refused(file: Path, tmp_path: Path) -> None:
    script = tmp_path / "code" / "train.py"
    script.write_bytes(b"\x7fELF\0\0")

    with pytest.raises(BadFieldError, match=r"script: scripts are Python; train.py is not"):
        load_job(file)
    script.unlink()
    with pytest.raises(BadFieldError, match=r"script: train.py is not in .*code; correct script"):
        load_job(file)


@pytest.mark.parametrize("field", ["script", "workdir"])
def test_a_path_that_is_too_long_is_refused_by_name(file: Path, field: str) -> None:
    long = "1e9" * 200

    with pytest.raises(BadFieldError) as refused:
        load_job(file, [f"{field}={long}"])

    assert (refused.value.field, "File name too long" in str(refused.value)) == (field, True)
    assert len(refused.value.message) < len(long)


def test_a_workdir_with_a_loop_of_links_is_refused(file: Path, tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to(tmp_path / "round")

    with pytest.raises(BadFieldError, match="workdir: round cannot be opened"):
        load_job(file, ["workdir=round"])


@pytest.mark.parametrize(
    ("before", "change", "said", "field"),
    [
        *((f"args = {args}", "args.width=64", "args is not a list of strings", "args")
          for args in ("true", "[1]", '"--width 3"')),
        ("", "slots=[4, 1]", "slots: slots \\[4, 1\\] is not a range; give", "slots"),
    ],
)  # fmt: skip
def test_an_invalid_value_is_named_with_its_field(
    file: Path, before: str, change: str, said: str, field: str
) -> None:
    file.write_text(f"{before}\n{JOB}")

    with pytest.raises(BadFieldError, match=said) as refused:
        load_job(file, [change])

    assert refused.value.field == field


# --- other files in the place of a job file


@pytest.mark.parametrize(
    ("name", "text", "what", "remedy"),
    [
        ("train.py", "import torch", "a script", "write a job file with `ones init FILE`, then submit the job file"),
        ("train", "#!/usr/bin/env python3\n", "a script", "write a job file with `ones init FILE`, then submit the job file"),
        ("train.ipynb", '{"cells": []}', "a notebook", "run `jupyter nbconvert --to script FILE`, then `ones init` on the script"),
        ("run.sh", "#!/bin/sh\npython train.py\n", "a shell script", SHELL_REMEDY),
        ("run.job", "#!/bin/bash\n#SBATCH --ntasks=4\n", "a batch script of Slurm", SHELL_REMEDY),
    ],
)  # fmt: skip
def test_a_script_in_the_place_of_a_job_file_is_named_with_a_remedy(
    tmp_path: Path, name: str, text: str, what: str, remedy: str
) -> None:
    path = tmp_path / name
    path.write_text(text)

    with pytest.raises(SettingsError) as refused:
        load_job(path)

    assert refused.value.message == f"{path} is {what}, not a job file"
    assert refused.value.hint == remedy.replace("FILE", str(path))


@pytest.mark.parametrize("head", ["\ufeff", "#!/usr/bin/env -S ones submit\n"])
def test_a_byte_order_mark_or_an_interpreter_line_is_skipped(file: Path, head: str) -> None:
    before = load_job(file)
    file.write_text(f"{head}{JOB}")

    assert load_job(file) == before


def test_a_job_file_is_read_from_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    text = f'name = "a"\nscript = "train.py"\nbatch_size = 4\nworkdir = "{tmp_path}"\n'
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)

    spec = load_job(Path(f"/dev/fd/{reader}"))
    os.close(reader)

    assert (spec.name, spec.workdir) == ("a", str(tmp_path))


# --- forms of values


def test_a_single_number_of_slots_is_minimum_and_maximum(file: Path) -> None:
    stated: Any = {"name": "a", "script": "train.py", "batch_size": 8, "slots": 4}

    assert load_job(file, ["slots=4"]).slots == (4, 4)
    assert JobSpec(**stated).slots == (4, 4)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stated), type=JobSpec) == JobSpec(**stated)
    file.write_text(JOB.replace("[1, 4]", "4"))
    assert load_job(file).slots == (4, 4)
    assert sweep(slots=4).job_spec().slots == (4, 4)


def test_a_stop_rule_that_is_not_a_table_is_answered_with_all_forms(file: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        load_job(file, ["stop=30"])

    assert refused.value.hint == (
        "write stop = { epochs = 30 }, { samples = 1000000 }, "
        '{ metric = "accuracy", at_least = 0.97 } or { metric = "accuracy", plateau = 5 }'
    )


@pytest.mark.parametrize("key", sorted(set(JobSpec.__struct_fields__) - {"sweep", "trial"}))
def test_the_text_that_an_error_suggests_is_accepted(key: str) -> None:
    several = r" or (?=slots)|, (?=\{)| or (?=\{)|, (?=\"keep)| or (?=\"auto|\"fail)"
    first, *others = re.split(several, example_of(JobSpec, key).replace(" (least, most)", ""))

    for value in (first.partition(" = ")[2], *(one.removeprefix("slots = ") for one in others)):
        table = tomllib.loads(JOB) | tomllib.loads(f"{key} = {value}")
        assert key in msgspec.to_builtins(convert(JobSpec, table, Path("job.toml")))


def test_a_spec_from_python_may_have_lists_and_paths(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    spec = job_spec(workdir=tmp_path, slots=[1, 4], args=["--width", "64"])

    assert checked(spec, tmp_path) == job_spec(
        workdir=str(tmp_path), slots=(1, 4), args=("--width", "64")
    )


NOT_SUBMITTED = "a value of type {} cannot be submitted; write {}".format


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"batch_size": "64"}, "Expected `int`, got `str`; write batch_size = 64"),
        ({"batch_size": np.int64(64)}, NOT_SUBMITTED("numpy.int64", "batch_size = 64")),
        ({"lr": np.float64(0.1)}, NOT_SUBMITTED("numpy.float64", "lr = 0.05")),
        ({"stop": StopRule(epochs=np.int64(3))}, NOT_SUBMITTED("numpy.int64", "stop = { epochs = 30 }, ")),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_by_field(
    tmp_path: Path, value: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadFieldError) as refused:
        checked(job_spec(**value), tmp_path)

    (field,) = value
    assert str(refused.value).startswith(f"{field}: {said}")
    assert refused.value.field == field
