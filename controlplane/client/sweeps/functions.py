"""Whether a sweep's functions are where it says, as far as reading without running can tell."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from pathlib import Path
from typing import Final

from schemas.errors import BadFieldError
from schemas.sweeps import SweepSpec

FIELDS: Final = ("input_fn", "model_fn", "train_fn", "eval_fn")


def check_functions(spec: SweepSpec, workdir: Path, *, own_python: bool) -> None:
    """Refuse names that lead nowhere, before anything travels.

    Args:
        workdir: where its modules lie.
        own_python: whether the sweep runs in an interpreter whose packages cannot be seen here.

    Raises:
        BadFieldError: naming the field and the remedy.
    """
    for field in FIELDS:
        path = getattr(spec, field)
        if path is None:
            continue
        module, _, name = path.partition(":")
        file = _file_of(workdir, module)
        if file is None:
            if own_python or _is_installed(module):
                continue
            what = f"sweep.{field}: there is no module {module} in {workdir}"
            hint = f"correct {path!r} or workdir{_near(module, _modules_in(workdir))}"
            raise BadFieldError(what, hint, f"sweep.{field}")
        names = _names_in(file, field)
        if name not in names and "*" not in names:
            what = f"sweep.{field}: {file.relative_to(workdir)} has no {name}"
            hint = f"name a function at its top level{_near(name, names)}"
            raise BadFieldError(what, hint, f"sweep.{field}")


def _file_of(workdir: Path, module: str) -> Path | None:
    place = workdir.joinpath(*module.split("."))
    for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
        if file.is_file():
            return file
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def _modules_in(workdir: Path) -> set[str]:
    return {path.stem for path in workdir.glob("*.py")}


def _names_in(file: Path, field: str) -> set[str]:
    """What a module binds at its top level; `*`: something that cannot be known."""
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        what = f"sweep.{field}: {file.name}{line}: {text}"
        raise BadFieldError(what, "correct the module", f"sweep.{field}") from None
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
