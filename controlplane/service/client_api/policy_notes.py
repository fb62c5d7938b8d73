"""Notes in replies about a job: what the policy or the cluster lacks for it."""

from __future__ import annotations

from controlplane.core.model.job import Job
from controlplane.core.model.node import NodePhase
from controlplane.core.state import State
from controlplane.policy.job_notes import job_notes
from controlplane.policy.registry import entry
from schemas.jobs import JobSpec


class PolicyNotes:
    """Notes about jobs under one policy."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._needs = entry(policy).needs

    def of_spec(self, spec: JobSpec) -> tuple[str, ...]:
        """About a job that has not begun."""
        stated = spec.stated_utility is not None
        return job_notes(self._policy, self._needs, utility_stated=stated)

    def of(self, job: Job, train_loss: float | None = None) -> tuple[str, ...]:
        """About a job as it is now; nothing of one that has ended.

        Args:
            train_loss: that it reported last, if anybody heard of one since its last epoch.
        """
        if job.ended:
            return ()
        return job_notes(
            self._policy,
            self._needs,
            utility_stated=job.spec.stated_utility is not None,
            epochs=job.progress.epoch,
            train_loss=job.progress.train_loss if train_loss is None else train_loss,
        )


def size_notes(state: State, spec: JobSpec) -> tuple[str, ...]:
    """Return a note if a job needs more slots than there are on nodes neither lost nor drained."""
    usable = [
        node for node in state.nodes.values() if node.phase is not NodePhase.LOST and not node.drain
    ]
    here = sum(len(node.spec.slots) for node in usable)
    if spec.slots[0] <= here:
        return ()
    what = f"it needs {spec.slots[0]} slots, the cluster has {here}"
    return (f"{what}: it waits until nodes join; `slots` in the job file may ask for fewer",)
