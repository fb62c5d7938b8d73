"""Job files, with KEY=VALUE of a command line over them, become specs or name what to change."""

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
from controlplane.client.spec_overrides import with_option, with_overrides
from schemas.errors import BadFieldError, OnesError
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
        name="digits", script="train.py", batch_size=64, slots=(1, 4),
        workdir=str(tmp_path / "code"), python=str(tmp_path / "venv" / "bin" / "python"),
        env={"MODE": "fast"}, stop=StopRule(epochs=3),
    )  # fmt: skip


def test_an_interpreter_without_a_slash_is_looked_up_on_the_node(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")

    spec = checked(job_spec(python="python3.11"), tmp_path)

    assert (spec.python, spec.workdir) == ("python3.11", str(tmp_path))


def test_an_interpreter_whose_absolute_path_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFieldError, match=r"python: a path of \d+ characters, at most 4096"):
        checked(job_spec(python="a/" * 2047), tmp_path)


J = JOB.replace
UTILITY = "utility = {"
NO_ARGUMENTS = 'args is not a list of strings in the job file; write args = ["--width", "64"]'
ASSIGNMENT = "write KEY=VALUE: lr=0.1, stop.epochs=3, args.width=64 or env.MODE=fast"


def refusal(path: Path, *overrides: str) -> tuple[str, str]:
    """Return the field of an error and what it says, with DIR for the folder of the file."""
    with pytest.raises(OnesError) as refused:
        load_job(path, overrides)
    return refused.value.field, str(refused.value).replace(str(path.parent), "DIR")


@pytest.mark.parametrize(
    ("text", "override", "field", "said"),
    [
        ("", "", "", "DIR/job.toml is empty; give at least name, script and batch_size"),
        ("x =", "", "", "DIR/job.toml: Invalid value (at end of document); correct the TOML"),
        (None, "", "", "DIR/job.toml: No such file or directory; check the path"),
        (J("batch_size = 64", ""), "", "batch_size", "batch_size: is missing; write batch_size = 64"),
        (J("batch_size", "batch_sise"), "", "batch_sise", "DIR/job.toml: unknown key batch_sise; did you mean batch_size?"),
        (J("= 64", '= "many"'), "", "batch_size", "DIR/job.toml: batch_size: Expected `int`, got `str`; write batch_size = 64"),
        (J("[1, 4]", "[1]"), "", "slots", "DIR/job.toml: slots: Expected `array` of length 2, got 1; write slots = [1, 8] (least, most) or slots = 4"),
        (J("= 3", "= []"), "", "stop.epochs", "DIR/job.toml: stop.epochs: Expected `int | null`, got `array`; write epochs = 30"),
        (J("epochs", "epoch"), "", "stop.epoch", "DIR/job.toml: unknown key stop.epoch; did you mean epochs?"),
        (JOB, "script=elf", "script", "script: scripts are Python; elf is not; give the Python file that trains, such as train.py"),
        (JOB, "script=missing.py", "script", "script: missing.py is not in DIR/code; correct script or workdir"),
        (JOB, "workdir=round", "workdir", "workdir: round cannot be opened: its links form a loop; correct workdir"),
        (JOB, "slots=[4, 1]", "slots", "slots: slots [4, 1] is not a range; give [least, most] with 1 <= least <= most"),
        (f"args = true\n{JOB}", "args.width=64", "args", NO_ARGUMENTS),
        (f"args = [1]\n{JOB}", "args.width=64", "args", NO_ARGUMENTS),
        (f'args = "--width 3"\n{JOB}', "args.width=64", "args", NO_ARGUMENTS),
        (JOB, "stop=30", "stop", 'DIR/job.toml: stop: Expected `object | null`, got `int`; write stop = { epochs = 30 }, { samples = 1000000 }, { metric = "accuracy", at_least = 0.97 } or { metric = "accuracy", plateau = 5 }'),
        (f'{UTILITY} value = "high" }}\n{JOB}', "", "utility.value", "DIR/job.toml: utility.value: Expected `float`, got `str`; write value = 80"),
        (JOB, "utility={ value = -1 }", "utility.value", "utility.value: -1.0 is out of range; give 0 to 1e+09: its value relative to other jobs"),
        (JOB, "utility={ value = nan }", "utility.value", "utility.value: nan is out of range; give 0 to 1e+09: its value relative to other jobs"),
        (JOB, "utility={ deadline_s = 5 }", "utility.value", "DIR/job.toml: utility.value: is missing; write value = 80"),
        (JOB, "utility={ value = 1, deadline_s = -5, decay = 1 }", "utility.deadline_s", "utility.deadline_s: -5.0 is in the past; give seconds after its submission, above 0, at most 1e+10, or leave it out"),
        (JOB, "utility={ value = 1, deadline_s = 5, decay = -1 }", "utility.decay", "utility.decay: -1.0 is out of range; give 0 (its deadline does not matter) to 1e+06, per second"),
        (JOB, "utility={ value = 1, dedline_s = 5 }", "utility.dedline_s", "DIR/job.toml: unknown key utility.dedline_s; did you mean deadline_s?"),
        (f'utility = "dear"\n{JOB}', "", "utility", "DIR/job.toml: utility: Expected `object`, got `str`; write utility = { value = 80, deadline_s = 3600, decay = 0.01 }"),
        (JOB, "lr", "set", f"--set 'lr' is not an assignment; {ASSIGNMENT}"),
        (JOB, "learning=1", "learning", "--set learning: a job has no such field; one of after, args, array, batch_size, class"),
        (JOB, "batchsize=1", "batchsize", "--set batchsize: a job has no such field; did you mean batch_size?"),
        (JOB, "lr.x=1", "lr.x", f"--set lr.x: lr has no entries; {ASSIGNMENT}"),
        (JOB, "env.=1", "env.", f"--set env. names no entry of env; {ASSIGNMENT}"),
        (JOB, "stop.epoch=1", "stop", "--set stop.epoch: there is no such stop rule; did you mean epochs?"),
        (JOB, "stop.zebra=1", "stop", "--set stop.zebra: there is no such stop rule; one of at_least, consecutive, epochs, metric, plateau, samples"),
    ],
)  # fmt: skip
def test_a_job_file_or_override_that_is_invalid_is_refused_with_its_field_and_a_remedy(
    file: Path, text: str | None, override: str, field: str, said: str
) -> None:
    (file.parent / "code" / "elf").write_bytes(b"\x7fELF\0\0")
    (file.parent / "round").symlink_to(file.parent / "round")
    file.unlink() if text is None else file.write_text(text)

    named, problem = refusal(file, *[override] * bool(override))

    assert (named, problem[: len(said)]) == (field, said)
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("train.py", "import torch", "DIR/train.py is a script, not a job file; write a job file with `ones init DIR/train.py`, then submit the job file"),
        ("train", "#!/usr/bin/env python3\n", "DIR/train is a script, not a job file; write a job file with `ones init DIR/train`, then submit the job file"),
        ("train.ipynb", '{"cells": []}', "DIR/train.ipynb is a notebook, not a job file; run `jupyter nbconvert --to script DIR/train.ipynb`, then `ones init` on the script"),
        ("run.sh", "#!/bin/sh\npython train.py\n", "DIR/run.sh is a shell script, not a job file; run it as it is with `ones run -- ./run.sh`, or add #SBATCH lines"),
    ],
)  # fmt: skip
def test_a_script_in_the_place_of_a_job_file_is_named_with_a_remedy(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)

    assert refusal(tmp_path / name) == ("", said)


@pytest.mark.parametrize("field", ["script", "workdir"])
def test_a_path_that_is_too_long_is_refused_by_name(file: Path, field: str) -> None:
    long = "1e9" * 200

    with pytest.raises(BadFieldError) as refused:
        load_job(file, [f"{field}={long}"])

    assert (refused.value.field, "File name too long" in str(refused.value)) == (field, True)
    assert len(refused.value.message) < len(long)


# --- other files in the place of a job file


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


@pytest.mark.parametrize(
    "key", sorted(set(JobSpec.__struct_encode_fields__) - {"sweep", "trial", "element"})
)
def test_the_text_that_an_error_suggests_is_accepted(key: str) -> None:
    several = r" or (?=slots)|, (?=\{)| or (?=\{)|, (?=\"keep|\"torchrun|\"command|\"mlflow)| or (?=\"auto|\"fail|\"interactive|\"wandb)"
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


TABLE: dict[str, Any] = {
    "name": "digits", "script": "train.py", "batch_size": 64, "args": ["--width", "64"],
    "stop": {"epochs": 3}, "env": {"MODE": "slow"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("assignment", "changed"),
    [
        ("lr=0.1", {"lr": 0.1}),
        ("batch_size=128", {"batch_size": 128}),
        ("record_samples=true", {"record_samples": True}),
        ("slots=[1, 4]", {"slots": [1, 4]}),
        ("name=7", {"name": "7"}),
        ('script="other.py"', {"script": "other.py"}),
        ("stop={ samples = 9 }", {"stop": {"samples": 9}}),
        ("stop.epochs=5", {"stop": {"epochs": 5}}),
        ("stop.samples=5", {"stop": {"samples": 5}}),
        ("env.MODE=2", {"env": {"MODE": "2"}}),
        ("env.OMP_NUM_THREADS=2", {"env": {"MODE": "slow", "OMP_NUM_THREADS": "2"}}),
        ("args.width=8", {"args": ["--width", "8"]}),
        ("args.depth=2", {"args": ["--width", "64", "--depth", "2"]}),
        ("env.EQUATION=a=b", {"env": {"MODE": "slow", "EQUATION": "a=b"}}),
    ],
)
def test_an_assignment_replaces_one_value_and_leaves_the_others(
    assignment: str, changed: dict[str, Any]
) -> None:
    before = {key: dict(v) if isinstance(v, dict) else v for key, v in TABLE.items()}

    assert with_overrides(TABLE, [assignment]) == {**TABLE, **changed}
    assert before == TABLE


@pytest.mark.parametrize(
    ("args", "name", "text", "after"),
    [
        (["--width=64", "data"], "width", "8", ["--width=8", "data"]),
        (["--learning-rate", "1"], "learning_rate", "2", ["--learning-rate", "2"]),
        (["--shift", "-3"], "shift", "-4", ["--shift", "-4"]),
        (["--amp", "--width", "1"], "amp", "true", ["--amp", "--width", "1"]),
        (["--amp", "--width", "1"], "amp", "false", ["--width", "1"]),
        (["--amp", "--width", "1"], "amp", "bf16", ["--amp", "bf16", "--width", "1"]),
        (["--amp", "false"], "amp", "true", ["--amp", "true"]),
        ([], "amp", "true", ["--amp"]),
        ([], "amp", "false", []),
        (["--widths", "1"], "width", "2", ["--widths", "1", "--width", "2"]),
    ],
)
def test_an_option_of_the_script_is_replaced_in_place_or_added(
    args: list[str], name: str, text: str, after: list[str]
) -> None:
    assert with_option(args, name, text) == after


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ('["a-1"]', ("a-1",)),
        ('{ job = "a-1", when = "any" }', ("any:a-1",)),
        ('[{ job = "a-1", when = "failed" }, "ok:b-2", { job = "c-3" }]', ("failed:a-1", "ok:b-2", "ok:c-3")),
    ],
)  # fmt: skip
def test_parents_are_texts_or_tables(file: Path, stated: str, expected: tuple[str, ...]) -> None:
    file.write_text(f"after = {stated}\n{JOB}")

    assert load_job(file).after == expected
