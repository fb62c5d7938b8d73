"""Removal of a script's own process group, which the agent replaces."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Final

from controlplane.cli.init_script.script_facts import Facts
from controlplane.cli.init_script.syntax import (
    Edit,
    assigned,
    blocks,
    called,
    last_name,
    value_of,
)

GONE: Final = frozenset(
    {"init_process_group", "destroy_process_group", "barrier", "set_device", "set_epoch"}
)
RANKS: Final = frozenset({"RANK", "get_rank"})
SIZES: Final = frozenset({"WORLD_SIZE", "get_world_size"})
LOCAL: Final = "LOCAL_RANK"
AGENT: Final = {"rank": "rank", "size": "world_size"}


@dataclass
class Removed:
    """Edits that remove the process group, and what is left to do by hand."""

    edits: list[Edit] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def distributed_edits(facts: Facts, agent: str) -> Removed:
    """Remove torch's own process group from a script, if it has one.

    Args:
        facts: of a script that can be ported.
        agent: the name of the agent in the script.
    """
    source, found = facts.source, Removed()
    if not _is_distributed(source.tree):
        return found
    gone: list[ast.stmt] = []
    for block in blocks(source.tree):
        leaving = [s for s in block if _goes(s)]
        gone += leaving
        for statement in leaving:
            first, last = source.lines(statement)
            alone = len(leaving) == len(block) and statement is leaving[0]
            text = f"{' ' * statement.col_offset}pass\n" if alone else ""
            found.edits.append(Edit(first, last, text))
    inside = {id(node) for statement in gone for node in ast.walk(statement)}
    _replace_ranks(facts, found, inside, agent)
    for node in ast.walk(source.tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Attribute) and node.attr == "module" and _is_model(node, facts):
            found.edits.append(Edit(*source.span(node), source.of(node.value)))
        name = called(node)
        if name.startswith(("dist.", "torch.distributed.")) and isinstance(node, ast.expr):
            kind = _kind(node)
            if kind in AGENT:
                found.edits.append(Edit(*source.span(node), f"{agent}.{AGENT[kind]}"))
            elif last_name(node) not in {"is_initialized", "is_available"}:
                found.problems.append(
                    f"line {node.lineno}: {name}() needs torch's own process group, which does not "
                    "exist: remove it; agent.report() takes the numbers of rank 0"
                )
    size = facts.batch_size
    found.advice.append(
        f"batch_size {size or ''} was that of one process; the job file has that of all processes"
    )
    return found


def _is_distributed(tree: ast.Module) -> bool:
    return any(
        last_name(node) in {"init_process_group", "DistributedSampler"} for node in ast.walk(tree)
    )


def _is_model(node: ast.Attribute, facts: Facts) -> bool:
    return isinstance(node.value, ast.Name) and facts.model is not None and (
        node.value.id == facts.model.name
    )  # fmt: skip


def _goes(statement: ast.stmt) -> bool:
    value = value_of(statement)
    if isinstance(statement, ast.Expr):
        return last_name(value) in GONE
    if isinstance(value, ast.IfExp):
        value = value.body
    return last_name(value) == "DistributedSampler" or _kind(value) in AGENT


def _kind(value: ast.AST | None) -> str:
    """Return "rank", "size" or "local" (rank on the host) for a value; otherwise empty."""
    if value is None:
        return ""
    if isinstance(value, ast.Call) and last_name(value) == "int" and value.args:
        value = value.args[0]
    named = last_name(value)
    if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant):
        named = str(value.slice.value)
    elif named in {"get", "getenv"} and isinstance(value, ast.Call) and value.args:
        first = value.args[0]
        named = str(first.value) if isinstance(first, ast.Constant) else ""
    return (
        "rank"
        if named in RANKS
        else "size"
        if named in SIZES
        else "local"
        if named == LOCAL
        else ""
    )


def _replace_ranks(facts: Facts, found: Removed, inside: set[int], agent: str) -> None:
    """Read rank and size from the agent wherever a name holds them, because they change."""
    source = facts.source
    names: dict[str, str] = {}
    for block in blocks(source.tree):
        for statement in block:
            value, name = value_of(statement), assigned(statement)
            kind = _kind(value)
            if kind in AGENT and name:
                names[name] = f"{agent}.{AGENT[kind]}"
            elif kind == "local" and value is not None:
                found.edits.append(Edit(*source.span(value), "0"))
                found.advice.append(
                    f"line {statement.lineno}: a worker sees one device, numbered 0"
                )
    for node in ast.walk(source.tree):
        if id(node) not in inside and isinstance(node, ast.Name) and node.id in names:
            found.edits.append(Edit(*source.span(node), names[node.id]))
