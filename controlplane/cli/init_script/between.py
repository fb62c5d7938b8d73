"""Where the statements between model, optimizer and loader go in the ported script."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Final

from controlplane.cli.init_script.syntax import (
    assigned,
    called,
    last_name,
    loads,
    stores,
    value_of,
)
from controlplane.cli.init_script.whole_script import Whole

WRAPPERS: Final = frozenset({"DDP", "DistributedDataParallel", "DataParallel"})
READS: Final = frozenset({"print", "info", "debug", "warning", "log", "write", "summary", "watch"})
MOVES: Final = frozenset({"to", "cuda", "cpu"})
MODES: Final = frozenset({"train", "eval"})


@dataclass
class Sorted:
    """The statements between the three, by where they go."""

    builds: list[ast.stmt] = field(default_factory=list)  # of the model: into build_model
    after: list[ast.stmt] = field(default_factory=list)  # below the call of load
    dropped: list[ast.stmt] = field(default_factory=list)  # the agent does it
    problems: list[str] = field(default_factory=list)


def sort_between(script: Whole) -> Sorted:
    """Sort the statements from the first of model, optimizer and loader to the last.

    A statement that uses one of the three moves below the call of `load`, and so do those that
    depend on it. One that changes the model moves into the model's builder, so that a checkpoint
    overrides it. If model and optimizer keep their lines, `load` makes only the loader.
    """
    three = [one.statement for one in script.three]
    block, kept = script.optimizer.block, script.keeps_model
    places = [place for place, s in enumerate(block) if any(s is one for one in three)]
    found = Sorted()
    model = script.model.name
    late: set[str] = set()  # names bound by `load`, or from what it returns
    for statement in block[places[0] : places[-1] + 1]:
        if not any(statement is one for one in three):
            if kept and _wraps(statement, model):
                found.dropped.append(statement)
            else:
                _sort(statement, model, late, found)
            continue
        needs = loads(statement) & late
        if statement is script.optimizer.statement:
            needs -= {model}
        if needs:
            what = f"line {statement.lineno}: it needs {', '.join(sorted(needs))}"
            found.problems.append(f"{what}, which exists only after agent.load() has returned")
        if not kept or statement is script.loader.statement:
            late |= stores(statement)
    return found


def _wraps(statement: ast.stmt, model: str) -> bool:
    value = value_of(statement)
    return assigned(statement) == model and last_name(value) in WRAPPERS


def _sort(statement: ast.stmt, model: str, late: set[str], found: Sorted) -> None:
    names = loads(statement)
    if not names & late:
        if stores(statement) & late:
            late |= stores(statement)
            found.after.append(statement)
        return
    if _moves_or_wraps(statement, model):
        found.dropped.append(statement)
    elif model in names and not names & (late - {model}) and _changes(statement, model):
        found.builds.append(statement)
    else:
        found.after.append(statement)
        late |= stores(statement)


def _moves_or_wraps(statement: ast.stmt, model: str) -> bool:
    if isinstance(statement, ast.If):
        return not statement.orelse and all(_moves_or_wraps(s, model) for s in statement.body)
    value = value_of(statement)
    if isinstance(value, ast.IfExp) and isinstance(value.orelse, ast.Name):
        value = value.body
    if not isinstance(value, ast.Call) or assigned(statement) not in {"", model}:
        return False
    of_model = (
        isinstance(value.func, ast.Attribute) and called(value) == f"{model}.{value.func.attr}"
    )
    return (of_model and last_name(value) in MOVES) or last_name(value) in WRAPPERS


def _changes(statement: ast.stmt, model: str) -> bool:
    """True if a statement changes the model rather than only reads it."""
    if any(name == model or name.startswith(f"{model}.") for name in [assigned(statement)]):
        return True
    if isinstance(statement, ast.Expr):
        return last_name(statement.value) not in READS | MODES
    return isinstance(statement, ast.For | ast.With | ast.If)
