"""Async client: submit, inspect, wait for and follow jobs across restarts of the controller."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from controlplane.client.archive import digest_of, pack
from controlplane.client.job_file import checked
from controlplane.client.streams import POLL_S
from controlplane.client.sweeps.requests import SweepRequests
from schemas.errors import TimedOutError
from schemas.ids import JobId, NodeId, SlotId
from schemas.jobs import ENDED, JobSpec
from schemas.wire.client import (
    CancelJob,
    CheckJob,
    DrainNode,
    Explanation,
    GetSearch,
    JobAccepted,
    JobChecked,
    JobDetail,
    Jobs,
    JobState,
    JobSummary,
    ListJobs,
    NodeInfo,
    Nodes,
    PauseJob,
    ResizeJob,
    ResumeJob,
    SearchInfo,
    SubmitJob,
    UndrainNode,
)
from schemas.wire.feed import FeedEvent


class Client(SweepRequests):
    """Connection to one cluster; an async context manager.

    A call raises `UnreachableError` if no reply arrives within `timeout`, and the error that the
    controller names if it refuses (`DeniedError`, `UnknownJobError`, ...). Calls that wait or
    follow (`wait`, `tail`, `events`) tolerate an absent controller for a minute and continue when
    it returns.

    Args:
        home: folder of the cluster; default: $ONES_HOME, else ~/.ones.
        timeout: seconds; default: $ONES_TIMEOUT_S, else 10. With the last default a call fails
            after at most 2 s if no process listens at the endpoint.

    Raises:
        SettingsError: if the folder has no cluster, or its keys cannot be used.
    """

    async def submit(self, spec: JobSpec, key: str | None = None, *, project: str = "") -> JobId:
        """Upload the working directory, submit a job and return its name.

        Args:
            spec: relative paths are relative to the current directory.
            key: idempotency key; the same key returns the same job. None: a new job each time.
            project: one of the key's projects, whose members see the job; empty: the first one.

        Raises:
            BadFieldError: if a field is invalid; no job was submitted.
            TooLargeError: if the packed working directory exceeds the limits of the cluster.
        """
        accepted = await self.submit_accepted(spec, key, project=project)
        return accepted.job

    async def submit_accepted(
        self,
        spec: JobSpec,
        key: str | None = None,
        *,
        on_sent: Callable[[int, int], None] | None = None,
        project: str = "",
    ) -> JobAccepted:
        """Submit as `submit` does; return also the job's state and notes on what the policy lacks.

        Args:
            spec: relative paths are relative to the current directory.
            key: idempotency key; the same key returns the same job. None: a new job each time.
            on_sent: called in the client's event loop during the upload with the bytes of the
                archive that the controller has, and the size of the archive.
            project: one of the key's projects, whose members see the job; empty: the first one.

        Raises:
            BadFieldError: if a field is invalid; no job was submitted.
            TooLargeError: if the packed working directory exceeds the limits of the cluster.
        """
        spec = checked(spec, Path.cwd())
        archive = await asyncio.to_thread(pack, Path(spec.workdir))
        digest = digest_of(archive)
        await self._put(digest, archive, on_sent)
        key = key or uuid.uuid4().hex
        request = SubmitJob(spec=spec, snapshot=digest, key=key, project=project)
        return await self._call(request, JobAccepted)

    async def submit_stored(
        self, spec: JobSpec, snapshot: str, key: str | None = None, *, project: str = ""
    ) -> JobAccepted:
        """Submit a job whose working directory the cluster already stores.

        Args:
            spec: its `workdir` is informational.
            snapshot: digest of the archive, as in `job` and in the manifest of a sweep.
            key: idempotency key; the same key returns the same job. None: a new job each time.
            project: one of the key's projects, whose members see the job; empty: the first one.

        Raises:
            BadFieldError: if a field is invalid, or (field `snapshot`) the archive is not stored.
        """
        key = key or uuid.uuid4().hex
        request = SubmitJob(spec=spec, snapshot=snapshot, key=key, project=project)
        return await self._call(request, JobAccepted)

    async def check(self, spec: JobSpec) -> tuple[str, ...]:
        """Check a job without submitting it.

        Returns:
            Notes on what the job lacks for the cluster's policy and which value is used instead.

        Raises:
            BadFieldError: if a field is invalid.
        """
        request = CheckJob(spec=checked(spec, Path.cwd()))
        return (await self._call(request, JobChecked)).notes

    async def jobs(self, *, ended: bool = False) -> tuple[JobSummary, ...]:
        """Return summaries of jobs, oldest first; ended jobs only if `ended`."""
        return (await self._job_list(ListJobs(ended=ended))).jobs

    async def find_jobs(
        self, *, ended: bool = False, states: Sequence[str] = (), user: str = "", name: str = ""
    ) -> Jobs:
        """Return the jobs that match all filters, oldest first.

        Args:
            ended: include ended jobs.
            states: only jobs in one of these states, ended or not; empty: any state.
            user: owner; empty: any.
            name: name in the job file, name of the job, or a pattern such as `lr-*`; empty: any.

        Raises:
            BadFieldError: if one of `states` is not a state.
        """
        request = ListJobs(ended=ended, states=tuple(states), user=user, name=name)
        return await self._job_list(request)

    async def explain(self, job: str) -> Explanation:
        """Return every decision about a job's slots and batch, with its reason.

        Raises:
            UnknownJobError: if there is no such job.
        """
        return await self._explanation(JobId(job))

    async def search(self) -> SearchInfo:
        """Return statistics of the scheduler."""
        return await self._call(GetSearch(), SearchInfo)

    async def cancel(self, job: str) -> JobDetail:
        """Cancel a job; an ended job does not change.

        Returns:
            The job after the request; the cancellation may not show in it yet.

        Raises:
            UnknownJobError: if there is no such job.
            DeniedError: if the job belongs to another user.
        """
        return await self._detail(CancelJob(job=JobId(job)), JobId(job))

    async def resize(
        self,
        job: str,
        slots: int | None = None,
        batch: int | None = None,
        on: Sequence[str] = (),
    ) -> JobDetail:
        """Override the policy for one job; applied as soon as slots allow.

        The policy leaves the job alone until `resume(auto=True)`.

        Args:
            slots: number of slots; 0 pauses the job; None: as in the previous override, or
                unchanged without one.
            batch: global batch, samples per step; None: unchanged.
            on: exactly these slots, NODE/INDEX; if only the batch is given, the previous ones are
                kept.

        Raises:
            BadFieldError: if the override can never be applied; names the field and the bound.
        """
        places = tuple(SlotId(slot) for slot in on)
        request = ResizeJob(job=JobId(job), slots=slots, batch=batch, on=places)
        return await self._detail(request, JobId(job))

    async def pause(self, job: str) -> JobDetail:
        """Release the slots of a job; its state is kept in a checkpoint.

        Raises:
            UnknownJobError: if there is no such job.
            DeniedError: if the job belongs to another user.
            BadFieldError: if the job has ended.
        """
        return await self._detail(PauseJob(job=JobId(job)), JobId(job))

    async def resume(self, job: str, *, auto: bool = False) -> JobDetail:
        """End the pause of a job.

        Args:
            auto: True returns the job to the policy's control; False keeps the slots and the batch
                of the override.

        Raises:
            UnknownJobError: if there is no such job.
            DeniedError: if the job belongs to another user.
            BadFieldError: if the job has ended, or was neither resized nor paused by an override.
        """
        return await self._detail(ResumeJob(job=JobId(job), auto=auto), JobId(job))

    async def nodes(self) -> tuple[NodeInfo, ...]:
        """Return all nodes."""
        return (await self._node_list()).nodes

    async def drain(self, node: str, within_s: float | None = None, reason: str = "") -> NodeInfo:
        """Drain a node: its jobs move or wait with their state kept, and no job starts there.

        Args:
            within_s: seconds after which remaining workers are stopped; None: never.
            reason: shown to the owners of the jobs that move.

        Raises:
            DeniedError: if the key belongs to neither an operator nor an admin.
            UnknownNodeError: if no such node ever joined.
        """
        request = DrainNode(node=NodeId(node), within_s=within_s, reason=reason)
        return (await self._call(request, Nodes)).nodes[0]

    async def undrain(self, node: str) -> NodeInfo:
        """Return a drained node to service.

        Raises:
            DeniedError: if the key belongs to neither an operator nor an admin.
            UnknownNodeError: if no such node ever joined.
        """
        return (await self._call(UndrainNode(node=NodeId(node)), Nodes)).nodes[0]

    async def wait(self, job: str, timeout: float | None = None) -> JobDetail:  # noqa: ASYNC109
        """Wait until a job has ended and return it.

        Args:
            timeout: seconds; None waits without limit.

        Raises:
            TimedOutError: if the job has not ended after `timeout` seconds.
        """
        await self.wait_state(job, timeout)
        return await self.job(job)

    async def wait_state(self, job: str, timeout: float | None = None) -> JobState:  # noqa: ASYNC109
        """Wait until a job has ended and return its state, without its history.

        Args:
            timeout: seconds; None waits without limit.

        Raises:
            TimedOutError: if the job has not ended after `timeout` seconds.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout if timeout is not None else None
        while True:
            left = POLL_S if deadline is None else max(0.0, min(POLL_S, deadline - loop.time()))
            found = await self.state(job, left)
            if found.state in ENDED:
                return found
            if deadline is not None and loop.time() >= deadline:
                what = f"{job} is {found.state} after {timeout:g} s"
                raise TimedOutError(what, "wait longer, or inspect the job with `ones show`")

    async def events(self, from_seq: int = 1, follow: bool = False) -> AsyncIterator[FeedEvent]:
        """Yield feed events, numbered without gaps.

        Args:
            from_seq: number of the first event, 1-based; if the controller no longer keeps it, the
                events start with the oldest kept one.
            follow: True continues until cancelled; False ends after the newest event.
        """
        async for page in self.event_pages(from_seq, follow=follow):
            for event in page:
                yield event

    async def tail(
        self, job: str, rank: int | None = None, follow: bool = True
    ) -> AsyncIterator[str]:
        """Yield the lines of a job's output from its start, without newlines.

        Args:
            rank: only this worker; None: all, in order of arrival.
            follow: True continues until the job has ended; False ends after the newest line.

        Raises:
            UnknownJobError: if there is no such job.
        """
        async for page in self.output_pages(job, rank, follow=follow):
            for line in page:
                yield line.text

    async def samples(self, job: str) -> AsyncIterator[dict[str, Any]]:
        """Yield a record `{"epoch", "step", "rank", "ids"}` for each committed step.

        Each sample occurs once an epoch. Steps that were lost with a worker and repeated from a
        checkpoint are omitted.

        Raises:
            UnknownJobError: if there is no such job.
            BadFieldError: if its spec does not set `record_samples`.
        """
        async for page in self.sample_pages(job):
            for record in page:
                yield record
