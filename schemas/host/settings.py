"""Settings as frozen structs, read from TOML files. Errors name the file, the key and a remedy."""

from __future__ import annotations

import codecs
import difflib
import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

import msgspec

from schemas.errors import SettingsError

S = TypeVar("S", bound=msgspec.Struct)
PREFIX = "ONES__"
EXAMPLE_VALUES: Final = {bool: "true", int: "1", float: "0.5"}  # for other types: a text


def load(kind: type[S], path: Path, environ: Mapping[str, str] | None = None) -> S:
    """Return the settings in `path`, overridden by `ONES__SECTION__KEY` variables of `environ`.

    Relative paths in the settings are not resolved.

    Raises:
        SettingsError: if the file cannot be read or parsed, or a key is unknown, missing or of the
            wrong type. The message names file and key.
    """
    return convert(kind, read_table(path, environ), path)


def read_table(path: Path, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the table in `path`, overridden by `ONES__SECTION__KEY` variables of `environ`.

    Raises:
        SettingsError: if the file cannot be read or parsed, or a variable names no section.
    """
    table = read_toml(path)
    for name, value in sorted((environ or {}).items()):
        if name.startswith(PREFIX):
            _override(table, name.removeprefix(PREFIX).lower().split("__"), value)
    return table


def read_toml(path: Path) -> dict[str, Any]:
    """Return the table in a TOML file.

    Raises:
        SettingsError: if the file cannot be read or is not TOML. The message names the file.
    """
    return parse_toml(read_file(path), path)


def read_file(path: Path) -> bytes:
    """Return the bytes of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}", "check the path") from None


def parse_toml(data: bytes, path: Path) -> dict[str, Any]:
    """Return the table in the bytes of a TOML file, which may have a byte order mark (UTF-8)."""
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        utf16 = error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        line = error.object.count(b"\n", 0, error.start) + 1
        what = "the file is in UTF-16" if utf16 else f"line {line} is not in UTF-8"
        raise SettingsError(f"{path}: {what}", "save the file as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: {error}", "correct the TOML") from None
    except RecursionError:
        raise SettingsError(f"{path}: arrays nested too deep", "correct the TOML") from None


def convert(kind: type[S], table: Mapping[str, Any], path: Path, prefix: str = "") -> S:
    """Return `table` as a struct. `prefix` is the path of the table in the file, such as `sweep.`.

    Raises:
        SettingsError: if a key is unknown, missing or of the wrong type. `field` is the key's path.
    """
    for unknown in _unknown(kind, table, path, prefix):
        raise unknown
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise value_error(kind, error, path, prefix) from None


def find_problems(
    kind: Any, table: Mapping[str, Any], path: Path, prefix: str = ""
) -> list[SettingsError]:
    """Return all errors that repeated calls of `convert` would raise one after the other.

    Unknown keys come first, then missing and invalid ones in the order of the struct. With a
    `prefix`, unknown keys are omitted, because the call for the whole file has reported them.
    """
    found = [] if prefix else list(_unknown(kind, table, path, prefix))
    for field in msgspec.structs.fields(kind):
        key = field.encode_name
        name = f"{prefix}{key}"
        if key not in table:
            if field.required:
                remedy = f"write {example_of(kind, key)}"
                found.append(SettingsError(f"{path}: {name}: is missing", remedy, name))
            continue
        value, inner = table[key], _struct_in(field.type)
        if inner is not None and isinstance(value, dict):
            found += find_problems(inner, value, path, f"{name}.")
            continue
        try:
            msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            found.append(value_error(kind, error, path, prefix, key))
    return found


def valid_part(table: Mapping[str, Any], wrong: Collection[SettingsError]) -> dict[str, Any]:
    """Return `table` without the keys that `find_problems` reported."""
    fields = {problem.field for problem in wrong}

    def sound(inner: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        return {
            key: sound(value, f"{prefix}{key}.") if isinstance(value, dict) else value
            for key, value in inner.items()
            if f"{prefix}{key}" not in fields
        }

    return sound(table, "")


def value_error(
    kind: Any, error: msgspec.ValidationError, path: Path, prefix: str = "", key: str = ""
) -> SettingsError:
    """Return the error for a key that is missing or has a value of the wrong type.

    `prefix` is the path of the struct in the file. `key` is set if only the value of that key was
    converted.
    """
    text, _, where = str(error).partition(" - at `")
    field = f"{key}{where.rstrip('`').removeprefix('$')}".removeprefix(".")
    if text.startswith("Object missing required field"):
        name = text.rpartition("field ")[2].strip("`")
        field, text = f"{field}.{name}" if field else name, "is missing"
    name = f"{prefix}{field}".rstrip(".")
    remedy = f"write {example_of(kind, field)}" if field else "correct this key"
    return SettingsError(f"{path}: {name or 'the file'}: {text}", remedy, name)


def example_of(kind: Any, field: str) -> str:
    """Return an example of a key in TOML, such as `key = value`.

    The value comes from the struct's `EXAMPLES`, otherwise from the default or the type of the key.
    `field` is a path such as `limits.range[1]`.
    """
    key = field
    for key in re.sub(r"\[[^]]*\]", "", field).split("."):
        found = next((one for one in msgspec.structs.fields(kind) if one.encode_name == key), None)
        if found is None:
            break
        value = getattr(kind, "EXAMPLES", {}).get(key) or _example(found.type, found.default)
        inner = _struct_in(found.type)
        if inner is None:
            break
        kind = inner
    return f"{key} = {value}"


def _example(annotation: Any, default: Any = None, *, inner: bool = False) -> str:
    """Return an example of a type in TOML. A `Literal` gives all choices, or one if `inner`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        choices = [one for one in args if one][:1] if inner else args
        return " or ".join(map(json.dumps, choices))
    if default and isinstance(default, str | int | float | tuple):
        return json.dumps(default)
    if (struct := _struct_in(annotation)) is not None:
        first = msgspec.structs.fields(struct)[0]
        stated = getattr(struct, "EXAMPLES", {}).get(first.name)
        return f"{{ {first.name} = {stated or _example(first.type, first.default, inner=True)} }}"
    if origin in {tuple, list}:
        return f"[{', '.join(_example(arg, inner=True) for arg in args if arg is not ...)}]"
    if _is_mapping(annotation):
        return f"{{ NAME = {_example(args[1], inner=True)} }}"
    return _example(args[0], inner=inner) if args else EXAMPLE_VALUES.get(annotation, '"text"')


def _override(table: dict[str, Any], keys: list[str], value: str) -> None:
    try:
        parsed = tomllib.loads(f"x = {value}")["x"]
    except (tomllib.TOMLDecodeError, RecursionError):
        parsed = value
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            name = PREFIX + "__".join(keys).upper()
            raise SettingsError(f"{name}: {key} is not a section", "correct the variable", name)
    table[keys[-1]] = parsed


def _unknown(
    kind: Any, table: Mapping[str, Any], path: Path, prefix: str
) -> Iterator[SettingsError]:
    known = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1) or _inner_keys(kind, key)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(known))}"
            yield SettingsError(f"{path}: unknown key {prefix}{key}", hint, f"{prefix}{key}")
            continue
        inner = _struct_in(known[key])
        if _is_mapping(known[key]) and isinstance(value, dict):
            inner = _struct_in(get_args(known[key])[1])
            for name, entry in value.items():
                if inner is not None and isinstance(entry, dict):
                    yield from _unknown(inner, entry, path, f"{prefix}{key}.{name}.")
            continue
        for entry in value if isinstance(value, list) else [value]:
            if inner is not None and isinstance(entry, dict):
                yield from _unknown(inner, entry, path, f"{prefix}{key}.")


def _inner_keys(kind: Any, key: str) -> list[str]:
    """Return the paths of all keys with this name in the tables of a struct."""
    return [
        f"{field.name}.{key}"
        for field in msgspec.structs.fields(kind)
        if key in getattr(_struct_in(field.type), "__struct_fields__", ())
    ]


def _is_mapping(annotation: Any) -> bool:
    origin = get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _struct_in(annotation: Any) -> Any:
    """Return the struct of a table or of a list of tables; None: it is no table of fixed keys."""
    if _is_mapping(annotation):
        return None
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct):
            return candidate
    return None
