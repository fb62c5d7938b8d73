"""What workers elsewhere tell of a node that is silent: that they miss theirs, too."""

from __future__ import annotations

from typing import Final

from controlplane.core.model.job import Job
from controlplane.core.model.node import Node
from controlplane.core.model.rescale import RescalePhase
from controlplane.core.model.worker import WorkerPhase
from controlplane.core.state import State
from schemas.ids import NodeId, node_of

MAX_FENCED_S: Final = 7200.0  # whoever says more is not waited for
GOING: Final = frozenset({WorkerPhase.LEAVING, WorkerPhase.EXITED})


def fenced_s(node: Node) -> float:
    """How long a node must have been silent before its workers are gone for certain.

    Args:
        node: whose agent ends its workers when nobody answers it, or does not; 0: it does not.
    """
    stated = node.spec.fenced_s
    return stated if 0.0 < stated <= MAX_FENCED_S else 0.0


def missed_by_peers(state: State, node: NodeId) -> bool:
    """Whether a group that lost a member waits for its workers on `node`, and for nobody else.

    Its members on other nodes stand still already and said so; those that are waited for did not.

    Args:
        state: of the cluster; it is only read.
        node: one that its agent tells nothing of; may be unknown.
    """
    return any(_is_missed(job, node) for job in state.slot_index.jobs_on(node))


def _is_missed(job: Job, node: NodeId) -> bool:
    change = job.change
    if change is None or change.phase is not RescalePhase.QUIESCING:
        return False
    waited_for = [
        node_of(member.slot)
        for member in change.group.members
        if member.worker not in change.points and job.workers[member.worker].phase not in GOING
    ]
    return set(waited_for) == {node} and bool(change.points)
