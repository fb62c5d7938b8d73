"""Controller, node agent and hopper: units of a sweep, and where the states of its models lie."""

from __future__ import annotations

import msgspec

from schemas.ids import JobId, NodeId, Term, WorkerId
from schemas.sweeps import Value
from schemas.wire import Message


class StateRef(msgspec.Struct, frozen=True, kw_only=True):
    """A state of a trial after so many of its visits, at least one."""

    trial: int
    version: int
    digest: str = ""  # SHA-256 of its frames, hexadecimal


class StateSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where a state can be had: a worker that has it in memory, or the agent of a node."""

    node: NodeId
    address: str  # HOST:PORT


class UnitOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Train a trial over a partition, from one state to the next."""

    attempt: int  # counts up over the sweep; whatever is said of an older one counts for nothing
    worker: WorkerId
    trial: int  # whose values and randomness it has
    values: dict[str, Value]
    state: StateRef | None  # to begin with; None: `model_fn` builds it
    sources: tuple[StateSource, ...]  # of it, the best first; a file on the own node goes before
    result: StateRef  # to end with, its digest not known yet
    epoch: int  # 1-based
    partition: int
    evaluate: bool  # afterwards: the epoch ends with this unit


class WantedState(msgspec.Struct, frozen=True, kw_only=True):
    """A state that should lie on the node; one that does not is fetched."""

    state: StateRef
    sources: tuple[StateSource, ...]


class SweepDelta(Message, tag="agent.sweep_delta.1"):
    """The full desired state of one sweep on one node, ordered by (term, revision).

    A unit of a worker that is not in `units` any more is to be given up, with the process: a worker
    that holds one is killed, and started anew if it is still a member of its group. A state on
    the node's disk goes when it is not in `wanted`, and is not the result of an attempt that is in
    `units` or above `attempts`.
    """

    job: JobId
    term: Term
    revision: int
    attempts: int  # the highest that was ordered anywhere when this was made
    units: tuple[UnitOrder, ...]  # of this node's workers
    wanted: tuple[WantedState, ...]


class SweepDeltaAcked(Message, tag="agent.sweep_delta_acked.1"):
    """Agent to controller: the newest (term, revision) I hold for the sweep `job`."""

    job: JobId
    term: Term
    revision: int


class StateCopied(Message, tag="sweep.state_copied.1"):
    """A wanted state is complete on the node's disk."""

    job: JobId
    trial: int
    version: int


class StateNotCopied(Message, tag="sweep.state_not_copied.1"):
    """A wanted state could not be had, or not be kept; it is tried again with the next delta."""

    job: JobId
    trial: int
    version: int
    why: str


class UnitTask(Message, tag="worker.unit_task.1"):
    """Agent to hopper: what to do now. Repeated whenever the worker greets."""

    unit: UnitOrder
