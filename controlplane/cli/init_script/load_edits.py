"""Edits that replace the lines of model, optimizer and loader by one call of `load`."""

from __future__ import annotations

import ast
from typing import Final

from controlplane.cli.init_script.between import WRAPPERS, Sorted
from controlplane.cli.init_script.script_facts import parameters_calls
from controlplane.cli.init_script.syntax import Edit, last_name, loads, stores
from controlplane.cli.init_script.whole_script import Whole

WIDE: Final = 101  # longest line for the call, newline included
VERBS: Final = ("build", "make", "new", "elastic_build")
ORDER_IS_THE_AGENTS: Final = frozenset({"shuffle", "sampler", "generator"})


def load_edits(script: Whole, between: Sorted) -> list[Edit]:
    """Merge the three lines into one call of `load`, at the place of the last one.

    Args:
        between: where the statements between them go.
    """
    if script.keeps_model:
        return _kept_edits(script, between)
    source = script.source
    by_line = sorted((one.statement for one in script.three), key=lambda one: one.lineno)
    indent = " " * by_line[0].col_offset
    parts = _parts(script, built=bool(between.builds))
    text = dict.fromkeys(map(id, by_line), "")
    call = f"{indent}{_load_call(script, parts)}\n"
    if len(call) > WIDE:  # the builders get lines of their own
        model, optimizer = (
            _free_name(script, what) if part.startswith("lambda") else part
            for what, part in (("model", parts[0]), ("optimizer", parts[1]))
        )
        if model != parts[0]:
            text[id(script.model.statement)] = f"{indent}{model} = {parts[0]}\n"
        if optimizer != parts[1]:
            text[id(script.optimizer.statement)] = f"{indent}{optimizer} = {parts[1]}\n"
        call = f"{indent}{_load_call(script, (model, optimizer, parts[2]))}\n"
    if between.builds:
        body = [source.line_of(s) for s in (script.model.statement, *between.builds)]
        inner = "".join(f"    {line}" for part in body for line in part.splitlines(keepends=True))
        first = f"{indent}def {_free_name(script, 'model')}():\n"
        last = f"{indent}    return {script.model.name}\n"
        text[id(script.model.statement)] = f"{first}{inner}{last}"
    after = "".join(source.line_of(statement) for statement in between.after)
    text[id(by_line[-1])] += call + after
    gone = (*between.builds, *between.after, *between.dropped)
    return [
        _agent_edit(script, by_line[0], indent),
        *(Edit(*source.lines(statement), text[id(statement)]) for statement in by_line),
        *(Edit(*source.lines(statement), "") for statement in gone),
    ]


def _kept_edits(script: Whole, between: Sorted) -> list[Edit]:
    """Keep model and optimizer in place, because parameter groups name parts of the model."""
    source, model = script.source, script.model
    by_line = sorted((one.statement for one in script.three), key=lambda one: one.lineno)
    indent = " " * by_line[0].col_offset
    parts = (f"lambda: {model.name}", f"lambda _: {script.optimizer.name}")
    call = f"{indent}{_load_call(script, (*parts, ', '.join(_loader_arguments(script))))}\n"
    after = call + "".join(source.line_of(statement) for statement in between.after)
    end = source.lines(by_line[-1])[1]
    bare = _bare_model(script)
    edits = [
        _agent_edit(script, by_line[0], indent),
        *(Edit(*source.lines(gone), "") for gone in (*between.after, *between.dropped)),
        Edit(*source.lines(script.loader.statement), ""),
        Edit(end, end, after),
    ]
    if bare is not model.value:
        edits.append(Edit(*source.span(model.value), source.of(bare)))
    return edits


def _parts(script: Whole, *, built: bool) -> tuple[str, str, str]:
    """Return the arguments of `load`: builders of model and optimizer, loader arguments."""
    bare, made = _bare_model(script), script.optimizer.value
    model = f"lambda: {_on_one_line(script, bare)}"
    if isinstance(bare, ast.Call) and not bare.args and not bare.keywords:
        model = script.source.of(bare.func)
    model = _free_name(script, "model") if built else model
    optimizer = f"lambda parameters: {_optimizer_text(script)}"
    if isinstance(made, ast.Call) and not made.keywords and parameters_calls(made) == made.args:
        optimizer = script.source.of(made.func)
    return model, optimizer, ", ".join(_loader_arguments(script))


def _agent_edit(script: Whole, first: ast.stmt, indent: str) -> Edit:
    """Make the agent before the first statement that uses it."""
    name = script.agent
    asking = [s for s in script.optimizer.block if name in loads(s) and s.lineno < first.lineno]
    at = script.source.lines(asking[0] if asking else first)[0]
    declared = f"{indent}global {name}\n" if _agent_is_global(script) else ""
    return Edit(at, at, f"{declared}{indent}{name} = ScalingAgent.from_env()\n")


def _free_name(script: Whole, what: str) -> str:
    """Return a name for a builder that the script does not use."""
    taken = stores(script.source.tree) | loads(script.source.tree)
    taken |= {n.name for n in ast.walk(script.source.tree) if isinstance(n, ast.FunctionDef)}
    return next(name for name in (f"{v}_{what}" for v in VERBS) if name not in taken)


def _load_call(script: Whole, parts: tuple[str, str, str]) -> str:
    names = f"{script.model.name}, {script.optimizer.name}, {script.loader.name}"
    return f"{names} = {script.agent}.load({', '.join(parts)})"


def _bare_model(script: Whole) -> ast.expr:
    """Return the expression that makes the model, without device moves and wrappers."""
    value = script.model.value
    while isinstance(value, ast.Call):
        moved = isinstance(value.func, ast.Attribute) and value.func.attr in {"to", "cuda"}
        if moved and isinstance(value.func, ast.Attribute):
            value = value.func.value
        elif last_name(value) in WRAPPERS and value.args:
            value = value.args[0]
        else:
            break
    return value


def _optimizer_text(script: Whole) -> str:
    """Return the call that makes the optimizer, with `parameters` as its argument."""
    source, value = script.source, script.optimizer.value
    (begin, _), text = source.span(value), source.of(value).encode()
    for call in reversed(parameters_calls(value)):
        first, last = source.span(call)
        text = text[: first - begin] + b"parameters" + text[last - begin :]
    return ast.unparse(ast.parse(text)) if b"\n" in text else text.decode()


def _loader_arguments(script: Whole) -> list[str]:
    call = script.loader_call
    places = ("dataset", "batch_size", "shuffle", "sampler")
    named = [*zip(places, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
    found: list[str] = []
    for name, value in named:
        text = _on_one_line(script, value)
        if name == "dataset":
            found.insert(0, text)
        elif name is None:
            found.append(f"**{text}")
        elif name not in ORDER_IS_THE_AGENTS:
            found.append(f"{name}={text}")
    spread = any(name is None for name, _ in named)
    if not spread and not any(text.startswith("batch_size=") for text in found):
        found.insert(1, "batch_size=1")
    return found


def _on_one_line(script: Whole, node: ast.expr) -> str:
    text = script.source.of(node)
    return ast.unparse(node) if "\n" in text else text


def _agent_is_global(script: Whole) -> bool:
    """True if another function than the one that makes the model uses the agent."""
    functions = [n for n in ast.walk(script.source.tree) if isinstance(n, ast.FunctionDef)]
    agent = script.agent
    made = [f for f in functions if script.optimizer.statement in ast.walk(f)]
    asking = [f for f in functions if agent in loads(f) or script.loop.statement in ast.walk(f)]
    return bool(made) and any(function is not made[-1] for function in asking)
