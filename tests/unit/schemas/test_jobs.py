from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from schemas.ids import JobId
from schemas.jobs import (
    MAX_ARGS,
    MAX_BATCH,
    MAX_FAMILY,
    MAX_TEXT,
    SWEEP_SCRIPT,
    JobProblem,
    JobSpec,
    StopRule,
    Utility,
    problems,
    script_problem,
)
from schemas.sweeps import RandomSearch, SearchSpec, SweepSpec, TrialSpec, log_uniform

SWEEP = SweepSpec(
    search=SearchSpec(
        space={"lr": log_uniform(1e-4, 0.1)}, searcher=RandomSearch(8), epochs=3, metric="accuracy"
    ),
    input_fn="data:load",
    model_fn="models:build",
    train_fn="models:train",
    partitions=4,
)
FORMS = "give one of epochs, samples, metric with at_least, metric with plateau"


def spec(**changes: Any) -> JobSpec:
    """The smallest job, with changes."""
    smallest: dict[str, Any] = {"name": "digits", "script": "train.py", "batch_size": 32}
    return JobSpec(**smallest | changes)


def stops(**rule: Any) -> tuple[JobProblem, ...]:
    return problems(spec(stop=StopRule(**rule)))


# --- accepted


def test_the_smallest_job_has_no_problems() -> None:
    assert problems(spec()) == ()


def test_a_job_with_everything_set_has_no_problems() -> None:
    whole = spec(
        args=("--width", "64", ""),
        workdir="/home/ada",
        script="src/train.py",
        max_batch_size=2048,
        max_local_batch=512,
        lr=0.05,
        slots=(1, 8),
        slots_wanted=2,
        python=".venv/bin/python",
        record_samples=True,
        stop=StopRule(metric="accuracy", at_least=0.97, consecutive=10, epochs=100),
        retries=100,
        seed=2**63 - 1,
        utility=Utility(value=10.0, deadline_s=3600.0, decay=0.01),
        env={"OMP_NUM_THREADS": "1", "_x": ""},
    )

    assert problems(whole) == ()


def test_bounds_that_are_left_out_follow_from_the_batch_and_the_least_slots() -> None:
    job = spec(slots=(2, 8))

    assert (job.batch_limit, job.local_limit, job.wanted) == (8 * 32, 32, 2)


@pytest.mark.parametrize(
    ("stated", "limit", "is_open"),
    [
        (None, 320, True),
        ("auto", 320, True),
        ("keep", 32, False),
        (32, 32, False),
        (500, 500, False),
    ],
)
def test_a_batch_is_kept_bounded_or_left_to_the_cluster(
    stated: object, limit: int, *, is_open: bool
) -> None:
    job = spec(max_batch_size=stated, max_local_batch=80, slots=(1, 4))

    assert (job.batch_limit, job.batch_limit_is_auto) == (limit, is_open)


def test_bounds_that_are_given_hold() -> None:
    job = spec(max_batch_size=256, max_local_batch=64, slots=(2, 8), slots_wanted=4)

    assert (job.batch_limit, job.local_limit, job.wanted) == (256, 64, 4)


def test_several_problems_are_told_together() -> None:
    assert [problem.field for problem in problems(spec(name="", batch_size=0, slots=(0, 0)))] == [
        "name",
        "batch_size",
        "slots",
    ]


# --- text


@pytest.mark.parametrize("name", ["a", "A-1_b", "7", "x" * 48])
def test_a_good_name_is_accepted(name: str) -> None:
    assert problems(spec(name=name)) == ()


@pytest.mark.parametrize(
    "name", ["", "-a", "_a", "a b", "a/b", "..", "a.b", "größe", "a\n", "x" * 49, "x" * 10_000]
)
def test_a_bad_name_is_told_shortened(name: str) -> None:
    remedy = "use 1 to 48 letters, digits, - or _, starting with a letter or digit"

    assert problems(spec(name=name)) == (
        JobProblem("name", f"{name[:60]!r} is not a job name", remedy),
    )


@pytest.mark.parametrize("family", ["", "x" * (MAX_FAMILY + 1)])
def test_a_family_without_a_name_or_with_a_long_one_is_refused(family: str) -> None:
    remedy = f"give 1 to {MAX_FAMILY} characters, or leave it out"

    assert problems(spec(family=family)) == (
        JobProblem("family", f"it has {len(family)} characters", remedy),
    )


def test_a_family_may_have_any_name_that_is_not_too_long() -> None:
    assert problems(spec(family="ResNet-18 on größere Bilder" + "x" * 100)) == ()


@pytest.mark.parametrize("script", ["train.py", "./train.py", "a/b/train.py", "..train.py"])
def test_a_script_inside_workdir_is_accepted(script: str) -> None:
    assert problems(spec(script=script)) == ()


@pytest.mark.parametrize("script", ["", "/bin/sh", "../train.py", "a/../../train.py", "a/.."])
def test_a_script_outside_workdir_is_refused(script: str) -> None:
    remedy = "give a path relative to workdir, such as train.py"

    assert problems(spec(script=script)) == (
        JobProblem("script", f"{script!r} is not inside workdir", remedy),
    )


SHELL = "give the Python file that it runs; its arguments go into args, exports into env"


@pytest.mark.parametrize(
    ("script", "first", "remedy"),
    [
        ("train.sh", b"", SHELL),
        ("run/train", b"#!/bin/bash\npython train.py", SHELL),
        ("a/Train.ipynb", b"", "write it out with `jupyter nbconvert --to script Train.ipynb`"),
        ("train", b"\x7fELF\0", "give the Python file that trains, such as train.py"),
        ("train.yaml", b"", "give the Python file that trains, such as train.py"),
        ("train.py", b"x = 1\0", "give the Python file that trains, such as train.py"),
    ],
)
def test_a_file_that_is_not_python_is_refused_with_what_to_do(
    script: str, first: bytes, remedy: str
) -> None:
    assert script_problem(script, first) == (f"scripts are Python; {script} is not", remedy)
    if not first:
        what = f"scripts are Python; {script} is not"
        assert problems(spec(script=script)) == (JobProblem("script", what, remedy),)


@pytest.mark.parametrize(
    ("script", "first"),
    [("train", b"#!/usr/bin/env python3\n"), ("train", b"import torch"), ("a.b/.train", b"")],
)
def test_a_script_needs_no_suffix(script: str, first: bytes) -> None:
    assert script_problem(script, first) is None


@pytest.mark.parametrize(
    "args", [("a",) * (MAX_ARGS + 1), ("a" * (MAX_TEXT + 1),), ("good", "b\0d")]
)
def test_arguments_that_no_process_can_take_are_refused(args: tuple[str, ...]) -> None:
    assert problems(spec(args=args)) == (
        JobProblem("args", "too many, too long or with a NUL byte", "shorten them"),
    )


def test_as_many_and_as_long_arguments_as_allowed_are_accepted() -> None:
    assert problems(spec(args=("a" * MAX_TEXT, *["b"] * (MAX_ARGS - 1)))) == ()


def test_a_job_file_that_would_not_fit_into_messages_is_refused() -> None:
    large = spec(env={f"A{number}": "b" * MAX_TEXT for number in range(32)})

    (problem,) = problems(large)

    assert (
        problem.what
        == f"the job file has {len(msgspec.msgpack.encode(large))} bytes, at most 1048576"
    )
    assert problem.remedy == "put large values into a file of the working directory"


@pytest.mark.parametrize(
    ("name", "value"),
    [("", "1"), ("1A", "1"), ("A-B", "1"), ("A=B", "1"), ("A", "\0"), ("A", "b" * (MAX_TEXT + 1))],
)
def test_a_variable_that_no_process_can_take_is_refused(name: str, value: str) -> None:
    remedy = "names are letters, digits and _, values at most 32 KiB without NUL"

    assert problems(spec(env={name: value})) == (
        JobProblem(f"env.{name}", "invalid variable", remedy),
    )


@pytest.mark.parametrize("name", ["ONES_", "ONES_HOME"])
def test_a_variable_of_the_cluster_is_reserved(name: str) -> None:
    assert problems(spec(env={"ONESELF": "1", name: "1"})) == (
        JobProblem(
            f"env.{name}",
            "is reserved for the cluster",
            "choose a name without the prefix ONES_",
        ),
    )


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        (
            "CUDA_VISIBLE_DEVICES",
            "leave it out: a worker sees the device of its slot, as device 0, and no other",
        ),
        (
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "leave it out: a group that changes relies on its value",
        ),
    ],
)
def test_a_variable_that_each_worker_is_given_is_refused(name: str, remedy: str) -> None:
    assert problems(spec(env={"NCCL_SOCKET_IFNAME": "ib0", name: "0"})) == (
        JobProblem(f"env.{name}", "is set by the cluster for each worker", remedy),
    )


# --- batches


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_holds_at_least_one_sample(size: int) -> None:
    assert problems(spec(batch_size=size)) == (
        JobProblem("batch_size", f"{size} is not 1 to {2**40}", "choose a value in this range"),
    )


def test_a_limit_below_the_batch_is_refused() -> None:
    assert problems(spec(max_batch_size=16)) == (
        JobProblem(
            "max_batch_size",
            "max_batch_size 16 is below batch_size 32",
            "raise the first or lower the second",
        ),
    )


def test_a_batch_above_what_fits_one_slot_is_accepted_since_it_is_taken_in_passes() -> None:
    job = spec(max_local_batch=16, slots=(1, 4))

    assert problems(job) == ()
    assert (job.pass_limit, job.local_limit, job.batch_limit) == (16, 32, 4 * 16)


@pytest.mark.parametrize("bound", [0, -1])
def test_a_pass_has_a_sample_at_least(bound: int) -> None:
    expected = JobProblem(
        "max_local_batch", f"{bound} is not 1 to {MAX_BATCH}", "choose a value in this range"
    )

    assert problems(spec(max_local_batch=bound)) == (expected,)


def test_limits_equal_to_the_batch_are_accepted() -> None:
    assert problems(spec(max_batch_size=32, max_local_batch=32)) == ()


@pytest.mark.parametrize("lr", [math.nan, math.inf, -math.inf, 0.0, -0.1])
def test_a_learning_rate_is_positive_and_finite(lr: float) -> None:
    remedy = "give a positive finite number, or leave it out to keep the script's"

    assert problems(spec(lr=lr)) == (JobProblem("lr", f"{lr} is not a learning rate", remedy),)


# --- slots


@pytest.mark.parametrize("slots", [(4, 2), (0, 1), (-1, 1), (0, 0)])
def test_slots_that_are_no_range_are_refused(slots: tuple[int, int]) -> None:
    assert problems(spec(slots=slots)) == (
        JobProblem(
            "slots",
            f"slots [{slots[0]}, {slots[1]}] is not a range",
            "give [least, most] with 1 <= least <= most",
        ),
    )


@pytest.mark.parametrize("wanted", [1, 5, 0, -2])
def test_wanted_slots_lie_within_slots(wanted: int) -> None:
    assert problems(spec(slots=(2, 4), slots_wanted=wanted)) == (
        JobProblem(
            "slots_wanted",
            f"slots_wanted {wanted} is outside slots [2, 4]",
            "choose a number within slots",
        ),
    )


@pytest.mark.parametrize("wanted", [2, 3, 4])
def test_wanted_slots_within_slots_are_accepted(wanted: int) -> None:
    assert problems(spec(slots=(2, 4), slots_wanted=wanted)) == ()


# --- the rest


@pytest.mark.parametrize("retries", [-1, 101])
def test_retries_are_bounded(retries: int) -> None:
    assert problems(spec(retries=retries)) == (
        JobProblem("retries", f"{retries} is not 0 to 100", "choose a value in this range"),
    )


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_fits_63_bits(seed: int) -> None:
    assert problems(spec(seed=seed)) == (
        JobProblem(
            "seed",
            f"{seed} is out of range",
            "give 0 to 2**63 - 1, or leave it out to keep the script's",
        ),
    )


def test_what_becomes_of_a_lost_job_travels_if_its_user_said_so() -> None:
    assert "on_loss" not in msgspec.to_builtins(spec())
    said = {word: spec(on_loss=word) for word in ("restart", "fail")}

    assert {word: msgspec.to_builtins(each)["on_loss"] for word, each in said.items()} == {
        "restart": "restart", "fail": "fail"
    }  # fmt: skip
    assert [spec().fails_on_loss, *(each.fails_on_loss for each in said.values())] == [
        False, False, True
    ]  # fmt: skip


def test_a_seed_that_nobody_gave_does_not_travel() -> None:
    assert spec().stated_seed is None
    assert "seed" not in msgspec.to_builtins(spec())
    assert msgspec.convert({**msgspec.to_builtins(spec()), "seed": 0}, JobSpec).stated_seed == 0


def test_a_utility_that_nobody_stated_does_not_travel() -> None:
    assert spec().stated_utility is None
    assert "utility" not in msgspec.to_builtins(spec())


@pytest.mark.parametrize(
    ("utility", "wrong"),
    [
        (Utility(value=0.0), ()),
        (Utility(value=1e9, deadline_s=0.5, decay=3.0), ()),
        (Utility(value=-1.0), ("utility.value",)),
        (Utility(value=math.nan), ("utility.value",)),
        (Utility(value=math.inf), ("utility.value",)),
        (Utility(value=1.0, deadline_s=0.0, decay=1.0), ("utility.deadline_s",)),
        (Utility(value=1.0, deadline_s=math.nan, decay=1.0), ("utility.deadline_s",)),
        (Utility(value=1.0, deadline_s=9.0, decay=-1.0), ("utility.decay",)),
        (Utility(value=1.0, deadline_s=9.0, decay=math.inf), ("utility.decay",)),
        (
            Utility(value=-1.0, deadline_s=-1.0, decay=math.nan),
            ("utility.value", "utility.deadline_s", "utility.decay"),
        ),
    ],
)
def test_a_utility_has_a_value_a_deadline_to_come_and_a_decay(
    utility: Utility, wrong: tuple[str, ...]
) -> None:
    assert tuple(problem.field for problem in problems(spec(utility=utility))) == wrong


def test_a_utility_is_whole_before_its_deadline_half_at_it_and_nothing_long_after() -> None:
    worth = Utility(value=8.0, deadline_s=100.0, decay=1.0)

    assert [worth.at(t) for t in (0.0, 100.0, 1e9)] == [pytest.approx(8.0), 4.0, 0.0]
    assert Utility(value=8.0, deadline_s=100.0).at(1e9) == 8.0
    assert Utility(value=8.0, decay=1.0).at(1e9) == 8.0


# --- when it is done


@pytest.mark.parametrize(
    "rule",
    [
        {"epochs": 1},
        {"samples": 1_000_000},
        {"metric": "accuracy", "at_least": 0.97},
        {"metric": "accuracy", "at_least": -1.5, "consecutive": 10},
        {"metric": "accuracy", "plateau": 5},
        {"metric": "accuracy", "at_least": 0.97, "epochs": 100},
        {"metric": "accuracy", "plateau": 5, "epochs": 100},
    ],
)
def test_each_form_of_a_stop_rule_is_accepted(rule: dict[str, Any]) -> None:
    assert stops(**rule) == ()


@pytest.mark.parametrize("rule", [{}, {"epochs": 3, "samples": 9}, {"consecutive": 2}])
def test_a_stop_rule_without_a_metric_has_either_epochs_or_samples(rule: dict[str, Any]) -> None:
    assert stops(**rule) == (JobProblem("stop", "not exactly one of epochs and samples", FORMS),)


@pytest.mark.parametrize("rule", [{"at_least": 0.9}, {"plateau": 5}, {"epochs": 3, "plateau": 5}])
def test_a_threshold_or_a_plateau_needs_a_metric(rule: dict[str, Any]) -> None:
    assert stops(**rule) == (
        JobProblem("stop.metric", "at_least and plateau need a metric", FORMS),
    )


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"epochs": 3},
        {"at_least": 0.9, "plateau": 5},
        {"at_least": 0.9, "samples": 9},
        {"plateau": 5, "samples": 9},
    ],
)
def test_a_metric_needs_either_a_threshold_or_a_plateau(rule: dict[str, Any]) -> None:
    assert stops(metric="accuracy", **rule) == (
        JobProblem("stop", "a metric needs either at_least or plateau", FORMS),
    )


@pytest.mark.parametrize(
    ("field", "rule"),
    [
        ("epochs", {"epochs": 0}),
        ("samples", {"samples": 0}),
        ("plateau", {"metric": "accuracy", "plateau": 0}),
        ("consecutive", {"metric": "accuracy", "at_least": 0.9, "consecutive": 0}),
    ],
)
def test_counts_of_a_stop_rule_begin_at_one(field: str, rule: dict[str, Any]) -> None:
    assert stops(**rule) == (JobProblem(f"stop.{field}", "0 is below 1", "raise it"),)


@pytest.mark.parametrize("threshold", [math.nan, math.inf, -math.inf])
def test_a_threshold_is_finite(threshold: float) -> None:
    assert stops(metric="accuracy", at_least=threshold) == (
        JobProblem("stop.at_least", f"{threshold} is not finite", "give a number"),
    )


# --- types, which decoding checks


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 32.5),
        ("batch_size", True),
        ("slots", [1]),
        ("slots", [1, 2, 3]),
        ("args", "--width 64"),
        ("env", {"A": 1}),
        ("stop", {"epochs": "3"}),
        ("lr", "0.1"),
        ("deadline", 3),
    ],
)
def test_a_job_of_the_wrong_shape_is_not_decoded(field: str, value: Any) -> None:
    table = {"name": "digits", "script": "train.py", "batch_size": 32, field: value}

    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(table, JobSpec)


@pytest.mark.parametrize("priority", [0.0, -1.0, 100.5, math.inf, math.nan])
def test_a_priority_that_is_no_weight_is_refused(priority: float) -> None:
    remedy = "give a weight in this range; 1 is the default"

    assert problems(spec(priority=priority)) == (
        JobProblem("priority", f"{priority} is not 0.01 to 100", remedy),
    )


@pytest.mark.parametrize("priority", [0.01, 1.0, 100.0])
def test_a_priority_within_its_range_is_accepted(priority: float) -> None:
    assert problems(spec(priority=priority)) == ()


# --- sweeps


def sweep(**changes: Any) -> JobSpec:
    """The smallest sweep, with changes."""
    smallest: dict[str, Any] = {
        "script": "sweep",
        "slots": (1, 4),
        "batch_size": 4,
        "max_batch_size": "keep",
        "sweep": SWEEP,
    }
    return spec(**smallest | changes)


def test_a_sweep_has_no_problems() -> None:
    assert problems(sweep()) == ()
    assert problems(sweep(max_batch_size=4, retries=2, priority=3.0, env={"A": "1"})) == ()


def test_a_sweep_has_neither_script_nor_batch_of_its_own() -> None:
    batch = "a sweep has no batch: its batch size is its maximum of slots, 4"
    remedy = "give batch_size = 4 and max_batch_size = 'keep'"

    assert problems(sweep(script="train.py", batch_size=32)) == (
        JobProblem(
            "script",
            "a sweep has no script",
            "name its functions in [sweep], and give script = 'sweep'",
        ),
        JobProblem("batch_size", batch, remedy),
    )
    assert problems(sweep(max_batch_size="auto")) == (JobProblem("batch_size", batch, remedy),)


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("args", ("--width",), "give what varies in sweep.search.space, the rest in env"),
        ("lr", 0.1, "make it a value of sweep.search.space"),
        ("record_samples", True, "`ones sweep manifest` lists the samples of each model"),
        ("stop", StopRule(epochs=3), "give sweep.search.epochs"),
        ("seed", 7, "give sweep.search.seed"),
        ("utility", Utility(value=1.0), "give priority"),
    ],
)
def test_what_means_nothing_to_a_sweep_is_refused(field: str, value: Any, remedy: str) -> None:
    assert problems(sweep(**{field: value})) == (
        JobProblem(field, "does not apply to a sweep", f"{remedy}, and leave it out"),
    )


def test_what_is_wrong_with_the_search_is_told_with_its_place() -> None:
    no_epochs = msgspec.structs.replace(SWEEP.search, epochs=0)

    for changes, expected in (
        ({"partitions": 0}, JobProblem("sweep.partitions", "partitions = 0 is outside 1 to 4096", "choose a value in this range")),
        ({"search": no_epochs}, JobProblem("sweep.search.epochs", "epochs = 0 is outside 1 to 1000000", "choose a value in this range")),
    ):  # fmt: skip
        assert problems(sweep(sweep=msgspec.structs.replace(SWEEP, **changes))) == (expected,)


def test_only_the_cluster_writes_a_trial() -> None:
    trial = TrialSpec(
        sweep=JobId("s-1"), trial=0, values={}, functions={}, partitions=1, seed=0, epochs=2,
        epochs_done=1, version=1, digest="", sources=(),
    )  # fmt: skip
    spec = JobSpec(name="s-t0", script=SWEEP_SCRIPT, batch_size=4, trial=trial)
    found = [(one.field, one.remedy) for one in problems(spec)]
    assert found == [("trial", "give sweep.graduate_batch instead")]
