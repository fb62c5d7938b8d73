"""node list, drain and undrain."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from controlplane.cli.common_options import COMMON, Common, NodeName
from controlplane.cli.exit_codes import Exit
from controlplane.cli.output import print_data, print_table
from controlplane.client import BlockingClient
from schemas.messages.client import NodeInfo


def node_list(*, common: Common = COMMON) -> int:
    """List the nodes that ever joined, with their slots."""
    with BlockingClient(common.home) as client:
        nodes = client.nodes()
    if common.output in {"json", "jsonl"}:
        print_data(nodes, common.output)
    elif common.output == "quiet":
        sys.stdout.writelines(f"{node.node}\n" for node in nodes)
    else:
        rows = [
            (n.node, n.state, n.host, n.slots, n.free, n.model, ", ".join(n.jobs), n.reason)
            for n in nodes
        ]
        print_table(["node", "state", "host", "slots", "free", "device", "jobs", "note"], rows)
    return Exit.OK


def drain(
    node: NodeName,
    /,
    *,
    deadline: Annotated[
        float | None, Parameter(help="seconds; what still runs there then is stopped, and waits")
    ] = None,
    reason: Annotated[str, Parameter(help="why, for those whose jobs move")] = "",
    common: Common = COMMON,
) -> int:
    """Empty NODE: its jobs train on elsewhere or wait with their state kept, and none comes."""
    with BlockingClient(common.home) as client:
        return _say(client.drain(node, deadline, reason), common)


def undrain(node: NodeName, /, *, common: Common = COMMON) -> int:
    """Give NODE back: jobs may come again."""
    with BlockingClient(common.home) as client:
        return _say(client.undrain(node), common)


def _say(node: NodeInfo, common: Common) -> int:
    if common.output in {"json", "jsonl"}:
        print_data(node, common.output)
    elif common.output == "quiet":
        sys.stdout.write(f"{node.node}\n")
    else:
        left = f", {len(node.jobs)} jobs there: {', '.join(node.jobs)}" if node.jobs else ""
        sys.stdout.write(f"{node.node} {node.state}{left}\n")
    return Exit.OK
