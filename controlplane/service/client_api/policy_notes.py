"""What the policy of this cluster needs of a job and does not get, for the replies about it."""

from __future__ import annotations

from controlplane.core.model.job import Job
from controlplane.policy.job_notes import job_notes
from controlplane.policy.registry import entry
from schemas.jobs import JobSpec


class PolicyNotes:
    """Notes about jobs under one policy.

    Args:
        policy: its name.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._needs = entry(policy).needs

    def of_spec(self, spec: JobSpec) -> tuple[str, ...]:
        """About a job that has not begun.

        Args:
            spec: as its user describes it.
        """
        stated = spec.stated_utility is not None
        return job_notes(self._policy, self._needs, utility_stated=stated)

    def of(self, job: Job, train_loss: float | None = None) -> tuple[str, ...]:
        """About a job as it is now; nothing of one that has ended.

        Args:
            job: as the core has it.
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
