"""`ones doctor`: checks of this host for its role, with a remedy for each finding."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter

from controlplane.cli.output import COMMON, Common, Exit, say_table
from controlplane.cli.progress import progress
from controlplane.client import Client
from controlplane.client.connection import CLIENT_FILE, CONTROLLER_FILE, find_home, home_folder
from controlplane.service import doctor as of_controller
from nodeagent import doctor as of_agent
from schemas.errors import OnesError
from schemas.host.findings import (
    Finding,
    daemon_of,
    error,
    ok,
    overrides_of,
    refusal,
    release_finding,
    skew_finding,
    versions,
)
from schemas.transport.handshake import handshake
from schemas.transport.keys import check_pair, load_public

COLUMNS: Final = ("role", "check", "state", "found", "remedy")
TIMEOUT_S: Final = 5.0


def doctor(
    *,
    controller: Annotated[
        Path | None, Parameter(help="settings file of the controller of this host")
    ] = None,
    agent: Annotated[Path | None, Parameter(help="settings file of the agent of this host")] = None,
    common: Common = COMMON,
) -> int:
    """Check this host as a client, controller or node; exit with code 1 if something is wrong.

    Nothing is changed. Run it as root for a daemon that systemd starts. Without a file it checks
    the client in --home, and all of a cluster that `ones local up` made there.
    """
    home = home_folder(common.home)
    daemons = [("controller", controller), ("agent", agent)]
    if controller is None and agent is None and (home / CONTROLLER_FILE).is_file():
        made = sorted(home.glob("agent-*.toml"))
        daemons = [("controller", home / CONTROLLER_FILE), *(("agent", one) for one in made)]
    found: list[tuple[str, Finding]] = []
    with progress(common.output, "checking this host"):
        if (home / CLIENT_FILE).is_file() or not (controller or agent):
            found += [("client", one) for one in _guarded(lambda: check_client(home))]
        for kind, path in daemons:
            if path is not None:
                found += check_daemon(kind, path.expanduser().resolve())
    rows = [{"role": role, **msgspec.to_builtins(one)} for role, one in found]
    wrong = [f"{role}: {one.found}; {one.remedy}" for role, one in found if one.state == "error"]
    cells = [[row[column] for column in COLUMNS] for row in rows]
    say_table(common, rows, wrong, COLUMNS, cells)
    return Exit.JOB_FAILED if wrong else Exit.OK


def check_daemon(kind: str, path: Path) -> list[tuple[str, Finding]]:
    """Return the findings for a settings file, each with the name of its daemon."""
    daemon = daemon_of(kind, path)
    with overrides_of(daemon):
        check = of_controller.diagnose if kind == "controller" else of_agent.diagnose
        return [(path.stem, one) for one in _guarded(lambda: check(path, daemon))]


def _guarded(check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield findings; an error of the project's own code, such as a missing file, is the last."""
    try:
        yield from check()
    except OnesError as why:
        yield refusal("settings", why)


def check_client(home: Path) -> list[Finding]:
    """Return the findings for the client in a folder."""

    async def collect() -> list[Finding]:
        return [finding async for finding in _client(home)]

    return asyncio.run(collect())


async def _client(folder: Path) -> AsyncIterator[Finding]:
    yield versions()
    home = find_home(folder)
    keys, server_key = check_pair(home.key), load_public(home.server_key)
    yield ok("keys", f"{home.key} is private, and its halves fit")
    try:
        async with Client(home, TIMEOUT_S) as client:
            before = time.time()
            cluster = await client.cluster()
            after = time.time()
    except OnesError as why:
        addresses = map(str.strip, home.endpoint.split(","))
        refused = (handshake(address, server_key, keys) for address in addresses)
        what = next(filter(None, refused), why.message)
        yield error("controller", f"{home.endpoint}: {what}", why.hint)
        return
    who = f"{cluster.user} ({cluster.role})"
    yield ok("controller", f"{home.endpoint} replies to {who}, policy {cluster.policy}")
    if cluster.stalled:
        yield error("controller", f"refuses submissions: {cluster.stalled}", "free its disk")
    yield release_finding(cluster.release)
    yield skew_finding(cluster.now, before, after)
    for port, kind, use in (
        (cluster.feed_port, "SUB", "events"),
        (cluster.log_port, "DEALER", "output and files"),
    ):
        reasons = {
            host: handshake(f"tcp://{host}:{port}", server_key, keys, kind=kind)
            for host in home.hosts
        }
        if all(reasons.values()):
            what = "; ".join(f"{host}:{port}: {why}" for host, why in reasons.items())
            yield error("ports", f"{use}: {what}", "open the port between the hosts")
        else:
            yield ok("ports", f"{port} for {use} is reachable")
