"""What to look at in a script besides the lines that change."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from controlplane.cli.init_script.script_facts import Facts
from controlplane.cli.init_script.syntax import called, last_name

ONE_IS_ENOUGH: Final = frozenset({"torch.save", "SummaryWriter", "wandb.init"})


def advice(facts: Facts, agent: str) -> list[str]:
    """What a group of several workers would do otherwise than one process, line by line.

    Args:
        facts: of the script.
        agent: what the agent is called in it.

    Returns:
        In the order of the lines.
    """
    found = [*_for_one_worker(facts.source.tree, agent), *_inside_of_batches(facts)]
    return [f"line {line}: {what}" for line, what in sorted(set(found))]


def _for_one_worker(tree: ast.Module, agent: str) -> Iterator[tuple[int, str]]:
    asked = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and "rank" in ast.unparse(test.test)
        for node in ast.walk(test)
    }
    for node in ast.walk(tree):
        name, line = called(node), getattr(node, "lineno", 0)
        if name in ONE_IS_ENOUGH and id(node) not in asked:
            yield line, f"every worker does {name}(): ask `{agent}.rank == 0` first"
        elif last_name(node) == "spawn" and name.split(".")[0] in {"mp", "torch"}:
            yield line, "the cluster starts the processes: call the function once"


def _inside_of_batches(facts: Facts) -> Iterator[tuple[int, str]]:
    """Every worker takes every batch, and each batch is one step."""
    optimizer = facts.optimizer.name if facts.optimizer else "optimizer"
    epochs = facts.epoch_loop.statement if facts.epoch_loop else None
    for loop in ast.walk(facts.source.tree):
        trains = any(last_name(node) == "backward" for node in ast.walk(loop))
        if not isinstance(loop, ast.For) or loop is epochs or not trains:
            continue
        for node in ast.walk(loop):
            if isinstance(node, ast.If):
                inner = [n for part in node.body for n in ast.walk(part)]
                if any(called(n) == f"{optimizer}.step" for n in inner):
                    yield node.lineno, "not each batch is a step: let `max_local_batch` divide it"
                if any(isinstance(n, ast.Break) for n in inner):
                    yield node.lineno, "the batch loop is left early: all workers have to, at once"
