"""`ones cluster`: nodes that another engine provides."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from cyclopts import App, Parameter

from controlplane.autoscaler import settings
from controlplane.autoscaler.app import STATUS_FILE, Status, engine_of
from controlplane.cli import local
from controlplane.cli.operators import write_key
from controlplane.cli.output import COMMON, Common, say, seconds_of
from controlplane.cli.progress import progress
from controlplane.client import BlockingClient, find_home
from controlplane.client.connection import home_folder
from controlplane.client.formats import second
from schemas.errors import BadFieldError, OnesError, SettingsError, UnreachableError
from schemas.host.settings import read_toml

AGENT_FILE: Final = "autoscaler-agent.toml"
JOIN: Final = "join"  # folder of the join key
ALL: Final = 10_000  # nodes; --nodes of Ray unless given
RELEASE_S: Final = 180.0  # until all machines are returned
POLL_S: Final = 0.5
AGENT: Final = """\
# Settings of the agents that the autoscaler starts. Its script sets the name, the address and the
# folders of each machine.
node = "{prefix}"
devices = "auto"
checkpoints = "state/checkpoints"

[controller]
host = "{host}"
agents = {port}

[notice]
on_term_s = {on_term_s}
{jobs}"""
TRUST: Final = """
[jobs]
trust_each_other = true  # jobs run as this user, like other work of the engine
"""

cluster = App(name="cluster", help="Get nodes from Slurm or Ray, and return them.")


@cluster.command
def up(
    *,
    slurm: Annotated[bool, Parameter(help="start agents in jobs of Slurm")] = False,
    ray: Annotated[
        bool, Parameter(help="start agents as actors on the Ray cluster of RAY_ADDRESS")
    ] = False,
    nodes: Annotated[
        int | None,
        Parameter(name=("--nodes", "-N"), help="least number of nodes (default: 1, or all of Ray)"),
    ] = None,
    max_nodes: Annotated[
        int | None, Parameter(help="most nodes, while jobs wait for slots (default: --nodes)")
    ] = None,
    partition: Annotated[str | None, Parameter(help="partition of Slurm")] = None,
    time_: Annotated[
        str | None, Parameter(name=("--time", "-t"), help="time limit of each node, as in sbatch")
    ] = None,
    gpus: Annotated[int | None, Parameter(help="GPUs of each node (default: none)")] = None,
    slots: Annotated[
        int | None, Parameter(help="CPU slots of a node without GPUs (default: its cores)")
    ] = None,
    notice: Annotated[
        str | None, Parameter(help="jobs have this long to leave a node that ends (default: 2m)")
    ] = None,
    wait: Annotated[
        str | None, Parameter(help="nodes are requested when jobs wait so long (default: 1m)")
    ] = None,
    idle: Annotated[
        str | None, Parameter(help="a node without jobs is returned after this (default: 5m)")
    ] = None,
    option: Annotated[
        tuple[str, ...] | None,
        Parameter(help="further option of sbatch, such as --option=--account=vision; repeatable"),
    ] = None,
    address: Annotated[
        str | None, Parameter(help="of this host, as nodes reach it (default: as the engine does)")
    ] = None,
    dir_: Annotated[Path | None, Parameter(name="--dir", help=local.DIR_HELP)] = None,
    common: Common = COMMON,
) -> None:
    """Start a cluster whose nodes come from Slurm or Ray, or change its options.

    If the folder has the key of an existing cluster, its controller is used.
    """
    if slurm == ray:
        raise BadFieldError("no engine, or several", "give --slurm or --ray", "slurm")
    engine_name = "ray" if ray else "slurm"
    home = home_folder(dir_ or common.home).resolve()
    stated = {
        "min_nodes": nodes, "max_nodes": max_nodes,
        "wait_s": None if wait is None else seconds_of(wait, "wait"),
        "idle_s": None if idle is None else seconds_of(idle, "idle"),
    }  # fmt: skip
    notice_s = None if notice is None else seconds_of(notice, "notice")
    of_slurm = {
        "partition": partition, "time": time_, "gpus": gpus, "slots": slots, "options": option,
    }  # fmt: skip
    if ray and (wrong := [name for name, value in of_slurm.items() if value is not None]):
        raise BadFieldError(f"--{wrong[0]} is an option of Slurm", "leave it out", wrong[0])
    of_ray = {"address": os.environ.get("RAY_ADDRESS")}
    of_engine = {**(of_ray if ray else of_slurm), "notice_s": notice_s}
    with progress(common.output, "starting the cluster"), local.lock(home):
        is_new = not (home / local.AUTOSCALER_FILE).exists()
        found = _write_settings(home, engine_name, stated, of_engine)
        try:
            host, on_term_s = asyncio.run(_ask(found, home))
        except OnesError:
            if is_new:  # else `ones local` would take the folder for one with an engine
                (home / local.AUTOSCALER_FILE).unlink()
            raise
        if not (home / "client.toml").exists():
            local.create_controller(home, address or _own_address(host))
        _start_controller(home)
        _let_join(home, engine_of(found, home).prefix, on_term_s)
        _start_autoscaler(home)
    endpoint = find_home(home).endpoint
    data = {"dir": str(home), "endpoint": endpoint, "min_nodes": found.min_nodes,
            "max_nodes": found.max_nodes}  # fmt: skip
    count = "all" if found.min_nodes == ALL else str(found.min_nodes)
    if found.max_nodes > found.min_nodes:
        count = f"{count} to {found.max_nodes}"
    nodes_from = f"{count} nodes from {engine_name.capitalize()}"
    lines = [
        f"cluster in {home} is up at {endpoint}, with {nodes_from}",
        f"export ONES_HOME={home}",
        "`ones cluster status` shows the requests and why they are made",
    ]
    say(common, data, *lines, quiet=lines[1:2])


@cluster.command
def status(
    *,
    dir_: Annotated[Path | None, Parameter(name="--dir", help=local.DIR_HELP)] = None,
    common: Common = COMMON,
) -> None:
    """Show the machines of the autoscaler, and its decisions with their reasons."""
    home = home_folder(dir_ or common.home).resolve()
    try:
        data = (home / "run" / STATUS_FILE).read_bytes()
        known = msgspec.json.decode(data, type=Status)
    except (OSError, msgspec.DecodeError):
        problem = f"no autoscaler has run in {home}"
        raise SettingsError(problem, "`ones cluster up` starts one", "dir") from None
    late_s = time.time() - known.time
    lines = [f"{known.engine}: {known.min_nodes} to {known.max_nodes} nodes; {known.note}"]
    if late_s > 60.0:  # noqa: PLR2004 - the longest interval
        lines.append(f"the autoscaler is not running since {late_s:.0f} s; `ones cluster up`")
    if known.problem:
        lines.append(f"problem: {known.problem}")
    lines += [
        f"  {one.id:>8}  {one.node or 'waits'}"
        + (f", until {second(one.ends_at)}" if one.ends_at is not None else "")
        + (f": {one.leaves or one.note}" if one.leaves or one.note else "")
        for one in known.allocations
    ]
    lines += [
        f"{second(one.time)}  {one.action} {one.target}: {one.why}" for one in known.decisions
    ]
    say(common, known, *lines, quiet=(one.id for one in known.allocations))


@cluster.command
def down(
    *,
    dir_: Annotated[Path | None, Parameter(name="--dir", help=local.DIR_HELP)] = None,
    common: Common = COMMON,
) -> None:
    """Return all machines and stop the cluster; the next `ones cluster up` resumes the jobs."""
    home = home_folder(dir_ or common.home).resolve()
    file = home / local.AUTOSCALER_FILE
    if not file.exists():
        problem = f"no cluster with nodes of another engine in {home}"
        raise SettingsError(problem, "give the folder of `ones cluster up`", "dir")
    with progress(common.output, "returning the nodes"), local.lock(home):
        parts = local.parts_of(home)
        left = [local.stop(part) for part in parts if part.config == file]
        asyncio.run(_release_all(settings.load(file), home))
        left += [local.stop(part) for part in parts if part.config != file]
    if any(left):
        problem = f"cluster in {home} is not down: {'; '.join(filter(None, left))}"
        raise SettingsError(problem, "resolve this, then run `ones cluster down` again")
    text = f"cluster in {home} is down"
    say(common, {"dir": str(home), "state": "down"}, text, quiet=[text])


async def _ask(found: settings.AutoscalerSettings, home: Path) -> tuple[str, float]:
    """Return the address of the engine's controller, and the time that TERM leaves to jobs."""
    async with contextlib.aclosing(engine_of(found, home)) as engine:
        return await engine.controller_host(), await engine.on_term_s()


def _own_address(controller_host: str) -> str:
    """Return this host's address on the way to the engine's controller."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((controller_host, 9))  # sends nothing
        except OSError as error:
            problem = f"the address of this host is not known: {error.strerror}"
            raise SettingsError(problem, "give --address", "address") from None
        return str(probe.getsockname()[0])


def _start_controller(home: Path) -> None:
    parts = [part for part in local.parts_of(home) if part.module == "controlplane.service"]
    if parts[0].config.exists():
        started = {part.name: part.start() for part in parts if part.pid() is None}
        local.await_ready(home, parts, started)


def _write_settings(
    home: Path, engine: str, stated: Mapping[str, Any], of_engine: Mapping[str, Any]
) -> settings.AutoscalerSettings:
    """Merge the stated options into the autoscaler's settings, and return all of them."""
    file = home / local.AUTOSCALER_FILE
    known = read_toml(file) if file.exists() else {}
    name = f"ones-{os.urandom(4).hex()}"
    least = ALL if engine == "ray" else 1
    table: dict[str, Any] = {"name": name, "min_nodes": least, **known, "engine": engine}
    table.update({key: value for key, value in stated.items() if value is not None})
    if stated["max_nodes"] is None:
        table["max_nodes"] = max(table.get("max_nodes", 0), table["min_nodes"])
    table.update(python=sys.executable, pid_file="run/autoscaler.pid")
    inner = {key: value for key, value in of_engine.items() if value is not None}
    table[engine] = {**known.get(engine, {}), **inner}
    fresh = file.with_suffix(".checked")
    try:
        local.write_settings(fresh, _toml(table))
        found = settings.load(fresh)
        fresh.replace(file)
    finally:
        fresh.unlink(missing_ok=True)
    return found


def _toml(table: Mapping[str, Any]) -> str:
    """Return a table of values and of tables of values as TOML."""
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in plain.items()]
    for name in table.keys() - plain.keys():
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in table[name].items()]
    return "\n".join(lines) + "\n"


def _let_join(home: Path, prefix: str, on_term_s: float) -> None:
    """Make the join key, and settings of the agents."""
    own = find_home(home)
    with BlockingClient(own) as client:
        if not (home / JOIN / "client.toml").exists():
            client.add_key(write_key(home / JOIN, prefix, "join", own), prefix, "join")
        port = client.cluster().agents_port
    text = AGENT.format(
        prefix=prefix, host=",".join(one.strip("[]") for one in own.hosts), port=port,
        on_term_s=on_term_s, jobs=TRUST if os.getuid() else "",
    )  # fmt: skip
    local.write_settings(home / AGENT_FILE, text)
    if not os.getuid():  # jobs may run as other users, who pass through these
        for folder in (home, home / "state", home / "state/work", home / "state/checkpoints"):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o711)


def _start_autoscaler(home: Path) -> None:
    """Start the autoscaler, or start it again with the present settings."""
    part = local.parts_of(home)[-1]
    if left := local.stop(part):
        raise UnreachableError(left)
    process = part.start()
    while part.pid() is None:
        if process.poll() is not None:
            said = part.log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise UnreachableError(f"{part.name} did not start: {said[-1] if said else ''}")
        time.sleep(local.POLL_S)


async def _release_all(found: settings.AutoscalerSettings, home: Path) -> None:
    """Return all machines and wait until they are gone."""
    async with contextlib.aclosing(engine_of(found, home)) as engine:
        for one in await engine.allocations():
            await engine.release(one.id)
        deadline = time.monotonic() + RELEASE_S
        while left := await engine.allocations():
            if time.monotonic() > deadline:
                names = ", ".join(one.id for one in left)
                raise UnreachableError(f"not returned after {RELEASE_S:.0f} s: {names}")
            await asyncio.sleep(POLL_S)
