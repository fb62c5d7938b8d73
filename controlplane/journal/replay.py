"""Records to core state, through the same `handle` that made them."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.core.inputs import Input
from controlplane.core.reactor import Reactor
from schemas.ids import Seconds


def replay(inputs: Iterable[tuple[Seconds, Input]]) -> Reactor:
    """The reactor as it was after the last of `inputs`; its commands were done or are re-cut.

    Args:
        inputs: all of a journal, in order, each with its time in seconds since the epoch.

    Raises:
        CoreError: if `inputs` are none that this release could have taken.
    """
    reactor = Reactor()
    for at, event in inputs:
        reactor.handle(event, at)
    return reactor
