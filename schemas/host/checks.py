"""Read-only checks of the folders, ports and keys that a settings file names on this host."""

from __future__ import annotations

import errno
import math
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from schemas.errors import SettingsError
from schemas.host.settings import find_problems, read_table, valid_part

S = TypeVar("S", bound=msgspec.Struct)


class Findings:
    """Problems of a settings file, in the order of the checks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[SettingsError] = []

    def add(self, field: str, what: str, remedy: str) -> None:
        """Record a problem of a field such as `listen.events`."""
        self.found.append(SettingsError(f"{field}: {what}", remedy, field))

    def attempt(self, field: str, work: Callable[[], object]) -> None:
        """Run one of the daemon's own checks, and record the error that it raises."""
        try:
            work()
        except SettingsError as error:
            field = error.field if error.field.startswith(f"{field}.") else field
            self.add(field, error.message.removeprefix(f"{field}: "), error.hint)

    def finite(self, settings: msgspec.Struct, prefix: str = "") -> None:
        """Check that all numbers are finite."""
        for name in settings.__struct_fields__:
            value = getattr(settings, name)
            if isinstance(value, msgspec.Struct):
                self.finite(value, f"{prefix}{name}.")
            elif isinstance(value, float) and not math.isfinite(value):
                self.add(f"{prefix}{name}", f"{value} is not finite", "give a number of seconds")

    def folder(self, field: str, path: Path) -> None:
        """Check that a folder is writable or can be created."""
        there = next(one for one in (path, *path.parents) if one.exists())
        if not there.is_dir():
            self.add(field, f"{there} is not a folder", "choose another folder")
        elif os.statvfs(there).f_flag & os.ST_RDONLY:
            self.add(field, f"{there} is mounted read-only", "mount it writable")
        elif not os.access(there, os.W_OK | os.X_OK):
            who = f"user {os.getuid()}"
            self.add(field, f"{who} cannot write to {there}", f"give it to {who}")
        elif not os.statvfs(there).f_bavail:
            self.add(field, f"no space is left in {there}", "free space there")

    def pid_file(self, name: str) -> None:
        """Check that pid file `name`, relative to the settings file, can be written. Skip ""."""
        if name:
            self.folder("pid_file", (self.path.parent / name).parent)

    def address(self, field: str, host: str) -> bool:
        """Check that an address belongs to this host. Return True if it does."""
        try:
            _bind(host, 0)
        except socket.gaierror as error:
            self.add(field, f"{host} cannot be found: {error.strerror}", "correct the address")
        except OSError as error:
            what = f"{host} is not an address of this host ({error.strerror})"
            self.add(field, what, "give an address of this host")
        else:
            return True
        return False

    def port(self, field: str, host: str, port: int) -> None:
        """Check that no process except this daemon listens on a TCP port. 0 always passes."""
        try:
            _bind(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                self.add(field, f"port {port}: {error.strerror}", "choose another port")
            elif not _is_ours(_listener(port), self.path):
                who = _name(_listener(port))
                remedy = "choose another port, or stop that process"
                self.add(field, f"port {port} is in use{who}", remedy)


def check_file(
    kind: type[S], path: Path, without: Mapping[str, Any] | None = None
) -> tuple[Findings, S]:
    """Return the problems of a settings file, and settings that can be used for further checks.

    In these settings, defaults replace invalid values. The values in `without` replace required
    fields that are missing or invalid.

    Raises:
        SettingsError: if the file cannot be read, or is not TOML.
    """
    table = read_table(path, os.environ)
    findings = Findings(path)
    findings.found += find_problems(kind, table, path)
    settings = msgspec.convert({**(without or {}), **valid_part(table, findings.found)}, kind)
    findings.finite(settings)
    return findings, settings


def _bind(host: str, port: int) -> None:
    kind = socket.SOCK_STREAM
    found = socket.getaddrinfo(host, port, type=kind)
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)  # IPv4 first
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def _listener(port: int) -> psutil.Process | None:
    """Return the process that listens on a port, or None if this user cannot see it."""
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN
            if listens and connection.laddr[1:] == (port,) and connection.pid:
                return psutil.Process(connection.pid)
    except (psutil.Error, OSError):
        pass
    return None


def _is_ours(process: psutil.Process | None, path: Path) -> bool:
    """True if the process is the daemon that runs with this settings file, or a child of it."""
    try:
        family = [process, process.parent()] if process is not None else []
        return any(str(path) in " ".join(one.cmdline()) for one in family if one is not None)
    except psutil.Error:
        return False


def _name(process: psutil.Process | None) -> str:
    try:
        return f" by {process.name()} (pid {process.pid})" if process is not None else ""
    except psutil.Error:
        return ""
