"""Messages of controller, node agent and sweep worker about units and locations of states."""

from __future__ import annotations

import msgspec

from schemas.ids import JobId, NodeId, Term, WorkerId
from schemas.sweeps import Value
from schemas.wire import Message


class StateRef(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a trial after `version` visits. There was at least one visit."""

    trial: int
    version: int
    digest: str = ""  # SHA-256 of the state's frames, hexadecimal


class StateSource(msgspec.Struct, frozen=True, kw_only=True):
    """A process that serves a state, either a worker that has it in memory or a node's agent."""

    node: NodeId
    address: str  # HOST:PORT


class UnitOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Order to train a trial over one partition, from one state to the next."""

    attempt: int  # increases during the sweep; reports of older attempts are ignored
    worker: WorkerId
    trial: int  # trial that provides values and random seeds
    values: dict[str, Value]
    state: StateRef | None  # state to start from; None: `model_fn` builds it
    sources: tuple[StateSource, ...]  # best first; unused if the node has the file
    result: StateRef  # the state after the unit; its digest is not known yet
    epoch: int  # 1-based
    partition: int
    evaluate: bool  # evaluate after training, because the epoch ends with this unit


class WantedState(msgspec.Struct, frozen=True, kw_only=True):
    """A state that must be on the node's disk. The agent fetches the state if it is missing."""

    state: StateRef
    sources: tuple[StateSource, ...]


class SweepDelta(Message, tag="agent.sweep_delta.1"):
    """The full desired state of one sweep on one node, ordered by (term, revision).

    A worker is killed if its unit is no longer in `units`, and restarted if it is still a member of
    its group. A state on disk is deleted unless `wanted` contains the state, or the attempt that
    wrote it is in `units` or above `attempts`.
    """

    job: JobId
    term: Term
    revision: int
    attempts: int  # highest attempt ordered on any node when this delta was made
    units: tuple[UnitOrder, ...]  # units of this node's workers
    wanted: tuple[WantedState, ...]
    journal: str = ""  # id of the journal that accepted the sweep; empty: older controller
    states_key: str = ""  # for requests of the sweep's states; empty: nobody may request them


class SweepDeltaAcked(Message, tag="agent.sweep_delta_acked.1"):
    """Agent to controller: the newest (term, revision) that the agent knows for sweep `job`."""

    job: JobId
    term: Term
    revision: int


class StateCopied(Message, tag="sweep.state_copied.1"):
    """A wanted state is complete on the node's disk."""

    job: JobId
    trial: int
    version: int


class StateNotCopied(Message, tag="sweep.state_not_copied.2"):
    """A wanted state could not be fetched or stored. The next delta causes another attempt."""

    job: JobId
    trial: int
    version: int
    reason: str


class UnitTask(Message, tag="worker.unit_task.1"):
    """Agent to sweep worker: the unit to train now. It is sent again when the worker greets."""

    unit: UnitOrder
    states_key: str = ""  # as in `SweepDelta`
