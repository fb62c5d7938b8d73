"""`ones config check` for a controller: reports all problems that would prevent the start."""

from __future__ import annotations

import asyncio
from pathlib import Path

from controlplane.service.keys import FILE, KeyFile
from controlplane.service.planner.policy_check import check_policy
from controlplane.service.settings import ControllerSettings, Listen, StandbySettings
from controlplane.service.standby.lease import LeaseError
from controlplane.service.standby.lease_stores import open_store
from controlplane.service.webhooks import check_webhooks
from schemas.errors import SettingsError
from schemas.host.checks import Findings, check_file
from schemas.transport.keys import load_authorised, load_keys


def check(path: Path) -> list[SettingsError]:
    """Return every problem of the settings on this host, with field and remedy.

    Ports in use by a controller with this same settings file are treated as free.
    """
    findings, settings = check_file(ControllerSettings, path)
    silence, home = settings.silence, path.parent
    told = any(problem.field.startswith("silence.") for problem in findings.found)
    if not told and silence.lost_s <= silence.suspect_s:
        what = f"{silence.lost_s} is not above silence.suspect_s ({silence.suspect_s})"
        findings.add("silence.lost_s", what, "raise it")
    policy = settings.policy
    findings.attempt("policy", lambda: check_policy(policy.name, policy.options))
    findings.attempt("keys.server", lambda: load_keys(home / settings.keys.server))
    findings.attempt("keys.authorised", lambda: load_authorised(home / settings.keys.authorised))
    keys = KeyFile(home / settings.state / FILE)
    findings.attempt("state", keys.read)
    findings.folder("state", home / settings.state)
    findings.attempt("webhooks", lambda: check_webhooks(settings.webhooks, home))
    findings.pid_file(settings.pid_file)
    lease = settings.standby.lease
    if lease and "://" not in lease:
        findings.folder("standby.lease", (home / lease).parent)
    elif lease:
        findings.attempt("standby.lease", lambda: asyncio.run(_try_lease(settings.standby, home)))
    _check_ports(findings, settings.listen)
    return findings.found


async def _try_lease(standby: StandbySettings, home: Path) -> None:
    """Read the lease. In PostgreSQL, its table is created.

    Raises:
        SettingsError: if its store cannot be used or does not reply.
    """
    store = open_store(standby.lease, standby.cluster, home)
    try:
        await store.read()
    except LeaseError as error:
        raise SettingsError(error.message, error.hint) from None
    finally:
        await store.close()


def _check_ports(findings: Findings, listen: Listen) -> None:
    if not findings.address("listen.host", listen.host):
        return
    taken: dict[int, str] = {}
    for name in listen.__struct_fields__:
        port = getattr(listen, name)
        if name == "host" or not port:
            continue
        if port in taken:
            what = f"port {port} is also used by listen.{taken[port]}"
            findings.add(f"listen.{name}", what, "use different ports")
        else:
            taken[port] = name
            findings.port(f"listen.{name}", listen.host, port)
