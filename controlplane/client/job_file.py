"""TOML files of jobs and sweeps, converted to checked specs that can be submitted."""

from __future__ import annotations

import ast
import copy
import difflib
import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from controlplane.client.sbatch import is_batch_script, job_of_batch_script
from controlplane.client.secret_env import separated
from controlplane.client.spec_overrides import nearest, parsed, toml_value, with_overrides
from controlplane.client.sweeps.sweep import BY_TYPE, JOB_FIELDS, Sweep
from schemas.errors import BadFieldError, SettingsError
from schemas.host.settings import convert, example_of, parse_toml, read_file, value_error
from schemas.jobs import JobSpec, problems, script_problem
from schemas.sweeps import FORMS, Parameter, SweepSpec

FIELDS: Final = tuple(
    field.name for field in msgspec.structs.fields(Sweep) if field.name not in JOB_FIELDS
)
REQUIRED: Final = tuple(field.name for field in msgspec.structs.fields(Sweep) if field.required)
STRING_FIELDS: Final = frozenset({"name", "workdir", "python", "family"})
FORM: Final = "write KEY=VALUE: epochs of searcher.max_epochs=9, space.lr=[0.1, 0.2], slots=[1, 4]"


def sweep_from(table: Mapping[str, Any], path: Path) -> JobSpec:
    """Return the job spec in the table of a sweep's file. Errors name the `path` of the file."""
    inner = table["sweep"]
    if not isinstance(inner, Mapping):
        raise SettingsError(f"{path}: sweep is not a table", "write [sweep]", "sweep")
    _refuse_unknown(path, "", table, (*JOB_FIELDS, "sweep"), FIELDS)
    _refuse_unknown(path, "sweep.", inner, FIELDS, JOB_FIELDS)
    for name in REQUIRED:
        if name not in inner:
            field, remedy = f"sweep.{name}", f"write {example_of(Sweep, name)}"
            raise SettingsError(f"{path}: {field}: is missing", remedy, field)
    found = {key: value for key, value in table.items() if key != "sweep"} | dict(inner)
    found["space"] = _space(found["space"], path)
    found["searcher"] = _searcher(found["searcher"], path)
    try:
        return msgspec.convert(found, Sweep).job_spec()
    except msgspec.ValidationError as error:
        wrong = value_error(Sweep, error, path)
        if wrong.field.split(".")[0].split("[")[0] not in JOB_FIELDS:
            wrong = value_error(Sweep, error, path, "sweep.")
        raise wrong from None


def with_sweep_overrides(table: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Return the table of a sweep's file with some values replaced.

    `space.lr=0.1` fixes a value, `space.lr=[0.1, 0.2]` makes it a choice,
    `space.lr.log_uniform=[1e-4, 1e-1]` sets another range; `searcher.eta=4`, `partitions=8`,
    `slots=[1, 4]` and `env.NAME=TEXT` set one entry. The prefix `sweep.` of a key is optional. If a
    key occurs twice, the last value wins.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(table))
    for key, text in parsed(assignments, FORM):
        first, *rest = key.removeprefix("sweep.").split(".")
        if first not in (*JOB_FIELDS, *FIELDS):
            problem = f"--set {key}: a sweep has no such field"
            raise BadFieldError(problem, nearest(first, (*JOB_FIELDS, *FIELDS)), key)
        inner = changed if first in JOB_FIELDS else changed.setdefault("sweep", {})
        if not isinstance(inner, dict):
            raise BadFieldError("sweep is not a table in the file", "correct it there", "sweep")
        plain = first in STRING_FIELDS or first == "env"
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
        problem = f"{path}: sweep.space is not a table"
        raise SettingsError(problem, "write [sweep.space]", "sweep.space")
    found = {}
    for name, value in space.items():
        field = f"sweep.space.{name}"
        if not isinstance(value, Mapping | list | str | int | float | bool):
            problem = f"{path}: {field}: {value!r} is not a value of a configuration"
            raise SettingsError(problem, "give strings, numbers or booleans", field)
        choice = value if isinstance(value, list) else [value]
        table = value if isinstance(value, Mapping) else {"choice": choice}
        found[name] = convert(Parameter, table, path, f"{field}.")
    return found


def _searcher(table: Any, path: Path) -> Any:
    field = "sweep.searcher"
    if not isinstance(table, Mapping):
        problem = f"{path}: {field} is not a table"
        raise SettingsError(problem, "write [sweep.searcher] and below it type = 'asha'", field)
    kinds = ", ".join(BY_TYPE)
    kind = table.get("type")
    if kind is None:
        raise SettingsError(f"{path}: {field}.type: is missing", f"one of {kinds}", f"{field}.type")
    if not isinstance(kind, str) or kind not in BY_TYPE:
        problem = f"{path}: {field}.type: unknown searcher {kind!r}"
        raise SettingsError(problem, nearest(str(kind), BY_TYPE), f"{field}.type")
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
        elif key in FORBIDDEN_FIELDS:
            hint = f"leave it out: {FORBIDDEN_FIELDS[key]}"
        else:
            hint = nearest(key, known)
        raise SettingsError(f"{path}: unknown key {field}", hint, field)


FORBIDDEN_FIELDS: Final = {
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


def check_functions(spec: SweepSpec, workdir: Path, *, own_python: bool) -> None:
    """Check that the functions of a sweep exist, before anything is uploaded.

    `own_python` is True if the sweep runs in another interpreter. Its packages are unknown here.
    """
    for field, path in spec.functions.items():
        module, _, name = path.partition(":")
        file = _file_of(workdir, module)
        if file is None:
            if own_python or _is_installed(module):
                continue
            problem = f"sweep.{field}: there is no module {module} in {workdir}"
            near = _near(module, {file.stem for file in workdir.glob("*.py")})
            hint = f"correct {path!r} or workdir{near}"
            raise BadFieldError(problem, hint, f"sweep.{field}")
        names = _names_in(file, field)
        if name not in names and "*" not in names:
            problem = f"sweep.{field}: {file.relative_to(workdir)} has no {name}"
            hint = f"name a function at its top level{_near(name, names)}"
            raise BadFieldError(problem, hint, f"sweep.{field}")


def _file_of(workdir: Path, module: str) -> Path | None:
    place = workdir.joinpath(*module.split("."))
    files = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((file for file in files if file.is_file()), None)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def _names_in(file: Path, field: str) -> set[str]:
    """Return the names that a module binds at its top level, with `*` if it may bind others."""
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        problem = f"sweep.{field}: {file.name}{line}: {text}"
        raise BadFieldError(problem, "correct the module", f"sweep.{field}") from None
    found: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {(one.asname or one.name).partition(".")[0] for one in names}
            case ast.Assign() | ast.AnnAssign():
                found |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                found.add("*")
    if "__getattr__" in found:
        found.add("*")
    return found


def _near(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known - {"*"}), n=1)
    return f"; did you mean {near[0]}?" if near else ""


HEAD_BYTES: Final = 4096  # number of bytes that show whether a file is a script
SCRIPTS: Final = {".py", ".ipynb"}
MAX_SHOWN: Final = 60  # characters of a path in an error


def load_job(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read the job or the sweep in a TOML file. Relative paths are relative to the file.

    Args:
        path: a TOML file, UTF-8.
        overrides: KEY=VALUE, see `with_overrides`, or `with_sweep_overrides` for a sweep.

    Raises:
        SettingsError: if the file cannot be read, or a key is unknown or has a wrong type.
        BadFieldError: if a value is invalid.
    """
    data = read_file(path)  # read only once, because the path might be a pipe
    if is_batch_script(data) and path.suffix != ".toml":
        fields, _ = job_of_batch_script(data.decode(errors="replace"), path.name)
        fields = with_overrides(fields, overrides) if overrides else fields
        return checked(convert(JobSpec, fields, path), path.resolve().parent)
    try:
        table = {} if path.suffix in SCRIPTS else parse_toml(data, path)
    except SettingsError as error:
        raise _script_error(path, data) or error from None
    if not table:
        empty = SettingsError(f"{path} is empty", "give at least name, script and batch_size")
        raise _script_error(path, data) or empty
    base = path.resolve().parent
    if "sweep" in table:
        table = with_sweep_overrides(table, overrides)
        return checked(sweep_from(table, path), base)
    if overrides:
        table = with_overrides(table, overrides)
    return checked(convert(JobSpec, _with_parents(table), path), base)


WHEN: Final = "when"


def _with_parents(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a table whose `after` has texts only: { job = "a-1", when = "any" } is any:a-1."""
    after = table.get("after")
    entries = after if isinstance(after, list) else [after]
    if not any(isinstance(entry, Mapping) for entry in entries):
        return table
    texts = [
        f"{entry.get(WHEN, 'ok')}:{entry.get('job', '')}" if isinstance(entry, Mapping) else entry
        for entry in entries
    ]
    return {**table, "after": texts}


def checked(spec: JobSpec, base: Path) -> JobSpec:
    """Check `spec` and return it with absolute paths.

    Args:
        base: folder to which relative paths refer.

    Raises:
        BadFieldError: if a field is invalid; the error names the field and the remedy.
    """
    spec = _typed(spec)
    if (python := spec.python) is not None and "/" in python:
        spec = msgspec.structs.replace(spec, python=str((base / python).absolute()))
    if isinstance(spec.secret_env, str):
        secret_env = str((base / spec.secret_env).absolute())
        spec = msgspec.structs.replace(spec, secret_env=secret_env)
    for problem in problems(separated(spec).spec):
        raise BadFieldError(f"{problem.field}: {problem.what}", problem.remedy, problem.field)
    workdir = _folder(base, spec.workdir)
    if (wanted := spec.stated_requirements) and not (workdir / wanted).is_file():
        what = f"requirements: {wanted} is not in {workdir}"
        raise BadFieldError(what, "correct requirements or workdir", "requirements")
    if spec.rigid:
        if not workdir.is_dir():
            raise BadFieldError(f"workdir: {workdir} is not a folder", "correct workdir", "workdir")
        return msgspec.structs.replace(spec, workdir=str(workdir))
    sweep = spec.stated_sweep
    if sweep is not None:
        if not workdir.is_dir():
            raise BadFieldError(f"workdir: {workdir} is not a folder", "correct workdir", "workdir")
        check_functions(sweep, workdir, own_python=spec.python is not None)
    else:
        _check_script(spec, workdir)
    limit = None if spec.batch_limit_is_auto else spec.batch_limit  # understood by every release
    return msgspec.structs.replace(spec, workdir=str(workdir), max_batch_size=limit)


def _script_error(path: Path, data: bytes) -> SettingsError | None:
    """Return the error for a script given as a job file, or None if `data` is not a script."""
    first = data[:HEAD_BYTES]
    shebang = first.partition(b"\n")[0] if first.startswith(b"#!") else b""
    if path.suffix == ".py" or b"python" in shebang:
        what = "a script"
        remedy = f"write a job file with `ones init {path}`, then submit the job file"
    elif path.suffix == ".ipynb":
        what = "a notebook"
        remedy = f"run `jupyter nbconvert --to script {path}`, then `ones init` on the script"
    elif shebang:
        what = "a shell script"
        remedy = f"run it as it is with `ones run -- ./{path.name}`, or add #SBATCH lines"
    else:
        return None
    return SettingsError(f"{path} is {what}, not a job file", remedy)


def _typed(spec: JobSpec) -> JobSpec:
    """Check the types of a spec made in Python. Turn lists into tuples and paths into strings."""
    plain = {}
    for field, name in zip(spec.__struct_fields__, spec.__struct_encode_fields__, strict=True):
        if (value := getattr(spec, field)) is not msgspec.UNSET:
            try:
                plain[name] = msgspec.to_builtins(value, enc_hook=_path_text)
            except TypeError as error:
                remedy = f"write {example_of(JobSpec, name)}"
                raise BadFieldError(f"{name}: {error}", remedy, name) from None
    try:
        return msgspec.convert(plain, JobSpec)
    except msgspec.ValidationError as error:
        wrong = value_error(JobSpec, error, Path())
        what = wrong.message.removeprefix(f"{Path()}: ")
        raise BadFieldError(what, wrong.hint, wrong.field) from None


def _path_text(value: object) -> str:
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    kind = type(value)
    raise TypeError(f"a value of type {kind.__module__}.{kind.__name__} cannot be submitted")


def _folder(base: Path, name: str) -> Path:
    try:
        folder = (base / name).resolve()
        folder.is_dir()  # raises OSError if the name is too long
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        why = error.strerror if isinstance(error, OSError) else "its links form a loop"
        what = f"workdir: {name[:MAX_SHOWN]} cannot be opened: {why}"
        raise BadFieldError(what, "correct workdir", "workdir") from None
    return folder


def _check_script(spec: JobSpec, workdir: Path) -> None:
    try:
        if not (workdir / spec.script).is_file():
            what = f"script: {spec.script} is not in {workdir}"
            raise BadFieldError(what, "correct script or workdir", "script")
        with (workdir / spec.script).open("rb") as file:
            found = script_problem(spec.script, file.read(HEAD_BYTES))
    except OSError as error:
        what = f"script: {spec.script[:MAX_SHOWN]} cannot be read: {error.strerror}"
        raise BadFieldError(what, "correct script or workdir", "script") from None
    if found is not None:
        raise BadFieldError(f"script: {found[0]}", found[1], "script")
