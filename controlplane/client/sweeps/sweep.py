"""A sweep as its user states it, and its conversion to and from a job spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

import msgspec

from controlplane.client.sweeps.searchers import Searcher, as_parameter, stated_searcher
from schemas.errors import BadFieldError, SettingsError
from schemas.jobs import KEEP, SWEEP_SCRIPT, JobSpec
from schemas.sweeps import Parameter, SearchSpec, SweepSpec, Value, check_sweep

Order = Literal["greedy", "rollouts", "random", "fixed"]
JOB_FIELDS: Final = (
    "name", "workdir", "slots", "slots_wanted", "python", "family", "priority", "retries", "env"
)  # fmt: skip
SWEEP_FIELDS: Final = tuple(name for name in SweepSpec.__struct_fields__ if name != "search")


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """Many configurations of one training, over data in fixed partitions, on changing slots.

    Functions are named as `module:function` in `workdir`; they are imported where units run, and
    never pickled. In a TOML file the fields up to `seed` belong to `[sweep]`.
    """

    EXAMPLES: ClassVar = {  # values in a sweep's file, for error messages
        "input_fn": '"data:load"',
        "model_fn": '"models:build"',
        "train_fn": '"models:train"',
        "eval_fn": '"models:evaluate"',
        "space": "{ lr = { log_uniform = [1e-4, 1e-1] } }",
        "searcher": '{ type = "asha", max_epochs = 9 }',
        "metric": '"accuracy": what eval_fn returns and is to be large (or small: mode = "min")',
        "partitions": "8: in how many parts the data is trained",
        "graduate_batch": "64",
        **{key: JobSpec.EXAMPLES[key] for key in ("name", "slots", "python", "family", "env")},
    }

    input_fn: str  # returns the data of one partition
    model_fn: str  # returns the model for the values of a configuration
    train_fn: str  # trains one pass over a partition
    eval_fn: str | None = None  # returns metrics of a model, at the end of each epoch
    space: Mapping[str, Any]  # `Parameter` by name; a list is a choice, another value is fixed
    searcher: Searcher
    metric: str  # name in the result of eval_fn, or of train_fn if there is no eval_fn
    mode: Literal["max", "min"] = "max"  # goal for the metric
    partitions: int  # of the data
    replicas: int = 1  # nodes that hold each partition; more than the nodes: every node
    keep: int = 1  # best configurations whose states are kept after the sweep
    order: Order = "fixed"  # in which configurations visit partitions
    revoke_s: float = 120.0  # for which a unit may continue when its slot is revoked
    graduate_batch: int | None = None  # of the last trials as elastic jobs; None: never graduate
    seed: int = 0
    # fields of the job
    name: str = "sweep"
    workdir: str = "."
    slots: tuple[int, int] | int | None = None  # minimum, maximum; default: 1 to `partitions`
    slots_wanted: int | None = None  # for policies of fixed size
    python: str | None = None  # interpreter with torch; default: the agent's
    family: str | None = None
    priority: float = 1.0
    retries: int = 0  # of failed worker starts
    env: dict[str, str] = msgspec.field(default_factory=dict)

    def sweep_spec(self) -> SweepSpec:
        """Return the checked search and training spec.

        Raises:
            BadFieldError: if a field is invalid; names the field of this class and the remedy.
        """
        search = SearchSpec(
            space={name: as_parameter(value) for name, value in self.space.items()},
            searcher=self.searcher.spec(),
            epochs=self.searcher.max_epochs,
            metric=self.metric,
            mode=self.mode,
            seed=self.seed,
        )
        spec = SweepSpec(search=search, **{name: getattr(self, name) for name in SWEEP_FIELDS})
        try:
            check_sweep(spec)
        except SettingsError as error:
            field, problem = error.field, error.message
            if field == "epochs":
                field, problem = "searcher.max_epochs", problem.replace("epochs", "max_epochs", 1)
            text = problem if problem.startswith(field) else f"{field}: {problem}"
            raise BadFieldError(text, error.hint, f"sweep.{field}") from None
        return spec

    def job_spec(self) -> JobSpec:
        """Return the job that runs this sweep.

        Raises:
            BadFieldError: if the sweep cannot be run; names the field and the remedy.
        """
        sweep = self.sweep_spec()
        slots = (1, self.partitions) if self.slots is None else self.slots
        slots = (slots, slots) if isinstance(slots, int) else slots
        fields = {name: getattr(self, name) for name in JOB_FIELDS}
        fields |= {"slots": slots, "env": dict(self.env)}
        return JobSpec(
            script=SWEEP_SCRIPT,
            batch_size=max(1, slots[1]),  # policies may assign any number of slots up to it
            max_batch_size=KEEP,
            sweep=sweep,
            **fields,
        )


def sweep_of(spec: JobSpec) -> Sweep:
    """Return the sweep of a job in the form in which a user states it.

    Raises:
        BadFieldError: if the job is not a sweep.
    """
    sweep = stated_sweep(spec)
    search = sweep.search
    return Sweep(
        space=search.space,
        searcher=stated_searcher(search),
        metric=search.metric,
        mode=search.mode,
        seed=search.seed,
        **{name: getattr(sweep, name) for name in SWEEP_FIELDS},
        **{name: getattr(spec, name) for name in JOB_FIELDS},
    )


def stated_sweep(spec: JobSpec) -> SweepSpec:
    """Return the sweep spec of a job.

    Raises:
        BadFieldError: if the job is not a sweep.
    """
    sweep = spec.stated_sweep
    if sweep is None:
        raise BadFieldError(f"{spec.name} is not a sweep", "give it a table [sweep]", "sweep")
    return sweep


def describe_parameter(parameter: Parameter) -> str:
    """Describe a parameter of the space in as few characters as possible.

    Args:
        parameter: has exactly one form.
    """
    if parameter.choice is not None:
        text = " | ".join(map(format_value, parameter.choice))
    else:
        least, most = parameter.bounds
        text = f"{parameter.form} {least:g} to {most:g}"
    conditions = [
        f"{other} = {' | '.join(map(format_value, values))}"
        for other, values in parameter.when.items()
    ]
    return f"{text} when {' and '.join(conditions)}" if conditions else text


def format_value(value: Value) -> str:
    """Format a value of a configuration for people."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
