"""The laboratory on some seeds: no fault loses samples."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.chaos.faults import begin
from tests.chaos.laboratory import SETTLE_S, run
from tests.chaos.schedule import Fault, draw
from tests.chaos.site import Site

LASTS_S = 12.0
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and disks need root"),
    pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="there are no tunnel devices"),
]


def test_a_seed_is_a_schedule() -> None:
    assert draw(7, LASTS_S) == draw(7, LASTS_S)
    assert draw(7, LASTS_S).jobs != draw(8, LASTS_S).jobs
    assert draw(7, LASTS_S).faults != draw(8, LASTS_S).faults


@pytest.mark.timeout(SETTLE_S + 120.0)  # a job that does not end is told by the checker
@pytest.mark.parametrize("seed", range(1, 11))
def test_no_seed_loses_samples(seed: int) -> None:
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        outcome = run(draw(seed, LASTS_S), Path(folder))

    assert outcome.problems == []


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
