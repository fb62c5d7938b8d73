"""The changes that make a plain script a job: as edits of its text, or why they cannot be made."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass, field, replace
from typing import Final

from controlplane.cli.init_script.advice import advice
from controlplane.cli.init_script.between import WRAPPERS, Sorted, sort_between
from controlplane.cli.init_script.distributed import distributed_edits
from controlplane.cli.init_script.script_facts import EpochLoop, Facts, look, parameters_calls
from controlplane.cli.init_script.syntax import (
    Edit,
    Source,
    assigned,
    blocks,
    called,
    keyword,
    last_name,
    loads,
    stores,
    value_of,
)

IMPORT: Final = "from elastic import ScalingAgent"
MOST_LINES: Final = 6
WIDE: Final = 101  # columns of a line that takes all parts, with its newline
VERBS: Final = ("build", "make", "new", "elastic_build")
ORDER_IS_THE_AGENTS: Final = frozenset({"shuffle", "sampler", "generator"})


@dataclass
class Port:
    """What became of a script."""

    text: str = ""  # as it would be; empty where it cannot be done
    missing: list[str] = field(default_factory=list)  # what a person has to do instead
    advice: list[str] = field(default_factory=list)  # what to look at besides

    def diff(self, before: str, name: str) -> str:
        """The change as a unified diff.

        Args:
            before: the script as it is.
            name: of its file.
        """
        lines = (before.splitlines(keepends=True), self.text.splitlines(keepends=True))
        return "".join(difflib.unified_diff(*lines, f"a/{name}", f"b/{name}")) if self.text else ""


def changed_lines(diff: str) -> int:
    """How many lines of the new text are not in the old one.

    Args:
        diff: unified.
    """
    return sum(line.startswith("+") and not line.startswith("+++") for line in diff.splitlines())


def port(facts: Facts, name: str = "train.py") -> Port:
    """Put the library into a script.

    Args:
        facts: what it is made of.
        name: of its file, for the count of lines that change.

    Returns:
        Its new text, which is Python again; or line by line why there is none.
    """
    done = Port(missing=_missing(facts), advice=advice(facts, agent_name(facts.source.tree)))
    if done.missing:
        return done
    removed = distributed_edits(facts, agent_name(facts.source.tree))
    done.advice += removed.advice
    single = look(Source(facts.source.edited(removed.edits)))
    between = sort_between(single)
    done.missing += [*removed.problems, *between.problems]
    if done.missing:
        return done
    changes = [*_import_edits(single), *_load_edits(single, between), *_loop_edits(single)]
    done.text = single.source.edited(changes)
    reporting = single.source.edited([*changes, *_report_edits(single)])
    if changed_lines(replace(done, text=reporting).diff(facts.source.text, name)) <= MOST_LINES:
        done.text = reporting
    elif facts.metric:
        agent = agent_name(facts.source.tree)
        line = f"`{agent}.report({facts.metric}={facts.metric})`"
        done.advice.append(f"{line} at the end of each epoch makes it a metric of the job")
    try:
        ast.parse(done.text)
    except SyntaxError as error:
        done.text = ""
        done.missing.append(f"line {error.lineno}: the change would not be Python: do it by hand")
    return done


def agent_name(tree: ast.Module) -> str:
    """What the agent is called in a script; some have an `agent` of their own.

    Args:
        tree: of the script.
    """
    return "scaling_agent" if "agent" in stores(tree) else "agent"


# --- what is not there


def _missing(facts: Facts) -> list[str]:
    if facts.ported:
        return ["it imports the library already: nothing to change"]
    found = []
    if facts.optimizer is None:
        found.append("no line makes an optimizer of torch.optim: pass one to agent.load() by hand")
    elif facts.model is None:
        line = facts.optimizer.statement.lineno
        found.append(
            f"line {line}: no `model.parameters()` of a model that is made before: "
            "build_optimizer takes all parameters of the model"
        )
    if facts.loader is None:
        found.append("no `NAME = DataLoader(...)` that is trained on: agent.load() makes it")
    if facts.epoch_loop is None:
        found.append(
            "no `for epoch in range(...)` around `backward()`: write `for epoch in agent.epochs(N)`"
        )
    if not found:
        found += _apart(facts) + _unusual_loader(facts) + _unusual_optimizer(facts)
    return found


def _apart(facts: Facts) -> list[str]:
    """All three have to be made in one place, for there they are replaced."""
    assert facts.model and facts.optimizer and facts.loader  # noqa: PT018, S101 - by the caller
    block = facts.optimizer.block
    found = [
        f"line {one.statement.lineno}: `{one.name}` is made in another place than the optimizer "
        f"(line {facts.optimizer.statement.lineno}): make them together"
        for one in (facts.model, facts.loader)
        if one.block is not block
    ]
    shared = [
        f"line {one.statement.lineno}: give each statement a line of its own"
        for one in (facts.model, facts.optimizer, facts.loader)
        if _shares_its_line(facts, one.statement)
    ]
    return [*found, *shared]


def _shares_its_line(facts: Facts, statement: ast.stmt) -> bool:
    whole, alone = facts.source.line_of(statement).strip(), facts.source.of(statement)
    return not whole.startswith(alone) or whole.removeprefix(alone).lstrip().startswith(";")


def _unusual_loader(facts: Facts) -> list[str]:
    loader = facts.loader
    assert loader is not None and isinstance(loader.value, ast.Call)  # noqa: PT018, S101
    at = f"line {loader.statement.lineno}"
    if facts.train_set is None:
        return [f"{at}: no dataset is named in it: pass the training set to agent.load()"]
    if keyword(loader.value, "batch_sampler") is not None:
        return [f"{at}: a batch sampler: which samples come when is the agent's"]
    sampler = keyword(loader.value, "sampler", 3)
    if sampler is None or "Distributed" in _maker(facts, sampler):
        return []
    if isinstance(sampler, ast.Constant | ast.IfExp):
        return []
    return [f"{at}: a sampler of its own: put weights and filters into the dataset"]


def _maker(facts: Facts, node: ast.expr) -> str:
    """What makes a value: the text of it, or of what the name was given."""
    text = facts.source.of(node)
    if isinstance(node, ast.Name):
        for block in blocks(facts.source.tree):
            for statement in block:
                if assigned(statement) == node.id and (value := value_of(statement)) is not None:
                    text += facts.source.of(value)
    return text


def _unusual_optimizer(facts: Facts) -> list[str]:
    model, optimizer = facts.model, facts.optimizer
    assert model and optimizer  # noqa: PT018, S101 - by the caller
    whole = [
        c for c in parameters_calls(optimizer.value) if called(c) == f"{model.name}.parameters"
    ]
    mentions = [
        n for n in ast.walk(optimizer.value) if isinstance(n, ast.Name) and n.id == model.name
    ]
    if len(mentions) > len(whole):
        line = optimizer.statement.lineno
        return [
            f"line {line}: groups by parts of the model: build_optimizer gets all its parameters"
        ]
    return []


# --- the change


def _load_edits(facts: Facts, between: Sorted) -> list[Edit]:
    """The three lines become the parts of one call, where the last of them stands."""
    assert facts.model and facts.optimizer and facts.loader  # noqa: PT018, S101 - by the caller
    source = facts.source
    three = (facts.model, facts.optimizer, facts.loader)
    by_line = sorted((one.statement for one in three), key=lambda statement: statement.lineno)
    indent = " " * by_line[0].col_offset
    parts = _parts(facts, built=bool(between.builds))
    text = dict.fromkeys(map(id, by_line), "")
    call = f"{indent}{_load_call(facts, parts)}\n"
    if len(call) > WIDE:  # the parts get lines of their own, where they are
        model, optimizer = (
            _free_name(facts, what) if part.startswith("lambda") else part
            for what, part in (("model", parts[0]), ("optimizer", parts[1]))
        )
        if model != parts[0]:
            text[id(facts.model.statement)] = f"{indent}{model} = {parts[0]}\n"
        if optimizer != parts[1]:
            text[id(facts.optimizer.statement)] = f"{indent}{optimizer} = {parts[1]}\n"
        call = f"{indent}{_load_call(facts, (model, optimizer, parts[2]))}\n"
    if between.builds:
        body = [source.line_of(s) for s in (facts.model.statement, *between.builds)]
        inner = "".join(f"    {line}" for part in body for line in part.splitlines(keepends=True))
        first = f"{indent}def {_free_name(facts, 'model')}():\n"
        last = f"{indent}    return {facts.model.name}\n"
        text[id(facts.model.statement)] = f"{first}{inner}{last}"
    after = "".join(source.line_of(statement) for statement in between.after)
    text[id(by_line[-1])] += call + after
    gone = (*between.builds, *between.after, *between.dropped)
    return [
        _agent_edit(facts, by_line[0], indent),
        *(Edit(*source.lines(statement), text[id(statement)]) for statement in by_line),
        *(Edit(*source.lines(statement), "") for statement in gone),
    ]


def _parts(facts: Facts, *, built: bool) -> tuple[str, str, str]:
    """What `load` takes: builders of model and optimizer, the data with its options."""
    assert facts.model and facts.optimizer  # noqa: PT018, S101 - by the caller
    bare, made = _bare_model(facts), facts.optimizer.value
    model = f"lambda: {_on_one_line(facts, bare)}"
    if isinstance(bare, ast.Call) and not bare.args and not bare.keywords:
        model = facts.source.of(bare.func)
    model = _free_name(facts, "model") if built else model
    optimizer = f"lambda parameters: {_optimizer_text(facts)}"
    if isinstance(made, ast.Call) and not made.keywords and parameters_calls(made) == made.args:
        optimizer = facts.source.of(made.func)
    return model, optimizer, ", ".join(_loader_arguments(facts))


def _agent_edit(facts: Facts, first: ast.stmt, indent: str) -> Edit:
    """The agent is there before anything that asks it."""
    assert facts.optimizer  # noqa: S101 - by the caller
    name = agent_name(facts.source.tree)
    asking = [s for s in facts.optimizer.block if name in loads(s) and s.lineno < first.lineno]
    at = facts.source.lines(asking[0] if asking else first)[0]
    declared = f"{indent}global {name}\n" if _agent_is_global(facts) else ""
    return Edit(at, at, f"{declared}{indent}{name} = ScalingAgent.from_env()\n")


def _free_name(facts: Facts, what: str) -> str:
    """A name for a builder that the script has not given to anything."""
    taken = stores(facts.source.tree) | loads(facts.source.tree)
    taken |= {n.name for n in ast.walk(facts.source.tree) if isinstance(n, ast.FunctionDef)}
    return next(name for name in (f"{v}_{what}" for v in VERBS) if name not in taken)


def _load_call(facts: Facts, parts: tuple[str, str, str]) -> str:
    assert facts.model and facts.optimizer and facts.loader  # noqa: PT018, S101 - by the caller
    names = f"{facts.model.name}, {facts.optimizer.name}, {facts.loader.name}"
    return f"{names} = {agent_name(facts.source.tree)}.load({', '.join(parts)})"


def _bare_model(facts: Facts) -> ast.expr:
    """The expression that makes the model, without device moves and wrappers."""
    assert facts.model  # noqa: S101 - by the caller
    value = facts.model.value
    while isinstance(value, ast.Call):
        moved = isinstance(value.func, ast.Attribute) and value.func.attr in {"to", "cuda"}
        if moved and isinstance(value.func, ast.Attribute):
            value = value.func.value
        elif last_name(value) in WRAPPERS and value.args:
            value = value.args[0]
        else:
            break
    return value


def _optimizer_text(facts: Facts) -> str:
    """The call that makes the optimizer, of `parameters`."""
    assert facts.optimizer  # noqa: S101 - by the caller
    source, value = facts.source, facts.optimizer.value
    (begin, _), text = source.span(value), source.of(value).encode()
    for call in reversed(parameters_calls(value)):
        first, last = source.span(call)
        text = text[: first - begin] + b"parameters" + text[last - begin :]
    return ast.unparse(ast.parse(text)) if b"\n" in text else text.decode()


def _loader_arguments(facts: Facts) -> list[str]:
    assert facts.loader and isinstance(facts.loader.value, ast.Call)  # noqa: PT018, S101
    call = facts.loader.value
    places = ("dataset", "batch_size", "shuffle", "sampler")
    named = [*zip(places, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
    found: list[str] = []
    for name, value in named:
        text = _on_one_line(facts, value)
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


def _on_one_line(facts: Facts, node: ast.expr) -> str:
    text = facts.source.of(node)
    return ast.unparse(node) if "\n" in text else text


def _loop_edits(facts: Facts) -> list[Edit]:
    """`range` becomes the agent's epochs, counted as they were."""
    loop = facts.epoch_loop
    assert loop  # noqa: S101 - by the caller
    epochs = f"{agent_name(facts.source.tree)}.epochs"
    text = f"{epochs}({facts.source.of(loop.count)})"
    if loop.start:
        text = f"({loop.start} + n for n in {epochs}({_count_from(facts, loop)}))"
    return [Edit(*facts.source.span(loop.numbers), text)]


def _count_from(facts: Facts, loop: EpochLoop) -> str:
    """How many numbers there are in a range that does not begin with 0."""
    last = loop.count
    if isinstance(last, ast.Constant):
        return str(int(str(last.value)) - (loop.start or 0))
    if isinstance(last, ast.BinOp) and isinstance(last.op, ast.Add):
        for one, other in ((last.left, last.right), (last.right, last.left)):
            if isinstance(one, ast.Constant) and one.value == loop.start:
                return facts.source.of(other)
    return f"{facts.source.of(last)} - {loop.start}"


def _report_edits(facts: Facts) -> list[Edit]:
    """The metric of an epoch, if there is one, at its end."""
    if not facts.metric or facts.epoch_loop is None:
        return []
    last = facts.epoch_loop.statement.body[-1]
    agent = agent_name(facts.source.tree)
    line = f"{' ' * last.col_offset}{agent}.report({facts.metric}={facts.metric})\n"
    end = facts.source.lines(last)[1]
    return [Edit(end, end, line if facts.source.line_of(last).endswith("\n") else f"\n{line}")]


def _import_edits(facts: Facts) -> list[Edit]:
    """Below the imports at the head of the script."""
    last: ast.stmt | None = None
    body = facts.source.tree.body
    for place, statement in enumerate(body):
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            last = statement
        elif not (place == 0 and is_text):
            break
    if last is None and body and isinstance(body[0], ast.Expr):
        last = body[0]
    at = facts.source.lines(last)[1] if last is not None else 0
    return [Edit(at, at, f"{IMPORT}\n")]


def _agent_is_global(facts: Facts) -> bool:
    """Whether another function than the one that makes the model asks the agent."""
    assert facts.optimizer and facts.epoch_loop  # noqa: PT018, S101 - by the caller
    functions = [n for n in ast.walk(facts.source.tree) if isinstance(n, ast.FunctionDef)]
    agent = agent_name(facts.source.tree)
    made = [f for f in functions if facts.optimizer.statement in ast.walk(f)]
    asking = [
        f for f in functions if agent in loads(f) or facts.epoch_loop.statement in ast.walk(f)
    ]
    return bool(made) and any(function is not made[-1] for function in asking)
