"""A sweep's TOML file to the job that it is."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from controlplane.client.spec_overrides import toml_value
from controlplane.client.sweeps.searchers import BY_TYPE
from controlplane.client.sweeps.sweep import Sweep
from schemas.errors import BadFieldError, SettingsError
from schemas.jobs import JobSpec
from schemas.sweeps import FORMS, Parameter
from schemas.toml_settings import convert

JOB_FIELDS: Final = (
    "name", "workdir", "slots", "slots_wanted", "python", "family", "priority", "retries", "env"
)  # fmt: skip
FIELDS: Final = tuple(
    field.name for field in msgspec.structs.fields(Sweep) if field.name not in JOB_FIELDS
)
REQUIRED: Final = tuple(field.name for field in msgspec.structs.fields(Sweep) if field.required)
TEXTS: Final = frozenset({"name", "workdir", "python", "family"})
FORM: Final = "write KEY=VALUE: epochs of searcher.max_epochs=9, space.lr=[0.1, 0.2], slots=[1, 4]"


def sweep_from(table: Mapping[str, Any], path: Path) -> JobSpec:
    """The job that a sweep's file describes; not yet held against its working directory.

    Args:
        table: of the file, with its `sweep`.
        path: of the file, for error messages.

    Raises:
        SettingsError: if a key is unknown, missing or of the wrong type.
        BadFieldError: if a value cannot be accepted.
    """
    inner = table["sweep"]
    if not isinstance(inner, Mapping):
        raise SettingsError(f"{path}: sweep is no table", "write [sweep]", "sweep")
    _refuse_unknown(path, "", table, (*JOB_FIELDS, "sweep"), FIELDS)
    _refuse_unknown(path, "sweep.", inner, FIELDS, JOB_FIELDS)
    for name in REQUIRED:
        if name not in inner:
            what = f"{path}: sweep.{name}: is missing"
            raise SettingsError(
                what, f"give it in [sweep]{EXAMPLES.get(name, '')}", f"sweep.{name}"
            )
    found = {key: value for key, value in table.items() if key != "sweep"} | dict(inner)
    found["space"] = _space(found["space"], path)
    found["searcher"] = _searcher(found["searcher"], path)
    try:
        return msgspec.convert(found, Sweep).job_spec()
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `")
        field = where.rstrip("`").removeprefix("$").removeprefix(".")
        full = field if field.split(".")[0].split("[")[0] in JOB_FIELDS else f"sweep.{field}"
        raise SettingsError(f"{path}: {full}: {text}", "correct this key", full) from None


EXAMPLES: Final = {
    "input_fn": ", such as input_fn = 'data:load'",
    "model_fn": ", such as model_fn = 'models:build'",
    "train_fn": ", such as train_fn = 'models:train'",
    "space": " as [sweep.space], such as lr = { log_uniform = [1e-4, 1e-1] }",
    "searcher": " as [sweep.searcher], such as type = 'asha'",
    "metric": ": what eval_fn returns and is to be large (or small: mode = 'min')",
    "partitions": ": in how many parts the data is trained",
}


def with_sweep_overrides(table: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """The table of a sweep's file with some of its values replaced.

    `space.lr=0.1` fixes a value, `space.lr=[0.1, 0.2]` makes it a choice,
    `space.lr.log_uniform=[1e-4, 1e-1]` gives another range; `searcher.eta=4`, `partitions=8`,
    `slots=[1, 4]` and `env.NAME=TEXT` set one entry. `sweep.` before a key may be left out.

    Args:
        table: of the file; it is left as it is.
        assignments: KEY=VALUE, each; a later one wins.

    Raises:
        BadFieldError: if an assignment has no such form or names no field of a sweep.
    """
    changed: dict[str, Any] = _copied(table)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise BadFieldError(f"--set {assignment!r} is no assignment", FORM, "set")
        first, *rest = key.strip().removeprefix("sweep.").split(".")
        if first not in (*JOB_FIELDS, *FIELDS):
            what = f"--set {key}: a sweep has no such field"
            raise BadFieldError(what, _near(first, (*JOB_FIELDS, *FIELDS)), key)
        inner = changed if first in JOB_FIELDS else changed.setdefault("sweep", {})
        if not isinstance(inner, dict):
            raise BadFieldError("sweep is no table in the file", "correct it there", "sweep")
        plain = first in TEXTS or first == "env"
        _set(inner, key, [first, *rest], text if plain else toml_value(text))
    return changed


def _set(table: dict[str, Any], key: str, path: Sequence[str], value: Any) -> None:
    first, *rest = path
    if not rest:
        table[first] = value
        return
    inner = table.setdefault(first, {})
    if path[-1] in FORMS and len(path) == 2 and first not in FIELDS:  # noqa: PLR2004 - VALUE.FORM
        kept = inner.get("when") if isinstance(inner, dict) else None
        table[first] = {rest[0]: value, **({"when": kept} if kept else {})}
        return
    if not isinstance(inner, dict):
        raise BadFieldError(f"--set {key}: {first} has no entries", FORM, key)
    _set(inner, key, rest, value)


def _space(space: Any, path: Path) -> dict[str, Parameter]:
    if not isinstance(space, Mapping):
        raise SettingsError(
            f"{path}: sweep.space is no table", "write [sweep.space]", "sweep.space"
        )
    found = {}
    for name, value in space.items():
        field = f"sweep.space.{name}"
        if isinstance(value, list):
            table: Mapping[str, Any] = {"choice": value}
        elif isinstance(value, Mapping):
            table = value
        elif isinstance(value, str | int | float | bool):
            table = {"choice": [value]}
        else:
            what = f"{path}: {field}: {value!r} is no value of a configuration"
            raise SettingsError(what, "give texts, numbers or truth values", field)
        found[name] = convert(Parameter, table, path, f"{field}.")
    return found


def _searcher(table: Any, path: Path) -> Any:
    field = "sweep.searcher"
    if not isinstance(table, Mapping):
        what = f"{path}: {field} is no table"
        raise SettingsError(what, "write [sweep.searcher] and below it type = 'asha'", field)
    kinds = ", ".join(BY_TYPE)
    kind = table.get("type")
    if kind is None:
        raise SettingsError(f"{path}: {field}.type: is missing", f"one of {kinds}", f"{field}.type")
    if kind not in BY_TYPE:
        near = _near(str(kind), tuple(BY_TYPE))
        raise SettingsError(f"{path}: {field}.type: no searcher {kind!r}", near, f"{field}.type")
    rest = {key: value for key, value in table.items() if key != "type"}
    return {"type": kind, **msgspec.structs.asdict(convert(BY_TYPE[kind], rest, path, f"{field}."))}


def _refuse_unknown(
    path: Path,
    prefix: str,
    table: Mapping[str, Any],
    known: Sequence[str],
    elsewhere: Iterable[str],
) -> None:
    for key in table:
        if key in known:
            continue
        field = f"{prefix}{key}"
        if key in elsewhere:
            hint = f"move it {'above [sweep]' if prefix else 'into [sweep]'}"
        elif key in NOT_OF_SWEEPS:
            hint = f"leave it out: {NOT_OF_SWEEPS[key]}"
        else:
            hint = _near(key, tuple(known))
        raise SettingsError(f"{path}: unknown key {field}", hint, field)


NOT_OF_SWEEPS: Final = {
    "script": "a sweep names functions, input_fn, model_fn and train_fn",
    "args": "what varies is in [sweep.space], the rest in [env]",
    "batch_size": "each configuration has its own; train_fn knows it",
    "max_batch_size": "each configuration has its own; train_fn knows it",
    "max_local_batch": "each configuration has its own; train_fn knows it",
    "lr": "make it a value of [sweep.space]",
    "stop": "give sweep.searcher.max_epochs",
    "record_samples": "`ones sweep manifest` says which partitions each configuration saw",
    "utility": "give priority",
}


def _near(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value
