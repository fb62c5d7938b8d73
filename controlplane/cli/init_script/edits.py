"""Edits that port a script: one call of `load`, moved statements, no own process group."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from controlplane.cli.init_script.script_facts import EpochLoop, Facts, Whole, parameters_calls
from controlplane.cli.init_script.syntax import (
    Edit,
    Source,
    assigned,
    blocks,
    called,
    last_name,
    loads,
    stores,
    value_of,
)

IMPORT: Final = "from elastic import ScalingAgent"
WRAPPERS: Final = frozenset({"DDP", "DistributedDataParallel", "DataParallel"})
READS: Final = frozenset({"print", "info", "debug", "warning", "log", "write", "summary", "watch"})
MOVES: Final = frozenset({"to", "cuda", "cpu"})
MODES: Final = frozenset({"train", "eval"})
MAX_COLUMNS: Final = 101  # longest line for the call of `load`, newline included
VERBS: Final = ("build", "make", "new", "elastic_build")
ORDER_IS_THE_AGENTS: Final = frozenset({"shuffle", "sampler", "generator"})


# --- statements between model, optimizer and loader


@dataclass
class Between:
    """Statements between model, optimizer and loader, by their new place."""

    builds: list[ast.stmt] = field(default_factory=list)  # of the model: into build_model
    after: list[ast.stmt] = field(default_factory=list)  # below the call of load
    dropped: list[ast.stmt] = field(default_factory=list)  # the agent does it
    problems: list[str] = field(default_factory=list)


def sort_between(script: Whole) -> Between:
    """Sort the statements from the first of model, optimizer and loader to the last.

    A statement that uses one of the three moves below the call of `load`, and so do those that
    depend on it. One that changes the model moves into the model's builder, so that a checkpoint
    overrides it. If model and optimizer keep their lines, `load` makes only the loader.
    """
    block, kept, model = script.optimizer.block, script.keeps_model, script.model.name
    first, last = (block.index(script.by_line[place]) for place in (0, -1))
    found = Between()
    late: set[str] = set()  # names bound by `load`, or from what it returns
    for statement in block[first : last + 1]:
        used, bound = loads(statement), stores(statement)
        if statement in script.by_line:
            needs = used & late - ({model} if statement is script.optimizer.statement else set())
            if needs:
                what = f"line {statement.lineno}: it needs {', '.join(sorted(needs))}"
                found.problems.append(f"{what}, which exists only after agent.load() has returned")
            if not kept or statement is script.loader.statement:
                late |= bound
        elif (kept and assigned(statement) == model and _is_wrapped(value_of(statement))) or (
            used & late and _moves_or_wraps(statement, model)
        ):
            found.dropped.append(statement)
        elif used & late == {model} and _changes(statement, model):
            found.builds.append(statement)
        elif (used | bound) & late:
            found.after.append(statement)
            late |= bound
    return found


def _is_wrapped(value: ast.expr | None) -> bool:
    return last_name(value) in WRAPPERS


def _moves_or_wraps(statement: ast.stmt, model: str) -> bool:
    if isinstance(statement, ast.If):
        return not statement.orelse and all(_moves_or_wraps(s, model) for s in statement.body)
    value = value_of(statement)
    if isinstance(value, ast.IfExp) and isinstance(value.orelse, ast.Name):
        value = value.body
    if not isinstance(value, ast.Call) or assigned(statement) not in {"", model}:
        return False
    move = last_name(value)
    return _is_wrapped(value) or (move in MOVES and called(value) == f"{model}.{move}")


def _changes(statement: ast.stmt, model: str) -> bool:
    """True if a statement changes the model rather than only reads it."""
    if assigned(statement) == model or assigned(statement).startswith(f"{model}."):
        return True
    if isinstance(statement, ast.Expr):
        return last_name(statement.value) not in READS | MODES
    return isinstance(statement, ast.For | ast.With | ast.If)


# --- the call of load


def load_edits(script: Whole, between: Between) -> list[Edit]:
    """Merge model, optimizer and loader into one call of `load`, at the place of the last one."""
    source, by_line = script.source, script.by_line
    indent = " " * by_line[0].col_offset
    after = "".join(map(source.line_of, between.after))
    gone = [*between.after, *between.dropped]
    edits = [_agent_edit(script, by_line[0], indent)]
    if script.keeps_model:  # parameter groups name parts of the model
        parts = [f"lambda: {script.model.name}", f"lambda _: {script.optimizer.name}"]
        end = source.lines(by_line[-1])[1]
        edits.append(Edit(end, end, f"{indent}{_load_call(script, *parts)}\n{after}"))
        gone.append(script.loader.statement)
        if (bare := _bare_model(script.model.value)) is not script.model.value:
            edits.append(source.replace(script.model.value, source.of(bare)))
    else:
        made, call = _builders(script, between, indent)
        made[by_line[-1]] = f"{made.get(by_line[-1], '')}{indent}{call}\n{after}"
        edits += [Edit(*source.lines(one), made.get(one, "")) for one in by_line]
        gone += between.builds
    return [*edits, *(Edit(*source.lines(statement), "") for statement in gone)]


def _builders(script: Whole, between: Between, indent: str) -> tuple[dict[ast.stmt, str], str]:
    """Return the lines that replace those of model and optimizer, and the call of `load`."""
    source, made = script.source, {}
    bare, optimizer = _bare_model(script.model.value), script.optimizer.value
    model_part = f"lambda: {source.on_one_line(bare)}"
    if isinstance(bare, ast.Call) and not bare.args and not bare.keywords:
        model_part = source.of(bare.func)
    optimizer_part = f"lambda parameters: {_optimizer_text(script)}"
    takes_all = isinstance(optimizer, ast.Call) and parameters_calls(optimizer) == optimizer.args
    if isinstance(optimizer, ast.Call) and takes_all and not optimizer.keywords:
        optimizer_part = source.of(optimizer.func)
    if between.builds:
        name = _free_name(script, "model")
        body = "".join(source.line_of(s) for s in (script.model.statement, *between.builds))
        inner = "".join(f"    {line}" for line in body.splitlines(keepends=True))
        text = f"{indent}def {name}():\n{inner}{indent}    return {script.model.name}\n"
        made[script.model.statement], model_part = text, name
    call = _load_call(script, model_part, optimizer_part)
    if len(f"{indent}{call}\n") > MAX_COLUMNS:  # the builders get lines of their own
        names = []
        for one, what, part in (
            (script.model, "model", model_part),
            (script.optimizer, "optimizer", optimizer_part),
        ):
            names.append(_free_name(script, what) if part.startswith("lambda") else part)
            if names[-1] != part:
                made[one.statement] = f"{indent}{names[-1]} = {part}\n"
        call = _load_call(script, *names)
    return made, call


def _load_call(script: Whole, model: str, optimizer: str) -> str:
    names = ", ".join(one.name for one in script.three)
    arguments = ", ".join((model, optimizer, *_loader_arguments(script)))
    return f"{names} = {script.facts.agent}.load({arguments})"


def _loader_arguments(script: Whole) -> list[str]:
    call = script.loader_call
    places = ("dataset", "batch_size", "shuffle", "sampler")
    named = [*zip(places, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
    found: list[str] = []
    for name, value in named:
        text = script.source.on_one_line(value)
        if name == "dataset":
            found.insert(0, text)
        elif name is None:
            found.append(f"**{text}")
        elif name not in ORDER_IS_THE_AGENTS:
            found.append(f"{name}={text}")
    if not any(name in {None, "batch_size"} for name, _ in named):
        found.insert(1, "batch_size=1")
    return found


def _agent_edit(script: Whole, first: ast.stmt, indent: str) -> Edit:
    """Make the agent before the first statement that uses it."""
    name, optimizer = script.facts.agent, script.optimizer
    asking = [s for s in optimizer.block if name in loads(s) and s.lineno < first.lineno]
    at = script.source.lines(asking[0] if asking else first)[0]
    # The agent is global if another function than the one that makes the model uses it.
    functions = [n for n in ast.walk(script.source.tree) if isinstance(n, ast.FunctionDef)]
    made = [f for f in functions if optimizer.statement in ast.walk(f)]
    using = [f for f in functions if name in loads(f) or script.loop.statement in ast.walk(f)]
    shared = bool(made) and any(function is not made[-1] for function in using)
    declared = f"{indent}global {name}\n" if shared else ""
    return Edit(at, at, f"{declared}{indent}{name} = ScalingAgent.from_env()\n")


def _free_name(script: Whole, what: str) -> str:
    """Return a name for a builder that the script does not use."""
    source = script.source
    taken = stores(source.tree) | loads(source.tree) | source.functions.keys()
    return next(name for name in (f"{v}_{what}" for v in VERBS) if name not in taken)


def _bare_model(value: ast.expr) -> ast.expr:
    """Return the expression that makes the model, without device moves and wrappers."""
    while isinstance(value, ast.Call):
        if isinstance(value.func, ast.Attribute) and value.func.attr in {"to", "cuda"}:
            value = value.func.value
        elif _is_wrapped(value) and value.args:
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


# --- epochs, report and import


def counted_epochs(source: Source, loop: EpochLoop, epochs: str) -> str:
    """Return what replaces `range`: the agent's epochs, with the same numbers."""
    last, start = loop.count, loop.start
    if not start:
        return f"{epochs}({source.of(last)})"
    count = f"{source.of(last)} - {start}"
    if isinstance(last, ast.Constant):
        count = str(int(str(last.value)) - start)
    elif isinstance(last, ast.BinOp) and isinstance(last.op, ast.Add):
        for one, other in ((last.right, last.left), (last.left, last.right)):
            if isinstance(one, ast.Constant) and one.value == start:  # range(1, EPOCHS + 1)
                count = source.of(other)
    return f"({start} + n for n in {epochs}({count}))"


def report_edits(script: Whole) -> list[Edit]:
    """Report the metric of an epoch at its end, if there is one."""
    metric = script.facts.metric
    if not metric:
        return []
    last = script.loop.statement.body[-1]
    line = f"{' ' * last.col_offset}{script.facts.agent}.report({metric}={metric})\n"
    end = script.source.lines(last)[1]
    return [Edit(end, end, line if script.source.line_of(last).endswith("\n") else f"\n{line}")]


def import_edit(source: Source, line: str) -> Edit:
    """Add a line below the imports at the head of the script."""
    body, at = source.tree.body, 0
    for place, statement in enumerate(body):
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            at = source.lines(statement)[1]
        elif not (place == 0 and is_text):
            break
    if not at and body and isinstance(body[0], ast.Expr):
        at = source.lines(body[0])[1]
    return Edit(at, at, f"{line}\n")


# --- torch's own process group


GONE: Final = frozenset(
    {"init_process_group", "destroy_process_group", "barrier", "set_device", "set_epoch"}
)
KINDS: Final = {  # names in scripts, and the agent's attribute; "": the rank on the host
    "RANK": "rank", "get_rank": "rank", "WORLD_SIZE": "world_size", "get_world_size": "world_size",
    "LOCAL_RANK": "",
}  # fmt: skip


@dataclass
class Removed:
    """Edits that remove the process group, and what is left to do by hand."""

    edits: list[Edit] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def distributed_edits(facts: Facts) -> Removed:
    """Remove torch's own process group from a script that can be ported, if it has one."""
    source, found = facts.source, Removed()
    if not any(last_name(c) in {"init_process_group", "DistributedSampler"} for c in source.calls):
        return found
    inside: set[ast.AST] = set()  # statements that go, with all their parts
    for block in blocks(source.tree):
        leaving = [s for s in block if _goes(s)]
        for statement in leaving:
            alone = len(leaving) == len(block) and statement is leaving[0]
            text = f"{' ' * statement.col_offset}pass\n" if alone else ""
            found.edits.append(Edit(*source.lines(statement), text))
            inside.update(ast.walk(statement))
    # Rank and size are read from the agent wherever a name holds them, because they change.
    names: dict[str, str] = {}
    for statement in (s for block in blocks(source.tree) for s in block):
        value, name, kind = value_of(statement), assigned(statement), _kind(value_of(statement))
        if kind and name:
            names[name] = f"{facts.agent}.{kind}"
        elif kind == "" and value is not None:
            found.edits.append(source.replace(value, "0"))
            found.advice.append(f"line {statement.lineno}: a worker sees one device, numbered 0")
    for node in ast.walk(source.tree):
        if node not in inside:
            found.edits += _replaced(node, facts, names, found.problems)
    size = facts.batch_size
    found.advice.append(
        f"batch_size {size or ''} was that of one process; the job file has that of all processes"
    )
    return found


def _replaced(
    node: ast.AST, facts: Facts, names: dict[str, str], problems: list[str]
) -> Iterator[Edit]:
    """Yield the edits of one name, attribute or call."""
    source, model = facts.source, facts.model.name if facts.model is not None else None
    match node:
        case ast.Name() if node.id in names:
            yield source.replace(node, names[node.id])
        case ast.Attribute(attr="module", value=ast.Name() as value) if value.id == model:
            yield source.replace(node, source.of(value))
        case ast.Call() if called(node).startswith(("dist.", "torch.distributed.")):
            if kind := _kind(node):
                yield source.replace(node, f"{facts.agent}.{kind}")
            elif last_name(node) not in {"is_initialized", "is_available"}:
                problems.append(
                    f"line {node.lineno}: {called(node)}() needs torch's own process group, which "
                    "does not exist: remove it; agent.report() takes the numbers of rank 0"
                )


def _goes(statement: ast.stmt) -> bool:
    value = value_of(statement)
    if isinstance(statement, ast.Expr):
        return last_name(value) in GONE
    if isinstance(value, ast.IfExp):
        value = value.body
    return last_name(value) == "DistributedSampler" or bool(_kind(value))


def _kind(value: ast.expr | None) -> str | None:
    """Return the agent's attribute for a value, "" for the rank on the host, None otherwise."""
    if isinstance(value, ast.Call) and last_name(value) == "int" and value.args:
        value = value.args[0]
    named: object = last_name(value)
    if isinstance(value, ast.Subscript):
        named = value.slice.value if isinstance(value.slice, ast.Constant) else ""
    elif isinstance(value, ast.Call) and named in {"get", "getenv"} and value.args:
        named = value.args[0].value if isinstance(value.args[0], ast.Constant) else ""
    return KINDS.get(str(named))
