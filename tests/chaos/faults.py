"""Carries faults out, and mends them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

from controlplane.journal.database import JournalError
from tests.chaos.network import Weather
from tests.chaos.schedule import Fault
from tests.chaos.site import CONTROL, Site

Mend = Callable[[], None]


def begin(site: Site, fault: Fault) -> tuple[str, Mend]:
    """Let it go wrong.

    Returns:
        What it met, empty if it found nothing there; and what mends it.
    """
    return KINDS[fault.kind](site, fault)


def _nothing() -> None:
    pass


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _daemon(site: Site, fault: Fault) -> tuple[str, Mend]:
    host = site.hosts[fault.host]
    if host.pid is None or host.process is None:
        return "", _nothing
    pid = host.pid
    if fault.kind == "kill daemon":
        _signal(pid, signal.SIGKILL)
        host.process.wait()
        return f"pid {pid}", lambda: site.start(fault.host)
    _signal(pid, signal.SIGSTOP)
    return f"pid {pid}", lambda: _signal(pid, signal.SIGCONT)


def _process(site: Site, fault: Fault) -> tuple[str, Mend]:
    action, what = fault.kind.split()
    every = {"worker": site.workers, "zygote": site.zygotes, "search": lambda _: site.searches()}
    pids = every[what](fault.host)
    if not pids:
        return "", _nothing
    pid = pids[fault.pick % len(pids)]
    _signal(pid, signal.SIGKILL if action == "kill" else signal.SIGSTOP)
    return f"pid {pid}", (_nothing if action == "kill" else lambda: _signal(pid, signal.SIGCONT))


def _power(site: Site, fault: Fault) -> tuple[str, Mend]:
    """All processes end at once, and what does not outlive a boot is gone."""
    host = site.hosts[fault.host]
    if host.pid is None:
        return "", _nothing
    pids = {host.pid, *site.pids(fault.host)}  # one that just began may not have come there yet
    for pid in pids:  # nobody may see anybody die
        _signal(pid, signal.SIGSTOP)
    for pid in pids.union(site.pids(fault.host)):
        _signal(pid, signal.SIGKILL)
    if host.process is not None:
        host.process.wait()
    shutil.rmtree(host.folder / "run", ignore_errors=True)
    return f"{len(pids)} processes", lambda: site.start(fault.host)


def _road(site: Site, fault: Fault) -> tuple[str, Mend]:
    weather = {
        "cut": Weather(blocked=True),
        "cut one way": Weather(blocked=True),
        "lose packets": Weather(loss=fault.amount),
        "delay": Weather(delay_s=fault.amount),
        "slow": Weather(bytes_per_s=fault.amount),
    }[fault.kind]
    roads = [(fault.host, fault.to)]
    if fault.kind == "cut":
        roads.append((fault.to, fault.host))

    def change(*, begins: bool) -> None:
        for source, target in roads:
            site.network.change(source, target, weather, begins=begins)

    change(begins=True)
    return "road", lambda: change(begins=False)


def _disk(site: Site, fault: Fault) -> tuple[str, Mend]:
    site.fill(fault.host)
    return "disk", lambda: site.empty(fault.host)


def _delete(site: Site, fault: Fault) -> tuple[str, Mend]:
    found = site.sockets if fault.kind == "delete socket" else site.logs
    paths: list[Path] = found(fault.host)
    if not paths:
        return "", _nothing
    path = paths[fault.pick % len(paths)]
    path.unlink(missing_ok=True)
    return path.name if fault.kind == "delete socket" else path.parent.name, _nothing


def _software(site: Site, fault: Fault) -> tuple[str, Mend]:
    """Another build takes over from a killed controller, or a restored journal from a stopped one."""
    host = site.hosts[CONTROL]
    if host.pid is None or host.process is None:
        return "", _nothing
    _signal(host.pid, signal.SIGKILL)
    host.process.wait()
    if fault.kind == "upgrade":
        site.change_build()
    else:
        try:
            site.restore()
        except JournalError as error:  # no room for a copy on a full disk
            return f"not restored: {error}", lambda: site.start(CONTROL)
    return f"build {site.build}", lambda: site.start(CONTROL)


def _clock(site: Site, fault: Fault) -> tuple[str, Mend]:
    site.set_clock(CONTROL, fault.amount)
    return "clock", lambda: site.set_clock(CONTROL, 0.0)


KINDS: Final[dict[str, Callable[[Site, Fault], tuple[str, Mend]]]] = {
    "kill daemon": _daemon, "stop daemon": _daemon, "kill worker": _process,
    "stop worker": _process, "kill zygote": _process, "kill search": _process,
    "stop search": _process, "power off": _power, "cut": _road, "cut one way": _road,
    "lose packets": _road, "delay": _road, "slow": _road, "fill disk": _disk,
    "delete socket": _delete, "delete log": _delete, "set clock": _clock, "upgrade": _software, "restore": _software,
}  # fmt: skip
