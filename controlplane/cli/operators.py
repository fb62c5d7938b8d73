"""`ones node` and `ones key`: commands for operators and admins."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import time
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter
from msgspec.structs import asdict

from controlplane.cli.output import COMMON, UNITS, Common, NodeName, say, say_table, seconds_of
from controlplane.client import BlockingClient
from controlplane.client.connection import CLIENT_FILE, Home, find_home
from controlplane.client.formats import byte_count, second
from nodeagent.settings import AgentSettings, Controller
from schemas.errors import BadFieldError, OnesError, SettingsError
from schemas.host.settings import convert
from schemas.ids import Seconds
from schemas.nodes import Reservation
from schemas.relations import stated_time
from schemas.transport.keys import check_name, write_keys
from schemas.wire.client import KeyInfo, NodeInfo, Role

SERVER: Final = "server"
WHEN: Final = "30d, 12h, or a date such as 2027-01-31 or 2027-01-31T12:00:00Z (default: never)"

key = App(name="key", help="Manage keys and their rights (admins).")


@key.command(name="add")
def add(
    name: str,
    /,
    *,
    role: Role,
    project: Annotated[
        tuple[str, ...], Parameter(help="project whose jobs the key may see; repeatable")
    ] = (),
    expires: Annotated[str | None, Parameter(help=WHEN)] = None,
    out: Annotated[Path | None, Parameter(help="folder for NAME (default: ./NAME)")] = None,
    common: Common = COMMON,
) -> None:
    """Make a key pair for NAME and authorise its public key; the secret key stays in the folder."""
    check_name(name, "name")
    home, folder = find_home(common.home), (out or Path(name)).expanduser()
    ends = None if expires is None else _time_of(expires)
    if name == SERVER:
        problem = f"name: {name} is reserved for the controller's key"
        raise BadFieldError(problem, "choose another name", "name")
    files = secret, _ = [folder / "keys" / f"{name}.{end}" for end in ("key_secret", "key")]
    for path in files:
        if path.exists():
            problem = f"{path} exists already"
            raise SettingsError(problem, "choose another --out, or move it away", "out")
    public = write_key(folder, name, role, home)
    try:
        with BlockingClient(home) as client:
            added = client.add_key(public, name, role, project, ends)
    except OnesError:
        for path in files:
            path.unlink(missing_ok=True)
        raise
    use = "" if role == "node" else f"; ONES_HOME={folder} uses it"
    text = f"authorised {name}; its secret key is {secret}{use}"
    say(common, {"folder": str(folder), "key": added}, text, quiet=[text])


@key.command(name="list")
def list_(
    *,
    all_: Annotated[
        bool, Parameter(name=("--all", "-a"), negative=(), help="also revoked and expired keys")
    ] = False,
    common: Common = COMMON,
) -> None:
    """List the valid keys."""
    with BlockingClient(common.home) as client:
        found = client.keys()
        _show(tuple(one for one in found if all_ or one.state == "valid"), common)


@key.command(name="revoke")
def revoke(key_: Annotated[str, Parameter(name="KEY")], /, *, common: Common = COMMON) -> None:
    """Revoke a public key, or all keys of a name, permanently, and close their sessions."""
    with BlockingClient(common.home) as client:
        _show(client.revoke_key(key_), common)


def write_key(folder: Path, name: str, role: str, home: Home) -> str:
    """Write a new key into a folder that is usable as ONES_HOME; return the public key.

    The folder of a node's key has only keys.
    """
    keys, client = folder / "keys", folder / CLIENT_FILE
    try:
        pair = write_keys(keys, name)
        if not (keys / f"{SERVER}.key").exists():
            shutil.copyfile(home.server_key, keys / f"{SERVER}.key")
        if role != "node" and not client.exists():
            secret = json.dumps(f"keys/{name}.key_secret", ensure_ascii=False)
            text = f'endpoint = "{home.endpoint}"\nkey = {secret}\n'
            client.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"{error.filename or keys}: {error.strerror}"
        raise SettingsError(problem, "choose another --out", "out") from None
    return pair.public.decode()


def _show(keys: tuple[KeyInfo, ...], common: Common) -> None:
    rows = [
        (one.name, one.role, ", ".join(one.projects), one.state,
         "" if one.expires is None else second(one.expires), one.kept, one.by, one.public)
        for one in keys
    ]  # fmt: skip
    columns = ["name", "role", "projects", "state", "expires", "kept", "by", "public"]
    say_table(common, keys, (one.public for one in keys), columns, rows)


def _time_of(text: str) -> float:
    number, unit = text[:-1], UNITS.get(text[-1:])
    if unit and number.replace(".", "", 1).isdecimal():
        return time.time() + float(number) * unit
    try:
        said = dt.datetime.fromisoformat(text)
    except ValueError:
        problem = f"expires: {text[:40]!r} is neither a duration nor a date"
        raise BadFieldError(problem, WHEN, "expires") from None
    return (said if said.tzinfo else said.replace(tzinfo=dt.UTC)).timestamp()


DEFAULTS: Final = Controller()
TEMPLATE: Final = """\
# Settings of the agent of node {node}: save them as FOLDER/agent-{node}.toml on its host, with the
# keys that `ones key add {node} --role node --out FOLDER` makes, then check and start it:
#   ones config check FOLDER/agent-{node}.toml
#   ones-agent --config FOLDER/agent-{node}.toml
# Paths are relative to FOLDER. Further settings: docs/operations/settings.md.
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


def node_list(*, common: Common = COMMON) -> None:
    """List all nodes that have ever joined, with their slots."""
    with BlockingClient(common.home) as client:
        nodes = client.nodes()
    rows = [
        (n.node, n.state, n.host, n.slots, n.free, n.model, n.cores, byte_count(n.memory_bytes),
         ", ".join(f"{name}={value}" for name, value in n.labels.items()),
         ", ".join(n.jobs), n.reason)
        for n in nodes
    ]  # fmt: skip
    columns = ["node", "state", "host", "slots", "free", "device", "cores", "memory", "labels",
               "jobs", "note"]  # fmt: skip
    say_table(common, nodes, (node.node for node in nodes), columns, rows)


def template(
    name: Annotated[str, Parameter(help="name of the new node")], /, *, common: Common = COMMON
) -> None:
    """Print the settings file of an agent that adds a new node to this cluster."""
    convert(AgentSettings, {"node": name}, Path("the new node"))
    home = find_home(common.home)
    with BlockingClient(home) as client:
        port = client.cluster().agents_port
    host = ",".join(one.strip("[]") for one in home.hosts)
    text = TEMPLATE.format(node=name, host=host, agents=port or DEFAULTS.agents)
    lines = text.splitlines()
    say(common, {"node": name, "settings": text}, *lines, quiet=lines)


def drain(
    node: NodeName,
    /,
    *,
    deadline: Annotated[
        str | None,
        Parameter(
            name=["--deadline", "--notice"],
            help="10m, 90s or seconds, after which remaining workers are stopped (default: never)",
        ),
    ] = None,
    reason: Annotated[str, Parameter(help="shown to the owners of the jobs that move")] = "",
    common: Common = COMMON,
) -> None:
    """Drain NODE: its jobs move or wait without losing state, and no job starts on it."""
    with BlockingClient(common.home) as client:
        within_s = None if deadline is None else seconds_of(deadline, "deadline")
        _say(client.drain(node, within_s, reason), common)


def cordon(
    node: NodeName,
    /,
    *,
    reason: Annotated[str, Parameter(help="shown to users whose jobs wait")] = "",
    common: Common = COMMON,
) -> None:
    """Start no new job on NODE; jobs that it has stay there. `undrain` ends it."""
    with BlockingClient(common.home) as client:
        _say(client.cordon(node, reason), common)


def reserve(
    *nodes: NodeName,
    begin: Annotated[str, Parameter(name="--from", help="2026-12-01T08:00Z, or +2h")],
    lasts: Annotated[str, Parameter(name="--for", help="30m, 2h or 1d")],
    project: Annotated[
        tuple[str, ...], Parameter(help="project whose jobs may run there; repeatable")
    ] = (),
    user: Annotated[
        tuple[str, ...], Parameter(help="user whose jobs may run there; repeatable")
    ] = (),
    reason: Annotated[str, Parameter(help="shown to users whose jobs wait or move")] = "",
    common: Common = COMMON,
) -> None:
    """Reserve each NODE for projects and users, or, without these, for maintenance.

    Other jobs leave before it begins. It ends by itself, or with `node unreserve`.
    """
    starts = stated_time(begin, Seconds(time.time()))
    ends = Seconds(starts + seconds_of(lasts, "for"))
    asked = Reservation(begin=starts, end=ends, reason=reason, projects=project, users=user)
    with BlockingClient(common.home) as client:
        found = client.reserve(nodes, asked)
    made = [one.id for one in found[0].reservations if one.begin == starts]
    lines = (f"{node.node}: {node.reason}" for node in found)
    say(common, found, f"{made[0]} reserves {len(found)} nodes", *lines, quiet=made)


def reservations(*, common: Common = COMMON) -> None:
    """List the reservations of nodes."""
    with BlockingClient(common.home) as client:
        nodes = client.nodes()
    found: dict[str, tuple[Reservation, list[str]]] = {}
    for node in nodes:
        for one in node.reservations:
            found.setdefault(one.id, (one, []))[1].append(node.node)
    rows = [
        (name, ", ".join(names), second(one.begin), second(one.end),
         ", ".join((*one.projects, *one.users)) or "maintenance", one.user, one.reason)
        for name, (one, names) in found.items()
    ]  # fmt: skip
    columns = ["id", "nodes", "from", "until", "for", "by", "reason"]
    data = [{**asdict(one), "nodes": names} for one, names in found.values()]
    say_table(common, data, found, columns, rows)


def unreserve(
    reservation: Annotated[str, Parameter(help="its id, as in `ones node reservations`")],
    /,
    *,
    common: Common = COMMON,
) -> None:
    """Cancel a reservation on all its nodes; other jobs may start there again."""
    with BlockingClient(common.home) as client:
        found = client.cancel_reservation(reservation)
    names = [node.node for node in found]
    say(common, found, f"{reservation} cancelled on {', '.join(names)}", quiet=names)


def undrain(node: NodeName, /, *, common: Common = COMMON) -> None:
    """Return NODE to service: jobs may start on it again."""
    with BlockingClient(common.home) as client:
        _say(client.undrain(node), common)


def forget(node: NodeName, /, *, common: Common = COMMON) -> None:
    """Remove NODE, which is lost and will not come back; a new agent may use its name."""
    with BlockingClient(common.home) as client:
        gone = client.forget_node(node)
    say(common, gone, f"{gone.node} forgotten", quiet=[gone.node])


def _say(node: NodeInfo, common: Common) -> None:
    left = f", {len(node.jobs)} jobs there: {', '.join(node.jobs)}" if node.jobs else ""
    say(common, node, f"{node.node} {node.state}{left}", quiet=[node.node])
