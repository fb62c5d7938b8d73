"""Recording of a controller's journal. The journal is opened read-only and can be in use.

`TraceError` is raised for a file that is not a journal, is damaged, was written by another release,
or contains no job to replay.
"""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Final
from urllib.parse import quote

from controlplane.core.history import JobHistories, JobHistory
from controlplane.core.inputs import NodeGreeted, NodeLost
from controlplane.core.model.job import NUMBERED, Job, number_of
from controlplane.core.model.job_phases import Phase
from controlplane.core.model.node import NodePhase
from controlplane.journal.database import SCHEMA_VERSION, JournalError
from controlplane.journal.reader import Reader
from controlplane.journal.replay import earliest
from controlplane.sim.cluster import NodeGroup, TraceError
from controlplane.sim.models.recording import (
    MAX_NUMBER,
    MIN_POSITIVE,
    ChangeTimes,
    Ending,
    Epoch,
    EpochSpeed,
    Family,
    Recording,
    Submission,
)
from schemas.errors import OnesError
from schemas.ids import NodeId
from schemas.jobs import JobSpec
from schemas.wire.client import EpochInfo, VersionInfo

NO_JOURNAL: Final = "name the file journal.sqlite in a controller's state folder"
Slots = dict[NodeId, int]  # number of slots of each present node


def replay_journal(path: Path) -> tuple[list[Job], JobHistories, Slots, int]:
    """Return the jobs of a journal, their history, and the cluster when it had most slots.

    The file is opened read-only. If the oldest inputs were deleted, the replay starts from the
    oldest saved state.

    Returns:
        Jobs, their histories, slots by node, and the number of past jobs with damaged rows.
    """
    damaged = 0
    with closing(_open_database(path)) as database:
        reader = Reader(path, database)
        try:
            core, first, *_ = earliest(reader)
            present: Slots = {
                node.node: len(node.spec.slots)
                for node in core.state.nodes.values()
                if node.phase is not NodePhase.LOST
            }
            largest = dict(present)
            for _, at, event in reader.numbered_inputs(first):
                match event:
                    case NodeGreeted():
                        present[event.node] = len(event.spec.slots)
                    case NodeLost():
                        present.pop(event.node, None)
                if sum(present.values()) > sum(largest.values()):
                    largest = dict(present)
                core.handle(event, at)
            jobs, damaged = _past_jobs(reader)
            jobs += core.state.jobs.values()
            histories = JobHistories(jobs={job.job: reader.records.of(job.job) for job in jobs})
        except JournalError as error:
            raise TraceError(error.message, error.hint) from None
        except (OnesError, LookupError, TypeError, ValueError) as error:
            problem = f"{path}: its history cannot be replayed by this release: {error!r}"
            raise TraceError(problem, "export it with the release that wrote it") from None
    jobs.sort(key=lambda job: number_of(job.job))
    return jobs, histories, largest, damaged


def _past_jobs(reader: Reader) -> tuple[list[Job], int]:
    found, damaged = [], 0
    for row in reader.ended.after(0):
        try:
            found.append(row.read())
        except JournalError:
            damaged += 1
    return found, damaged


def _open_database(path: Path) -> sqlite3.Connection:
    """Open the database read-only; a database that is not in use is not even locked.

    Without a write-ahead log next to it, the file is complete. SQLite would create the log's files
    to read the database, unless the file is declared immutable.
    """
    if not path.is_file():
        raise TraceError(f"{path}: no such file", NO_JOURNAL)
    at_rest = not path.with_name(f"{path.name}-wal").exists()
    uri = f"file:{quote(str(path.absolute()))}?mode=ro{'&immutable=1' * at_rest}"
    try:
        database = sqlite3.connect(uri, uri=True, isolation_level=None)
    except sqlite3.Error as error:
        raise TraceError(f"{path}: {error}", "check the file's owner") from None
    try:
        row = database.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
        version = row[0] if row else "unknown"
    except sqlite3.Error as error:
        database.close()
        raise TraceError(f"{path} is not a journal: {error}", NO_JOURNAL) from None
    if version != str(SCHEMA_VERSION):
        database.close()
        hint = f"this release reads schema {SCHEMA_VERSION}; export it with the one that wrote it"
        raise TraceError(f"{path} is a journal of schema {version}", hint)
    return database


ENDINGS: Final[Mapping[Phase, Ending]] = {
    Phase.SUCCEEDED: "succeeded",
    Phase.FAILED: "failed",
    Phase.CANCELLED: "cancelled",
}
NO_SPEEDS: Final = "no job of its family trained a whole epoch on one group"
TOO_LARGE: Final = "it needs more slots than the cluster had"
NO_EPOCH: Final = "it ended before its first epoch did"
DAMAGED_ROW: Final = "its row in the journal is damaged (`ones admin check`)"
UNKNOWN_LENGTH: Final = "it had not ended, and did not state how much work it was"


def recording_from_journal(journal: Path) -> Recording:
    """Return a recording of the jobs in a journal, with all measurements of their behaviour.

    The controller of the journal may be running. A recording contains no environments, arguments,
    paths, scripts or names of users; users have numbers. It omits resizes and pauses by operators,
    and failures of scripts that succeeded when retried. It has no GPU models of nodes, because no
    measurement names its GPU.
    """
    jobs, histories, slots, damaged = replay_journal(journal)
    if not jobs:
        raise TraceError(f"{journal}: no job was submitted", "wait for one")
    most = sum(slots.values())
    families = {
        key: _family(label, [job for job in jobs if job.family == key], histories)
        for key, label in _labels(jobs).items()
    }
    users = {user: f"user-{n}" for n, user in enumerate(dict.fromkeys(j.user for j in jobs), 1)}
    left_out: Counter[str] = Counter()
    taken = []
    for job in jobs:
        family = families[job.family]
        if reason := _unfit_reason(job, family, most):
            left_out[reason] += 1
            continue
        at = max(0.0, job.submitted_at - jobs[0].submitted_at)
        epochs = _epochs(histories.of(job.job))
        taken.append(_submission(job, epochs, family, users[job.user], at=at, most=most))
    if damaged:
        left_out[DAMAGED_ROW] += damaged
    if not taken:
        why = "; ".join(f"{count}: {reason}" for reason, count in left_out.items())
        raise TraceError(f"{journal}: none of {len(jobs)} jobs can be replayed ({why})", "wait")
    used = {job.family for job in taken}
    return Recording(
        name=journal.stem,
        nodes=_groups(slots.values()),
        took=_change_times(histories.of(job.job) for job in jobs),
        families=tuple(family for family in families.values() if family.name in used),
        jobs=tuple(taken),
        left_out=dict(left_out),
    )


def _labels(jobs: Iterable[Job]) -> dict[str, str]:
    """Return a short label for each family; the full name could reveal users and arguments."""
    found: dict[str, str] = {}
    for job in jobs:
        if job.family not in found:
            stem = job.spec.family or NUMBERED.sub("", job.spec.name) or job.spec.name
            label, count = stem[:150], 1
            while label in found.values():
                count += 1
                label = f"{stem[:150]} ({count})"
            found[job.family] = label
    return found


def _unfit_reason(job: Job, family: Family, most: int) -> str:
    """Return the reason why a job cannot be replayed, or "" if it can."""
    if not family.speeds:
        return NO_SPEEDS
    if job.spec.slots[0] > most:
        return TOO_LARGE
    if not job.progress.samples_done and job.phase in {Phase.SUCCEEDED, Phase.FAILED}:
        return NO_EPOCH
    if not job.ended and _stated(job, family) is None:
        return UNKNOWN_LENGTH
    return ""


def _stated(job: Job, family: Family) -> int | None:
    """Return the stated work of a job in samples, even if the job never trained."""
    if job.stop_samples is not None or job.progress.epoch_samples or job.spec.stop is None:
        return job.stop_samples
    stop, length = job.spec.stop, family.epoch_samples
    return stop.epochs * length if stop.epochs and stop.metric is None else None


def _submission(
    job: Job, epochs: tuple[Epoch, ...], family: Family, user: str, *, at: float, most: int
) -> Submission:
    return Submission(
        name=job.job,
        at=at,
        user=user,
        family=family.name,
        spec=_anonymous_spec(job.spec, family.name, most),
        ended=ENDINGS.get(job.phase, "unfinished"),
        ended_after_s=max(0.0, job.accounting.since - job.submitted_at) if job.ended else None,
        samples=job.progress.samples_done,
        stated_samples=_stated(job, family),
        epoch_samples=job.progress.epoch_length or family.epoch_samples,
        epochs=epochs,
    )


def _epochs(history: JobHistory) -> tuple[Epoch, ...]:
    formed = [
        version.time + version.took_s for version in history.versions if version.outcome == "formed"
    ]
    found, before = [], None
    for info in history.epochs:
        if info.epoch < 1 or info.global_batch < 1:
            continue
        speed = _speed(info)
        lasted_s = None
        if speed is not None and before is not None and info.epoch == before.epoch + 1:
            # A group that restarted from the end of the previous epoch paused in between.
            steady = not any(before.time < at <= info.time for at in formed)
            lasted_s = _positive(info.time - before.time) if steady else None
        loss = info.train_loss if math.isfinite(info.train_loss or 0.0) else None
        scale = _positive(info.noise_scale)
        found.append(Epoch(info.epoch, info.global_batch, scale, loss, speed, lasted_s))
        before = info
    return tuple(found)


def _anonymous_spec(spec: JobSpec, family: str, most: int) -> JobSpec:
    """Return the part of a specification that policies may see; slots are limited to `most`."""
    return JobSpec(
        name=spec.name,
        script="train.py",
        batch_size=spec.batch_size,
        max_batch_size=spec.max_batch_size,
        max_local_batch=spec.max_local_batch,
        lr=spec.lr,
        slots=spec.slots,
        family=family,
        slots_wanted=min(spec.wanted, most),
        stop=spec.stop,
        retries=spec.retries,
    )


def _family(name: str, jobs: Sequence[Job], histories: JobHistories) -> Family:
    succeeded = [job.progress.samples_done for job in jobs if job.phase is Phase.SUCCEEDED]
    return Family(
        name=name,
        speeds=tuple(
            speed
            for job in jobs
            for speed in map(_speed, histories.of(job.job).epochs)
            if speed is not None
        ),
        epoch_samples=max(job.progress.epoch_length for job in jobs),
        took=_change_times(histories.of(job.job) for job in jobs),
        finished=tuple(samples for samples in succeeded if samples),
        furthest=max(job.progress.samples_done for job in jobs),
    )


def _speed(info: EpochInfo) -> EpochSpeed | None:
    """Return the speed of a whole epoch that one group trained, or None if it was not measured."""
    if not info.whole or min(info.slots, info.nodes, info.global_batch) <= 0:
        return None
    if _positive(info.samples_per_s) is None:
        return None
    times = info.step_times
    return EpochSpeed(
        info.nodes,
        info.slots,
        info.global_batch,
        info.samples_per_s,
        sync_s=None if times is None else times.sync_s,
        passes=None if times is None else times.passes,
    )


def _positive(number: float | None) -> float | None:
    return number if number is not None and MIN_POSITIVE <= number <= MAX_NUMBER else None


def _change_times(histories: Iterable[JobHistory]) -> ChangeTimes:
    took: dict[str, list[float]] = {
        kind: [] for kind in ("pause", "start", "restart", "join", "switch")
    }
    for history in histories:
        pauses = (decision.numbers.get("pause_ms") for decision in history.decisions)
        took["pause"] += [pause_ms / 1000.0 for pause_ms in pauses if pause_ms is not None]
        before: VersionInfo | None = None
        for version in history.versions:
            if version.outcome != "formed":
                continue
            if version.kind == "start":
                took["start" if before is None else "restart"].append(version.took_s)
            elif version.kind == "join" and before is not None:
                newcomers = set(version.slots) - set(before.slots)
                took["join" if newcomers else "switch"].append(version.took_s)
            before = version
    medians = {
        f"{kind}_s": max(0.0, median(times)) if times else None for kind, times in took.items()
    }
    return ChangeTimes(**medians)


def _groups(slots: Iterable[int]) -> tuple[NodeGroup, ...]:
    alike = groupby(sorted((count for count in slots if count), reverse=True))
    return tuple(NodeGroup(count=len(list(group)), slots=size) for size, group in alike)
