"""node list."""

from __future__ import annotations

import sys

from controlplane.cli.common_options import COMMON, Common
from controlplane.cli.exit_codes import Exit
from controlplane.cli.output import print_json, print_line, print_table
from controlplane.client import BlockingClient


def node_list(*, common: Common = COMMON) -> int:
    """List the nodes that ever joined, with their slots."""
    with BlockingClient(common.home) as client:
        nodes = client.nodes()
    if common.output == "json":
        print_json(nodes)
    elif common.output == "jsonl":
        for node in nodes:
            print_line(node)
    elif common.output == "quiet":
        sys.stdout.writelines(f"{node.node}\n" for node in nodes)
    else:
        rows = [
            (n.node, n.state, n.host, n.slots, n.free, n.model, ", ".join(n.jobs), n.reason)
            for n in nodes
        ]
        print_table(["node", "state", "host", "slots", "free", "device", "jobs", "note"], rows)
    return Exit.OK
