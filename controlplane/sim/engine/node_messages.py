"""What nodes say to the controller: hello, and the numbered reports of their agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from controlplane.core.inputs import Input, NodeGreeted, NodeReported
from schemas.ids import BootId, NodeId
from schemas.messages.agent import AgentEvent
from schemas.nodes import NodeSpec


class SimulatedNodes:
    """Each node with its life (boot) and the number of its last report."""

    def __init__(self, specs: Sequence[NodeSpec], handle: Callable[[Input], None]) -> None:
        """Begin before any of them said hello.

        Args:
            handle: takes what the controller hears.
        """
        self._specs = {spec.node: spec for spec in specs}
        self._handle = handle
        self._boots: dict[NodeId, BootId] = {}
        self._reported: dict[NodeId, int] = {}

    def greet_all(self) -> None:
        """Every node says hello for the first time."""
        for node in self._specs:
            self.greet(node)

    def greet(self, node: NodeId) -> None:
        """It begins a new life, empty.

        Args:
            node: of the cluster; its reports are counted from 1 again.
        """
        life = int(self._boots.get(node, BootId("0"))) + 1
        self._boots[node], self._reported[node] = BootId(str(life)), 0
        self._handle(
            NodeGreeted(node=node, boot=self._boots[node], spec=self._specs[node], workers=())
        )

    def report(self, node: NodeId, event: AgentEvent) -> None:
        """Its agent reports something.

        Args:
            event: gets the next number of this life.
        """
        self._reported[node] += 1
        boot, seq = self._boots[node], self._reported[node]
        self._handle(NodeReported(node=node, boot=boot, seq=seq, event=event))
