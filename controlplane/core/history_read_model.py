"""What happened to jobs: a read model for people, policies and records; no decision looks at it.

Handlers write it while they decide, so the journal rebuilds it through the same `handle`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from controlplane.core.model.job import SpeedPromise
from controlplane.core.sweep_read_model import SweepHistory
from schemas.ids import JobId, NodeId, Seconds, WorkerId
from schemas.messages.agent import GroupFormed
from schemas.messages.client import Change, Decision, EpochInfo, PromiseInfo, VersionInfo

KEPT_EPOCHS: Final = 1000
KEPT_CHANGES: Final = 500
KEPT_GAINS: Final = 1000
KEPT_PROMISES: Final = 100
REALISED: Final = "speed_realised"


class JobHistory(msgspec.Struct, kw_only=True):
    """One job's past."""

    changes: list[Change] = []  # of its phase, the latest
    decisions: list[Decision] = []  # groups that were ordered, and why; the latest
    versions: list[VersionInfo] = []  # every group that was ordered
    epochs: list[EpochInfo] = []  # the latest
    processes: dict[WorkerId, NodeId] = {}  # every one that existed, and where
    promises: list[PromiseInfo] = []  # of its end: the first, and the latest


class JobHistories(msgspec.Struct, kw_only=True):
    """Every job's past, and what the plans of all of them came to."""

    jobs: dict[JobId, JobHistory] = {}
    plans_taken: int = 0
    sweeps: dict[JobId, SweepHistory] = {}
    gains: list[tuple[float, float]] = []  # speed-ups of changes, predicted and realised

    def of(self, job: JobId) -> JobHistory:
        """The past of `job`; empty if nothing happened to it yet.

        Args:
            job: may be unknown. What is returned for it is not kept.
        """
        return self.jobs.get(job) or JobHistory()

    def sweep_of(self, job: JobId) -> SweepHistory:
        """The past of the sweep `job`; empty if nothing happened to it yet.

        Args:
            job: may be unknown. What is returned for it is not kept.
        """
        return self.sweeps.get(job) or SweepHistory()

    def sweep(self, job: JobId) -> SweepHistory:
        """The past of the sweep `job`, to be written to.

        Args:
            job: that is a sweep.
        """
        return self.sweeps.setdefault(job, SweepHistory())

    def phase_changed(self, job: JobId, change: Change) -> None:
        """A job moved along its table.

        Args:
            job: that moved.
            change: from where to where, when and why; the latest `KEPT_CHANGES` are kept.
        """
        history = self._open(job)
        history.changes.append(change)
        del history.changes[:-KEPT_CHANGES]

    def group_ordered(self, job: JobId, decision: Decision, version: VersionInfo) -> None:
        """A group was ordered.

        Args:
            job: that it is for.
            decision: who decided and why; the latest `KEPT_CHANGES` are kept.
            version: what the group is, and what it goes on from; all are kept.
        """
        history = self._open(job)
        history.decisions.append(decision)
        del history.decisions[:-KEPT_CHANGES]
        history.versions.append(version)

    def decided(self, job: JobId, decision: Decision) -> None:
        """Something was decided that orders no group.

        Args:
            job: that it is about.
            decision: who decided and why.
        """
        history = self._open(job)
        history.decisions.append(decision)
        del history.decisions[:-KEPT_CHANGES]

    def end_promised(self, job: JobId, promise: PromiseInfo) -> None:
        """Its policy said by when a job will be done.

        Args:
            job: that it is about.
            promise: the first is always kept, and the latest `KEPT_PROMISES` of the others.
        """
        promises = self._open(job).promises
        promises.append(promise)
        del promises[1:-KEPT_PROMISES]

    def group_concluded(
        self, job: JobId, outcome: str, now: Seconds, formed: GroupFormed | None = None
    ) -> None:
        """It is known what became of the group that was ordered last; the first word counts.

        Args:
            job: whose group it was.
            outcome: formed, abandoned, broken, suspended, or how the job lost it.
            now: when.
            formed: the report of its last member, for where it goes on from.
        """
        history = self._open(job)
        if not history.versions or history.versions[-1].outcome:
            return
        last = history.versions[-1]
        took_s = now - last.time
        last = msgspec.structs.replace(last, outcome=outcome, took_s=took_s)
        if formed is not None:
            last = msgspec.structs.replace(
                last, resumed_epoch=formed.epoch, resumed_step=formed.step
            )
        history.versions[-1] = last
        decided = history.decisions[-1] if history.decisions else None
        if decided is not None and decided.version == last.version:
            history.decisions[-1] = msgspec.structs.replace(decided, outcome=outcome, took_s=took_s)

    def epoch_finished(self, job: JobId, epoch: EpochInfo) -> None:
        """A job finished an epoch.

        Args:
            job: that trained it.
            epoch: what came of it; the latest `KEPT_EPOCHS` are kept.
        """
        history = self._open(job)
        history.epochs.append(epoch)
        del history.epochs[:-KEPT_EPOCHS]

    def process_started(self, job: JobId, worker: WorkerId, node: NodeId) -> None:
        """A process exists.

        Args:
            job: that it works for.
            worker: the name of the process.
            node: where it is.
        """
        self._open(job).processes[worker] = node

    def speed_measured(self, job: JobId, promise: SpeedPromise, samples_per_s: float) -> None:
        """The first whole epoch of a group is held against the speed that its policy expected.

        Args:
            job: that changed.
            promise: what its policy expected.
            samples_per_s: what it got, mean over the epoch.
        """
        history = self._open(job)
        last = history.decisions[-1]
        numbers = {**last.numbers, REALISED: samples_per_s}
        history.decisions[-1] = msgspec.structs.replace(last, numbers=numbers)
        self.gains.append((promise.then / promise.now, samples_per_s / promise.now))
        del self.gains[:-KEPT_GAINS]

    def _open(self, job: JobId) -> JobHistory:
        history = self.jobs.get(job)
        if history is None:
            history = self.jobs[job] = JobHistory()
        return history
