"""`ones config check` of an agent: reports in one run all problems that would prevent its start."""

from __future__ import annotations

import shutil
import socket
from functools import partial
from pathlib import Path
from typing import Final

from nodeagent.accounts import check_jobs
from nodeagent.devices import fenced_s, inventory
from nodeagent.settings import AgentSettings
from schemas.errors import SettingsError
from schemas.host.checks import check_file
from schemas.transport.keys import load_keys, load_public

NAMELESS: Final = "nameless"  # replaces a name that is missing or invalid


def check(path: Path) -> list[SettingsError]:
    """Return the problems of an agent's settings on this host. Change nothing.

    A port is treated as free if the agent that uses it was started with this same file.
    """
    findings, settings = check_file(AgentSettings, path, {"node": NAMELESS})
    home = path.parent
    findings.attempt("devices", lambda: inventory(settings))
    if settings.key or settings.node != NAMELESS:
        key = settings.key or f"keys/{settings.node}.key_secret"
        findings.attempt("key", lambda: load_keys(home / key))
    findings.attempt("controller.key", lambda: load_public(home / settings.controller.key))
    for host in settings.controller.hosts:
        findings.attempt("controller.host", partial(_resolve, host))
    if findings.address("address", settings.address):
        findings.port("states_port", settings.address, settings.states_port)
        findings.port("metrics", settings.address, settings.metrics)
    for name in ("run", "work", "checkpoints"):
        findings.folder(name, home / getattr(settings, name))
    findings.attempt("jobs", lambda: check_jobs(settings))
    findings.pid_file(settings.pid_file)
    findings.attempt("fence_s", lambda: fenced_s(settings))
    if settings.python and shutil.which(settings.python) is None:
        what = f"program {settings.python!r} not found"
        findings.add("python", what, "give an interpreter of this host, or leave it out")
    return findings.found


def _resolve(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        what = f"{host} cannot be found: {error.strerror}"
        raise SettingsError(what, "correct the name, or check the name service") from None
