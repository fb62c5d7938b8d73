"""A node that cannot start workers is offered none, until its agent says that it can again."""

from __future__ import annotations

from controlplane.core.handler_context import HandlerContext
from controlplane.core.model.node import Node


def note_problems(ctx: HandlerContext, node: Node, problems: tuple[str, ...]) -> None:
    """A node's agent says what keeps it from starting workers; those that train go on.

    Args:
        problems: in words, with what helps; none: it is well.
    """
    if problems == node.problems:
        return
    if bool(problems) is not bool(node.problems):
        ctx.state.slot_index.touch_node(node.node)
        ctx.ask = True
    node.problems = problems
    if problems:
        ctx.announce("node.unhealthy", node=node, detail={"reason": "; ".join(problems)})
    else:
        ctx.announce("node.healthy", node=node)
