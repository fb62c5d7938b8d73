"""Checks what operators ask of nodes, before it becomes an input."""

from __future__ import annotations

import math
from typing import Final

from controlplane.core.inputs import DrainRequested, UndrainRequested
from controlplane.core.state import State
from schemas.errors import BadFieldError, UnknownNodeError, suggestion
from schemas.link import Identity
from schemas.messages.client import DrainNode, UndrainNode

LONGEST_S: Final = 1e8  # three years
REASON_CHARACTERS: Final = 500


def drain_input(
    state: State, request: DrainNode | UndrainNode, who: Identity
) -> DrainRequested | UndrainRequested | None:
    """The input that a request becomes.

    Returns:
        None if there is nothing to do: the node is not drained.

    Raises:
        UnknownNodeError: if no such node ever joined.
        BadFieldError: if the deadline is no time that can come.
    """
    node = state.nodes.get(request.node)
    if node is None:
        what = f"no node {request.node[:64]!r} ever joined"
        hint = suggestion(request.node, state.nodes, "`ones node list` has every one")
        raise UnknownNodeError(what, hint, "node")
    if isinstance(request, UndrainNode):
        return None if node.drain is None else UndrainRequested(node=node.node, user=who.name)
    within_s = request.within_s
    if within_s is not None and not (math.isfinite(within_s) and 0 <= within_s <= LONGEST_S):
        what = f"within_s: {within_s} is not between 0 and {LONGEST_S:g} seconds"
        raise BadFieldError(what, "leave it out to wait for as long as it takes", "within_s")
    if len(request.reason) > REASON_CHARACTERS:
        what = f"reason: {len(request.reason)} characters, at most {REASON_CHARACTERS}"
        raise BadFieldError(what, "say it shorter", "reason")
    return DrainRequested(node=node.node, user=who.name, reason=request.reason, within_s=within_s)
