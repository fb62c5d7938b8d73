"""A sweep as its user states it, which becomes a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from controlplane.client.sweeps.searchers import Searcher, as_parameter, as_stated
from schemas.errors import BadFieldError, SettingsError
from schemas.jobs import KEEP, SWEEP_SCRIPT, JobSpec
from schemas.sweeps import Parameter, SearchSpec, SweepSpec, Value, check_sweep

Order = Literal["greedy", "rollouts", "random", "fixed"]


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """Many configurations of one training, over data in fixed partitions, on changing slots.

    Functions are named by module path, `module:function` in `workdir`; they are imported where
    units run, and never pickled. In a TOML file the fields up to `seed` stand in `[sweep]`.
    """

    EXAMPLES: ClassVar = {  # of values in a sweep's file, for errors
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

    input_fn: str  # the data of one partition
    model_fn: str  # what is trained, from the values of a configuration
    train_fn: str  # one pass over a partition
    eval_fn: str | None = None  # metrics of a model, at the end of each epoch
    space: Mapping[str, Any]  # a `Parameter` for each value; a list: a choice; else: fixed
    searcher: Searcher
    metric: str  # of what eval_fn returns, else of what train_fn does
    mode: Literal["max", "min"] = "max"  # whether it should be large or small
    partitions: int  # of the data
    replicas: int = 1  # nodes that hold each partition; more: every node
    keep: int = 1  # best configurations whose states stay when the sweep is over
    order: Order = "fixed"  # who visits which partition next
    revoke_s: float = 120.0  # that a unit may still take where its slot is wanted
    graduate_batch: int | None = None  # of the last trials as elastic jobs; None: they stay
    seed: int = 0
    # of its job
    name: str = "sweep"
    workdir: str = "."
    slots: tuple[int, int] | int | None = None  # least, most; default: 1 to `partitions`
    slots_wanted: int | None = None  # for policies of fixed size
    python: str | None = None  # interpreter with torch; default: the agent's
    family: str | None = None
    priority: float = 1.0
    retries: int = 0  # failures of the workers' start that are tried again
    env: dict[str, str] = msgspec.field(default_factory=dict)

    def sweep_spec(self) -> SweepSpec:
        """What is searched and trained, checked.

        Raises:
            BadFieldError: naming the field of this class and the remedy.
        """
        search = SearchSpec(
            space={name: as_parameter(value) for name, value in self.space.items()},
            searcher=self.searcher.spec(),
            epochs=self.searcher.max_epochs,
            metric=self.metric,
            mode=self.mode,
            seed=self.seed,
        )
        spec = SweepSpec(
            search=search,
            input_fn=self.input_fn,
            model_fn=self.model_fn,
            train_fn=self.train_fn,
            eval_fn=self.eval_fn,
            partitions=self.partitions,
            replicas=self.replicas,
            keep=self.keep,
            order=self.order,
            revoke_s=self.revoke_s,
            graduate_batch=self.graduate_batch,
        )
        try:
            check_sweep(spec)
        except SettingsError as error:
            field, what = error.field, error.message
            if field == "epochs":
                field, what = "searcher.max_epochs", what.replace("epochs", "max_epochs", 1)
            said = what if what.startswith(field) else f"{field}: {what}"
            raise BadFieldError(said, error.hint, f"sweep.{field}") from None
        return spec

    def job_spec(self) -> JobSpec:
        """The job that it is.

        Raises:
            BadFieldError: if the sweep cannot be run; naming the field and the remedy.
        """
        sweep = self.sweep_spec()
        slots = (1, self.partitions) if self.slots is None else self.slots
        slots = (slots, slots) if isinstance(slots, int) else slots
        return JobSpec(
            name=self.name,
            script=SWEEP_SCRIPT,
            workdir=self.workdir,
            batch_size=max(1, slots[1]),  # so that policies may give it any number of slots
            max_batch_size=KEEP,
            slots=slots,
            slots_wanted=self.slots_wanted,
            python=self.python,
            family=self.family,
            priority=self.priority,
            retries=self.retries,
            env=dict(self.env),
            sweep=sweep,
        )


def sweep_of(spec: JobSpec) -> Sweep:
    """The sweep as its user could have stated it.

    Raises:
        BadFieldError: if it is none.
    """
    sweep = stated_sweep(spec)
    search = sweep.search
    return Sweep(
        input_fn=sweep.input_fn,
        model_fn=sweep.model_fn,
        train_fn=sweep.train_fn,
        eval_fn=sweep.eval_fn,
        space=search.space,
        searcher=as_stated(search),
        metric=search.metric,
        mode=search.mode,
        partitions=sweep.partitions,
        replicas=sweep.replicas,
        keep=sweep.keep,
        order=sweep.order,
        revoke_s=sweep.revoke_s,
        graduate_batch=sweep.graduate_batch,
        seed=search.seed,
        name=spec.name,
        workdir=spec.workdir,
        slots=spec.slots,
        slots_wanted=spec.slots_wanted,
        python=spec.python,
        family=spec.family,
        priority=spec.priority,
        retries=spec.retries,
        env=spec.env,
    )


def stated_sweep(spec: JobSpec) -> SweepSpec:
    """What a job searches.

    Raises:
        BadFieldError: if it is no sweep.
    """
    sweep = spec.stated_sweep
    if sweep is None:
        raise BadFieldError(f"{spec.name} is no sweep", "give it a table [sweep]", "sweep")
    return sweep


def in_words(parameter: Parameter) -> str:
    """A value of the space, as short as it goes.

    Args:
        parameter: with one form.
    """
    if parameter.choice is not None:
        said = " | ".join(map(short, parameter.choice))
    else:
        least, most = parameter.bounds
        said = f"{parameter.form} {least:g} to {most:g}"
    conditions = [
        f"{other} = {' | '.join(map(short, values))}" for other, values in parameter.when.items()
    ]
    return f"{said} when {' and '.join(conditions)}" if conditions else said


def short(value: Value) -> str:
    """A value of a configuration for people."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
