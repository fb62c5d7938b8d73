"""Port of a script to the library, or the reasons against it, and lines that need attention."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from controlplane.cli.init_script.edits import WRAPPERS, distributed_edits, load_edits, sort_between
from controlplane.cli.init_script.frameworks import Framework, adapter_edits, refused_options
from controlplane.cli.init_script.script_facts import (
    EpochLoop,
    Facts,
    Whole,
    agent_name,
    look,
    whole,
)
from controlplane.cli.init_script.summed_losses import summed_losses
from controlplane.cli.init_script.syntax import (
    Edit,
    Source,
    assigned,
    blocks,
    called,
    dotted,
    keyword,
    last_name,
    literal,
    loads,
    value_of,
)

ONE_IS_ENOUGH: Final = frozenset({"torch.save", "SummaryWriter", "wandb.init"})
ASKS_FIRST: Final = re.compile("rank|main_process")
SUMMED: Final = (
    "the loss is a sum over the batch, so that gradients depend on how the batch is split: divide "
    "it by len(inputs) before backward(); for SGD, multiply the learning rate by batch_size"
)
OWN_RATE: Final = (
    "the rate is set in each step from the script's own counter. A worker that joins or resumes "
    "has another step counter. Make a scheduler (LambdaLR) after load(), or count with agent.step"
)
Line = tuple[int, str]


def advice(facts: Facts, agent: str) -> list[str]:
    """Return the lines that several workers run differently from one process."""
    first = f"{agent}.rank == 0"
    if facts.framework is not None:
        first = "accelerator.is_main_process" if facts.framework.name == "accelerate" else ""
    found = [*_for_one_worker(facts.source.tree, first)] if first else []
    return _in_order([*found, *_left_early(facts)])


def refused(facts: Facts) -> list[str]:
    """Return the lines that fail or misbehave on a cluster, each with its remedy."""
    tree = facts.source.tree
    found = [
        *((line, SUMMED) for line in summed_losses(tree)),
        *_unusable(tree),
        *_own_rates(facts),
        *_side_by_side(facts),
    ]
    if facts.framework is not None:
        found += refused_options(facts.framework, tree)
    else:
        found += _accumulation(facts)
    return _in_order(found)


def _in_order(found: Sequence[Line]) -> list[str]:
    return [f"line {line}: {problem}" for line, problem in sorted(set(found))]


def _for_one_worker(tree: ast.Module, first: str) -> Iterator[Line]:
    asked = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and ASKS_FIRST.search(ast.unparse(test.test))
        for node in ast.walk(test)
    }
    for node in ast.walk(tree):
        name, line = called(node), getattr(node, "lineno", 0)
        if name in ONE_IS_ENOUGH and id(node) not in asked:
            yield line, f"every worker runs {name}(): guard it with `if {first}:`"
        elif last_name(node) == "spawn" and name.split(".")[0] in {"mp", "torch"}:
            yield line, "the cluster starts the processes: call the function directly"


# --- loops over batches: every worker takes part in each batch, and each batch is one step


def _batch_loops(facts: Facts) -> list[ast.For]:
    epochs = facts.epoch_loop.statement if facts.epoch_loop else None
    return [
        loop
        for loop in ast.walk(facts.source.tree)
        if isinstance(loop, ast.For)
        and loop is not epochs
        and any(last_name(node) == "backward" for node in ast.walk(loop))
    ]


def _left_early(facts: Facts) -> Iterator[Line]:
    for node in (n for loop in _batch_loops(facts) for n in ast.walk(loop)):
        if isinstance(node, ast.If):
            inner = [n for part in node.body for n in ast.walk(part)]
            if any(isinstance(n, ast.Break) for n in inner):
                yield (
                    node.lineno,
                    "the batch loop ends early: all workers have to leave it in the same step",
                )


def _accumulation(facts: Facts) -> Iterator[Line]:
    optimizer = facts.optimizer.name if facts.optimizer else "optimizer"
    for node in (n for loop in _batch_loops(facts) for n in ast.walk(loop)):
        if isinstance(node, ast.If):
            inner = [n for part in node.body for n in ast.walk(part)]
            if any(called(n) == f"{optimizer}.step" for n in inner):
                problem = (
                    "a step for several batches is refused: step in each, and raise batch_size"
                )
                yield (
                    node.lineno,
                    f"{problem}; a share above max_local_batch is computed in several passes",
                )


def _own_rates(facts: Facts) -> Iterator[Line]:
    """Yield the lines that set the learning rate in each step."""
    tree = facts.source.tree
    loops: list[ast.AST] = [*_batch_loops(facts)]
    loops += [facts.step_loop] if facts.step_loop else []
    names = {called(node) for loop in loops for node in ast.walk(loop)}
    loops += [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in names]
    for node in (n for loop in loops for n in ast.walk(loop)):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Subscript) and literal(target.slice) == "lr":
            yield target.lineno, OWN_RATE


def _side_by_side(facts: Facts) -> Iterator[Line]:
    tree = facts.source.tree
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    loaders = {assigned(n) for n in statements if last_name(value_of(n)) == "DataLoader"}
    for loop in _batch_loops(facts):
        zips = [node for node in ast.walk(loop.iter) if called(node) == "zip"]
        if any(len(loads(node) & loaders) > 1 for node in zips):
            problem = "two loaders are read side by side, and agent.load() deals out one"
            yield loop.lineno, f"{problem}: give it one dataset whose samples have both parts"


# --- optimizers, gradients and datasets that the library refuses


def _unusable(tree: ast.Module) -> Iterator[Line]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            names = ", ".join(alias.name for alias in node.names)
            plain = f"from {node.module} import {names}" if node.module else f"import {names}"
            problem = "a relative import, but a job's script is run as a file of no package"
            yield node.lineno, f"{problem}: write `{plain}`, with the module beside the script"
        if isinstance(node, ast.Call) and last_name(node) == "LBFGS":
            problem = "LBFGS evaluates its closure several times in a step, which is refused"
            yield (
                node.lineno,
                f"{problem}: use an optimizer that evaluates it once, such as SGD or Adam",
            )
        if isinstance(node, ast.Call) and literal(keyword(node, "sparse")) is True:
            yield node.lineno, "sparse gradients are refused in a group: leave `sparse=True` out"
        if isinstance(node, ast.ClassDef) and "IterableDataset" in {
            dotted(base).rpartition(".")[2] for base in node.bases
        }:
            methods = {getattr(one, "name", "") for one in node.body}
            if "__len__" not in methods:
                problem = f"{node.name} has no length, which is refused"
                yield (
                    node.lineno,
                    f"{problem}: give it a __len__ that returns the samples of one pass",
                )


IMPORT: Final = "from elastic import ScalingAgent"
MAX_LINES: Final = 6


@dataclass
class Port:
    """Result of porting a script."""

    text: str = ""  # the new script; empty if it cannot be ported
    missing: list[str] = field(default_factory=list)  # what has to be done by hand
    refused: list[str] = field(default_factory=list)  # lines that fail or misbehave on a cluster
    advice: list[str] = field(default_factory=list)  # other lines to look at

    def diff(self, before: str, name: str) -> str:
        """Return the change of the text `before` as a unified diff."""
        lines = (before.splitlines(keepends=True), self.text.splitlines(keepends=True))
        return "".join(difflib.unified_diff(*lines, f"a/{name}", f"b/{name}")) if self.text else ""


def changed_lines(diff: str) -> int:
    """Return the number of added lines in a diff."""
    return sum(line.startswith("+") and not line.startswith("+++") for line in diff.splitlines())


def port(facts: Facts, name: str = "train.py") -> Port:
    """Make a script use the library.

    Returns:
        The new text, which is valid Python, or the reasons why there is none.
    """
    done = Port(
        missing=_missing(facts),
        refused=refused(facts),
        advice=advice(facts, agent_name(facts.source.tree)),
    )
    if done.missing:
        return done
    if facts.framework is not None:
        return _with_adapter(facts, facts.framework, done)
    removed = distributed_edits(facts, agent_name(facts.source.tree))
    done.advice += removed.advice
    single = whole(look(Source(facts.source.edited(removed.edits))))
    if single is None:
        removed.problems.append(
            "lines are missing without its own process group: port the script by hand"
        )
        done.missing += removed.problems
        return done
    between = sort_between(single)
    done.missing += [*removed.problems, *between.problems]
    if done.missing:
        return done
    changes = [
        *_import_edits(single.source, IMPORT),
        *load_edits(single, between),
        *_loop_edits(single),
    ]
    done.text = single.source.edited(changes)
    reporting = single.source.edited([*changes, *_report_edits(single)])
    if changed_lines(replace(done, text=reporting).diff(facts.source.text, name)) <= MAX_LINES:
        done.text = reporting
    elif facts.metric:
        agent = agent_name(facts.source.tree)
        line = f"`{agent}.report({facts.metric}={facts.metric})`"
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
    """Replace the trainer of a framework by our adapter."""
    source, loop = facts.source, facts.epoch_loop
    counted = (loop.numbers, _counted(source, loop, "EPOCHS")) if loop is not None else None
    adapter = adapter_edits(source, framework, counted)
    done.missing += adapter.problems
    if not done.missing:
        done.text = source.edited([*_import_edits(source, adapter.imports), *adapter.edits])
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
        found = [f"{second} beside `{one.name}`: {remedy}; docs/exactness.md shows such a loop"]
    found += _wrapped_elsewhere(facts)
    if not found and (script := whole(facts)) is not None:
        found += _unusual(script)
    return found


def _no_loop(facts: Facts) -> str:
    if (loop := facts.step_loop) is not None:
        text = facts.source.of(loop).partition("\n")[0]
        return (
            f"line {loop.lineno}: `{text}` counts steps, whose batch changes on a cluster: write "
            "`for epoch in agent.epochs(N)` around a loop over the loader; "
            "stop = { samples = STEPS x BATCH } in the job file ends it after as many samples"
        )
    if (loop := facts.far_loop) is not None:
        text = facts.source.of(loop).partition("\n")[0]
        return (
            f"line {loop.lineno}: `{text}` trains in other functions: pass them what agent.load() "
            "returns, and loop over agent.epochs(N) there"
        )
    return "no `for epoch in range(...)` around `backward()`: write `for epoch in agent.epochs(N)`"


def _wrapped_elsewhere(facts: Facts) -> list[str]:
    """Return DDP wrappers that are not among the lines of model, optimizer and loader."""
    block = facts.optimizer.block if facts.optimizer else []
    near = {id(node) for statement in block for node in ast.walk(statement)}
    remedy = "leave it out: the agent's group reduces gradients"
    return [
        f"line {node.lineno}: `{facts.source.of(node.func)}(...)` away from the optimizer: {remedy}"
        for node in ast.walk(facts.source.tree)
        if isinstance(node, ast.Call) and last_name(node) in WRAPPERS and id(node) not in near
    ]


def _unusual(script: Whole) -> list[str]:
    return [*_apart(script), *_unusual_loader(script)]


def _apart(script: Whole) -> list[str]:
    """Return what keeps the three from being replaced in one place."""
    optimizer = script.optimizer
    found = [
        f"line {one.statement.lineno}: `{one.name}` is made in another block than the optimizer "
        f"(line {optimizer.statement.lineno}): make them in the same one"
        for one in (script.model, script.loader)
        if one.block is not optimizer.block
    ]
    shared = [
        f"line {one.statement.lineno}: give each statement a line of its own"
        for one in script.three
        if _shares_its_line(script.source, one.statement)
    ]
    return [*found, *shared]


def _shares_its_line(source: Source, statement: ast.stmt) -> bool:
    line, alone = source.line_of(statement).strip(), source.of(statement)
    return not line.startswith(alone) or line.removeprefix(alone).lstrip().startswith(";")


def _unusual_loader(script: Whole) -> list[str]:
    at = f"line {script.loader.statement.lineno}"
    if keyword(script.loader_call, "batch_sampler") is not None:
        remedy = "give batch_size, and pad in collate_fn"
        return [f"{at}: a batch sampler, but the agent decides the order of samples: {remedy}"]
    sampler = keyword(script.loader_call, "sampler", 3)
    if sampler is None or "Distributed" in _maker(script.source, sampler):
        return []
    if isinstance(sampler, ast.Constant | ast.IfExp):
        return []
    return [f"{at}: a sampler of the script's own: put weights and filters into the dataset"]


def _maker(source: Source, node: ast.expr) -> str:
    """Return the text of an expression, with that of the values of a name."""
    text = source.of(node)
    if isinstance(node, ast.Name):
        for block in blocks(source.tree):
            for statement in block:
                if assigned(statement) == node.id and (value := value_of(statement)) is not None:
                    text += source.of(value)
    return text


# --- the change


def _loop_edits(script: Whole) -> list[Edit]:
    """Replace `range` by the agent's epochs, with the same numbers."""
    text = _counted(script.source, script.loop, f"{script.agent}.epochs")
    return [Edit(*script.source.span(script.loop.numbers), text)]


def _counted(source: Source, loop: EpochLoop, epochs: str) -> str:
    if loop.start:
        return f"({loop.start} + n for n in {epochs}({_count_from(source, loop)}))"
    return f"{epochs}({source.of(loop.count)})"


def _count_from(source: Source, loop: EpochLoop) -> str:
    """Return the length of a range that does not begin with 0, as text."""
    last = loop.count
    if isinstance(last, ast.Constant):
        return str(int(str(last.value)) - (loop.start or 0))
    if isinstance(last, ast.BinOp) and isinstance(last.op, ast.Add):
        for one, other in ((last.left, last.right), (last.right, last.left)):
            if isinstance(one, ast.Constant) and one.value == loop.start:
                return source.of(other)
    return f"{source.of(last)} - {loop.start}"


def _report_edits(script: Whole) -> list[Edit]:
    """Report the metric of an epoch at its end, if there is one."""
    if not script.metric:
        return []
    last = script.loop.statement.body[-1]
    agent = script.agent
    line = f"{' ' * last.col_offset}{agent}.report({script.metric}={script.metric})\n"
    end = script.source.lines(last)[1]
    return [Edit(end, end, line if script.source.line_of(last).endswith("\n") else f"\n{line}")]


def _import_edits(source: Source, line: str) -> list[Edit]:
    """Add a line below the imports at the head of the script."""
    last: ast.stmt | None = None
    body = source.tree.body
    for place, statement in enumerate(body):
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            last = statement
        elif not (place == 0 and is_text):
            break
    if last is None and body and isinstance(body[0], ast.Expr):
        last = body[0]
    at = source.lines(last)[1] if last is not None else 0
    return [Edit(at, at, f"{line}\n")]
