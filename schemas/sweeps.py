"""What a user asks for: a sweep over configurations of one training.

The brackets of Hyperband: how many configurations, and how long they train at first.

Metrics of an epoch within the bounds that scripts are told of, whoever wrote them down.
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
    """Hyperband's brackets: how many trials, and their first rung in epochs.

    Li et al., JMLR '18, algorithm 1, with R = `most`: s from floor(log_eta R) down to 0,
    n = ceil((s_max + 1) eta^s / (s + 1)), r = R eta^-s.

    Args:
        most: epochs of a trial that is never stopped.
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
MAX_EPOCH_METRICS: Final = 500  # of an epoch, by name
MAX_METRIC: Final = 100  # characters of its name
MAX_SEED: Final = 2**63 - 1
MAX_PARTITIONS: Final = 4096
MAX_CHOICES: Final = 1000
MAX_PARAMETERS: Final = 256
MAX_SPACE_BYTES: Final = 128 << 10  # as it travels: with every reply about the sweep
MAX_WHOLE: Final = 2**53  # beyond, neighbours are one number
MAX_VALUES: Final = 100_000  # of all configurations together: drawing them holds up the cluster
PARAMETER_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
FORMS: Final = ("choice", "uniform", "log_uniform", "integer", "log_integer")


class Parameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one value of a configuration is drawn from; exactly one of its forms."""

    choice: tuple[Value, ...] | None = None
    uniform: tuple[float, float] | None = None  # least, most
    log_uniform: tuple[float, float] | None = None  # its logarithm is uniform; above 0
    integer: tuple[int, int] | None = None  # least, most, both included
    log_integer: tuple[int, int] | None = None  # the same, small ones as often as large ones
    when: Mapping[str, tuple[Value, ...]] = {}  # only where these have one of these values

    @property
    def form(self) -> str:
        """The form that it has; empty if none."""
        return next((form for form in FORMS if getattr(self, form) is not None), "")

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and most; of a choice, of the places in it."""
        if self.choice is not None:
            return 0, len(self.choice) - 1
        return self.uniform or self.log_uniform or self.integer or self.log_integer or (0, 0)


def choice(*values: Value) -> Parameter:
    """One of `values`, each as likely."""
    return Parameter(choice=values)


def uniform(least: float, most: float) -> Parameter:
    """A number between these."""
    return Parameter(uniform=(least, most))


def log_uniform(least: float, most: float) -> Parameter:
    """A number between these, each order of magnitude as likely; `least` is above 0."""
    return Parameter(log_uniform=(least, most))


def integer(least: int, most: int) -> Parameter:
    """A whole number, both ends included."""
    return Parameter(integer=(least, most))


Space = Mapping[str, Parameter]


class Grid(msgspec.Struct, frozen=True, tag="grid", tag_field="type", forbid_unknown_fields=True):
    """Every combination of choices and whole numbers, to the last epoch."""


class RandomSearch(
    msgspec.Struct, frozen=True, tag="random", tag_field="type", forbid_unknown_fields=True
):
    """Configurations drawn by chance, each to the last epoch."""

    configurations: int


# In which order ASHA looks at scores: in one that follows from them, or (paper) as they arrive
Promotes = Literal["in_order", "on_arrival"]


class SuccessiveHalving(
    msgspec.Struct,
    frozen=True,
    tag="successive_halving",
    tag_field="type",
    forbid_unknown_fields=True,
):
    """Rungs that wait for all (Jamieson and Talwalkar, AISTATS '16): the best 1 / eta go on."""

    configurations: int
    min_epochs: int = 1
    eta: int = 3


class Hyperband(
    msgspec.Struct, frozen=True, tag="hyperband", tag_field="type", forbid_unknown_fields=True
):
    """Brackets of successive halving from many short to few long (Li et al., JMLR '18)."""

    eta: int = 3


class Asha(msgspec.Struct, frozen=True, tag="asha", tag_field="type", forbid_unknown_fields=True):
    """Rungs that do not wait for all (Li et al., MLSys '20): promoted once among the best."""

    configurations: int
    min_epochs: int = 1
    eta: int = 3
    promotes: Promotes = "in_order"


class MedianStopping(
    msgspec.Struct, frozen=True, tag="median", tag_field="type", forbid_unknown_fields=True
):
    """Who is worse than the median of the others stops (Golovin et al., KDD '17)."""

    configurations: int
    grace_epochs: int = 1
    min_others: int = 3  # that have come as far


class PopulationBased(
    msgspec.Struct, frozen=True, tag="pbt", tag_field="type", forbid_unknown_fields=True
):
    """The worst quarter goes on as changed copies of the best (Jaderberg et al., 2017)."""

    population: int
    interval_epochs: int = 1
    resample: float = 0.25  # how often a value is drawn anew instead of perturbed


Searcher = (
    Grid | RandomSearch | SuccessiveHalving | Hyperband | Asha | MedianStopping | PopulationBased
)


class SearchSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is searched, how, and what is best."""

    space: Mapping[str, Parameter]
    searcher: Searcher
    epochs: int  # that a configuration gets at most
    metric: str
    mode: Literal["max", "min"] = "max"
    seed: int = 0


class SweepSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sweep, as a part of its job: what is searched, and what trains.

    Functions are named by module path, `module:function` in the job's working directory.
    """

    search: SearchSpec
    input_fn: str  # the data of one partition
    model_fn: str  # what is trained, from the values of a configuration
    train_fn: str  # one pass over a partition
    eval_fn: str | None = None  # metrics of a model, at the end of each epoch
    partitions: int  # of the data
    replicas: int = 1  # nodes that hold each partition; more: every node
    keep: int = 1  # best configurations whose states stay when the sweep is over
    revoke_s: float = 120.0  # a worker whose slot is wanted may take so long to end its unit
    # Who visits what next: the most loaded; that, chosen by 20 plays; by chance (Cerebro).
    order: VisitOrder = "fixed"
    # Global batch of the last trials as elastic jobs, once they are fewer than half the slots.
    graduate_batch: int | None = None  # None: they train on here, and stay exact

    @property
    def functions(self) -> dict[str, str]:
        """Those that it names, by field."""
        given = {name: getattr(self, name) for name in FUNCTIONS}
        return {name: path for name, path in given.items() if path is not None}


class TrialSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A trial of a sweep that goes on as an elastic job; the controller writes it."""

    sweep: JobId
    trial: int
    values: dict[str, Value]
    functions: dict[str, str]  # paths by field
    partitions: int
    seed: int  # of the sweep
    epochs: int  # to train to
    epochs_done: int
    version: int  # of the state that it goes on from
    digest: str  # of that
    sources: tuple[str, ...]  # HOST:PORT of who has it


FUNCTION_PATH: Final = re.compile(r"[A-Za-z_][\w.]{0,199}:[A-Za-z_]\w{0,99}")
MAX_REPLICAS: Final = 1024
MAX_REVOKE_S: Final = 86_400.0
MAX_GRADUATE_BATCH: Final = 2**40  # samples
FUNCTIONS: Final = ("input_fn", "model_fn", "train_fn", "eval_fn")


def check_sweep(spec: SweepSpec) -> None:
    """Refuse what no sweep can do.

    Raises:
        SettingsError: names the field and the remedy.
    """
    check_search(spec.search)
    for field in FUNCTIONS:
        path = getattr(spec, field)
        if path is not None and not FUNCTION_PATH.fullmatch(path):
            what = f"{field} = {path[:120]!r} is no module:function"
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
            raise SettingsError(what, "choose one inside", field)


def check_values(space: Space, values: Values) -> None:
    """Refuse a configuration that is none of this space; numbers may be beyond its bounds.

    Args:
        space: checked.
        values: that a user chose.

    Raises:
        SettingsError: names the field and the remedy.
    """
    for name in values:
        if name not in space:
            what = f"values.{name[:64]} is no value of this sweep"
            raise SettingsError(what, f"give {', '.join(space)}", f"values.{name[:64]}")
    for name, parameter in space.items():
        field = f"values.{name}"
        applies = all(values.get(other) in some for other, some in parameter.when.items())
        if applies and name not in values:
            raise SettingsError(f"{field} is missing", "give it a value", field)
        if name in values and not applies:
            goes = " and ".join(f"{key} in {list(some)}" for key, some in parameter.when.items())
            raise SettingsError(f"{field} goes only with {goes}", "leave it out", field)
        if name in values:
            _check_value(field, parameter, values[name])


def _check_value(field: str, parameter: Parameter, value: Value) -> None:
    if parameter.choice is not None:
        if not any(type(value) is type(one) and value == one for one in parameter.choice):
            known = ", ".join(map(repr, parameter.choice[:20]))
            raise SettingsError(f"{field} = {value!r} is none of its choices", known, field)
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SettingsError(f"{field} = {value!r} is no number", "give a finite one", field)
    if isinstance(value, int) and abs(value) > MAX_WHOLE:
        raise SettingsError(f"{field} is beyond 2**53", "give a smaller one", field)
    if parameter.form.endswith("integer") and not isinstance(value, int):
        raise SettingsError(f"{field} = {value} is no whole number", "give one", field)


def is_metric(name: str) -> bool:
    """Whether `name` can be one of a metric: short, and printable.

    Args:
        name: that a user wrote.
    """
    return 1 <= len(name) <= MAX_METRIC and name.isprintable()


def check_search(spec: SearchSpec) -> None:
    """Refuse what no sweep can do.

    Raises:
        SettingsError: names the field and the remedy.
    """
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
        raise SettingsError("space has a text that is none", "write it in UTF-8", "space") from None
    if size > MAX_SPACE_BYTES:
        what = f"space takes {size} bytes, more than {MAX_SPACE_BYTES}"
        raise SettingsError(what, "name long choices, and look them up in model_fn", "space")
    if not 1 <= spec.epochs <= MAX_EPOCHS:
        raise SettingsError(
            f"epochs = {spec.epochs} is outside 1 to {MAX_EPOCHS}", "choose one inside", "epochs"
        )
    if not spec.metric:
        raise SettingsError("metric is empty", "name what eval_fn returns", "metric")
    if not is_metric(spec.metric):
        what = f"metric = {spec.metric[:60]!r} is no name of a metric"
        raise SettingsError(what, f"give 1 to {MAX_METRIC} printable characters", "metric")
    if abs(spec.seed) > MAX_SEED:
        raise SettingsError("seed does not fit 64 bits", "give a smaller number", "seed")
    _check_searcher(spec)


def _check_parameter(name: str, parameter: Parameter, space: Space) -> None:
    field = f"space.{name[:64]}"
    if not PARAMETER_NAME.fullmatch(name):
        what = f"{field}: {name[:64]!r} is no name of an argument"
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
        raise SettingsError(f"{field}.choice repeats a value", "give each once", field)
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
        what = f"{field}.{form} = [{least}, {most}] is no range"
        raise SettingsError(what, "give two finite numbers, the smaller first", field)
    if not math.isfinite(most - least):
        what = f"{field}.{form} = [{least}, {most}] is wider than numbers go"
        raise SettingsError(what, "give bounds that are closer", field)
    if form.endswith("integer") and max(abs(least), abs(most)) > MAX_WHOLE:
        what = f"{field}.{form} goes beyond 2**53"
        raise SettingsError(what, "give smaller bounds", field)
    if form.startswith("log") and least <= 0:
        what = f"{field}.{form} begins at {least}"
        raise SettingsError(what, "logarithms need numbers above 0", field)


def _check_conditions(space: Space) -> None:
    """No value may depend on itself."""
    for name in space:
        seen, ahead = {name}, list(space[name].when)
        while ahead:
            other = ahead.pop()
            if other == name:
                what = f"space.{name}.when depends on itself"
                raise SettingsError(what, "take one `when` of the circle out", f"space.{name}")
            if other not in seen:
                seen.add(other)
                ahead += space[other].when


def _check_searcher(spec: SearchSpec) -> None:
    searcher = spec.searcher
    if isinstance(searcher, Grid):
        for name, parameter in spec.space.items():
            if parameter.form not in {"choice", "integer"}:
                what = f"searcher grid cannot list space.{name}.{parameter.form}"
                raise SettingsError(
                    what, "use choice or integer, or another searcher", f"space.{name}"
                )
        many = math.prod(int(most - least) + 1 for least, most in _bounds_of(spec.space))
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
            raise SettingsError(what, "choose one inside", f"searcher.{field}")
    _check_many(spec)


def _check_many(spec: SearchSpec) -> None:
    """All first configurations are drawn at once, within an input of the controller."""
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


def _bounds_of(space: Space) -> list[tuple[float, float]]:
    return [parameter.bounds for parameter in space.values()]


def bounded_metrics(given: Mapping[str, float]) -> dict[str, float]:
    """The first that may be, the finite ones of them, under names that may be."""
    finite = {name: value for name, value in given.items() if math.isfinite(value)}
    kept = list(finite.items())[:MAX_EPOCH_METRICS]
    return {printable(name[:MAX_METRIC]): value for name, value in kept}


def are_bounded(given: Mapping[str, float]) -> bool:
    """Whether there is nothing to leave out."""
    return len(given) <= MAX_EPOCH_METRICS and all(
        len(name) <= MAX_METRIC and name.isprintable() and math.isfinite(value)
        for name, value in given.items()
    )


def printable(text: str) -> str:
    """The text in one line, without what would steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)
