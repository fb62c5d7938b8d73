"""Faults of the laboratory meet what is there, also what only just began."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.chaos.faults import begin
from tests.chaos.schedule import Fault
from tests.chaos.site import Site

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and disks need root"),
    pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="there are no tunnel devices"),
]


@pytest.mark.timeout(60)
def test_a_power_failure_also_kills_a_daemon_outside_its_namespace() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="lab-") as folder,
        Site(Path(folder), os.getpid(), nodes=1, slots=1, policy="fifo") as site,
    ):
        host = site.hosts["node-1"]
        host.process = subprocess.Popen(["sleep", "100"])
        met, mend = begin(site, Fault(0.0, "power off", "node-1"))
        off = host.pid
        mend()
        on = host.pid

    assert met == "1 processes"
    assert off is None
    assert on is not None
