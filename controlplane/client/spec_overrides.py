"""KEY=VALUE overrides from the command line, applied to the table of a job file."""

from __future__ import annotations

import copy
import difflib
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from schemas.errors import BadFieldError
from schemas.host.settings import example_of
from schemas.jobs import JobSpec, StopRule

FIELDS: Final = {field.encode_name: field.type for field in msgspec.structs.fields(JobSpec)}
STOP_FIELDS: Final = tuple(field.name for field in msgspec.structs.fields(StopRule))
STRING_FIELDS: Final = frozenset({"name", "script", "workdir", "family", "python", "class"})
FORM: Final = "write KEY=VALUE: lr=0.1, stop.epochs=3, args.width=64 or env.MODE=fast"


def with_overrides(table: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Return the table of a job file with some values replaced.

    `args.width=64` replaces the value of `--width` in `args`, or appends `--width 64`; `true` and
    `false` add and remove a flag without a value. `env.NAME=TEXT`, `stop.epochs=3` and
    `utility.deadline_s=900` set one entry. A value is parsed as TOML if possible, else it is a
    string. If a key occurs twice, the last value wins. Types are checked later, when the table
    becomes a spec.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(table))
    for key, text in parsed(assignments, FORM):
        field, dot, entry = key.partition(".")
        if dot and not entry:
            raise BadFieldError(f"--set {key} names no entry of {field}", FORM, key)
        if field not in FIELDS:
            problem = f"--set {key}: a job has no such field"
            raise BadFieldError(problem, nearest(field, FIELDS), key)
        if not dot:
            value = toml_value(text)
            is_text = field in STRING_FIELDS and not isinstance(value, str)
            changed[field] = text if is_text else value
        elif field == "args":
            changed["args"] = with_option(_args_of(changed), entry, text)
        elif field in {"env", "stop", "utility"}:
            _set_entry(changed, field, entry, text)
        else:
            raise BadFieldError(f"--set {key}: {field} has no entries", FORM, key)
    return changed


def parsed(assignments: Sequence[str], form: str) -> Iterator[tuple[str, str]]:
    """Yield the key and the text of each KEY=VALUE; an error about another text shows `form`."""
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise BadFieldError(f"--set {assignment!r} is not an assignment", form, "set")
        yield key.strip(), text


def with_option(args: Sequence[str], name: str, text: str) -> list[str]:
    """Return the arguments of a script with one option set, as `--name value` or `--name=value`.

    In `name`, `-` and `_` are equivalent. The texts `true` and `false` add and remove an option
    that has no value.
    """
    kept = list(args)
    flag = f"--{name}"
    for place, arg in enumerate(kept):
        option, equals, _ = arg.partition("=")
        if not option.startswith("--") or option.replace("_", "-") != flag.replace("_", "-"):
            continue
        if equals:
            kept[place] = f"{option}={text}"
        elif _has_value(kept, place):
            kept[place + 1] = text
        elif text == "false":
            del kept[place]
        elif text != "true":
            kept.insert(place + 1, text)
        return kept
    return kept if text == "false" else [*kept, flag] if text == "true" else [*kept, flag, text]


def _args_of(table: Mapping[str, Any]) -> list[str]:
    args = table.get("args", [])
    if not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
        remedy = f"write {example_of(JobSpec, 'args')}"
        raise BadFieldError("args is not a list of strings in the job file", remedy, "args")
    return args


def _has_value(args: Sequence[str], place: int) -> bool:
    after = args[place + 1] if place + 1 < len(args) else "-"
    return not after.startswith("-") or _is_number(after)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _set_entry(table: dict[str, Any], field: str, entry: str, text: str) -> None:
    if field == "stop" and entry not in STOP_FIELDS:
        problem = f"--set stop.{entry}: there is no such stop rule"
        raise BadFieldError(problem, nearest(entry, STOP_FIELDS), "stop")
    inner = table.setdefault(field, {})
    if not isinstance(inner, dict):
        remedy = f"write {example_of(JobSpec, field)}"
        raise BadFieldError(f"{field} is not a table in the job file", remedy, field)
    other = {"epochs": "samples", "samples": "epochs"}.get(entry)
    if field == "stop" and other and "metric" not in inner:
        inner.pop(other, None)  # a spec has exactly one of the two
    inner[entry] = text if field == "env" or entry == "metric" else toml_value(text)


def toml_value(text: str) -> Any:
    """Parse a TOML value. Return other text unchanged."""
    try:
        parsed = tomllib.loads(f"x = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return parsed["x"] if len(parsed) == 1 else text


def nearest(key: str, known: Collection[str]) -> str:
    """Return the remedy for an unknown key. It names the most similar known key, or all keys."""
    near = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else f"one of {', '.join(sorted(known))}"
