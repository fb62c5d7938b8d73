"""Two controllers and a database on hosts of their own, through seeded kills and partitions.

Odd seeds use etcd, even ones PostgreSQL. `ONES_SEEDS` is the number of runs, from seed
`ONES_FIRST_SEED`. Each prints its takeover times and the longest step.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from controlplane.client import BlockingClient
from controlplane.client.job_file import load_job
from schemas.errors import OnesError
from tests.chaos.network import Network, Weather
from tests.support.cluster import TOY
from tests.support.lease_servers import LeaseServer, etcd, postgresql
from tests.support.standbys import NODE, USER, Standbys, standbys

pytestmark = [
    pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces"),
]  # fmt: skip
SEEDS: Final = int(os.environ.get("ONES_SEEDS", "2"))
FIRST_SEED: Final = int(os.environ.get("ONES_FIRST_SEED", "0"))
ROUNDS: Final = 3
A, B, DATABASE = "a", "b", "database"
SHORT: Final = 'name = "short"\nkind = "command"\ncommand = ["true"]\nslots = 1\n'
CUT: Final = Weather(blocked=True)
FAULTS: Final = (
    "kill the active controller", "freeze the active controller", "kill the database",
    "cut active from standby", "cut active from database", "cut standby from database",
    "isolate the active controller", "kill the standby",
)  # fmt: skip
STEPS: Final = TOY.replace("agent.epochs(4)", "agent.epochs(100_000)").replace(
    "        step += 1\n",
    "        step += 1\n        open(os.environ['STEPS'], 'a').write(f'{time.time()}\\n')\n",
)


class Laboratory:
    """A cluster with faults, and a user who submits all the time."""

    def __init__(self, pair: Standbys, network: Network, database: LeaseServer, seed: int) -> None:
        self.pair, self.network, self.database = pair, network, database
        self.draw = random.Random(seed)  # noqa: S311 - no secret
        self.names = dict(zip(pair.hosts, (A, B), strict=True))
        self.takeovers: list[float] = []
        self.accepted: list[str] = []
        folder = pair.folder / "short"
        folder.mkdir()
        (folder / "job.toml").write_text(SHORT)
        self._spec = load_job(folder / "job.toml")
        self._stop = threading.Event()
        self._user = threading.Thread(target=self._submit, daemon=True)
        self._user.start()

    def _submit(self) -> None:
        with self.network.inside(USER), BlockingClient(self.pair.cluster.home, 60.0) as client:
            for number in itertools.count():
                accepted = None
                while accepted is None and not self._stop.is_set():
                    try:
                        accepted = client.submit(self._spec, key=f"key-{number}")
                    except OnesError:
                        time.sleep(0.1)
                if accepted is None:
                    return
                self.accepted.append(accepted)
                time.sleep(0.05)

    def round(self) -> None:
        """Begin a fault, let it last, repair it, and wait until both hosts have everything."""
        pair, what = self.pair, self.draw.choice(FAULTS)
        active = pair.record().holder
        (standby,) = set(pair.hosts) - {active}
        lasts_s, began, term = self.draw.uniform(1.0, 8.0), time.monotonic(), pair.term()
        repair = self._begin(what, active, standby)
        if "active controller" in what:
            pair.until(lambda: pair.record().holder == standby, what)
            pair.until(lambda: pair.term() > term, what)
            self.takeovers.append(time.monotonic() - began)
        else:
            time.sleep(lasts_s)
        repair()
        pair.until_complete()
        told = f"{what}, {time.monotonic() - began:.1f} s, accepted {len(self.accepted)}"
        sys.stdout.write(f"{told}\n")

    def _begin(self, what: str, active: str, standby: str) -> Callable[[], object]:
        pair = self.pair
        if what == "kill the database":
            self.database.kill()
            return self.database.start
        if what.startswith("kill"):
            host = active if "active" in what else standby
            pair.kill(host)
            return lambda: pair.start(host)
        if what.startswith("freeze"):
            pair.kill(active, signal.SIGSTOP)
            return lambda: pair.kill(active, signal.SIGCONT)
        ends = {
            "cut active from standby": [(active, standby)],
            "cut active from database": [(active, "")],
            "cut standby from database": [(standby, "")],
            "isolate the active controller": [(active, standby), (active, "")],
        }[what]
        roads = [
            (self.names.get(one, DATABASE), self.names.get(other, DATABASE))
            for pair_ends in ends
            for one, other in (pair_ends, pair_ends[::-1])
        ]
        for road in roads:
            self.network.change(*road, CUT, begins=True)

        def repair() -> None:
            for road in roads:
                self.network.change(*road, CUT, begins=False)

        return repair

    def end(self) -> None:
        self._stop.set()
        self._user.join()


@pytest.fixture(params=range(FIRST_SEED, FIRST_SEED + SEEDS))
def laboratory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Laboratory]:
    seed = request.param
    with ExitStack() as stack:
        network = stack.enter_context(Network((A, B, DATABASE, NODE, USER), seed))
        folder = tmp_path / "store"
        folder.mkdir()
        serve = etcd if seed % 2 else postgresql
        database = stack.enter_context(
            serve(folder, network.address(DATABASE), lambda: network.inside(DATABASE))
        )
        hosts = tuple(map(network.address, (A, B)))
        names = dict(zip(hosts, (A, B), strict=True))
        pair = stack.enter_context(
            standbys(
                tmp_path / "c", database.url, hosts=hosts,
                at=lambda name: network.inside(names.get(name, name)),
            )
        )  # fmt: skip
        made = Laboratory(pair, network, database, seed)
        stack.callback(made.end)
        yield made


def test_faults_lose_nothing_that_was_acknowledged(laboratory: Laboratory, tmp_path: Path) -> None:
    pair, steps = laboratory.pair, tmp_path / "steps"
    path = pair.cluster.write(
        STEPS, batch_size=20, slots=[1, 1], record_samples=True, stop={"epochs": 100_000},
        env={"OMP_NUM_THREADS": "1", "STEPS": str(steps), "PAUSE_S": "0.02"},
    )  # fmt: skip
    with pair.client() as client:
        job = client.submit(load_job(path))
    pair.until(steps.exists, "training")

    for _ in range(ROUNDS):
        laboratory.round()
    laboratory.end()

    with pair.client() as client:
        kept = {client.job(name).summary.name for name in laboratory.accepted}
        shown = client.job(job)
    assert kept == {"short"}
    assert len(set(laboratory.accepted)) == len(laboratory.accepted)
    assert (shown.summary.state, shown.summary.rescales, len(shown.versions)) == ("running", 0, 1)
    times = [float(line) for line in steps.read_text().split()]
    gaps = sorted(later - one for one, later in itertools.pairwise(times))
    sys.stdout.write(
        f"takeovers {[round(one, 1) for one in laboratory.takeovers]} s, accepted "
        f"{len(laboratory.accepted)}, {len(gaps)} steps: median {statistics.median(gaps):.3f} s, "
        f"longest {gaps[-1]:.3f} s\n"
    )
