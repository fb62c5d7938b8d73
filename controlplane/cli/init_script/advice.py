"""What to look at in a script besides the lines that change."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Final

from controlplane.cli.init_script.frameworks import refused_options
from controlplane.cli.init_script.literal_numbers import literal
from controlplane.cli.init_script.script_facts import Facts
from controlplane.cli.init_script.syntax import (
    assigned,
    called,
    dotted,
    keyword,
    last_name,
    loads,
    value_of,
)

ONE_IS_ENOUGH: Final = frozenset({"torch.save", "SummaryWriter", "wandb.init"})
ASKS_FIRST: Final = re.compile("rank|main_process")
SUMMED: Final = (
    "the loss is a sum over the batch, which is refused: divide it by len(inputs) before "
    "backward(); for SGD, multiply the learning rate with batch_size"
)
OWN_RATE: Final = (
    "the rate is set in each step: workers that join or resume count otherwise: make a scheduler "
    "(LambdaLR) behind load(), or count with agent.step"
)
Line = tuple[int, str]


def advice(facts: Facts, agent: str) -> list[str]:
    """What a group of several workers would do otherwise than one process, line by line.

    Args:
        facts: of the script.
        agent: what the agent is called in it.

    Returns:
        In the order of the lines.
    """
    first = f"{agent}.rank == 0"
    if facts.framework is not None:
        first = "accelerator.is_main_process" if facts.framework.name == "accelerate" else ""
    found = [*_for_one_worker(facts.source.tree, first)] if first else []
    return _in_order([*found, *_left_early(facts)])


def refused(facts: Facts) -> list[str]:
    """What the library refuses on a cluster, or what goes wrong there, line by line.

    Args:
        facts: of the script.

    Returns:
        In the order of the lines, each with its remedy.
    """
    tree = facts.source.tree
    found = [
        *_summed_losses(tree),
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
    return [f"line {line}: {what}" for line, what in sorted(set(found))]


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
            yield line, f"every worker does {name}(): ask `{first}` first"
        elif last_name(node) == "spawn" and name.split(".")[0] in {"mp", "torch"}:
            yield line, "the cluster starts the processes: call the function once"


# --- loops over batches: every worker takes every batch, and each batch is one step


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
                yield node.lineno, "the batch loop is left early: all workers have to, at once"


def _accumulation(facts: Facts) -> Iterator[Line]:
    optimizer = facts.optimizer.name if facts.optimizer else "optimizer"
    for node in (n for loop in _batch_loops(facts) for n in ast.walk(loop)):
        if isinstance(node, ast.If):
            inner = [n for part in node.body for n in ast.walk(part)]
            if any(called(n) == f"{optimizer}.step" for n in inner):
                what = "not each batch is a step, which is refused: step in each, raise batch_size"
                yield node.lineno, f"{what}: shares above max_local_batch are taken in passes"


def _own_rates(facts: Facts) -> Iterator[Line]:
    """Rates that are set step by step, from a number that a worker which joins does not have."""
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
            what = "two loaders are read side by side, and agent.load() deals out one"
            yield loop.lineno, f"{what}: give it one dataset whose samples have both parts"


# --- what the library cannot train exactly


def _unusable(tree: ast.Module) -> Iterator[Line]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            names = ", ".join(alias.name for alias in node.names)
            plain = f"from {node.module} import {names}" if node.module else f"import {names}"
            what = "a relative import, but a job's script is run as a file of no package"
            yield node.lineno, f"{what}: write `{plain}`, with the module beside the script"
        if isinstance(node, ast.Call) and last_name(node) == "LBFGS":
            what = "LBFGS evaluates its closure several times in a step, which is refused"
            yield node.lineno, f"{what}: take an optimizer that does once, such as SGD or Adam"
        if isinstance(node, ast.Call) and literal(keyword(node, "sparse")) is True:
            yield node.lineno, "sparse gradients are refused in a group: leave `sparse=True` out"
        if isinstance(node, ast.ClassDef) and "IterableDataset" in {
            dotted(base).rpartition(".")[2] for base in node.bases
        }:
            methods = {getattr(one, "name", "") for one in node.body}
            if "__len__" not in methods:
                what = f"{node.name} has no length, which is refused"
                yield node.lineno, f"{what}: give it __len__, the samples of one pass"


def _summed_losses(tree: ast.Module) -> Iterator[Line]:
    """Losses that add up over the batch, and that nothing divides before `backward()`."""
    sums, parts = _criteria(tree, "sum"), _criteria(tree, "none")
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.Module):
            continue
        for loss in _losses(scope):
            values = _values(loss, scope)
            if any(_is_scaled(value) for value in values):
                continue
            for call in (n for value in values for n in ast.walk(value)):
                if isinstance(call, ast.Call) and (line := _sums_at(call, sums, parts)):
                    yield line, SUMMED


def _criteria(tree: ast.Module, reduction: str) -> dict[str, int]:
    """Names of loss functions that were made with a reduction, and the lines."""
    return {
        dotted(node.targets[0]): node.value.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _reduces(node.value, reduction)
    }


def _reduces(node: ast.AST, reduction: str) -> bool:
    return isinstance(node, ast.Call) and literal(keyword(node, "reduction")) == reduction


def _sums_at(call: ast.Call, sums: dict[str, int], parts: dict[str, int]) -> int:
    """The line of a call that adds a loss up; 0 for any other call."""
    if _reduces(call, "sum"):
        return call.lineno
    if called(call) in sums:
        return sums[called(call)]
    if last_name(call) == "sum":
        inner = [n for n in ast.walk(call.func) if isinstance(n, ast.Call)]
        inner += [
            n for argument in call.args for n in ast.walk(argument) if isinstance(n, ast.Call)
        ]
        if any(called(n) in parts or _reduces(n, "none") for n in inner):
            return call.lineno
    return 0


def _losses(scope: ast.FunctionDef | ast.Module) -> Iterator[ast.expr]:
    """What `backward()` is called on, or what a framework is given as the loss."""
    for node in _own(scope):
        if isinstance(node, ast.Call) and last_name(node) == "backward":
            yield from node.args[:1]
            if isinstance(node.func, ast.Attribute):
                yield node.func.value
        steps = getattr(scope, "name", "") in {"training_step", "compute_loss"}
        if steps and isinstance(node, ast.Return) and node.value is not None:
            yield node.value


def _values(loss: ast.expr, scope: ast.FunctionDef | ast.Module) -> list[ast.AST]:
    """An expression, and what the names in it were given in the same scope."""
    found: list[ast.AST] = [loss]
    names = loads(loss)
    for node in _own(scope):
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) in names:
            found.append(node.value)
        elif isinstance(node, ast.AugAssign) and dotted(node.target) in names:
            found.append(node)
    return found


def _own(scope: ast.FunctionDef | ast.Module) -> Iterator[ast.AST]:
    """The nodes of a scope, without those of functions and classes inside."""
    pending: list[ast.AST] = list(scope.body)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)


def _is_scaled(value: ast.AST) -> bool:
    return any(
        isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div | ast.Mult)
        for node in ast.walk(value)
    )
