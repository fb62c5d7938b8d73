"""A node that is cut off, either way or both: lost until it hears and is heard, no slot used by two."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import zmq

from controlplane.client import BlockingClient
from schemas.errors import OnesError
from schemas.jobs import JobSpec, StopRule
from schemas.transport.sockets import Link
from tests.chaos import checker
from tests.chaos.laboratory import lines_in
from tests.chaos.network import Network, Weather
from tests.chaos.site import CONTROL, USER, Site
from tests.chaos.user import SCRIPT
from tests.support.schemas_links import events_of as events_of_link

LIMIT_S: Final = 90.0
CUT: Final = Weather(blocked=True)
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and disks need root"),
    pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="there are no tunnel devices"),
]


@pytest.fixture
def fence_s() -> float:
    return 0.0


@pytest.fixture
def site(fence_s: float) -> Iterator[Site]:
    with (
        tempfile.TemporaryDirectory(prefix="lab-") as folder,
        Site(Path(folder), os.getpid(), nodes=2, slots=1, policy="fifo", fence_s=fence_s) as made,
    ):
        for name in made.hosts:
            made.start(name)
        (made.base / "work").mkdir()
        (made.base / "work" / "train.py").write_bytes(SCRIPT.read_bytes())
        with made.network.inside(USER):
            yield made


def until(site: Site, found: Callable[[BlockingClient], Any]) -> Any:
    """Ask again and again, until it is there."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            with BlockingClient(site.home, timeout=3.0) as client:
                if there := found(client):
                    return there
        except OnesError:
            pass
        time.sleep(0.1)
    logs = [
        (host.folder / "daemon.log").read_text(errors="replace")[-2000:]
        for host in site.hosts.values()
    ]
    raise AssertionError("\n\n".join(["it never came", *logs]))


def job(site: Site, name: str, *, slots: int, epochs: int) -> JobSpec:
    """One that takes about a second an epoch."""
    given = {
        "RECORDS": site.records, "SAMPLES": 120, "EPOCHS": epochs, "BATCH": 12, "PAUSE_S": 0.1,
        "FAILS_AT": 0, "OMP_NUM_THREADS": 1,
    }  # fmt: skip
    return JobSpec(
        name=name, script="train.py", workdir=str(site.base / "work"), batch_size=12,
        max_batch_size=12, slots=(slots, slots), stop=StopRule(epochs=epochs),
        env={key: str(value) for key, value in given.items()},
    )  # fmt: skip


def events_of(client: BlockingClient, node: str) -> list[str]:
    return [event.event for event in client.events() if event.node == node]


@pytest.mark.parametrize("way", ["it does not hear", "it is not heard", "neither"])
def test_the_slot_of_a_partitioned_node_is_reused_after_its_worker_exited(
    site: Site, way: str
) -> None:
    until(site, lambda c: len([n for n in c.nodes() if n.state == "up"]) == 2)
    with BlockingClient(site.home) as client:
        alone = client.submit(job(site, "alone", slots=1, epochs=10))
    workers = until(site, lambda c: (s := c.job(alone)).summary.epoch >= 2 and s.workers)
    node = workers[0].node
    with BlockingClient(site.home) as client:
        before = len(events_of(client, node))  # a loaded host may have suspected it already
    roads = [(CONTROL, node)] * (way != "it is not heard")
    roads += [(node, CONTROL)] * (way != "it does not hear")

    for road in roads:
        site.network.change(*road, CUT, begins=True)
    until(site, lambda c: "node.lost" in events_of(c, node)[before:])
    ended = until(site, lambda c: (s := c.job(alone).summary).state == "succeeded" and s)
    with BlockingClient(site.home) as client:
        meanwhile = events_of(client, node)
    for road in roads:
        site.network.change(*road, CUT, begins=False)
    until(site, lambda c: "node.up" in events_of(c, node)[len(meanwhile) :])
    with BlockingClient(site.home) as client:
        both = client.submit(job(site, "both", slots=2, epochs=2))
    until(site, lambda c: c.job(both).summary.state == "succeeded")

    assert meanwhile[-2:] == ["node.suspect", "node.lost"]
    assert ended.epoch == 10
    records = checker.records_of(lines_in(site.records))
    assert [record.job for record in records if record.slot == f"{node}/0"] == [alone, both]
    assert list(checker.slots_used_twice(records)) == []


@pytest.mark.parametrize("fence_s", [3.0])
def test_a_fenced_node_kills_its_workers_before_their_job_starts_elsewhere(site: Site) -> None:
    until(site, lambda c: len([n for n in c.nodes() if n.state == "up"]) == 2)
    with BlockingClient(site.home) as client:
        name = client.submit(job(site, "alone", slots=1, epochs=9))
    workers = until(site, lambda c: (s := c.job(name)).summary.epoch >= 2 and s.workers)

    site.network.change(workers[0].node, CONTROL, CUT, begins=True)
    until(site, lambda c: c.job(name).summary.state == "succeeded")
    site.network.change(workers[0].node, CONTROL, CUT, begins=False)
    until(site, lambda c: "node.up" in events_of(c, workers[0].node))

    records = checker.records_of(lines_in(site.records))
    trained = [record for record in records if record.used]  # one may be stopped as it begins
    first, second = sorted(trained, key=lambda record: record.used[0])
    assert (first.job, second.job) == (name, name)
    assert first.used[-1][1] < second.used[0][0]


async def test_a_prompt_connection_without_a_sign_of_its_peer_is_replaced() -> None:
    limit_s = 12.0  # other connections take 20 s or more
    with Network(["a", "b"], os.getpid()) as network, zmq.Context() as context:
        with network.inside("a"):
            server = context.socket(zmq.ROUTER)
            server.bind(address := f"tcp://{network.address('a')}:7700")
        with network.inside("b"):
            link = Link(None)
            dealer = link.connect("DEALER", address, prompt=True)
        while not dealer.send(b"heard"):
            await asyncio.sleep(0.05)
        lost = events_of_link(dealer, zmq.Event.DISCONNECTED)
        for source, target in (("a", "b"), ("b", "a")):
            network.change(source, target, CUT, begins=True)

        dealer.send(b"not heard")

        await asyncio.wait_for(lost, limit_s)
        link.close()
        server.close(linger=0)
