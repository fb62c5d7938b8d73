"""A sweep in a file or in Python becomes a job and is previewed, or the error names what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controlplane import client
from controlplane.client.job_file import load_job
from controlplane.client.sweeps.preview import Preview, Range, SlotHours, preview
from schemas import sweeps
from schemas.errors import BadFieldError, OnesError
from schemas.jobs import JobSpec
from schemas.sweeps import Parameter, SearchSpec, SweepSpec
from tests.support.client_examples import sweep

FILE = """
name = "digits"
slots = [1, 4]

[sweep]
input_fn = "data:load"
model_fn = "models:build"
train_fn = "models:train"
eval_fn = "models.scores:evaluate"
metric = "accuracy"
partitions = 8
seed = 7

[sweep.space]
lr = { log_uniform = [1e-4, 1e-1] }
width = [16, 64]
momentum = 0.9

[sweep.searcher]
type = "asha"
max_epochs = 9
"""
MODELS = "def build(values): ...\n\ndef train(trained, data, unit): ...\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "data.py").write_text("from somewhere import load\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text(MODELS)
    (tmp_path / "models" / "scores.py").write_text("evaluate = build_evaluation()\n")
    path = tmp_path / "sweep.toml"
    path.write_text(FILE)
    return path


def test_the_file_and_the_class_become_the_same_job(file: Path) -> None:
    functions = {
        "input_fn": "data:load", "model_fn": "models:build", "train_fn": "models:train",
        "eval_fn": "models.scores:evaluate",
    }  # fmt: skip
    stated = client.Sweep(
        name="digits", slots=(1, 4), **functions, metric="accuracy", partitions=8, seed=7,
        space={"lr": client.LogUniform(1e-4, 1e-1), "width": [16, 64], "momentum": 0.9},
        searcher=client.ASHA(max_epochs=9), workdir=str(file.parent),
    )  # fmt: skip
    space = {
        "lr": Parameter(log_uniform=(1e-4, 1e-1)),
        "width": Parameter(choice=(16, 64)),
        "momentum": Parameter(choice=(0.9,)),
    }
    asha = sweeps.Asha(configurations=27, min_epochs=1, eta=3)
    search = SearchSpec(space=space, searcher=asha, epochs=9, metric="accuracy", seed=7)
    spec = JobSpec(
        name="digits", script="sweep", workdir=str(file.parent), batch_size=4, max_batch_size=4,
        slots=(1, 4), sweep=SweepSpec(search=search, **functions, partitions=8),
    )  # fmt: skip

    assert load_job(file) == spec
    assert stated.sweep_spec() == spec.sweep


@pytest.mark.parametrize(
    ("searcher", "spec"),
    [
        (client.Grid(9), sweeps.Grid()),
        (client.RandomSearch(9, 20), sweeps.RandomSearch(20)),
        (client.SuccessiveHalving(9), sweeps.SuccessiveHalving(27)),
        (client.Hyperband(81), sweeps.Hyperband()),
        (client.ASHA(max_epochs=16, min_epochs=2, eta=2), sweeps.Asha(16, 2, 2)),
        (client.ASHA(max_epochs=1000), sweeps.Asha(64)),  # more, if they are asked for
        (client.MedianStopping(9, 20, grace_epochs=2), sweeps.MedianStopping(20, 2)),
        (client.PBT(9, population=8), sweeps.PopulationBased(8)),
    ],
)
def test_searchers_become_specs_with_their_epochs(
    searcher: client.ASHA, spec: sweeps.Searcher
) -> None:
    space = {"width": client.Choice(1, 2)}

    search = sweep(searcher=searcher, space=space).sweep_spec().search

    assert (search.searcher, search.epochs) == (spec, searcher.max_epochs)


def test_values_have_forms_and_conditions() -> None:
    space = {
        "model": client.Choice("cnn", "mlp"), "kernel": client.Integer(3, 7, when={"model": ["cnn"]}),
        "width": client.LogInteger(8, 512), "dropout": client.Uniform(0.0, 0.5),
    }  # fmt: skip

    assert sweep(space=space).sweep_spec().search.space == {
        "model": Parameter(choice=("cnn", "mlp")),
        "kernel": Parameter(integer=(3, 7), when={"model": ("cnn",)}),
        "width": Parameter(log_integer=(8, 512)),
        "dropout": Parameter(uniform=(0.0, 0.5)),
    }


@pytest.mark.parametrize(
    ("there", "instead", "said"),
    [
        ("max_epochs = 9", "max_epoch = 9",
         "unknown key sweep.searcher.max_epoch; did you mean max_epochs?"),
        ("max_epochs = 9", "", "sweep.searcher.max_epochs: is missing"),
        ("max_epochs = 9", "max_epochs = 0",
         "searcher.max_epochs: max_epochs = 0 is outside 1 to 1000000; choose a value in this range"),
        ("max_epochs = 9", "max_epochs = 9\neta = 1", "searcher.eta = 1 is outside 2 to 100"),
        ('"asha"', '"asah"', "sweep.searcher.type: unknown searcher 'asah'; did you mean asha?"),
        ('type = "asha"', "", "sweep.searcher.type: is missing; one of grid, random,"),
        ("log_uniform = [1e-4, 1e-1]", "log_unifrm = [1, 2]",
         "unknown key sweep.space.lr.log_unifrm; did you mean log_uniform?"),
        ("log_uniform = [1e-4, 1e-1]", "log_uniform = [0, 2]",
         "space.lr.log_uniform starts at 0.0; logarithms need numbers above 0"),
        ("log_uniform = [1e-4, 1e-1]", 'log_uniform = [1e-3, "x"]',
         "sweep.space.lr.log_uniform[1]: Expected `float`, got `str`; write log_uniform = [0.5, 0.5]"),
        ("[16, 64]", "[16, 16]", "space.width.choice repeats a value; give each value once"),
        ("momentum = 0.9", "momentum = 1979-05-27",
         "sweep.space.momentum: datetime.date(1979, 5, 27) is not a value of a configuration"),
        ("partitions = 8", "partitons = 8",
         "unknown key sweep.partitons; did you mean partitions?"),
        ("partitions = 8", "", "sweep.partitions: is missing; write partitions = 8: in how many parts"),
        ("partitions = 8", "partitions = 0", "partitions = 0 is outside 1 to 4096"),
        ("partitions = 8", 'partitions = "x"', "sweep.partitions: Expected `int`, got `str`; write"),
        ('name = "digits"', "name = 3", 'name: Expected `str`, got `int`; write name = "digits"'),
        ("partitions = 8", "partitions = 8\nslots_wanted = 2",
         "unknown key sweep.slots_wanted; move it above [sweep]"),
        ("slots = [1, 4]", "partitions = 8", "unknown key partitions; move it into [sweep]"),
        ("slots = [1, 4]", "slots = [4, 1]", "slots: slots [4, 1] is not a range"),
        ("slots = [1, 4]", "lr = 0.1", "unknown key lr; leave it out: make it a value of"),
        ('"models:build"', '"models:biuld"',
         "models/__init__.py has no biuld; name a function at its top level; did you mean build?"),
        ('"models:build"', '"modles:build"', "sweep.model_fn: there is no module modles in "),
        ('"models:build"', '"models"',
         "model_fn = 'models' is not module:function; such as 'data:load'"),
        ("seed = 7", 'mode = "maximum"', "sweep.mode: Invalid enum value 'maximum'"),
        ('name = "digits"', 'name = "digits"\nworkdir = "none"', "none is not a folder"),
    ],
)  # fmt: skip
def test_an_invalid_file_is_refused_in_one_line_with_the_field(
    file: Path, there: str, instead: str, said: str
) -> None:
    assert there in FILE
    file.write_text(FILE.replace(there, instead, 1))

    with pytest.raises(OnesError) as refused:
        load_job(file)

    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.field
    assert refused.value.hint


def test_a_module_that_cannot_be_parsed_is_named_with_its_line(file: Path) -> None:
    (file.parent / "data.py").write_text("def load(:\n")

    with pytest.raises(BadFieldError, match=r"sweep.input_fn: data.py, line 1: .*; correct the"):
        load_job(file)


def test_modules_of_another_interpreter_are_not_looked_up(file: Path) -> None:
    file.write_text(FILE.replace('"data:load"', '"elsewhere:load"'))
    with pytest.raises(BadFieldError, match="there is no module elsewhere"):
        load_job(file)

    file.write_text('python = "/opt/python"\n' + file.read_text())

    assert load_job(file).python == "/opt/python"


@pytest.mark.parametrize(
    ("assignment", "there", "instead"),
    [
        ("space.lr=0.1", "lr = { log_uniform = [1e-4, 1e-1] }", "lr = 0.1"),
        ("space.lr=[0.1, 0.2]", "{ log_uniform = [1e-4, 1e-1] }", "[0.1, 0.2]"),
        ("space.lr.uniform=[1, 2]", "log_uniform = [1e-4, 1e-1]", "uniform = [1, 2]"),
        ("sweep.partitions=4", "partitions = 8", "partitions = 4"),
        ("partitions=4", "partitions = 8", "partitions = 4"),
        ("searcher.eta=2", "max_epochs = 9", "max_epochs = 9\neta = 2"),
        ("slots=[2, 3]", "slots = [1, 4]", "slots = [2, 3]"),
        ("name=1", '"digits"', '"1"'),
        ("env.MODE=1", 'name = "digits"', 'env = { MODE = "1" }\nname = "digits"'),
        ("mode=min", "seed = 7", 'seed = 7\nmode = "min"'),
    ],
)
def test_an_override_takes_precedence_over_the_file(
    file: Path, assignment: str, there: str, instead: str
) -> None:
    found = load_job(file, [assignment])

    assert there in FILE
    file.write_text(FILE.replace(there, instead, 1))
    assert found == load_job(file)


@pytest.mark.parametrize(
    ("text", "assignment", "said"),
    [
        (FILE, "partitions", "'partitions' is not an assignment"),
        (FILE, "partiton=3", "a sweep has no such field; did you mean partitions?"),
        (FILE, "metric.x=3", "metric has no entries"),
        (FILE, "searcher.type=gird", "unknown searcher 'gird'; did you mean grid?"),
        ("sweep = 3", "space.lr=0.1", "sweep is not a table in the file"),
    ],
)
def test_an_invalid_override_is_named(file: Path, text: str, assignment: str, said: str) -> None:
    file.write_text(text)

    with pytest.raises(OnesError, match=said):
        load_job(file, [assignment])


def test_every_field_of_the_cluster_can_be_stated() -> None:
    fields = set(SweepSpec.__struct_fields__) | set(SearchSpec.__struct_fields__)

    assert fields - {"search", "epochs"} <= set(client.Sweep.__struct_fields__)


def previewed(searcher: Any, slots: tuple[int, int] = (1, 4), **changes: Any) -> Preview:
    return preview(sweep(searcher=searcher, **changes).sweep_spec(), slots, 3600.0, 10)


def test_a_grid_is_counted_to_the_last_unit() -> None:
    space = {"width": client.Choice(1, 2, 3), "depth": client.Choice(1, 2)}

    assert previewed(client.Grid(2), space=space) == Preview(
        configurations=6,
        trials=Range(6, 6, 6),
        epochs=Range(12, 12, 12),
        units=Range(48, 48, 48),
        units_to_the_end=48,
        unit_s=3600.0,
        slots=(SlotHours(1, 48.0, 1.0), SlotHours(2, 24.0, 1.0), SlotHours(4, 12.0, 1.0)),
        state_bytes=10,
        hop_bytes=420.0,  # the first unit of each begins with a new model
        useful_slots=4,
    )


@pytest.mark.parametrize(
    ("searcher", "configurations", "trials", "epochs"),
    [
        (client.SuccessiveHalving(9), 27, 27, 27 + 9 * 2 + 3 * 6),  # rungs at 1, 3 and 9
        (client.Hyperband(9), 17, 17, 9 + 3 * 2 + 6 + 5 * 3 + 6 + 3 * 9),  # 9 of 1, 5 of 3, 3 of 9
        (client.PBT(4, population=8), 8, 8 + 3 * 2, 32),  # two copies at each of three intervals
    ],
)
def test_synchronous_searchers_train_a_fixed_number_of_epochs(
    searcher: Any, configurations: int, trials: int, epochs: int
) -> None:
    found = previewed(searcher)

    assert found.configurations == configurations
    assert found.trials == Range(trials, trials, trials)
    assert found.epochs == Range(epochs, epochs, epochs)


def test_asynchronous_searchers_have_a_range() -> None:
    found = previewed(client.ASHA(9))

    assert 27 + 9 * 2 + 3 * 6 <= found.epochs.least < found.epochs.mean < found.epochs.most
    assert found.epochs.most < 27 * 9 / 2


def test_more_slots_than_configurations_stay_idle() -> None:
    found = previewed(client.RandomSearch(2, 3), slots=(2, 16))

    assert found.useful_slots == 3
    assert [one.slots for one in found.slots] == [2, 4, 8, 16]
    assert [one.hours for one in found.slots] == [12.0, 8.0, 8.0, 8.0]
    assert found.slots[-1].busy == 24 / (16 * 8)


def test_a_large_search_is_previewed() -> None:
    found = previewed(client.ASHA(81, configurations=4_000))

    assert found.configurations == 4_000
    assert 4_000 < found.epochs.mean < 24_000
