"""Checks of a job: accepted values, problems of others, and any value at all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.ids import JobId
from schemas.jobs import (
    MAX_ARGS,
    MAX_BATCH,
    MAX_FAMILY,
    MAX_PATH,
    MAX_SAMPLES,
    MAX_SLOTS,
    MAX_TEXT,
    MAX_VARIABLES,
    SWEEP_SCRIPT,
    EndWarning,
    JobProblem,
    JobSpec,
    StopRule,
    Utility,
    problems,
    script_problem,
)
from schemas.sweeps import (
    MAX_EPOCHS,
    MAX_METRIC,
    Asha,
    Hyperband,
    MedianStopping,
    Parameter,
    PopulationBased,
    RandomSearch,
    SearchSpec,
    SuccessiveHalving,
    SweepSpec,
    TrialSpec,
    choice,
    log_uniform,
)
from tests.support.sizes import examples

SWEEP: Final = SweepSpec(
    search=SearchSpec(
        space={"lr": log_uniform(1e-4, 0.1)}, searcher=RandomSearch(8), epochs=3, metric="accuracy"
    ),
    input_fn="data:load", model_fn="models:build", train_fn="models:train", partitions=4,
)  # fmt: skip
OF_SWEEP: Final[dict[str, Any]] = {
    "script": "sweep", "slots": (1, 4), "batch_size": 4, "max_batch_size": "keep", "sweep": SWEEP,
}  # fmt: skip
NO_EPOCHS: Final = msgspec.structs.replace(SWEEP.search, epochs=0)
NO_TEXT: Final = "\udc80"  # JSON can contain it, UTF-8 cannot
NAME: Final = "use 1 to 48 letters, digits, - or _, starting with a letter or digit"
SHELL: Final = "give the Python file that it runs; its arguments go into args, exports into env"
PYTHON: Final = "give the Python file that trains, such as train.py"
VARIABLE: Final = "names are letters, digits and _, values at most 32 KiB without NUL"
RIGID: Final[dict[str, Any]] = {
    "kind": "command",
    "command": ("make",),
    "script": "",
    "batch_size": 0,
}
NOT_RIGID: Final = 'give kind = "command" or "torchrun", or leave {} out'
NOT_ELASTIC: Final = "leave it out, or give it to the program in command"
RANGE: Final = "choose a value in this range"
FORMS: Final = "give one of epochs, samples, metric with at_least, metric with plateau"
NO_BATCH: Final = (
    "batch_size", "a sweep has no batch: its batch size is its maximum of slots, 4",
    "give batch_size = 4 and max_batch_size = 'keep'",
)  # fmt: skip
TRIAL: Final = TrialSpec(
    sweep=JobId("s-1"), trial=0, values={}, functions={}, partitions=1, seed=0, epochs=2,
    epochs_done=1, version=1, digest="", sources=(),
)  # fmt: skip


def spec(**changes: Any) -> JobSpec:
    """Return the smallest job, with changes."""
    smallest: dict[str, Any] = {"name": "digits", "script": "train.py", "batch_size": 32}
    return JobSpec(**smallest | changes)


def stop(**rule: Any) -> dict[str, Any]:
    return {"stop": StopRule(**rule)}


ACCEPTED: Final[list[dict[str, Any]]] = [
    {},
    {"gpu_type": "a100", "constraints": {"nvlink": "yes"}, "cpus": 0.5, "memory_bytes": 1},
    RIGID | {"exclusive": True, "gpu_type": "NVIDIA A100-SXM4-80GB", "slots": 2},
    RIGID | {"slots": 0, "cpus": 2.0, "memory_bytes": 1 << 30, "constraints": {"zone": "a"}},
    {"exclusive": False},
    RIGID, RIGID | {"slots": 4, "grace_s": 0.0, "retries": 2, "max_run_s": 60.0},
    RIGID | {"kind": "torchrun", "slots": 8, "on_loss": "fail", "env": {"A": "b"}},
    {
        "args": ("--width", "64", ""), "workdir": "/home/ada", "script": "src/train.py",
        "max_batch_size": 2048, "max_local_batch": 512, "lr": 0.05, "slots": (1, 8),
        "slots_wanted": 2, "python": ".venv/bin/python", "record_samples": True, "retries": 100,
        **stop(metric="accuracy", at_least=0.97, consecutive=10, epochs=100),
        "seed": 2**63 - 1, "progress_deadline_s": 60, "utility": Utility(value=10.0, deadline_s=3600.0, decay=0.01),
        "env": {"OMP_NUM_THREADS": "1", "_x": ""},
    },
    *({"name": name} for name in ("a", "A-1_b", "7", "x" * 48)),
    {"family": "ResNet-18 on größere Bilder" + "x" * 100},
    *({"script": script} for script in ("train.py", "./train.py", "a/b/train.py", "..train.py")),
    {"args": ("a" * MAX_TEXT, *["b"] * (MAX_ARGS - 1))},
    {"max_local_batch": 16, "slots": (1, 4)},  # taken in several passes
    {"max_batch_size": 32, "max_local_batch": 32},
    *({"slots": (2, 4), "slots_wanted": wanted} for wanted in (2, 3, 4)),
    *({"priority": priority} for priority in (0.01, 1.0, 100.0)),
    *({"utility": one} for one in (Utility(value=0.0), Utility(value=1e9, deadline_s=0.5, decay=3.0))),
    stop(epochs=1), stop(epochs=MAX_EPOCHS), stop(samples=1_000_000), stop(samples=MAX_SAMPLES),
    *(
        stop(metric="accuracy", **rule)
        for rule in (
            {"at_least": 0.97}, {"at_least": -1.5, "consecutive": 10}, {"plateau": 5},
            {"at_least": 0.97, "epochs": 100}, {"plateau": 5, "epochs": 100},
        )
    ),
    OF_SWEEP,
    OF_SWEEP | {"max_batch_size": 4, "retries": 2, "priority": 3.0, "env": {"A": "1"}},
]  # fmt: skip

Problem = tuple[str, str, str]  # field, text, remedy
REFUSED: Final[list[tuple[dict[str, Any], Problem]]] = [
    *(
        ({"name": name}, ("name", f"{name[:60]!r} is not a job name", NAME))
        for name in ("", "-a", "_a", "a b", "a/b", "..", "a.b", "größe", "a\n", "x" * 49, "x" * 10_000)
    ),
    *(
        ({"family": family}, ("family", f"it has {len(family)} characters", f"give 1 to {MAX_FAMILY} characters, or leave it out"))
        for family in ("", "x" * (MAX_FAMILY + 1))
    ),
    ({"family": NO_TEXT}, ("family", "it has characters that are not printable", "remove them")),
    *(
        ({"script": script}, ("script", f"{script!r} is not inside workdir", "give a path relative to workdir, such as train.py"))
        for script in ("/bin/sh", "../train.py", "a/../../train.py", "a/..")
    ),
    ({"script": "train.sh"}, ("script", "scripts are Python; train.sh is not", SHELL)),
    ({"script": "train.yaml"}, ("script", "scripts are Python; train.yaml is not", PYTHON)),
    *(
        ({"args": args}, ("args", "too many, too long or with a NUL byte", "shorten them"))
        for args in (("a",) * (MAX_ARGS + 1), ("a" * (MAX_TEXT + 1),), ("good", "b\0d"))
    ),
    *(
        ({"env": {name: value}}, (f"env.{name}", "invalid variable", VARIABLE))
        for name, value in (
            ("", "1"), ("1A", "1"), ("A-B", "1"), ("A=B", "1"), ("A", "\0"), ("A", "b" * (MAX_TEXT + 1)),
        )
    ),
    *(
        ({"env": {"ONESELF": "1", name: "1"}}, (f"env.{name}", "is reserved for the cluster", "choose a name without the prefix ONES_"))
        for name in ("ONES_", "ONES_HOME")
    ),
    *(
        ({"env": {"NCCL_SOCKET_IFNAME": "ib0", name: "0"}}, (f"env.{name}", "is set by the cluster for each worker", remedy))
        for name, remedy in (
            ("CUDA_VISIBLE_DEVICES", "leave it out: a worker sees the device of its slot, as device 0, and no other"),
            ("NCCL_BLOCKING_WAIT", "leave it out: a group that changes relies on its value"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "leave it out: a group that changes relies on its value"),
        )
    ),
    (
        {"env": {f"A{number}": "" for number in range(MAX_VARIABLES + 1)}},
        ("env", f"it has {MAX_VARIABLES + 1} variables, at most {MAX_VARIABLES}", "put them into a file of the working directory"),
    ),
    (
        {"workdir": "x" * (MAX_PATH + 1)},
        ("workdir", f"a path of {MAX_PATH + 1} characters, at most {MAX_PATH}", "give a shorter one"),
    ),
    ({"python": "a\0b"}, ("python", "it is not a path", "give one without NUL bytes, in UTF-8")),
    ({"script": ""}, ("script", "is missing", 'write script = "train.py"')),
    ({"batch_size": 0}, ("batch_size", "is missing", "write batch_size = 64")),
    ({"batch_size": -1}, ("batch_size", f"-1 is not 1 to {2**40}", RANGE)),
    (
        {"max_batch_size": 16},
        ("max_batch_size", "max_batch_size 16 is below batch_size 32", "raise the first or lower the second"),
    ),
    *(
        ({"max_local_batch": most}, ("max_local_batch", f"{most} is not 1 to {MAX_BATCH}", RANGE))
        for most in (0, -1, MAX_BATCH + 1)
    ),
    *(
        ({"lr": lr}, ("lr", f"{lr} is not a learning rate", "give a positive finite number, or leave it out to keep the script's"))
        for lr in (math.nan, math.inf, -math.inf, 0.0, -0.1)
    ),
    *(
        ({"slots": slots}, ("slots", f"slots [{slots[0]}, {slots[1]}] is not a range", "give [least, most] with 1 <= least <= most"))
        for slots in ((4, 2), (0, 1), (-1, 1), (0, 0))
    ),
    ({"slots": (1, MAX_SLOTS + 1)}, ("slots", f"slots: the maximum {MAX_SLOTS + 1} exceeds {MAX_SLOTS}", "lower the maximum")),
    *(
        ({"slots": (2, 4), "slots_wanted": wanted}, ("slots_wanted", f"slots_wanted {wanted} is outside slots [2, 4]", "choose a number within slots"))
        for wanted in (1, 5, 0, -2)
    ),
    ({"command": ("make",)}, ("command", "does not apply to an elastic job", NOT_RIGID.format("command"))),
    ({"grace_s": 5.0}, ("grace_s", "does not apply to an elastic job", NOT_RIGID.format("grace_s"))),
    (RIGID | {"image": "-v /:/x"}, ("image", "it is not the name of an image", 'write image = "docker.io/library/python:3.13"')),
    (
        {"image": "debian:12", "requirements": "r.txt"},
        ("requirements", "does not apply to an image", "install them in the image"),
    ),
    ({"requirements": "../r.txt"}, ("requirements", "it is not inside workdir", "give a path relative to workdir, such as requirements.txt")),
    (
        RIGID | {"kind": "torchrun", "slots": 0},
        ("slots", "slots [0, 0] is not a range", "give [least, most] with 1 <= least <= most"),
    ),
    *(
        ({"gpu_type": text}, ("gpu_type", f"{text[:60]!r} is not a type of GPU", "give words of a device in `ones node list`: a100"))
        for text in ("", "--", "a" * 101)
    ),
    *(
        ({"cpus": cpus}, ("cpus", f"{cpus} is not a number of cores", "give a number above 0, at most 65536"))
        for cpus in (0.0, -1.0, math.nan, math.inf)
    ),
    *(
        ({"memory_bytes": size}, ("memory_bytes", f"{size} is not a number of bytes", "give bytes for each slot, above 0"))
        for size in (0, -1, 2**63)
    ),
    (
        {"constraints": {"a b": "yes"}},
        ("constraints", "'a b' is not a name", "use 1 to 63 letters, digits, - _ . or /, starting with a letter or digit"),
    ),
    ({"exclusive": True}, ("exclusive", "does not apply to an elastic job", "leave it out: an elastic job shares nodes")),
    *(
        (RIGID | {"slots": 0, field: value}, (field, "does not apply to a job without slots", "leave it out"))
        for field, value in (("gpu_type", "a100"), ("exclusive", True))
    ),
    ({"deadline": "soon"}, ("deadline", "'soon' is not a time", "write 2026-12-01T08:00Z or +2h (s, m, h or d after the submission)")),
    ({"warn": EndWarning()}, ("warn", "does not apply to an elastic job", NOT_RIGID.format("warn"))),
    (RIGID | {"warn": EndWarning()}, ("warn", "the job's time is not limited", "give max_run_s or deadline, too")),
    (RIGID | {"max_run_s": 9.0, "warn": EndWarning(before_s=0.0)}, ("warn.before_s", "0.0 is not a positive number of seconds", "give seconds before the end of its time")),
    (RIGID | {"command": ()}, ("command", "is missing", 'write command = ["python", "prepare.py", "--rows", "1000"]')),
    (RIGID | {"command": ("a", "b\0d")}, ("command", "too many, too long or with a NUL byte", "shorten it")),
    (
        RIGID | {"slots": (1, 2)},
        ("slots", "slots [1, 2] is a range, and a command job has a fixed number", "write slots = 2"),
    ),
    *(
        (RIGID | {"grace_s": grace_s}, ("grace_s", f"{grace_s} is not 0 to 3600 seconds", RANGE))
        for grace_s in (-1.0, 3600.5, math.nan)
    ),
    *(
        (RIGID | {field: value}, (field, "does not apply to a command job", NOT_ELASTIC))
        for field, value in (("script", "train.py"), ("args", ("--a",)), ("lr", 0.1), ("batch_size", 64), ("seed", 1))
    ),
    *(({"retries": many}, ("retries", f"{many} is not 0 to 100", RANGE)) for many in (-1, 101)),
    *(
        ({"progress_deadline_s": limit_s}, ("progress_deadline_s", f"{limit_s} is not a number of seconds from 60 up", "give one, or leave it out for 1800"))
        for limit_s in (59.9, 0, -1.0, math.inf, math.nan)
    ),
    *(
        ({"seed": seed}, ("seed", f"{seed} is out of range", "give 0 to 2**63 - 1, or leave it out to keep the script's"))
        for seed in (-1, 2**63)
    ),
    *(
        ({"priority": one}, ("priority", f"{one} is not 0.01 to 100", "give a weight in this range; 1 is the default"))
        for one in (0.0, -1.0, 100.5, math.inf, math.nan)
    ),
    (
        {"utility": Utility(value=1.0, deadline_s=1e300)},
        ("utility.deadline_s", "1e+300 is too far off", "give seconds after its submission, above 0, at most 1e+10, or leave it out"),
    ),
    *(
        (stop(**rule), ("stop", "not exactly one of epochs and samples", FORMS))
        for rule in ({}, {"epochs": 3, "samples": 9}, {"consecutive": 2})
    ),
    *(
        (stop(**rule), ("stop.metric", "at_least and plateau need a metric", FORMS))
        for rule in ({"at_least": 0.9}, {"plateau": 5}, {"epochs": 3, "plateau": 5})
    ),
    *(
        (stop(metric="accuracy", **rule), ("stop", "a metric needs either at_least or plateau", FORMS))
        for rule in (
            {}, {"epochs": 3}, {"at_least": 0.9, "plateau": 5}, {"at_least": 0.9, "samples": 9},
            {"plateau": 5, "samples": 9},
        )
    ),
    (stop(epochs=0), ("stop.epochs", "0 is below 1", "raise it")),
    (stop(samples=0), ("stop.samples", "0 is below 1", "raise it")),
    (stop(metric="m", plateau=0), ("stop.plateau", "0 is below 1", "raise it")),
    (stop(metric="m", at_least=0.9, consecutive=0), ("stop.consecutive", "0 is below 1", "raise it")),
    *(
        (stop(**{field: value}), (f"stop.{field}", f"{value} is above {most}", f"give 1 to {most}"))
        for field, most in (("epochs", MAX_EPOCHS), ("samples", MAX_SAMPLES))
        for value in (most + 1, 2**63, 2**70)
    ),
    *(
        (stop(metric="m", **{"plateau": 2, field: MAX_EPOCHS + 1}), (f"stop.{field}", f"{MAX_EPOCHS + 1} is above {MAX_EPOCHS}", f"give 1 to {MAX_EPOCHS}"))
        for field in ("plateau", "consecutive")
    ),
    *(
        (stop(metric=metric, at_least=0.5), ("stop.metric", f"{metric[:60]!r} is not a metric name", f"give 1 to {MAX_METRIC} printable characters"))
        for metric in ("", "x" * (MAX_METRIC + 1), "a\x1b[2J", "a\nb", "\u202e", NO_TEXT)
    ),
    *(
        (stop(metric="accuracy", at_least=value), ("stop.at_least", f"{value} is not finite", "give a number"))
        for value in (math.nan, math.inf, -math.inf)
    ),
    (OF_SWEEP | {"max_batch_size": "auto"}, NO_BATCH),
    *(
        (OF_SWEEP | {field: value}, (field, "does not apply to a sweep", f"{remedy}, and leave it out"))
        for field, value, remedy in (
            ("args", ("--width",), "give what varies in sweep.search.space, the rest in env"),
            ("lr", 0.1, "make it a value of sweep.search.space"),
            ("record_samples", True, "`ones sweep manifest` lists the samples of each model"),
            ("stop", StopRule(epochs=3), "give sweep.search.epochs"),
            ("on_loss", "fail", "lost units are trained again"),
            ("seed", 7, "give sweep.search.seed"),
            ("utility", Utility(value=1.0), "give priority"),
        )
    ),
    *(
        (OF_SWEEP | {"sweep": msgspec.structs.replace(SWEEP, **changes)}, (field, what, RANGE))
        for changes, field, what in (
            ({"partitions": 0}, "sweep.partitions", "partitions = 0 is outside 1 to 4096"),
            ({"search": NO_EPOCHS}, "sweep.search.epochs", "epochs = 0 is outside 1 to 1000000"),
        )
    ),
    ({"script": SWEEP_SCRIPT, "trial": TRIAL}, ("trial", "is written by the cluster", "give sweep.graduate_batch instead")),
]  # fmt: skip


def named(changes: dict[str, Any]) -> str:
    return ascii(changes)[1:60].replace("::", ":")


@pytest.mark.parametrize("changes", ACCEPTED, ids=named)
def test_a_correct_job_has_no_problems(changes: dict[str, Any]) -> None:
    assert problems(spec(**changes)) == ()


@pytest.mark.parametrize(
    ("changes", "problem"), REFUSED, ids=lambda one: named(one) if isinstance(one, dict) else ""
)
def test_a_wrong_value_is_named_with_its_remedy(changes: dict[str, Any], problem: Problem) -> None:
    assert problems(spec(**changes)) == (JobProblem(*problem),)


def test_several_problems_are_reported_together() -> None:
    no_script = ("script", "a sweep has no script", "name its functions in [sweep], and give script = 'sweep'")  # fmt: skip

    found = problems(spec(name="", batch_size=0, slots=(0, 0)))
    assert [problem.field for problem in found] == ["name", "batch_size", "slots"]
    assert problems(spec(**OF_SWEEP | {"script": "train.py", "batch_size": 32})) == (
        JobProblem(*no_script),
        JobProblem(*NO_BATCH),
    )


def test_a_job_that_does_not_fit_into_messages_is_refused() -> None:
    large = spec(env={f"A{number}": "b" * MAX_TEXT for number in range(32)})

    size, remedy = (
        len(msgspec.msgpack.encode(large)),
        "put large values into a file of the working directory",
    )
    assert problems(large) == (JobProblem("args", f"the job file has {size} bytes, at most 262144", remedy),)  # fmt: skip


@pytest.mark.parametrize(
    ("utility", "wrong"),
    [
        (Utility(value=-1.0), ["value"]),
        (Utility(value=math.nan), ["value"]),
        (Utility(value=math.inf), ["value"]),
        (Utility(value=1.0, deadline_s=0.0, decay=1.0), ["deadline_s"]),
        (Utility(value=1.0, deadline_s=math.nan, decay=1.0), ["deadline_s"]),
        (Utility(value=1.0, deadline_s=9.0, decay=-1.0), ["decay"]),
        (Utility(value=1.0, deadline_s=9.0, decay=math.inf), ["decay"]),
        (Utility(value=-1.0, deadline_s=-1.0, decay=math.nan), ["value", "deadline_s", "decay"]),
    ],
)
def test_a_utility_has_a_value_a_future_deadline_and_a_decay(
    utility: Utility, wrong: list[str]
) -> None:
    found = [problem.field for problem in problems(spec(utility=utility))]
    assert found == [f"utility.{field}" for field in wrong]


# --- values that follow from others


def test_limits_follow_from_the_batch_and_the_slots() -> None:
    def limits(**changes: Any) -> tuple[int, int, int, int]:
        job = spec(**changes)
        return job.batch_limit, job.local_limit, job.pass_limit, job.wanted

    assert limits(slots=(2, 8)) == (8 * 32, 32, 32, 2)
    given = {"max_batch_size": 256, "max_local_batch": 64, "slots": (2, 8), "slots_wanted": 4}
    assert limits(**given) == (256, 64, 64, 4)
    assert limits(max_local_batch=16, slots=(1, 4)) == (4 * 16, 32, 16, 1)


@pytest.mark.parametrize(
    ("stated", "limit", "auto"),
    [(None, 320, True), ("auto", 320, True), ("keep", 32, False), (32, 32, False), (500, 500, False)],
)  # fmt: skip
def test_a_batch_is_kept_bounded_or_automatic(stated: object, limit: int, *, auto: bool) -> None:
    job = spec(max_batch_size=stated, max_local_batch=80, slots=(1, 4))

    assert (job.batch_limit, job.batch_limit_is_auto) == (limit, auto)


@pytest.mark.parametrize(
    ("script", "first", "remedy"),
    [
        ("train.sh", b"", SHELL),
        ("run/train", b"#!/bin/bash\npython train.py", SHELL),
        ("a/Train.ipynb", b"", "write it out with `jupyter nbconvert --to script Train.ipynb`"),
        ("train", b"\x7fELF\0", PYTHON),
        ("train.yaml", b"", PYTHON),
        ("train.py", b"x = 1\0", PYTHON),
        ("train", b"#!/usr/bin/env python3\n", None),
        ("train", b"import torch", None),
        ("a.b/.train", b"", None),
    ],
)
def test_a_script_is_python_by_its_suffix_or_its_first_bytes(
    script: str, first: bytes, remedy: str | None
) -> None:
    found = (f"scripts are Python; {script} is not", remedy)
    assert script_problem(script, first) == (None if remedy is None else found)


def test_values_that_are_not_stated_are_not_encoded() -> None:
    table = msgspec.to_builtins(spec())

    assert (
        not {"on_loss", "progress_deadline_s", "seed", "utility", "sweep", "trial"} & table.keys()
    )
    assert (spec().stated_seed, spec().stated_utility, spec().fails_on_loss) == (None, None, False)
    assert (spec().progress_limit_s, spec(progress_deadline_s=90).progress_limit_s) == (1800.0, 90)
    assert msgspec.convert({**table, "seed": 0}, JobSpec).stated_seed == 0
    for word, fails in (("restart", False), ("fail", True)):
        job = spec(on_loss=word)
        assert (msgspec.to_builtins(job)["on_loss"], job.fails_on_loss) == (word, fails)


def test_a_utility_is_full_before_its_deadline_half_at_it_and_nothing_long_after() -> None:
    worth = Utility(value=8.0, deadline_s=100.0, decay=1.0)

    assert [worth.at(t) for t in (0.0, 100.0, 1e9)] == [pytest.approx(8.0), 4.0, 0.0]
    assert Utility(value=8.0, deadline_s=100.0).at(1e9) == 8.0
    assert Utility(value=8.0, decay=1.0).at(1e9) == 8.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 32.5), ("batch_size", True), ("slots", [1]), ("slots", [1, 2, 3]), ("args", "--width 64"),
        ("env", {"A": 1}), ("stop", {"epochs": "3"}), ("lr", "0.1"), ("deadline", 3),
    ],
)  # fmt: skip
def test_a_job_of_the_wrong_types_is_not_decoded(field: str, value: Any) -> None:
    table = {"name": "digits", "script": "train.py", "batch_size": 32, field: value}

    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(table, JobSpec)


# --- any value can be encoded or is refused


NO_UTF8: Final = "\udc80"  # as JSON may escape it, and no UTF-8 can say it
INTEGERS: Final = (2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**70, -1, -(2**70))
NUMBERS: Final = (*INTEGERS, 1e300, 5e-324, math.nan, math.inf, -math.inf)
TEXTS: Final = ("", "x", "\0", "\x1b[2J", NO_UTF8, "x" * 5000, "x" * (1 << 20), "größe")
VALUES: Final = (*NUMBERS, *TEXTS)

ORDINARY: Final[dict[str, Any]] = {
    "name": "digits", "script": "train.py", "args": ["a"], "workdir": ".", "batch_size": 32,
    "max_batch_size": 64, "max_local_batch": 64, "lr": 0.1, "slots": [1, 4], "slots_wanted": 2,
    "family": "f", "python": "python", "priority": 1.0, "retries": 1, "progress_deadline_s": 600.0, "seed": 1,
    "stop": {"metric": "m", "at_least": 0.5, "consecutive": 2, "epochs": 9, "plateau": None},
    "utility": {"value": 1.0, "deadline_s": 9.0, "decay": 0.1}, "env": {"A": "1"},
}  # fmt: skip
SWEEP_TABLE: Final[dict[str, Any]] = {
    "name": "s", "script": SWEEP_SCRIPT, "batch_size": 2, "max_batch_size": "keep", "slots": [1, 2],
    "sweep": msgspec.to_builtins(SweepSpec(
        search=SearchSpec(
            space={"a": choice(1, 2), "b": Parameter(uniform=(0.0, 1.0), when={"a": (1,)}),
                   "c": Parameter(integer=(1, 9)), "d": Parameter(log_uniform=(0.1, 1.0))},
            searcher=RandomSearch(2), epochs=3, metric="m",
        ),
        input_fn="a:b", model_fn="a:b", train_fn="a:b", eval_fn="a:b", partitions=2,
        graduate_batch=8,
    )),
}  # fmt: skip
SEARCHERS: Final = (
    RandomSearch(9), SuccessiveHalving(9), Hyperband(), Asha(9), MedianStopping(9),
    PopulationBased(9),
)  # fmt: skip


def places(table: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value that is no table of others."""
    pairs = table.items() if isinstance(table, dict) else enumerate(table)
    for key, value in pairs:
        if isinstance(value, dict | list | tuple):
            yield from places(value, (*path, key))
        else:
            yield (*path, key)


def put(table: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The same, but for one value; on the path of a key's own, the key."""
    changed = dict(table) if isinstance(table, dict) else list(table)
    key, rest = path[0], path[1:]
    changed[key] = put(table[key], rest, value) if rest else value
    return changed


def spec_of(table: Any) -> JobSpec | None:
    try:
        return msgspec.convert(table, JobSpec)
    except (msgspec.ValidationError, UnicodeEncodeError):
        return None  # the wrong type: the codec says so


def numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, int | float):
        yield value
    elif not isinstance(value, str | None):
        for one in value:
            yield from numbers_in(one)


def assert_harmless_or_refused(table: Any) -> None:
    spec = spec_of(table)
    if spec is None or problems(spec):
        return
    whole = msgspec.msgpack.decode(msgspec.msgpack.encode(spec))
    for number in numbers_in(whole):
        if isinstance(number, int):
            assert -(2**63) <= number < 2**63
        else:
            assert math.isfinite(number) or spec.stated_utility == Utility(value=1.0, decay=0.1)
    assert msgspec.convert(whole, JobSpec) == spec


def test_ordinary_values_have_no_problems() -> None:
    for table in (ORDINARY, SWEEP_TABLE):
        spec = spec_of(table)
        assert spec is not None
        assert problems(spec) == ()


@pytest.mark.parametrize("path", [*places(ORDINARY)], ids=lambda path: ".".join(map(str, path)))
def test_any_value_of_a_job_travels_or_is_refused(path: tuple[Any, ...]) -> None:
    for value in VALUES:
        assert_harmless_or_refused(put(ORDINARY, path, value))


@pytest.mark.parametrize("path", [*places(SWEEP_TABLE)], ids=lambda path: ".".join(map(str, path)))
def test_any_value_of_a_sweep_travels_or_is_refused(path: tuple[Any, ...]) -> None:
    for value in VALUES:
        assert_harmless_or_refused(put(SWEEP_TABLE, path, value))


@pytest.mark.parametrize("searcher", SEARCHERS, ids=lambda searcher: type(searcher).__name__)
def test_any_number_of_a_searcher_travels_or_is_refused(searcher: msgspec.Struct) -> None:
    where = ("sweep", "search", "searcher")
    table = put(SWEEP_TABLE, where, msgspec.to_builtins(searcher))
    for path in places(msgspec.to_builtins(searcher)):
        for value in NUMBERS:
            assert_harmless_or_refused(put(table, (*where, *path), value))


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([*places(ORDINARY)]), st.sampled_from(VALUES)), min_size=2)
)
def test_any_values_together_travel_or_are_refused(changes: list[tuple[Any, Any]]) -> None:
    table: Any = ORDINARY
    for path, value in changes:
        table = put(table, path, value)

    assert_harmless_or_refused(table)
