"""What happens in a run, as a pure function of its seed: jobs that come, and faults that come and go."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

POLICIES: Final = ("ones", "ones", "fair", "goodput", "tiresias")
CALM_S: Final = 4.0  # at the beginning, until everything is up
JOB_EVERY_S: Final = 3.0  # mean
FAULT_EVERY_S: Final = 1.5  # mean
NODES: Final = 2
SLOTS: Final = 2
OWN_UIDS: Final = 0.5  # of all runs


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong at `at_s`, and is mended `lasts_s` later."""

    at_s: float
    kind: str
    host: str
    lasts_s: float = 0.0
    to: str = ""  # the other end of a road
    amount: float = 0.0  # loss as a share, delay in seconds, bytes per second, seconds of a jump
    pick: int = 0  # which of several processes or files, modulo their number

    def __str__(self) -> str:
        road = f" -> {self.to}" if self.to else ""
        much = f" {self.amount:g}" if self.amount else ""
        return f"{self.at_s:6.2f} s  {self.kind}{much}  {self.host}{road}  for {self.lasts_s:.1f} s"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job that somebody submits, and what has to become of it."""

    at_s: float
    name: str
    least: int
    most: int
    epochs: int
    samples: int  # of its data set
    batch: int
    pause_s: float  # of a step, on top of what it computes
    fails_at: int = 0  # epoch in which its script ends with exit code 7
    cancel_after_s: float = 0.0
    orders: tuple[
        tuple[float, str], ...
    ] = ()  # seconds after it came: "slots 2", "pause", "resume"


@dataclass(frozen=True, slots=True)
class Schedule:
    """One run."""

    seed: int
    lasts_s: float  # until everything is mended; jobs may take longer
    policy: str
    jobs: tuple[Arrival, ...]
    faults: tuple[Fault, ...]
    own_uids: bool = False  # each job runs as a uid of its own; else as its node's agent


def draw(seed: int, lasts_s: float, *, software: bool = False) -> Schedule:
    """The run of a seed.

    Args:
        seed: the same gives the same.
        lasts_s: until everything is mended, seconds.
        software: also upgrade the killed controller to another build, and restore its journal.
    """
    dice = random.Random(f"chaos {seed}")
    policy = dice.choice(POLICIES)
    jobs = [_job(dice, at, n) for n, at in enumerate(_times(dice, 1.0, 0.6 * lasts_s, JOB_EVERY_S))]
    times = _times(dice, CALM_S, 0.9 * lasts_s, FAULT_EVERY_S)
    faults = [_fault(dice, at, lasts_s) for at in times]
    if software:
        more = random.Random(f"software {seed}")
        kinds = ("upgrade", "restore", more.choice(("upgrade", "restore")))
        drawn = (Fault(more.uniform(CALM_S, 0.9 * lasts_s), kind, "control") for kind in kinds)
        faults = sorted([*faults, *drawn], key=lambda fault: fault.at_s)
    own_uids = random.Random(f"uids {seed}").random() < OWN_UIDS
    return Schedule(seed, lasts_s, policy, tuple(jobs), tuple(faults), own_uids)


def _times(dice: random.Random, begin: float, end: float, every_s: float) -> list[float]:
    found, at = [], begin
    while at < end:
        found.append(round(at, 2))
        at += dice.expovariate(1.0 / every_s)
    return found


def _job(dice: random.Random, at: float, number: int) -> Arrival:
    least, most = dice.choice(((1, 1), (1, 2), (1, 4), (2, 2), (2, 4)))
    epochs = dice.randint(3, 10)
    kind = dice.choice(("plain", "plain", "plain", "ordered", "fails", "cancelled"))
    orders: tuple[tuple[float, str], ...] = ()
    if kind == "ordered":
        begin = dice.uniform(2.0, 6.0)
        orders = dice.choice(
            (
                ((begin, f"slots {least}"), (begin + 3.0, f"slots {most}"), (begin + 6.0, "auto")),
                ((begin, "pause"), (begin + dice.uniform(0.5, 3.0), "resume")),
            )
        )
    return Arrival(
        at_s=at, name=f"job{number}", least=least, most=most, epochs=epochs,
        samples=dice.choice((96, 144, 240)), batch=12,
        pause_s=dice.choice((0.02, 0.05, 0.1)),
        fails_at=dice.randint(2, epochs) if kind == "fails" else 0,
        cancel_after_s=dice.uniform(3.0, 10.0) if kind == "cancelled" else 0.0,
        orders=orders,
    )  # fmt: skip


def _fault(dice: random.Random, at: float, lasts_s: float) -> Fault:
    kind = dice.choice((*KINDS, *OFTEN))
    fault = KINDS[kind](dice, at, kind)
    room = max(0.3, lasts_s - at)
    return fault if fault.lasts_s < room else replace(fault, lasts_s=round(room, 2))


Draw = Callable[[random.Random, float, str], Fault]  # at a time, of a kind


def _node(dice: random.Random) -> str:
    return f"node-{dice.randint(1, NODES)}"


def _daemon(dice: random.Random) -> str:
    return dice.choice(("control", _node(dice)))


def _length(dice: random.Random, longest: float) -> float:
    """Most are short; some outlast what makes a node suspect (1.5 s) or lost (6 s)."""
    return round(min(longest, dice.expovariate(1.0 / 2.0) + 0.2), 2)


def _at(host: Callable[[random.Random], str], longest_s: float, *, picks: bool = False) -> Draw:
    """Return how a fault of a host is drawn, which may pick one of several things there."""

    def drawn(dice: random.Random, at: float, kind: str) -> Fault:
        where, lasts_s = host(dice), _length(dice, longest_s)
        return Fault(at, kind, where, lasts_s, pick=dice.randrange(100) if picks else 0)

    return drawn


def _road(*amounts: float) -> Draw:
    def drawn(dice: random.Random, at: float, kind: str) -> Fault:
        source, target = dice.sample(("control", *(f"node-{n + 1}" for n in range(NODES))), 2)
        lasts = _length(dice, 10.0)
        return Fault(at, kind, source, lasts_s=lasts, to=target, amount=dice.choice(amounts))

    return drawn


def _clock(dice: random.Random, at: float, kind: str) -> Fault:
    jump = dice.choice((-3600.0, -30.0, -2.0, 2.0, 30.0, 3600.0))
    return Fault(at, kind, "control", lasts_s=_length(dice, 10.0), amount=jump)


DAEMON: Final = _at(_daemon, 10.0)
AT_NODE: Final = _at(_node, 8.0, picks=True)
SEARCH: Final = _at(lambda _: "control", 8.0)
KINDS: Final[dict[str, Draw]] = {
    "kill daemon": DAEMON, "stop daemon": DAEMON, "kill worker": AT_NODE, "stop worker": AT_NODE,
    "kill zygote": AT_NODE, "kill search": SEARCH, "stop search": SEARCH, "power off": AT_NODE,
    "cut": _road(0.0), "cut one way": _road(0.0), "lose packets": _road(0.02, 0.1, 0.3),
    "delay": _road(0.02, 0.1, 0.5), "slow": _road(20_000.0, 200_000.0),
    "fill disk": _at(_daemon, 8.0), "delete socket": AT_NODE, "delete log": AT_NODE,
    "set clock": _clock,
}  # fmt: skip
OFTEN: Final = ("kill daemon", "stop daemon", "kill worker", "power off", "cut", "fill disk")
