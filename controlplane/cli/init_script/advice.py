"""Lines of a script that a person should look at, besides those that `ones init` changes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Final

from controlplane.cli.init_script.frameworks import refused_options
from controlplane.cli.init_script.literal_numbers import literal
from controlplane.cli.init_script.script_facts import Facts
from controlplane.cli.init_script.summed_losses import summed_losses
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
    "the loss is a sum over the batch, so that gradients depend on how the batch is split: divide "
    "it by len(inputs) before backward(); for SGD, multiply the learning rate by batch_size"
)
OWN_RATE: Final = (
    "the rate is set in each step from the script's own counter. A worker that joins or resumes "
    "has another step counter. Make a scheduler (LambdaLR) after load(), or count with agent.step"
)
Line = tuple[int, str]


def advice(facts: Facts, agent: str) -> list[str]:
    """Return the lines that several workers run differently from one process.

    Args:
        agent: the name of the agent in the script.
    """
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
                what = "a step for several batches is refused: step in each, and raise batch_size"
                yield (
                    node.lineno,
                    f"{what}; a share above max_local_batch is computed in several passes",
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
            what = "two loaders are read side by side, and agent.load() deals out one"
            yield loop.lineno, f"{what}: give it one dataset whose samples have both parts"


# --- optimizers, gradients and datasets that the library refuses


def _unusable(tree: ast.Module) -> Iterator[Line]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            names = ", ".join(alias.name for alias in node.names)
            plain = f"from {node.module} import {names}" if node.module else f"import {names}"
            what = "a relative import, but a job's script is run as a file of no package"
            yield node.lineno, f"{what}: write `{plain}`, with the module beside the script"
        if isinstance(node, ast.Call) and last_name(node) == "LBFGS":
            what = "LBFGS evaluates its closure several times in a step, which is refused"
            yield (
                node.lineno,
                f"{what}: use an optimizer that evaluates it once, such as SGD or Adam",
            )
        if isinstance(node, ast.Call) and literal(keyword(node, "sparse")) is True:
            yield node.lineno, "sparse gradients are refused in a group: leave `sparse=True` out"
        if isinstance(node, ast.ClassDef) and "IterableDataset" in {
            dotted(base).rpartition(".")[2] for base in node.bases
        }:
            methods = {getattr(one, "name", "") for one in node.body}
            if "__len__" not in methods:
                what = f"{node.name} has no length, which is refused"
                yield node.lineno, f"{what}: give it a __len__ that returns the samples of one pass"
