"""Job files: from a TOML file to a checked spec that can be submitted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from controlplane.client.spec_overrides import with_overrides
from controlplane.client.sweeps.sweep_file import check_functions, sweep_from, with_sweep_overrides
from schemas.errors import BadFieldError, SettingsError
from schemas.host.settings import convert, example_of, parse_toml, read_file, value_error
from schemas.jobs import JobSpec, problems, script_problem

HEAD_BYTES: Final = 4096  # of a script, to see that it is text
SCRIPTS: Final = {".py", ".ipynb"}
MAX_SHOWN: Final = 60  # characters of a path in an error


def load_job(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read the job or the sweep in a TOML file; relative paths are relative to the file.

    Args:
        path: a TOML file, UTF-8.
        overrides: KEY=VALUE, see `with_overrides`, or `with_sweep_overrides` for a sweep.

    Raises:
        SettingsError: if the file cannot be read, or a key is unknown or has a wrong type.
        BadFieldError: if a value is invalid.
    """
    data = read_file(path)  # read once: the path may be a pipe
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
    return checked(convert(JobSpec, table, path), base)


def checked(spec: JobSpec, base: Path) -> JobSpec:
    """Check `spec` and return it with absolute paths.

    Args:
        base: folder to which relative paths refer.

    Raises:
        BadFieldError: if a field is invalid; names the field and the remedy.
    """
    spec = _typed(spec)
    for problem in problems(spec):
        raise BadFieldError(f"{problem.field}: {problem.what}", problem.remedy, problem.field)
    workdir = _folder(base, spec.workdir)
    sweep = spec.stated_sweep
    if sweep is not None:
        if not workdir.is_dir():
            raise BadFieldError(f"workdir: {workdir} is not a folder", "correct workdir", "workdir")
        check_functions(sweep, workdir, own_python=spec.python is not None)
    else:
        _check_script(spec, workdir)
    python = spec.python
    if python is not None and "/" in python:
        python = str((base / python).absolute())
    return msgspec.structs.replace(
        spec, workdir=str(workdir), python=python, max_batch_size=_stated_limit(spec)
    )


def _script_error(path: Path, data: bytes) -> SettingsError | None:
    """Return the error for a script given as a job file, or None if `data` is not a script."""
    first = data[:HEAD_BYTES]
    shebang = first.partition(b"\n")[0] if first.startswith(b"#!") else b""
    if path.suffix == ".py" or b"python" in shebang:
        what, remedy = (
            "a script",
            f"write a job file with `ones init {path}`, then submit the job file",
        )
    elif path.suffix == ".ipynb":
        what = "a notebook"
        remedy = f"run `jupyter nbconvert --to script {path}`, then `ones init` on the script"
    elif shebang or b"\n#SBATCH" in first:
        what = "a batch script of Slurm" if b"\n#SBATCH" in first else "a shell script"
        remedy = (
            "write a job file with `ones init` for the Python file that it runs; its arguments go "
            "into args, its exports into [env], the number of its tasks into slots"
        )
    else:
        return None
    return SettingsError(f"{path} is {what}, not a job file", remedy)


def _typed(spec: JobSpec) -> JobSpec:
    """Check the types of a spec made in Python; lists become tuples, paths become strings."""
    plain = {}
    for name in spec.__struct_fields__:
        if (value := getattr(spec, name)) is not msgspec.UNSET:
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


def _stated_limit(spec: JobSpec) -> int | None:
    """Return `max_batch_size` in the form that every release understands: a number or None."""
    return None if spec.batch_limit_is_auto else spec.batch_limit
