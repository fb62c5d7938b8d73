"""A sweep as its user defines it, with searchers and spaces, and the conversion to a job spec."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final, Literal, get_args

import msgspec

from schemas import sweeps as spec
from schemas.errors import BadFieldError, SettingsError
from schemas.jobs import KEEP, SWEEP_SCRIPT, JobSpec
from schemas.sweeps import MAX_CONFIGURATIONS, Parameter, SearchSpec, SweepSpec, Value, check_sweep

MAX_DEFAULT_CONFIGURATIONS: Final = 64
When = Mapping[str, Iterable[Value]] | None


# --- values


def Choice(*values: Value, when: When = None) -> Parameter:  # noqa: N802 - reads as a type
    """Value drawn from `values` with equal probability.

    Args:
        values: strings, numbers or booleans.
        when: values of other parameters. This parameter exists only with these values.
    """
    return Parameter(choice=values, when=_conditions(when))


def Uniform(least: float, most: float, when: When = None) -> Parameter:  # noqa: N802
    """Number between `least` and `most`, both included."""
    return Parameter(uniform=(least, most), when=_conditions(when))


def LogUniform(least: float, most: float, when: When = None) -> Parameter:  # noqa: N802
    """Number between `least` and `most`, both included. Its logarithm is uniformly distributed.

    Args:
        least: smallest number, above 0.
        most: largest number.
    """
    return Parameter(log_uniform=(least, most), when=_conditions(when))


def Integer(least: int, most: int, when: When = None) -> Parameter:  # noqa: N802
    """Integer between `least` and `most`, both included."""
    return Parameter(integer=(least, most), when=_conditions(when))


def LogInteger(least: int, most: int, when: When = None) -> Parameter:  # noqa: N802
    """Integer between `least` and `most`, both included. Its logarithm is uniformly distributed.

    Args:
        least: smallest integer, at least 1.
        most: largest integer.
    """
    return Parameter(log_integer=(least, most), when=_conditions(when))


def as_parameter(value: Parameter | list[Value] | tuple[Value, ...] | Value) -> Parameter:
    """Return a space entry as a parameter. A list is a choice, and a single value is fixed."""
    if isinstance(value, Parameter):
        return value
    return Parameter(choice=tuple(value) if isinstance(value, list | tuple) else (value,))


def _conditions(when: When) -> dict[str, tuple[Value, ...]]:
    return {name: tuple(values) for name, values in (when or {}).items()}


# --- searchers


class _Searcher(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    max_epochs: int  # limit for each configuration

    def spec(self) -> spec.Searcher:
        """Return the searcher in the controller's form."""
        fields = msgspec.structs.asdict(self)
        most = fields.pop("max_epochs")
        if "eta" in fields and fields.get("configurations", most) is None:
            least, eta = fields["min_epochs"], fields["eta"]
            fields["configurations"] = _default_configurations(least, most, eta)
        return SPECS[str(self.__struct_config__.tag)](**fields)


class Grid(_Searcher, frozen=True, tag="grid"):
    """Search that trains every combination of choices and integers to the last epoch."""


class RandomSearch(_Searcher, frozen=True, tag="random"):
    """Randomly drawn configurations, each trained to the last epoch."""

    configurations: int  # number of configurations


class SuccessiveHalving(_Searcher, frozen=True, tag="successive_halving"):
    """Synchronous rungs where the best 1 / eta continue (Jamieson and Talwalkar, AISTATS '16)."""

    configurations: int | None = None  # default: `eta` of them reach the last epoch; at most 64
    min_epochs: int = 1  # of the first rung
    eta: int = 3  # one of so many trials continues at a rung


class Hyperband(_Searcher, frozen=True, tag="hyperband"):
    """Brackets of successive halving, from many short to few long trials (Li et al., JMLR '18)."""

    eta: int = 3  # one of so many trials continues at a rung


class ASHA(_Searcher, frozen=True, tag="asha"):
    """Asynchronous rungs: a trial is promoted when it is among the best (Li et al., MLSys '20)."""

    configurations: int | None = None  # default: `eta` of them reach the last epoch; at most 64
    min_epochs: int = 1  # of the first rung
    eta: int = 3  # one of so many trials continues at a rung
    promotes: spec.Promotes = "in_order"  # in_order: slots do not change the winner


class MedianStopping(_Searcher, frozen=True, tag="median"):
    """Searcher that stops trials worse than the median of the others (Golovin et al., KDD '17)."""

    configurations: int  # number of configurations
    grace_epochs: int = 1  # epochs before a trial can be stopped
    min_others: int = 3  # least number of other trials that have as many epochs


class PBT(_Searcher, frozen=True, tag="pbt"):
    """Searcher that replaces the worst quarter by changed best trials (Jaderberg et al., 2017)."""

    population: int  # number of trials that train at a time
    interval_epochs: int = 1  # between two replacements
    resample: float = 0.25  # probability of drawing a new value instead of perturbing it


Searcher = Grid | RandomSearch | SuccessiveHalving | Hyperband | ASHA | MedianStopping | PBT
SPECS: Final[dict[str, Callable[..., spec.Searcher]]] = {
    str(kind.__struct_config__.tag): kind for kind in get_args(spec.Searcher)
}
BY_TYPE: Final[dict[str, type[_Searcher]]] = {
    str(kind.__struct_config__.tag): kind for kind in get_args(Searcher)
}


def _default_configurations(least: int, most: int, eta: int) -> int:
    count, at = eta, least
    while 1 <= at < most and eta > 1 and count < MAX_CONFIGURATIONS:
        at, count = at * eta, count * eta
    return max(1, min(count, MAX_DEFAULT_CONFIGURATIONS))


JOB_FIELDS: Final = (
    "name", "workdir", "slots", "slots_wanted", "python", "family", "priority", "retries", "env",
    "after", "not_before", "labels", "secret_env", "requirements",
    "image",
)  # fmt: skip
SWEEP_FIELDS: Final = tuple(name for name in SweepSpec.__struct_fields__ if name != "search")


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """Many configurations of one training, over data in fixed partitions, on changing slots.

    Functions are named as `module:function` in `workdir`. They are imported where units run, and
    never pickled. In a TOML file the fields up to `seed` belong to `[sweep]`.
    """

    EXAMPLES: ClassVar = {  # example values in a sweep's file, quoted in errors
        "input_fn": '"data:load"',
        "model_fn": '"models:build"',
        "train_fn": '"models:train"',
        "eval_fn": '"models:evaluate"',
        "space": "{ lr = { log_uniform = [1e-4, 1e-1] } }",
        "searcher": '{ type = "asha", max_epochs = 9 }',
        "metric": '"accuracy": what eval_fn returns and is to be large (or small: mode = "min")',
        "partitions": "8: in how many parts the data is trained",
        "graduate_batch": "64",
        **{
            key: JobSpec.EXAMPLES[key]
            for key in (
                "name",
                "slots",
                "python",
                "family",
                "env",
                "after",
                "not_before",
                "labels",
                "secret_env",
                "requirements",
                "image",
            )
        },
    }

    input_fn: str  # returns the data of one partition
    model_fn: str  # returns the model for the values of a configuration
    train_fn: str  # trains one pass over a partition
    eval_fn: str | None = None  # returns metrics of a model, at the end of each epoch
    space: Mapping[str, Any]  # `Parameter` by name; a list is a choice, another value is fixed
    searcher: Searcher  # search algorithm
    metric: str  # name in the result of eval_fn, or of train_fn if there is no eval_fn
    mode: Literal["max", "min"] = "max"  # goal for the metric
    partitions: int  # number of partitions of the data
    replicas: int = 1  # number of nodes with a copy of each partition; at most all nodes
    keep: int = 1  # number of best configurations with states kept after the sweep
    order: spec.VisitOrder = "fixed"  # order in which configurations visit partitions
    revoke_s: float = 120.0  # how long a unit may continue after its slot is revoked
    graduate_batch: int | None = None  # batch of the elastic jobs that the last trials become
    seed: int = 0  # seed of configurations, models and units
    # --- fields of the job
    name: str = "sweep"  # letters, digits, - and _; the sweep is called NAME-N
    workdir: str = "."  # folder that is uploaded, relative to the file
    slots: tuple[int, int] | int | None = None  # minimum, maximum; default: 1 to `partitions`
    slots_wanted: int | None = None  # for policies that assign a fixed number of slots
    python: str | None = None  # interpreter with torch; default: the agent's
    family: str | None = None  # equal for jobs of one model
    priority: float = 1.0  # weight relative to other jobs of the user
    retries: int = 0  # number of retries of failed worker starts
    env: dict[str, str] = msgspec.field(default_factory=dict)  # environment variables
    after: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET  # jobs that end before
    not_before: str | msgspec.UnsetType = msgspec.UNSET  # earliest start
    labels: dict[str, str] | msgspec.UnsetType = msgspec.UNSET  # by which jobs are selected
    secret_env: str | msgspec.UnsetType = msgspec.UNSET  # file of secret variables
    requirements: str | msgspec.UnsetType = msgspec.UNSET  # file in `workdir`, installed by uv
    image: str | msgspec.UnsetType = msgspec.UNSET  # of the containers in which units run

    def sweep_spec(self) -> SweepSpec:
        """Return the checked search and training spec.

        Raises:
            BadFieldError: if a field is invalid; the error names this class's field and the remedy.
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
            BadFieldError: if the sweep cannot run; the error names the field and the remedy.
        """
        sweep = self.sweep_spec()
        slots = (1, self.partitions) if self.slots is None else self.slots
        slots = (slots, slots) if isinstance(slots, int) else slots
        fields = {name: getattr(self, name) for name in JOB_FIELDS}
        fields |= {"slots": slots, "env": dict(self.env)}
        return JobSpec(
            script=SWEEP_SCRIPT,
            batch_size=max(1, slots[1]),  # policies may assign at most as many slots
            max_batch_size=KEEP,
            sweep=sweep,
            **fields,
        )


def stated_sweep(spec: JobSpec) -> SweepSpec:
    """Return the sweep spec of a job; raise `BadFieldError` if the job is not a sweep."""
    sweep = spec.stated_sweep
    if sweep is None:
        raise BadFieldError(f"{spec.name} is not a sweep", "give it a table [sweep]", "sweep")
    return sweep


def describe_parameter(parameter: Parameter) -> str:
    """Describe a checked parameter of the space in as few characters as possible."""
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


def format_values(values: Mapping[str, Value]) -> str:
    """Format the values of a configuration with their names."""
    return ", ".join(f"{name} {format_value(value)}" for name, value in values.items())
