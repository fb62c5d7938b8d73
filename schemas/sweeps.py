"""A sweep over configurations of one training, as its user describes it, and its checks.

The module also has Hyperband's brackets, and bounds for metrics that scripts report for an epoch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from schemas.errors import SettingsError
from schemas.ids import JobId


def brackets(most: int, eta: int) -> list[tuple[int, int]]:
    """Return the number of trials and the epochs of the first rung for each Hyperband bracket.

    Li et al., JMLR '18, algorithm 1, with R = `most`, the epochs of a trial that is never stopped:
    s from floor(log_eta R) down to 0, n = ceil((s_max + 1) eta^s / (s + 1)), r = R eta^-s.
    """
    top = 0
    while eta ** (top + 1) <= most:
        top += 1
    return [(-(-(top + 1) * eta**s // (s + 1)), max(1, most // eta**s)) for s in range(top, -1, -1)]


Value = str | int | float | bool
Values = Mapping[str, Value]

VisitOrder = Literal["greedy", "rollouts", "random", "fixed"]

MAX_CONFIGURATIONS: Final = 10_000
MAX_EPOCHS: Final = 1_000_000
MAX_EPOCH_METRICS: Final = 500  # number of metrics for each epoch
MAX_METRIC: Final = 100  # characters of a metric's name
MAX_SEED: Final = 2**63 - 1
MAX_PARTITIONS: Final = 4096
MAX_CHOICES: Final = 1000
MAX_PARAMETERS: Final = 256
MAX_SPACE_BYTES: Final = 128 << 10  # of an encoded space, which each reply about a sweep contains
MAX_WHOLE: Final = 2**53  # larger integers are not exact in a float
MAX_VALUES: Final = 100_000  # over all configurations, because drawing them blocks the controller
PARAMETER_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
FORMS: Final = ("choice", "uniform", "log_uniform", "integer", "log_integer")


class Parameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Distribution of one value of a configuration. Exactly one of its forms is set."""

    choice: tuple[Value, ...] | None = None  # one of these, each equally likely
    uniform: tuple[float, float] | None = None  # least, most
    log_uniform: tuple[float, float] | None = None  # least, most, above 0; the logarithm is uniform
    integer: tuple[int, int] | None = None  # least, most, both included
    log_integer: tuple[int, int] | None = None  # as `integer`, but the logarithm is uniform
    when: Mapping[str, tuple[Value, ...]] = {}  # applies only if other parameters have these values

    @property
    def form(self) -> str:
        """Name of the form that is set, or "" if no form is set."""
        return next((form for form in FORMS if getattr(self, form) is not None), "")

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest value, or the first and last index of a choice."""
        if self.choice is not None:
            return 0, len(self.choice) - 1
        return self.uniform or self.log_uniform or self.integer or self.log_integer or (0, 0)


def choice(*values: Value) -> Parameter:
    """Return a parameter that has one of `values`, each with equal probability."""
    return Parameter(choice=values)


def uniform(least: float, most: float) -> Parameter:
    """Return a parameter with uniformly distributed numbers between the bounds."""
    return Parameter(uniform=(least, most))


def log_uniform(least: float, most: float) -> Parameter:
    """Return a parameter with all orders of magnitude equally likely. `least` is above 0."""
    return Parameter(log_uniform=(least, most))


def integer(least: int, most: int) -> Parameter:
    """Return a parameter with whole numbers from `least` to `most`, both included."""
    return Parameter(integer=(least, most))


Space = Mapping[str, Parameter]


class Grid(msgspec.Struct, frozen=True, tag="grid", tag_field="type", forbid_unknown_fields=True):
    """Search that trains all combinations of choices and whole numbers to the last epoch."""


class RandomSearch(
    msgspec.Struct, frozen=True, tag="random", tag_field="type", forbid_unknown_fields=True
):
    """Random configurations, each trained to the last epoch."""

    configurations: int  # number of configurations


Promotes = Literal["in_order", "on_arrival"]


class SuccessiveHalving(
    msgspec.Struct,
    frozen=True,
    tag="successive_halving",
    tag_field="type",
    forbid_unknown_fields=True,
):
    """Synchronous rungs (Jamieson and Talwalkar, AISTATS '16). The best 1 / eta trials continue."""

    configurations: int  # number of configurations
    min_epochs: int = 1  # of the first rung
    eta: int = 3  # one of so many trials continues at a rung


class Hyperband(
    msgspec.Struct, frozen=True, tag="hyperband", tag_field="type", forbid_unknown_fields=True
):
    """Brackets of successive halving, from many short to few long trials (Li et al., JMLR '18)."""

    eta: int = 3  # one of so many trials continues at a rung


class Asha(msgspec.Struct, frozen=True, tag="asha", tag_field="type", forbid_unknown_fields=True):
    """Asynchronous rungs (Li et al., MLSys '20). A trial is promoted once it is among the best."""

    configurations: int  # number of configurations
    min_epochs: int = 1  # of the first rung
    eta: int = 3  # one of so many trials continues at a rung
    # order in which scores are used: independent of timing (in_order), the paper's (on_arrival)
    promotes: Promotes = "in_order"


class MedianStopping(
    msgspec.Struct, frozen=True, tag="median", tag_field="type", forbid_unknown_fields=True
):
    """Search that stops trials worse than the median of the others (Golovin et al., KDD '17)."""

    configurations: int  # number of configurations
    grace_epochs: int = 1  # epochs before a trial can be stopped
    min_others: int = 3  # required number of other trials that have trained as long


class PopulationBased(
    msgspec.Struct, frozen=True, tag="pbt", tag_field="type", forbid_unknown_fields=True
):
    """Search that replaces the worst quarter by changed best trials (Jaderberg et al., 2017)."""

    population: int  # number of trials that train at a time
    interval_epochs: int = 1  # between two replacements
    resample: float = 0.25  # probability that a value is redrawn instead of perturbed


Searcher = (
    Grid | RandomSearch | SuccessiveHalving | Hyperband | Asha | MedianStopping | PopulationBased
)


class SearchSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Search space, search algorithm and objective."""

    space: Mapping[str, Parameter]  # distribution of each value, by name
    searcher: Searcher  # search algorithm
    epochs: int  # upper limit for each configuration
    metric: str  # metric that decides
    mode: Literal["max", "min"] = "max"  # whether larger or smaller values are better
    seed: int = 0  # seed of all draws


class SweepSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sweep of a job, with its search and the functions that train.

    Functions are named by module path, `module:function` in the job's working directory.
    """

    search: SearchSpec  # what is tried
    input_fn: str  # loads the data of one partition
    model_fn: str  # makes the model from the values of a configuration
    train_fn: str  # trains one pass over a partition
    eval_fn: str | None = None  # computes metrics of a model at the end of each epoch
    partitions: int  # number of data partitions
    replicas: int = 1  # number of nodes with a copy of each partition, limited to all nodes
    keep: int = 1  # number of best configurations with states kept after the sweep
    revoke_s: float = 120.0  # time that a worker has to end its unit when its slot is withdrawn
    # Choice of the next visit: most loaded first (greedy), best of 20 (rollouts), Cerebro (random).
    order: VisitOrder = "fixed"
    # Global batch with which the last trials become elastic jobs, once they are fewer than half the
    # slots.
    graduate_batch: int | None = None  # None: trials stay in the sweep and remain bit-exact

    @property
    def functions(self) -> dict[str, str]:
        """Paths of the functions that are given, by field."""
        given = {name: getattr(self, name) for name in FUNCTIONS}
        return {name: path for name, path in given.items() if path is not None}


class TrialSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A trial of a sweep that continues as an elastic job. The controller writes this."""

    sweep: JobId
    trial: int
    values: dict[str, Value]
    functions: dict[str, str]  # paths of functions by field
    partitions: int
    seed: int  # seed of the sweep
    epochs: int  # upper limit
    epochs_done: int
    version: int  # version of the state to continue from
    digest: str  # digest of this state
    sources: tuple[str, ...]  # HOST:PORT of processes that serve the state
    states_key: str = ""  # for requests of the state; set for workers of the job only


FUNCTION_PATH: Final = re.compile(r"[A-Za-z_][\w.]{0,199}:[A-Za-z_]\w{0,99}")
MAX_REPLICAS: Final = 1024
MAX_REVOKE_S: Final = 86_400.0
MAX_GRADUATE_BATCH: Final = 2**40  # samples
FUNCTIONS: Final = ("input_fn", "model_fn", "train_fn", "eval_fn")


def check_sweep(spec: SweepSpec) -> None:
    """Check a sweep."""
    check_search(spec.search)
    for field in FUNCTIONS:
        path = getattr(spec, field)
        if path is not None and not FUNCTION_PATH.fullmatch(path):
            what = f"{field} = {path[:120]!r} is not module:function"
            raise SettingsError(what, "such as 'data:load'", field)
    for field, least, most in (
        ("partitions", 1, MAX_PARTITIONS),
        ("replicas", 1, MAX_REPLICAS),
        ("keep", 0, MAX_CONFIGURATIONS),
        ("graduate_batch", 1, MAX_GRADUATE_BATCH),
        ("revoke_s", 0, MAX_REVOKE_S),
    ):
        value = getattr(spec, field)
        if value is not None and not least <= value <= most:
            what = f"{field} = {value} is outside {least} to {most}"
            raise SettingsError(what, "choose a value in this range", field)


def check_values(space: Space, values: Values) -> None:
    """Check a user's configuration against a valid space. Numbers may exceed the space's bounds.

    Raises:
        SettingsError: if a value is invalid or missing. It names the field and the remedy.
    """
    for name in values:
        if name not in space:
            what = f"values.{name[:64]} is not a value of this sweep"
            raise SettingsError(what, f"give {', '.join(space)}", f"values.{name[:64]}")
    for name, parameter in space.items():
        field = f"values.{name}"
        applies = all(values.get(other) in some for other, some in parameter.when.items())
        if applies and name not in values:
            raise SettingsError(f"{field} is missing", "give it a value", field)
        if name in values and not applies:
            goes = " and ".join(f"{key} in {list(some)}" for key, some in parameter.when.items())
            raise SettingsError(f"{field} applies only with {goes}", "leave it out", field)
        if name in values:
            _check_value(field, parameter, values[name])


def _check_value(field: str, parameter: Parameter, value: Value) -> None:
    if parameter.choice is not None:
        if not any(type(value) is type(one) and value == one for one in parameter.choice):
            known = ", ".join(map(repr, parameter.choice[:20]))
            raise SettingsError(f"{field} = {value!r} is not one of its choices", known, field)
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SettingsError(f"{field} = {value!r} is not a number", "give a finite number", field)
    if isinstance(value, int) and abs(value) > MAX_WHOLE:
        raise SettingsError(f"{field} is beyond 2**53", "give a smaller number", field)
    if parameter.form.endswith("integer") and not isinstance(value, int):
        raise SettingsError(f"{field} = {value} is not an integer", "give an integer", field)


def is_metric(name: str) -> bool:
    """True if `name` is a valid name of a metric: short and printable."""
    return 1 <= len(name) <= MAX_METRIC and name.isprintable()


def check_search(spec: SearchSpec) -> None:
    """Check a search."""
    if not spec.space:
        raise SettingsError("space is empty", "give at least one value to choose", "space")
    if len(spec.space) > MAX_PARAMETERS:
        what = f"space has {len(spec.space)} values, more than {MAX_PARAMETERS}"
        raise SettingsError(what, "search those that matter most", "space")
    for name, parameter in spec.space.items():
        _check_parameter(name, parameter, spec.space)
    _check_conditions(spec.space)
    try:
        size = len(msgspec.msgpack.encode(spec.space))
    except UnicodeEncodeError:
        raise SettingsError("space contains invalid text", "write it in UTF-8", "space") from None
    if size > MAX_SPACE_BYTES:
        what = f"space takes {size} bytes, more than {MAX_SPACE_BYTES}"
        raise SettingsError(what, "name long choices, and look them up in model_fn", "space")
    if not 1 <= spec.epochs <= MAX_EPOCHS:
        raise SettingsError(
            f"epochs = {spec.epochs} is outside 1 to {MAX_EPOCHS}",
            "choose a value in this range",
            "epochs",
        )
    if not spec.metric:
        raise SettingsError("metric is empty", "name a metric that eval_fn returns", "metric")
    if not is_metric(spec.metric):
        what = f"metric = {spec.metric[:60]!r} is not a metric name"
        raise SettingsError(what, f"give 1 to {MAX_METRIC} printable characters", "metric")
    if abs(spec.seed) > MAX_SEED:
        raise SettingsError("seed does not fit 64 bits", "give a smaller number", "seed")
    _check_searcher(spec)


def _check_parameter(name: str, parameter: Parameter, space: Space) -> None:
    field = f"space.{name[:64]}"
    if not PARAMETER_NAME.fullmatch(name):
        what = f"{field}: {name[:64]!r} is not an argument name"
        raise SettingsError(what, "letters, digits and _, at most 64", field)
    given = [form for form in FORMS if getattr(parameter, form) is not None]
    if len(given) != 1:
        what = f"{field} has {' and '.join(given) or 'no values'}"
        raise SettingsError(what, f"give exactly one of {', '.join(FORMS)}", field)
    if parameter.choice is not None:
        _check_choice(field, parameter.choice)
    else:
        _check_range(field, given[0], getattr(parameter, given[0]))
    for other, values in parameter.when.items():
        if other not in space or other == name:
            what = f"{field}.when names {other[:64]!r}"
            raise SettingsError(what, "name another value of the space", f"{field}.when")
        if not values:
            raise SettingsError(
                f"{field}.when.{other} is empty", "list the values that it goes with", field
            )
        _check_numbers(f"{field}.when.{other}", values)


def _check_choice(field: str, values: tuple[Value, ...]) -> None:
    if not 1 <= len(values) <= MAX_CHOICES:
        what = f"{field}.choice has {len(values)} values"
        raise SettingsError(what, f"give 1 to {MAX_CHOICES}", field)
    if len({(type(value), value) for value in values}) < len(values):
        raise SettingsError(f"{field}.choice repeats a value", "give each value once", field)
    _check_numbers(f"{field}.choice", values)


def _check_numbers(field: str, values: tuple[Value, ...]) -> None:
    where = field.rpartition(".when.")[0] or field.removesuffix(".choice")
    for value in values:
        if isinstance(value, float) and not math.isfinite(value):
            raise SettingsError(f"{field} has {value}", "give finite numbers", where)
        if isinstance(value, int) and abs(value) > MAX_WHOLE:
            what = f"{field} has a whole number beyond 2**53"
            raise SettingsError(what, "give smaller ones", where)


def _check_range(field: str, form: str, bounds: tuple[float, float]) -> None:
    least, most = bounds
    if not (math.isfinite(least) and math.isfinite(most) and least < most):
        what = f"{field}.{form} = [{least}, {most}] is not a range"
        raise SettingsError(what, "give two finite numbers, the smaller first", field)
    if not math.isfinite(most - least):
        what = f"{field}.{form} = [{least}, {most}] exceeds the range of numbers"
        raise SettingsError(what, "give bounds that are closer", field)
    if form.endswith("integer") and max(abs(least), abs(most)) > MAX_WHOLE:
        what = f"{field}.{form} goes beyond 2**53"
        raise SettingsError(what, "give smaller bounds", field)
    if form.startswith("log") and least <= 0:
        what = f"{field}.{form} starts at {least}"
        raise SettingsError(what, "logarithms need numbers above 0", field)


def _check_conditions(space: Space) -> None:
    """Refuse parameters that depend on themselves."""
    for name in space:
        seen, ahead = {name}, list(space[name].when)
        while ahead:
            other = ahead.pop()
            if other == name:
                what = f"space.{name}.when depends on itself"
                raise SettingsError(what, "remove one `when` of the cycle", f"space.{name}")
            if other not in seen:
                seen.add(other)
                ahead += space[other].when


def _check_searcher(spec: SearchSpec) -> None:
    searcher = spec.searcher
    if isinstance(searcher, Grid):
        for name, parameter in spec.space.items():
            if parameter.form not in {"choice", "integer"}:
                what = f"searcher grid cannot enumerate space.{name}.{parameter.form}"
                raise SettingsError(
                    what, "use choice or integer, or another searcher", f"space.{name}"
                )
        bounds = [parameter.bounds for parameter in spec.space.values()]
        many = math.prod(int(most - least) + 1 for least, most in bounds)
        if many > MAX_CONFIGURATIONS:
            what = f"space lists {many} configurations, more than {MAX_CONFIGURATIONS}"
            raise SettingsError(what, "give fewer values, or draw some at random", "space")
        return
    for field, least, most in (
        ("configurations", 1, MAX_CONFIGURATIONS),
        ("population", 4, MAX_CONFIGURATIONS),
        ("eta", 2, 100),
        ("min_epochs", 1, spec.epochs),
        ("interval_epochs", 1, spec.epochs),
        ("grace_epochs", 1, spec.epochs),
        ("min_others", 1, MAX_CONFIGURATIONS),
        ("resample", 0, 1),
    ):
        value = getattr(searcher, field, least)
        if not least <= value <= most:
            what = f"searcher.{field} = {value} is outside {least} to {most}"
            raise SettingsError(what, "choose a value in this range", f"searcher.{field}")
    _check_many(spec)


def _check_many(spec: SearchSpec) -> None:
    """Limit the number of initial configurations, because the controller draws them in one step."""
    searcher = spec.searcher
    if isinstance(searcher, Hyperband):
        many = sum(size for size, _ in brackets(spec.epochs, searcher.eta))
        if many > MAX_CONFIGURATIONS:
            what = f"hyperband tries {many} configurations in {spec.epochs} epochs with eta"
            what += f" {searcher.eta}, more than {MAX_CONFIGURATIONS}"
            raise SettingsError(what, "give fewer epochs or a larger eta", "epochs")
    else:
        many = getattr(searcher, "configurations", getattr(searcher, "population", 0))
    if many * len(spec.space) > MAX_VALUES:
        what = f"{many} configurations of {len(spec.space)} values are more than {MAX_VALUES}"
        raise SettingsError(what, "try fewer configurations", "searcher")


def bounded_metrics(given: Mapping[str, float]) -> dict[str, float]:
    """Return the first `MAX_EPOCH_METRICS` finite metrics, with short printable names."""
    finite = {name: value for name, value in given.items() if math.isfinite(value)}
    kept = list(finite.items())[:MAX_EPOCH_METRICS]
    return {printable(name[:MAX_METRIC]): value for name, value in kept}


def are_bounded(given: Mapping[str, float]) -> bool:
    """True if `bounded_metrics` would change nothing."""
    return len(given) <= MAX_EPOCH_METRICS and all(
        len(name) <= MAX_METRIC and name.isprintable() and math.isfinite(value)
        for name, value in given.items()
    )


def printable(text: str) -> str:
    """Return the text on one line. Characters that could control a terminal become spaces."""
    return "".join(c if c.isprintable() else " " for c in text)
