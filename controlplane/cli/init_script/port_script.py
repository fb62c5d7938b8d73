"""The port of a script to the library, or the reasons why it cannot be ported."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass, field, replace
from typing import Final

from controlplane.cli.init_script.frameworks import Framework, adapter_edits, distributed_edits
from controlplane.cli.init_script.remarks import advice, refused
from controlplane.cli.init_script.script_facts import (
    EpochLoop,
    Facts,
    Whole,
    look,
    parameters_calls,
    whole,
)
from controlplane.cli.init_script.syntax import (
    Edit,
    Source,
    assigned,
    called,
    keyword,
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
MAX_LINES: Final = 6  # a metric is reported, too, unless more lines would change


@dataclass
class Port:
    """Result of porting a script."""

    text: str = ""  # the new script; empty if it cannot be ported
    missing: list[str] = field(default_factory=list)  # changes to make by hand
    refused: list[str] = field(default_factory=list)  # lines that fail or misbehave on a cluster
    advice: list[str] = field(default_factory=list)  # remarks on other lines

    def diff(self, before: str, name: str) -> str:
        """Return a unified diff from text `before` to the new script, or "" if there is none."""
        lines = (before.splitlines(keepends=True), self.text.splitlines(keepends=True))
        return "".join(difflib.unified_diff(*lines, f"a/{name}", f"b/{name}")) if self.text else ""


def changed_lines(diff: str) -> int:
    """Return the number of lines that a diff adds."""
    return sum(line.startswith("+") and not line.startswith("+++") for line in diff.splitlines())


def port(facts: Facts, name: str = "train.py") -> Port:
    """Return a script that uses the library, or the reasons why it cannot be ported."""
    done = Port(missing=_missing(facts), refused=refused(facts), advice=advice(facts))
    if done.missing:
        return done
    if facts.framework is not None:
        return _with_adapter(facts, facts.framework, done)
    model = facts.model.name if facts.model is not None else ""
    edits: list[Edit] = []
    if (removed := distributed_edits(facts.source, facts.agent, model)) is not None:
        size = f"batch_size {facts.batch_size or ''} was that of one process"
        done.advice += [*removed.advice, f"{size}; the job file has that of all processes"]
        done.missing += removed.problems
        edits = removed.edits
    single = whole(look(Source(facts.source.edited(edits))))
    if single is None:
        done.missing += ["lines are missing without its own process group: port the script by hand"]
        return done
    source, agent = single.source, single.facts.agent
    between = sort_between(single)
    done.missing += between.problems
    if done.missing:
        return done
    epochs = counted_epochs(source, single.loop, f"{agent}.epochs")
    changes = [
        import_edit(source, IMPORT),
        *load_edits(single, between),
        source.replace(single.loop.numbers, epochs),
    ]
    done.text = source.edited(changes)
    reporting = source.edited([*changes, *report_edits(single)])
    if changed_lines(replace(done, text=reporting).diff(facts.source.text, name)) <= MAX_LINES:
        done.text = reporting
    elif facts.metric:
        line = f"`{facts.agent}.report({facts.metric}={facts.metric})`"
        done.advice.append(f"{line} at the end of each epoch makes it a metric of the job")
    try:
        ast.parse(done.text)
    except SyntaxError as error:
        done.text = ""
        done.missing.append(
            f"line {error.lineno}: the change would not be valid Python: make it by hand"
        )
    return done


def _with_adapter(facts: Facts, framework: Framework, done: Port) -> Port:
    source, loop = facts.source, facts.epoch_loop
    counted = loop and (loop.numbers, counted_epochs(source, loop, "EPOCHS"))
    adapter = adapter_edits(source, framework, counted)
    done.missing += adapter.problems
    if not done.missing:
        names = ", ".join(sorted(adapter.needed))
        line = f"from elastic.{framework.name} import {names}" if names else ""
        done.text = source.edited([import_edit(source, line), *adapter.edits])
    return done


# --- what is missing


def _missing(facts: Facts) -> list[str]:
    if facts.ported:
        return ["the script imports the library already"]
    if facts.framework is not None:
        return []
    found = []
    if facts.optimizer is None:
        found.append("no line makes an optimizer of torch.optim: pass one to agent.load() by hand")
    elif facts.model is None:
        line = facts.optimizer.statement.lineno
        found.append(
            f"line {line}: no `model.parameters()` of a model made above: "
            "give the optimizer all parameters of the model"
        )
    if facts.loader is None:
        found.append(
            "no `NAME = DataLoader(...)` is iterated for training: pass the data to agent.load()"
        )
    if facts.epoch_loop is None:
        found.append(_no_loop(facts))
    elif facts.loader is not None and facts.train_set is None:
        line = facts.loader.statement.lineno
        found.append(f"line {line}: no dataset in the call: pass the training set to agent.load()")
    if len(facts.optimizers) > 1:
        one, other = facts.optimizers[:2]
        second = f"line {other.statement.lineno}: a second optimizer, `{other.name}`"
        remedy = "let build_model return one nn.ModuleDict and build_optimizer a tuple"
        page = "docs/exactness/optimizers.md"
        found = [f"{second} beside `{one.name}`: {remedy}; {page} shows such a loop"]
    found += _wrapped_elsewhere(facts)
    if not found and (script := whole(facts)) is not None:
        found += [*_apart(script), *_unusual_loader(script)]
    return found


def _no_loop(facts: Facts) -> str:
    loop = facts.step_loop or facts.far_loop
    if loop is None:
        return (
            "no `for epoch in range(...)` around `backward()`: write `for epoch in agent.epochs(N)`"
        )
    head, _, _ = facts.source.of(loop).partition("\n")
    at = f"line {loop.lineno}: `{head}`"
    if facts.step_loop is not None:
        return (
            f"{at} counts steps, whose batch changes on a cluster: write "
            "`for epoch in agent.epochs(N)` around a loop over the loader; "
            "stop = { samples = STEPS x BATCH } in the job file ends it after as many samples"
        )
    return (
        f"{at} trains in other functions: pass them what agent.load() "
        "returns, and loop over agent.epochs(N) there"
    )


def _wrapped_elsewhere(facts: Facts) -> list[str]:
    """Return a problem for each DDP wrapper that is not in the same block as the optimizer."""
    block = facts.optimizer.block if facts.optimizer else []
    near = {node for statement in block for node in ast.walk(statement)}
    remedy = "leave it out: the agent's group reduces gradients"
    return [
        f"line {call.lineno}: `{facts.source.of(call.func)}(...)` away from the optimizer: {remedy}"
        for call in facts.source.calls
        if last_name(call) in WRAPPERS and call not in near
    ]


def _apart(script: Whole) -> list[str]:
    """Return problems that prevent one call from replacing model, optimizer and loader."""
    source, optimizer = script.source, script.optimizer
    found = [
        f"line {one.statement.lineno}: `{one.name}` is made in another block than the optimizer "
        f"(line {optimizer.statement.lineno}): make them in the same one"
        for one in (script.model, script.loader)
        if one.block is not optimizer.block
    ]
    for one in script.three:
        line, alone = source.line_of(one.statement).strip(), source.of(one.statement)
        if not line.startswith(alone) or line.removeprefix(alone).lstrip().startswith(";"):
            found.append(f"line {one.statement.lineno}: give each statement a line of its own")
    return found


def _unusual_loader(script: Whole) -> list[str]:
    at = f"line {script.loader.statement.lineno}"
    if keyword(script.loader_call, "batch_sampler") is not None:
        remedy = "give batch_size, and pad in collate_fn"
        return [f"{at}: a batch sampler, but the agent decides the order of samples: {remedy}"]
    sampler = keyword(script.loader_call, "sampler", 3)
    if sampler is None or isinstance(sampler, ast.Constant | ast.IfExp):
        return []
    text = script.source.of(sampler)
    made = [script.source.of(one.value) for one in script.facts.made if one.name == text]
    if any("Distributed" in maker for maker in (text, *made)):
        return []
    return [f"{at}: a sampler of the script's own: put weights and filters into the dataset"]


# --- statements between model, optimizer and loader


@dataclass
class Between:
    """Statements between model, optimizer and loader, grouped by where they move."""

    builds: list[ast.stmt] = field(default_factory=list)  # move into the model's builder
    after: list[ast.stmt] = field(default_factory=list)  # move below the call of `load`
    dropped: list[ast.stmt] = field(default_factory=list)  # removed: the agent does their work
    problems: list[str] = field(default_factory=list)


def sort_between(script: Whole) -> Between:
    """Group the statements from the first to the last of model, optimizer and loader.

    A statement that uses one of these three moves below the call of `load`, with all statements
    that depend on it. A statement that changes the model moves into the function that builds the
    model, because a checkpoint must override the change. If model and optimizer keep their lines,
    `load` makes only the loader.
    """
    block, kept, model = script.optimizer.block, script.keeps_model, script.model.name
    first, last = (block.index(script.by_line[place]) for place in (0, -1))
    found = Between()
    late: set[str] = set()  # names bound by `load` or computed from its results
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
    """True if a statement changes the model; False if it only reads the model."""
    if assigned(statement) == model or assigned(statement).startswith(f"{model}."):
        return True
    if isinstance(statement, ast.Expr):
        return last_name(statement.value) not in READS | MODES
    return isinstance(statement, ast.For | ast.With | ast.If)


# --- the call of load


def load_edits(script: Whole, between: Between) -> list[Edit]:
    """Return edits that replace model, optimizer and loader with one `load` at the last of them."""
    source, by_line = script.source, script.by_line
    indent = " " * by_line[0].col_offset
    after = "".join(map(source.line_of, between.after))
    gone = [*between.after, *between.dropped]
    edits = [_agent_edit(script, by_line[0], indent)]
    if script.keeps_model:  # parameter groups refer to parts of the model
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
    if len(f"{indent}{call}\n") > MAX_COLUMNS:  # put the builders on lines of their own
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
    """Return an edit that creates the agent before the first statement that uses it."""
    name, optimizer = script.facts.agent, script.optimizer
    asking = [s for s in optimizer.block if name in loads(s) and s.lineno < first.lineno]
    at = script.source.lines(asking[0] if asking else first)[0]
    # The agent is global if it is used outside the function that makes the model.
    functions = [n for n in ast.walk(script.source.tree) if isinstance(n, ast.FunctionDef)]
    made = [f for f in functions if optimizer.statement in ast.walk(f)]
    using = [f for f in functions if name in loads(f) or script.loop.statement in ast.walk(f)]
    shared = bool(made) and any(function is not made[-1] for function in using)
    declared = f"{indent}global {name}\n" if shared else ""
    return Edit(at, at, f"{declared}{indent}{name} = ScalingAgent.from_env()\n")


def _free_name(script: Whole, what: str) -> str:
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
    """Return the optimizer's call with the name `parameters` instead of the model's parameters."""
    source, value = script.source, script.optimizer.value
    (begin, _), text = source.span(value), source.of(value).encode()
    for call in reversed(parameters_calls(value)):
        first, last = source.span(call)
        text = text[: first - begin] + b"parameters" + text[last - begin :]
    return ast.unparse(ast.parse(text)) if b"\n" in text else text.decode()


# --- epochs, report and import


def counted_epochs(source: Source, loop: EpochLoop, epochs: str) -> str:
    """Return the replacement for `range`: the agent's epochs, with the same numbers as before."""
    last, start = loop.end, loop.start
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
    """Return an edit that reports the metric after each epoch, or [] if there is no metric."""
    metric = script.facts.metric
    if not metric:
        return []
    last = script.loop.statement.body[-1]
    line = f"{' ' * last.col_offset}{script.facts.agent}.report({metric}={metric})\n"
    end = script.source.lines(last)[1]
    return [Edit(end, end, line if script.source.line_of(last).endswith("\n") else f"\n{line}")]


def import_edit(source: Source, line: str) -> Edit:
    """Return an edit that adds a line below the imports at the top of the script."""
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
