"""Checks of `ones doctor` for a controller: the settings, and what they need of this host."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import psutil

from controlplane.service import settings_check
from controlplane.service.keys import FILE, KeyFile, KeyTable
from controlplane.service.settings import ControllerSettings
from controlplane.service.standby.lease import Held
from controlplane.service.standby.lease_stores import open_store
from schemas.errors import OnesError, SettingsError
from schemas.host.checks import check_file
from schemas.host.findings import (
    Finding,
    clock_synchronised,
    error,
    ok,
    open_files,
    refusal,
    settings_findings,
    space,
    sync_finding,
    sync_time,
    versions,
    warning,
)
from schemas.transport.keys import Identity, check_pair, load_authorised

MODULES: Final = ("numpy", "prometheus_client", "scipy", "uvloop")
DAY_S: Final = 86_400.0
SOON_S: Final = 14 * DAY_S  # before a key expires
MIN_FREE_BYTES: Final = 1 << 30


def diagnose(path: Path, daemon: psutil.Process | None = None) -> Iterator[Finding]:
    """Yield the findings for a controller's settings file, and for its daemon if it runs.

    Raises:
        SettingsError: if the file cannot be read, or is not TOML.
    """
    yield versions("controller", MODULES)
    problems = settings_check.check(path)
    yield from settings_findings(problems)
    _, settings = check_file(ControllerSettings, path)
    listen, home = settings.listen, path.parent
    if not any(problem.field.startswith("listen.") for problem in problems):
        ports = [getattr(listen, name) for name in listen.__struct_fields__ if name != "host"]
        holder = f"used by process {daemon.pid} with these settings" if daemon else "free"
        yield ok("ports", f"{', '.join(map(str, filter(None, ports)))}: {holder}")
    yield from _keys(settings, home)
    state = home / settings.state
    yield from space("state", state, MIN_FREE_BYTES)
    if state.is_dir():
        yield sync_finding(f"state {state}", sync_time(state))
    if settings.standby.lease and not any(one.field == "standby.lease" for one in problems):
        yield _lease(settings, home)
    yield open_files(daemon)
    yield clock_synchronised()


def _keys(settings: ControllerSettings, home: Path) -> Iterator[Finding]:
    """Check the keys; `settings_check` has reported files that cannot be read."""
    server, state = home / settings.keys.server, home / settings.state
    try:
        check_pair(server)
        listed = load_authorised(home / settings.keys.authorised)
        online = KeyFile(state / FILE)
        known = KeyTable(online, listed).known.listed
    except SettingsError as why:
        yield refusal("keys", why)
        return
    if state.is_dir() and (owner := state.stat().st_uid) not in {0, server.stat().st_uid}:
        what = f"{server} does not belong to the owner of {state}, as whom the controller runs"
        yield error("keys", what, f"chown {owner} {server}, or use a credential of systemd")
    yield keys_finding(known, time.time())


def keys_finding(known: Mapping[bytes, Identity], now: float) -> Finding:
    """Judge the keys that may connect, at a time in seconds since the epoch."""
    valid = [one for one in known.values() if one.expires is None or one.expires > now]
    roles = Counter(one.role for one in valid)
    found = ", ".join(f"{count} {role}" for role, count in sorted(roles.items())) or "none"
    if not roles["admin"]:
        return warning("keys", f"no key of an admin ({found})", "add one to authorised.toml")
    ends = {one.name: one.expires for one in known.values() if one.expires is not None}
    ended = sorted(name for name, end in ends.items() if end <= now)
    soon = sorted(name for name, end in ends.items() if now < end < now + SOON_S)
    if ended or soon:
        words = [f"expired: {', '.join(ended)}"] * bool(ended)
        words += [f"expire within {SOON_S / DAY_S:.0f} days: {', '.join(soon)}"] * bool(soon)
        return warning("keys", "; ".join(words), "`ones key add` makes new ones")
    return ok("keys", found)


def _lease(settings: ControllerSettings, home: Path) -> Finding:
    standby = settings.standby

    async def read() -> Held:
        store = open_store(standby.lease, standby.cluster, home)
        try:
            return await store.read()
        finally:
            await store.close()

    try:
        return lease_finding(asyncio.run(read()), standby.hosts)
    except OnesError as why:
        return refusal("lease", why)


def lease_finding(held: Held, hosts: tuple[str, ...]) -> Finding:
    """Judge the lease of several controllers."""
    record = held.record
    if held.expired or not record.holder:
        return warning("lease", "no controller holds it", "start the controllers")
    found = f"{record.holder} holds it, term {record.term}"
    behind = [host for host in hosts if host not in record.complete]
    if behind:
        remedy = "start these controllers, and wait until they have followed"
        return warning("lease", f"{found}; without all inputs: {', '.join(behind)}", remedy)
    return ok("lease", f"{found}; all {len(hosts)} controllers have all inputs")
