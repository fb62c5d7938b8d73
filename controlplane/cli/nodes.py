"""`ones node`: list, drain and undrain nodes, and print settings of a new agent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter

from controlplane.cli.output import COMMON, Common, Exit, NodeName, print_data, print_table
from controlplane.client import BlockingClient, find_home
from nodeagent.settings import AgentSettings, Controller
from schemas.host.settings import convert
from schemas.wire.client import NodeInfo

DEFAULTS: Final = Controller()
TEMPLATE: Final = """\
# Settings of the agent of node {node}: save them as FOLDER/agent-{node}.toml on its host, with the
# keys that `ones key add {node} --role node --out FOLDER` makes, then check and start it:
#   ones config check FOLDER/agent-{node}.toml
#   ones-agent --config FOLDER/agent-{node}.toml
# Paths are relative to FOLDER. Further settings: docs/operations.md.
node = "{node}"
address = "127.0.0.1"  # this host's address, as other nodes see it
devices = "auto"  # all GPUs, else CPU slots; "cpu": CPU slots
slots = 4  # CPU slots, where GPUs are not used
key = "keys/{node}.key_secret"
run = "run/{node}"  # sockets and folders of workers; on a local disk
work = "state/work/{node}"  # working directories of jobs
checkpoints = "state/checkpoints"  # one folder, shared by all nodes that a job may resume on
pid_file = "run/agent-{node}.pid"

[controller]
host = "{host}"
agents = {agents}
key = "keys/server.key"
"""


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


def template(
    name: Annotated[str, Parameter(help="name of the new node")], /, *, common: Common = COMMON
) -> int:
    """Print the settings file of an agent that adds a new node to this cluster."""
    convert(AgentSettings, {"node": name}, Path("the new node"))
    home = find_home(common.home)
    with BlockingClient(home) as client:
        port = client.cluster().agents_port
    host = home.host.strip("[]")
    text = TEMPLATE.format(node=name, host=host, agents=port or DEFAULTS.agents)
    if common.output in {"json", "jsonl"}:
        print_data({"node": name, "settings": text}, common.output)
    else:
        sys.stdout.write(text)
    return Exit.OK


def drain(
    node: NodeName,
    /,
    *,
    deadline: Annotated[
        float | None,
        Parameter(help="seconds after which remaining workers are stopped (default: never)"),
    ] = None,
    reason: Annotated[str, Parameter(help="shown to the owners of the jobs that move")] = "",
    common: Common = COMMON,
) -> int:
    """Drain NODE: its jobs move or wait with their state kept, and no job starts there."""
    with BlockingClient(common.home) as client:
        return _say(client.drain(node, deadline, reason), common)


def undrain(node: NodeName, /, *, common: Common = COMMON) -> int:
    """Return NODE to service: jobs may start there again."""
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
