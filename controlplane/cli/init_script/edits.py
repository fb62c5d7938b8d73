"""Edits that port a script: one call of `load`, moved statements, no own process group."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Final

from controlplane.cli.init_script.script_facts import Facts, Whole, parameters_calls
from controlplane.cli.init_script.syntax import (
    Edit,
    assigned,
    blocks,
    called,
    last_name,
    loads,
    stores,
    value_of,
)

WRAPPERS: Final = frozenset({"DDP", "DistributedDataParallel", "DataParallel"})
READS: Final = frozenset({"print", "info", "debug", "warning", "log", "write", "summary", "watch"})
MOVES: Final = frozenset({"to", "cuda", "cpu"})
MODES: Final = frozenset({"train", "eval"})


@dataclass
class Sorted:
    """Statements between model, optimizer and loader, by their new place."""

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


WIDE: Final = 101  # longest line for the call, newline included
VERBS: Final = ("build", "make", "new", "elastic_build")
ORDER_IS_THE_AGENTS: Final = frozenset({"shuffle", "sampler", "generator"})


def load_edits(script: Whole, between: Sorted) -> list[Edit]:
    """Merge model, optimizer and loader into one call of `load`, at the place of the last one."""
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
    """Remove torch's own process group from a script that can be ported, if it has one."""
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
