"""TOML file to a frozen struct; errors name file, key and remedy."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from schemas.errors import SettingsError

S = TypeVar("S", bound=msgspec.Struct)
PREFIX = "ONES__"


def load(kind: type[S], path: Path, environ: Mapping[str, str] | None = None) -> S:
    """The settings in `path`, overridden by `ONES__SECTION__KEY` variables of `environ`.

    Relative paths inside the settings are left as they stand.

    Args:
        kind: the struct that the file fills.
        path: a TOML file.
        environ: variables; those that do not begin with `ONES__` are passed over.

    Raises:
        SettingsError: if the file cannot be read or parsed, a key is unknown, missing or of the
            wrong type; the message names file and key.
    """
    table = read_toml(path)
    for name, value in sorted((environ or {}).items()):
        if name.startswith(PREFIX):
            _override(table, name.removeprefix(PREFIX).lower().split("__"), value)
    return convert(kind, table, path)


def read_toml(path: Path) -> dict[str, Any]:
    """The table in `path`.

    Args:
        path: a TOML file, UTF-8.

    Raises:
        SettingsError: if it cannot be read or is no TOML; the message names the file.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}", "check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {error}", "correct the TOML") from None


def convert(kind: type[S], table: Mapping[str, Any], path: Path, prefix: str = "") -> S:
    """`table` as a `kind`, with every unknown key refused.

    Args:
        kind: the struct that `table` fills.
        table: as it was parsed.
        path: where it came from, for error messages.
        prefix: of its keys in the file, such as `sweep.searcher.`; empty: it is the whole file.

    Raises:
        SettingsError: if a key is unknown, missing or of the wrong type; `field` is its path.
    """
    _refuse_unknown(kind, table, path, prefix)
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `")
        field = where.rstrip("`").removeprefix("$").removeprefix(".")
        if text.startswith("Object missing required field"):
            name = text.rpartition("field ")[2].strip("`")
            field, text = f"{field}.{name}" if field else name, "is missing"
        field = f"{prefix}{field}" if field else prefix.rstrip(".")
        raise SettingsError(
            f"{path}: {field or 'the file'}: {text}", "correct this key", field
        ) from None


def _override(table: dict[str, Any], keys: list[str], value: str) -> None:
    try:
        parsed = tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        parsed = value
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            name = PREFIX + "__".join(keys).upper()
            raise SettingsError(f"{name}: {key} is no section", "correct the variable", name)
    table[keys[-1]] = parsed


def _refuse_unknown(kind: Any, table: Mapping[str, Any], path: Path, prefix: str) -> None:
    known = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(known))}"
            raise SettingsError(f"{path}: unknown key {prefix}{key}", hint, f"{prefix}{key}")
        inner = _struct_in(known[key])
        for entry in value if isinstance(value, list) else [value]:
            if inner is not None and isinstance(entry, dict):
                _refuse_unknown(inner, entry, path, f"{prefix}{key}.")


def _struct_in(annotation: Any) -> Any:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct):
            return candidate
    return None
