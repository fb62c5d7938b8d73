"""Measured tables: their values, values between them, damage."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.sim.cluster import TraceError
from controlplane.sim.models.job_model import (
    ChangeCosts,
    JobModel,
    Throughput,
    TrainingModel,
)
from controlplane.sim.models.profiles import ProfilesModel, smallest_rotation
from controlplane.sim.results import TraceJob
from schemas.epochs import StepTimes
from schemas.ids import Seconds
from schemas.jobs import StopRule

COSTS: Final = ChangeCosts(start_s=30.0, restart_s=30.0, prepare_s=30.0, switch_s=30.0)
PLACED: Final = "placement,local_bsz,step_time,sync_time\n"
SIZED: Final = "num_nodes,num_replicas,local_bsz,step_time,sync_time\n"
EPOCHS: Final = "progress,iteration,grad_sqr,grad_var\n"
TABLES: Final = {
    "placements.csv": PLACED + "1,8,1.0,0\n1,16,1.5,0\n2,8,1.2,0.2\n11,8,1.4,0.4\n12,8,1.6,0.6\n",
    "scalability.csv": SIZED
    + "1,1,8,1.0,0\n1,1,16,1.5,0\n2,2,8,1.4,0.4\n2,2,16,2.0,0.5\n4,4,8,2.0,1.0\n4,4,16,2.5,1.0\n",
    "validation-8.csv": EPOCHS + "100,100,1,8\n200,200,1,8\n",
    "validation-16.csv": EPOCHS + "110,70,1,16\n210,140,1,16\n",
}


def write(folder: Path, name: str = "bert", tables: Mapping[str, str | bytes] = TABLES) -> Path:
    """A folder of profiles with one application in it; returns it."""
    (folder / name).mkdir()
    for file, text in tables.items():
        body = text.encode() if isinstance(text, str) else text
        (folder / name / file).write_bytes(body)
    return folder


def asked(application: str = "bert", slots: int = 1, batch: int = 0) -> TraceJob:
    return TraceJob(name="a", at=Seconds(0.0), workload=application, slots=slots, batch=batch)


def job_model_of(folder: Path, job: TraceJob | None = None, *, stated: bool = False) -> JobModel:
    training_model: TrainingModel = ProfilesModel(folder, COSTS, stated=stated)
    return training_model.job_model(job or asked(), "fixed", seed=1)


# --- values


def test_the_first_batch_on_one_slot_is_as_measured(tmp_path: Path) -> None:
    job_model = job_model_of(write(tmp_path))

    assert job_model.throughput((1,), 8, 0) == Throughput(
        samples_per_s=8.0, progress_per_s=8.0, step_s=1.0, parts=StepTimes(1.0, 0.0, 8, 1)
    )
    assert (job_model.application, job_model.epochs, job_model.epoch_samples, job_model.costs) == (
        "bert", 2, 800, COSTS,
    )  # fmt: skip
    assert [job_model.epoch_ends_at(epoch) for epoch in range(2)] == [800.0, 1600.0]


def test_a_larger_batch_is_worth_less_for_each_sample(tmp_path: Path) -> None:
    gain = (16 + 1) / (16 / 2 + 1)

    throughput = job_model_of(write(tmp_path)).throughput((2,), 16, 0)

    assert throughput == Throughput(
        pytest.approx(16 / 1.2),  # type: ignore[arg-type] # approx compares
        pytest.approx(gain * 8 / 1.2),  # type: ignore[arg-type]
        1.2,
        parts=StepTimes(1.2, 0.2, 8, 1),
    )


def test_a_batch_above_the_local_limit_takes_two_passes(tmp_path: Path) -> None:
    job_model = job_model_of(write(tmp_path))

    throughput = job_model.throughput((1,), 16, 0)
    assert (throughput.step_s, throughput.samples_per_s) == (2.0, 8.0)
    assert throughput.parts == StepTimes(pass_s=1.0, sync_s=0.0, local_batch=8, passes=2)
    assert job_model.throughput((2,), 8, 0).step_s == 1.2  # smaller local batches take no less


def test_placements_are_rotated_and_unmeasured_ones_interpolated(tmp_path: Path) -> None:
    job_model = job_model_of(write(tmp_path))

    assert job_model.throughput((2, 1), 16, 0) == job_model.throughput((1, 2), 16, 0)
    assert job_model.throughput((1, 2), 16, 0).step_s == 1.6
    assert smallest_rotation((2, 1, 1)) == (1, 1, 2)
    # halfway between 2 nodes with 2 slots and 4 nodes with 4
    assert job_model.throughput((1, 1, 1), 16, 0).step_s == pytest.approx(1.7, abs=0.2)
    with pytest.raises(TraceError, match=r"not measured near 4\+4\+4\+4\+4"):
        job_model.throughput((4, 4, 4, 4, 4), 16, 0)


def test_a_fixed_job_has_the_tuned_batch_and_an_elastic_job_the_smallest(tmp_path: Path) -> None:
    folder = write(tmp_path)

    fixed = job_model_of(folder, asked(slots=2)).spec
    elastic = ProfilesModel(folder, COSTS).job_model(asked(slots=2), "elastic", seed=1).spec
    assert (fixed.batch_size, fixed.wanted, fixed.batch_limit) == (16, 2, 16)
    assert job_model_of(folder, asked(slots=2, batch=8)).spec.batch_size == 8
    assert (elastic.batch_size, elastic.batch_limit, elastic.slots) == (8, 16, (1, 64))


def test_work_is_stated_on_demand_and_counted_as_published(tmp_path: Path) -> None:
    folder = write(tmp_path)
    job_model = job_model_of(folder)
    report = job_model.epoch_metrics(1, 8)

    assert job_model.spec.stop is None
    assert job_model_of(folder, stated=True).spec.stop == StopRule(epochs=2)
    assert [job_model.remaining_steps(epoch, 0.0) for epoch in range(3)] == [100.0, 1.0, 1.0]
    assert (report.noise_scale, report.train_loss) == (64.0, None)


def test_the_throughput_of_an_epoch_depends_on_its_noise_scale(tmp_path: Path) -> None:
    noisier = {**TABLES, "validation-8.csv": EPOCHS + "100,100,1,8\n200,200,1,80\n"}
    job_model = job_model_of(write(tmp_path, tables=noisier))

    assert [job_model.noise_scale(epoch, 8) for epoch in (0, 1, 2)] == [64.0, 640.0, 640.0]
    for epoch in range(2):
        for batch in (8, 12, 16):
            phi = job_model.noise_scale(epoch, batch)
            throughput = job_model.throughput((2,), batch, epoch)
            assert phi is not None
            worth = (phi + 8) / (phi + batch)
            assert throughput.progress_per_s / throughput.samples_per_s == pytest.approx(worth)
            assert job_model.epoch_metrics(epoch + 1, batch).noise_scale == phi


def test_tables_may_lie_in_a_folder_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    write(tmp_path / "traces")

    assert job_model_of(tmp_path).application == "bert"


# --- damage


def complaint(folder: Path, job: TraceJob | None = None) -> TraceError:
    with pytest.raises(TraceError) as raised:
        job_model_of(folder, job).throughput((1,), 8, 0)
    assert raised.value.hint
    return raised.value


@pytest.mark.parametrize("name", ["gpt", "../bert", "", ".", "bert/../bert", "x" * 300])
def test_an_application_without_a_profile_is_refused(tmp_path: Path, name: str) -> None:
    error = complaint(write(tmp_path), asked(name))

    assert "has no profile" in str(error)
    assert "bert" in error.hint


def test_missing_folders_epochs_and_batches_are_refused(tmp_path: Path) -> None:
    folder = write(write(tmp_path), "gpt")

    assert "unknown number of epochs" in str(complaint(folder, asked("gpt")))
    assert "measured up to a batch of 16, not 32" in str(complaint(folder, asked(slots=4)))
    with pytest.raises(TraceError, match="nowhere is not a folder"):
        ProfilesModel(tmp_path / "nowhere", COSTS)


@pytest.mark.parametrize("missing", TABLES)
def test_a_missing_table_is_named(tmp_path: Path, missing: str) -> None:
    folder = write(tmp_path)
    (folder / "bert" / missing).unlink()
    if missing.startswith("validation"):
        for file in (folder / "bert").glob("validation-*"):
            file.unlink()

    assert str(folder / "bert") in str(complaint(folder))


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("placements.csv", "", "column placement is missing"),
        ("placements.csv", PLACED, "nothing was measured on one slot"),
        ("placements.csv", PLACED + "2,8,1,0\n", "nothing was measured on one slot"),
        ("placements.csv", PLACED + "1,8,1,0\n1x,8,1,0\n", "placements.csv:3: column placement"),
        ("placements.csv", PLACED + "1,8,nan,0\n", "placements.csv:2: column step_time"),
        ("placements.csv", PLACED + "1,8,-1,0\n", "placements.csv:2: column step_time"),
        ("placements.csv", PLACED + "1,8,0,0\n", "placements.csv:2: column step_time"),
        ("placements.csv", PLACED + "1,8,1,1.5\n", "placements.csv:2: column sync_time"),
        ("placements.csv", PLACED + "1,0,1,0\n", "placements.csv:2: column local_bsz"),
        ("placements.csv", PLACED + "1,8,1\n", "placements.csv:2: column sync_time"),
        ("scalability.csv", SIZED + "0,1,8,1,0\n", "scalability.csv:2: column num_nodes"),
        ("validation-8.csv", EPOCHS + "100,100,1,8\n", "1 epochs, a job of bert takes 2"),
        ("validation-8.csv", EPOCHS + "1,1,1,0\n2,2,1,8\n", "validation-8.csv:2: column grad_var"),
        ("validation-8.csv", EPOCHS + "1,1,-1,8\n2,2,1,8\n", "validation-8.csv:2: column grad_sqr"),
        ("validation-x.csv", EPOCHS, "its name should say the batch"),
        ("validation-0.csv", EPOCHS, "its name should say the batch"),
        ("validation-8.csv", b"\xff\xfe", "validation-8.csv:1"),
    ],
)
def test_damaged_tables_are_refused(
    tmp_path: Path, file: str, text: str | bytes, says: str
) -> None:
    error = complaint(write(tmp_path, tables={**TABLES, file: text}))

    assert says in str(error)


def goes_on_or_says_why(tables: Mapping[str, str | bytes]) -> None:
    """Every answer is a number that time can be computed from, or a complaint."""
    with tempfile.TemporaryDirectory() as made:
        try:
            job_model = job_model_of(write(Path(made), tables=tables))
            for placement, batch in [((1,), 8), ((1,), 16), ((2,), 16), ((1, 1), 16)]:
                for epoch in range(job_model.epochs):
                    throughput = job_model.throughput(placement, batch, epoch)
                    assert 0.0 < throughput.samples_per_s < math.inf
                    assert 0.0 < throughput.progress_per_s < math.inf
                    assert math.isfinite(job_model.epoch_ends_at(epoch))
                    assert math.isfinite(job_model.remaining_steps(epoch, 0.0))
                    noise = job_model.epoch_metrics(epoch, batch).noise_scale
                    assert noise is None or math.isfinite(noise)
            assert job_model.epoch_samples >= 0
        except TraceError as error:
            assert error.hint  # noqa: PT017 - one of two good ends


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(file=st.sampled_from(sorted(TABLES)), body=st.binary(max_size=200))
def test_no_bytes_crash_the_reader(file: str, body: bytes) -> None:
    goes_on_or_says_why({**TABLES, file: body})


@settings(max_examples=300, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
@given(
    file=st.sampled_from(sorted(TABLES)), row=st.integers(1, 4), column=st.integers(0, 4),
    cell=st.sampled_from(
        ["0", "-1", "nan", "inf", "1e12", "1e-12", "1e400", "0.5", "8", "x", "", " ", '"', "1e-300"]
    ),
)  # fmt: skip
def test_no_cell_leads_to_an_unusable_number(file: str, row: int, column: int, cell: str) -> None:
    lines = [line.split(",") for line in TABLES[file].splitlines()]
    row, column = row % len(lines), column % len(lines[0])
    lines[row][column] = cell

    goes_on_or_says_why({**TABLES, file: "\n".join(map(",".join, lines)) + "\n"})
