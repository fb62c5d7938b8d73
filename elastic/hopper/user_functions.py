"""The functions of a sweep, by module path: never pickled, imported where units run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic.hopper.unit import Unit
from elastic.training_errors import UsageError

Metrics = Mapping[str, float]
EvalFunction = Callable[[Any, Any, Unit], Metrics]


@dataclass(frozen=True, slots=True)
class UserFunctions:
    """What a user writes for a sweep.

    Attributes:
        input_fn: the data of one partition, from its number and how many there are; called once in
            each process. A number of None asks for the data that every epoch is evaluated on.
        model_fn: what is trained, from a configuration; see `trained_objects`.
        train_fn: one pass over a partition's data; may return metrics.
        eval_fn: metrics of a trained model on the evaluation's data; None: nothing is evaluated.
    """

    input_fn: Callable[[int | None, int], Any]
    model_fn: Callable[[Mapping[str, Any]], Any]
    train_fn: Callable[[Any, Any, Unit], Metrics | None]
    eval_fn: EvalFunction | None = None


def import_functions(paths: Mapping[str, str]) -> UserFunctions:
    """Import them.

    Args:
        paths: `input_fn`, `model_fn`, `train_fn` and maybe `eval_fn`, each `module:function`.

    Raises:
        UsageError: if one cannot be imported or called; names the field.
    """
    missing = {"input_fn", "model_fn", "train_fn"} - paths.keys()
    if missing:
        name = min(missing)
        raise UsageError(f"{name} is missing", f"{name} = 'module:function'", name)
    return UserFunctions(**{name: _function(name, path) for name, path in paths.items()})


def _function(field: str, path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    if not module or not name:
        raise UsageError(f"{field} = {path!r} is no module:function", "such as 'data:load'", field)
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError as error:
        hint = f"{module} must be importable in the sweep's workdir, with all that it imports"
        raise UsageError(f"{field} = {path!r}: {error}", hint, field) from error
    except AttributeError:
        what = f"{field} = {path!r}: module {module} has no {name}"
        raise UsageError(what, "name a function at its top level", field) from None
    except Exception as error:
        what = f"{field} = {path!r}: importing {module} raised {type(error).__name__}: {error}"
        raise UsageError(what, "a module of functions does nothing when imported", field) from error
    if not callable(found):
        raise UsageError(f"{field} = {path!r} is no function", "name a function", field)
    return found  # type: ignore[no-any-return]
