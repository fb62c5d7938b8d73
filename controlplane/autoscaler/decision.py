"""Decisions of the autoscaler: how many nodes to hold, and which of them to return.

The decision is a pure function of what the engine and the controller report. What the autoscaler
has ordered is read from their replies (an allocation's state, the reason of a drain), so that it
can be restarted at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from schemas.nodes import NOTICE
from schemas.wire.client import JobSummary, NodeInfo

# Codes of reasons that more nodes may end. Others are of the job itself, or of its user's limits.
FOR_SLOTS: Final = frozenset({"no_slots", "too_large", "waits", "next_in_line", "shape", "planned"})
ON_ONE_NODE: Final = frozenset({"command", "interactive"})  # kinds of jobs
MARK: Final = "autoscaler: allocation "  # in the reasons of drains that it orders
GOING: Final = frozenset({"draining", "drained", "cordoned"})
FIRST_PAUSE_S: Final = 15.0  # after an allocation on which no agent joined; then twice as long
MAX_PAUSE_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How many nodes the autoscaler holds, and how fast it reacts."""

    min_nodes: int
    max_nodes: int
    wait_s: float = 60.0  # a job waits for slots this long before nodes are requested
    idle_s: float = 300.0  # a node has no job this long before it is returned
    join_s: float = 120.0  # an agent joins this long after the start of its allocation, or never


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One machine, or the request of one, as its engine reports it."""

    id: str
    node: str = ""  # name of the node that its agent has; empty while the request waits
    ends_at: float | None = None  # seconds since the epoch; None: no time limit
    leaves: str = ""  # why the engine wants it back; empty: it may stay
    note: str = ""  # the engine's reason why the request waits


@dataclass(frozen=True, slots=True)
class Request:
    """Request machines, none of which is among `exclude`."""

    count: int
    exclude: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Release:
    """Return a machine, or withdraw its request."""

    allocation: str
    why: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Let the jobs of a node move away; with a deadline if its machine has one."""

    node: str
    why: str
    within_s: float | None = None


@dataclass(frozen=True, slots=True)
class Undrain:
    """Return a node to service, because another machine has its name now."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove a lost node whose machine has been returned."""

    node: str
    why: str


Action = Request | Release | Drain | Undrain | Forget


@dataclass(frozen=True, slots=True)
class Memory:
    """What the autoscaler has to remember: since when something is the case, and failures."""

    waiting_since: float | None = None  # some job waits for slots
    idle_since: Mapping[str, float] = field(default_factory=dict)  # by node
    started: Mapping[str, float] = field(default_factory=dict)  # by allocation, until it joins
    joined: frozenset[str] = frozenset()  # allocations whose agents have joined
    late: frozenset[str] = frozenset()  # allocations whose agents did not join in time
    failures: int = 0  # allocations in a row on which no agent joined
    not_before: float = 0.0  # of the next request


@dataclass(frozen=True, slots=True)
class Outcome:
    """Ordered actions, the next memory, and why nothing more is requested, for people."""

    actions: tuple[Action, ...]
    memory: Memory
    note: str


State = Literal["pending", "joining", "up", "leaving"]


def decide(
    allocations: Sequence[Allocation],
    nodes: Mapping[str, NodeInfo],
    jobs: Iterable[JobSummary],
    bounds: Bounds,
    memory: Memory,
    *,
    now: float,
) -> Outcome:
    """Return what to do now.

    Args:
        allocations: machines and requests of this autoscaler, in the order of their ids.
        nodes: nodes of the cluster that this autoscaler provides, by name.
        jobs: at least all jobs without slots that have not ended.
        bounds: limits of the user.
        memory: memory of the previous decision.
        now: seconds since the epoch.
    """
    memory = _remember(allocations, nodes, bounds, memory, now)
    actions: list[Action] = []
    usable: list[Allocation] = []
    for one in allocations:
        state = _state(one, nodes.get(one.node), memory)
        if state != "leaving":
            usable.append(one)
        actions += _of_allocation(one, state, nodes.get(one.node), bounds, memory, now=now)
    released = {action.allocation for action in actions if isinstance(action, Release)}
    usable = [one for one in usable if one.id not in released]
    actions += _forgotten(allocations, nodes)

    each = max((node.slots for node in nodes.values()), default=0)
    waiting = [
        job for job in jobs
        if job.code in FOR_SLOTS and not job.slots
        and not (each and job.kind in ON_ONE_NODE and job.min_slots > each)
    ]  # fmt: skip
    since = None
    if waiting:
        since = now if memory.waiting_since is None else memory.waiting_since
    idle = _idle(usable, nodes, memory, now)
    memory = replace(memory, waiting_since=since, idle_since=idle)
    missing = bounds.min_nodes - len(usable)
    why = f"{len(usable)} of at least {bounds.min_nodes} nodes"
    if missing <= 0 and since is not None:
        missing, why = _missing_nodes(waiting, nodes, since, bounds, now)
        missing -= sum(one.node not in nodes for one in usable)  # requested before
    room = bounds.max_nodes - len(usable)
    if missing > 0 and room > 0 and now >= memory.not_before:
        actions.append(Request(min(missing, room), _excluded(nodes), why))
        note = why
    elif missing > 0 and room > 0:
        note = f"{why}; next request in {memory.not_before - now:.0f} s, as no agent joined"
    elif missing > 0:
        note = f"{why}; there are {len(usable)} nodes, the maximum"
    else:
        actions += _returned(usable, idle, bounds, now) if since is None else ()
        note = "enough nodes" if since is None else why
    return Outcome(tuple(actions), memory, note)


def _excluded(nodes: Mapping[str, NodeInfo]) -> tuple[str, ...]:
    """Return the nodes that operators have drained, whose machines are not wanted."""
    return tuple(sorted(
        name for name, node in nodes.items()
        if node.state in GOING and MARK not in node.reason and not _gave_notice(node)
    ))  # fmt: skip


def _state(one: Allocation, node: NodeInfo | None, memory: Memory) -> State:
    if node is not None and _gave_notice(node) and one.id not in memory.joined:
        node = None  # of an earlier allocation: the notice ends when the agent joins
    if one.leaves or (node is not None and node.state in GOING and not _is_former(one, node)):
        return "leaving"
    if not one.node:
        return "pending"
    return "joining" if node is None or node.state == "lost" else "up"


def _is_former(one: Allocation, node: NodeInfo) -> bool:
    """True if the node was drained for an earlier allocation of the same machine."""
    return MARK in node.reason and f"{MARK}{one.id}: " not in node.reason


def _gave_notice(node: NodeInfo) -> bool:
    """True if the node itself gave notice that its allocation ends."""
    return node.state in GOING and f"by {NOTICE}{node.node}" in node.reason


def _of_allocation(
    one: Allocation,
    state: State,
    node: NodeInfo | None,
    bounds: Bounds,
    memory: Memory,
    *,
    now: float,
) -> Iterator[Action]:
    if node is not None and node.state in GOING and _is_former(one, node):
        yield Undrain(node.node, f"{node.node} is allocation {one.id} now")
    elif state == "leaving" and (node is None or node.state in {"drained", "lost"}):
        why = one.leaves or (node.reason.rpartition(": ")[2] if node is not None else "drained")
        yield Release(one.id, f"{one.node or 'a request'} has no jobs: {why}")
    elif state == "leaving" and node is not None and node.state not in GOING:
        left_s = None if one.ends_at is None else max(0.0, one.ends_at - now)
        yield Drain(node.node, f"{MARK}{one.id}: {one.leaves}", left_s)
    elif state == "joining" and one.id in memory.joined:
        yield Release(one.id, f"{one.node} is lost")
    elif one.id in memory.late:
        yield Release(one.id, f"no agent joined from {one.node} within {bounds.join_s:.0f} s")


def _remember(
    allocations: Sequence[Allocation],
    nodes: Mapping[str, NodeInfo],
    bounds: Bounds,
    memory: Memory,
    now: float,
) -> Memory:
    """Return the memory with the allocations that started, joined or failed to join."""
    up = {
        one.id
        for one in allocations
        if one.node in nodes and _state(one, nodes[one.node], memory) in {"up", "leaving"}
    }
    running = {one.id for one in allocations if one.node}
    joined = (memory.joined | up) & running
    started = {name: memory.started.get(name, now) for name in running - joined}
    late = frozenset(name for name, at in started.items() if now - at > bounds.join_s)
    gone = memory.started.keys() - running - memory.late  # ended before their agents joined
    failures, not_before = (0 if joined - memory.joined else memory.failures), memory.not_before
    if failed := len(gone) + len(late - memory.late):
        failures += failed
        not_before = now + min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10))
    return replace(
        memory, started=started, joined=joined, late=late, failures=failures, not_before=not_before,
    )  # fmt: skip


def _forgotten(
    allocations: Sequence[Allocation], nodes: Mapping[str, NodeInfo]
) -> Iterator[Forget]:
    held = {one.node for one in allocations}
    for name, node in nodes.items():
        if node.state == "lost" and name not in held:
            yield Forget(name, f"the machine of {name} was returned")


def _missing_nodes(
    waiting: Sequence[JobSummary],
    nodes: Mapping[str, NodeInfo],
    since: float,
    bounds: Bounds,
    now: float,
) -> tuple[int, str]:
    """Return how many nodes the waiting jobs lack, and the reason in words."""
    usable = [node for node in nodes.values() if node.state == "up"]
    needed, free = sum(job.min_slots for job in waiting), sum(node.free for node in usable)
    each = max((node.slots for node in nodes.values()), default=1)
    lacking = max(1, needed - free)
    waited_s = now - since
    jobs = "1 job waits" if len(waiting) == 1 else f"{len(waiting)} jobs wait"
    why = f"{jobs} for {needed} slots since {waited_s:.0f} s, {free} are free"
    return (-(-lacking // each) if waited_s >= bounds.wait_s else 0), why


def _idle(
    usable: Sequence[Allocation], nodes: Mapping[str, NodeInfo], memory: Memory, now: float
) -> dict[str, float]:
    names = [one.node for one in usable if one.node in nodes]
    empty = [name for name in names if nodes[name].state == "up" and not nodes[name].jobs]
    return {name: memory.idle_since.get(name, now) for name in empty}


def _returned(
    usable: Sequence[Allocation], idle: Mapping[str, float], bounds: Bounds, now: float
) -> Iterator[Action]:
    """Withdraw requests that no job needs, and drain nodes that were idle for long."""
    spare = len(usable) - bounds.min_nodes
    over = f"more than {bounds.min_nodes} nodes, and no job waits for slots"
    for one in reversed(usable):
        idle_s = now - idle.get(one.node, now)
        if spare > 0 and not one.node:
            yield Release(one.id, over)
            spare -= 1
        elif spare > 0 and idle_s >= bounds.idle_s:
            yield Drain(one.node, f"{MARK}{one.id}: idle for {idle_s:.0f} s")
            spare -= 1
