"""Hellos of many nodes at once: one of each node waits, and only so many are under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from schemas.ids import NodeId
from schemas.messages.agent import Hello
from schemas.session import says_the_same

UNDER_WAY: Final = 32  # hellos in the journal's queue: more would hold up everything behind them


@dataclass(slots=True)
class HelloQueue:
    """Who waits to be greeted, in order of arrival, and who is being greeted.

    An agent that repeats its hello takes no second place: the newest one counts, and the
    connection that it came by.
    """

    limit: int = UNDER_WAY
    waiting: dict[NodeId, tuple[bytes, Hello]] = field(default_factory=dict)
    under_way: dict[NodeId, tuple[bytes, Hello]] = field(default_factory=dict)

    def put(self, route: bytes, hello: Hello) -> None:
        """A hello came.

        Args:
            hello: of any node. If the same is under way, only its answer takes the new route.
        """
        begun = self.under_way.get(hello.node)
        if begun is not None and says_the_same(begun[1], hello):
            self.under_way[hello.node] = (route, hello)
            self.waiting.pop(hello.node, None)
        else:
            self.waiting[hello.node] = (route, hello)

    def take(self) -> Hello | None:
        """The next one that may be handled; it is under way then. None: nobody, or not now."""
        if len(self.under_way) >= self.limit:
            return None
        node = next((node for node in self.waiting if node not in self.under_way), None)
        if node is None:
            return None
        self.under_way[node] = self.waiting.pop(node)
        return self.under_way[node][1]

    def done(self, node: NodeId) -> bytes:
        """A hello is durable: the next one may come.

        Returns:
            Where the answer goes.
        """
        return self.under_way.pop(node)[0]
