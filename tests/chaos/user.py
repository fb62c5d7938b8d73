"""Those who use the cluster while it suffers: they submit, order, wait and follow, and remember what they were told."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from controlplane.client import BlockingClient
from schemas.errors import OnesError
from schemas.jobs import JobSpec, StopRule
from schemas.wire.client import JobDetail
from schemas.wire.feed import FeedEvent
from tests.chaos.schedule import Arrival

TIMEOUT_S: Final = 3.0
AGAIN_S: Final = 0.5
LOOK_S: Final = 0.2
SCRIPT: Final = Path(__file__).with_name("train.py")


@dataclass
class Told:
    """What one user was told of one job."""

    arrival: Arrival
    key: str
    job: str = ""  # empty: never accepted
    accepted_s: float = 0.0
    ended: str = ""  # the state that `wait` answered with
    cancelled: bool = False  # the cluster took the order
    refused: list[str] = field(default_factory=list)


class Users:
    """One thread for each job, and one that follows the events from the first on."""

    def __init__(self, home: Path, workdir: Path, records: Path, name: str) -> None:
        self._home, self._workdir, self._records, self._name = home, workdir, records, name
        self._pool = ThreadPoolExecutor(max_workers=64)
        self._work: list[Future[None]] = []
        self._closing = threading.Event()
        self.told: list[Told] = []
        self.events: list[FeedEvent] = []
        workdir.mkdir()
        (workdir / "train.py").write_bytes(SCRIPT.read_bytes())
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()

    def comes(self, arrival: Arrival) -> None:
        """Somebody submits a job and stays with it to its end."""
        told = Told(arrival, f"{self._name}-{arrival.name}")
        self.told.append(told)
        self._work.append(self._pool.submit(self._stay, told))

    def finish(self, deadline: float) -> bool:
        """Wait until everybody has heard of the end of their jobs; False if somebody has not."""
        for work in self._work:
            try:
                work.result(timeout=max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return False
        return True

    def close(self) -> None:
        """Everybody goes."""
        self._closing.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._follower.join()

    def _stay(self, told: Told) -> None:
        arrival = told.arrival
        with self._client() as client:
            spec = self._spec(arrival)
            while not told.job:
                try:
                    told.job = client.submit(spec, key=told.key)
                except OnesError as error:
                    told.refused.append(str(error))
                    if self._closing.wait(AGAIN_S):
                        return
            told.accepted_s = began = time.monotonic()
            for after_s, order in self._orders(arrival):
                if self._closing.wait(max(0.0, began + after_s - time.monotonic())):
                    return
                self._give(client, told, order)
            while not told.ended and not self._closing.is_set():
                with contextlib.suppress(OnesError):
                    told.ended = client.wait(told.job, timeout=5.0).summary.state

    def _give(self, client: BlockingClient, told: Told, order: str) -> None:
        word, _, number = order.partition(" ")
        for _ in range(20):
            try:
                match word:
                    case "slots":
                        client.resize(told.job, slots=int(number))
                    case "pause":
                        client.pause(told.job)
                    case "resume" | "auto":
                        client.resume(told.job, auto=word == "auto")
                    case _:
                        client.cancel(told.job)
                        told.cancelled = True
            except OnesError as error:
                told.refused.append(f"{order}: {error}")
                if error.code not in {"unreachable", "unavailable"} or self._closing.wait(AGAIN_S):
                    return
            else:
                return

    def _orders(self, arrival: Arrival) -> list[tuple[float, str]]:
        cancel = [(arrival.cancel_after_s, "cancel")] if arrival.cancel_after_s else []
        return [*arrival.orders, *cancel]

    def _follow(self) -> None:
        while not self._closing.wait(LOOK_S):
            with contextlib.suppress(OnesError), self._client() as client:
                while not self._closing.wait(LOOK_S):
                    self.events.extend(client.events(from_seq=len(self.events) + 1))

    def _client(self) -> BlockingClient:
        return BlockingClient(self._home, timeout=TIMEOUT_S)

    def _spec(self, arrival: Arrival) -> JobSpec:
        env: dict[str, Any] = {
            "RECORDS": self._records, "SAMPLES": arrival.samples, "EPOCHS": arrival.epochs,
            "BATCH": arrival.batch, "PAUSE_S": arrival.pause_s, "FAILS_AT": arrival.fails_at,
            "OMP_NUM_THREADS": 1,
        }  # fmt: skip
        return JobSpec(
            name=arrival.name, script="train.py", workdir=str(self._workdir),
            batch_size=arrival.batch, max_batch_size=4 * arrival.batch,
            slots=(arrival.least, arrival.most), stop=StopRule(epochs=arrival.epochs),
            record_samples=True, env={key: str(value) for key, value in env.items()},
        )  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """What the cluster says in the end."""

    jobs: dict[str, JobDetail]
    samples: dict[str, list[dict[str, Any]]]
    lines: dict[str, list[str]]


def look(home: Path) -> Seen:
    """Ask for everything about every job."""
    with BlockingClient(home, timeout=30.0) as client:
        names = [summary.job for summary in client.jobs(ended=True)]
        return Seen(
            jobs={name: client.job(name) for name in names},
            samples={name: list(client.samples(name)) for name in names},
            lines={name: list(client.tail(name, follow=False)) for name in names},
        )
