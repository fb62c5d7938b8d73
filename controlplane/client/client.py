"""Async client: submit, look, wait, follow, across restarts of the controller."""

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
    """A connection to one cluster; an async context manager.

    A call raises `UnreachableError` when nothing answers for `timeout` seconds, and the error that
    the controller names when it refuses (`DeniedError`, `UnknownJobError`, ...). Those that wait or
    follow (`wait`, `tail`, `events`) bear an absent controller for a minute, and go on when it is
    back.

    Args:
        home: the cluster's folder; default: $ONES_HOME, else ~/.ones.
        timeout: seconds; default: $ONES_TIMEOUT_S, else 10, and 2 at most where nobody listens.

    Raises:
        SettingsError: if there is no cluster in that folder, or its keys cannot be used.
    """

    async def submit(self, spec: JobSpec, key: str | None = None, *, project: str = "") -> JobId:
        """Ship the working directory and submit.

        Args:
            spec: what to run; relative paths are relative to the current directory.
            key: makes a repetition harmless: the same key gives the same job.
            project: of the key's: whose members see the job; empty: the first of them.

        Returns:
            The job's name.

        Raises:
            BadFieldError: if a field cannot be accepted; nothing was submitted.
            TooLargeError: if the working directory packs to more than the cluster takes.
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
        """The same as `submit`, with the state that the job is in and what it lacks for the policy.

        Args:
            spec: what to run; relative paths are relative to the current directory.
            key: makes a repetition harmless: the same key gives the same job. None: a new job each
                time.
            on_sent: called in the client's loop as the working directory travels, with the bytes
                of its archive that the controller has, and all there are.
            project: of the key's: whose members see the job; empty: the first of them.

        Raises:
            BadFieldError: if a field cannot be accepted; nothing was submitted.
            TooLargeError: if the working directory packs to more than the cluster takes.
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
        """Submit a job whose working directory the cluster has from an earlier one.

        Args:
            spec: what to run; its `workdir` is only told.
            snapshot: digest of the archive, as `job` and a sweep's manifest name it.
            key: makes a repetition harmless: the same key gives the same job.
            project: of the key's: whose members see the job; empty: the first of them.

        Raises:
            BadFieldError: if a field cannot be accepted, or (field `snapshot`) it is not there.
        """
        key = key or uuid.uuid4().hex
        request = SubmitJob(spec=spec, snapshot=snapshot, key=key, project=project)
        return await self._call(request, JobAccepted)

    async def check(self, spec: JobSpec) -> tuple[str, ...]:
        """What the cluster would say of a job; nothing is submitted.

        Returns:
            What it lacks for the policy that the cluster has, and what it would get instead; empty
            if it lacks nothing.

        Raises:
            BadFieldError: if a field could not be accepted.
        """
        request = CheckJob(spec=checked(spec, Path.cwd()))
        return (await self._call(request, JobChecked)).notes

    async def jobs(self, *, ended: bool = False) -> tuple[JobSummary, ...]:
        """Summaries, oldest first; with `ended`, of ended jobs too.

        Args:
            ended: False: only jobs that have not ended.
        """
        return (await self._job_list(ListJobs(ended=ended))).jobs

    async def find_jobs(
        self, *, ended: bool = False, states: Sequence[str] = (), user: str = "", name: str = ""
    ) -> Jobs:
        """Some jobs, oldest first.

        Args:
            ended: ended ones too.
            states: only those in one of these, ended or not; none: in any.
            user: only this user's; empty: everybody's.
            name: of the job file or the job, or a pattern such as `lr-*`; empty: any.

        Raises:
            BadFieldError: if one of `states` is none.
        """
        request = ListJobs(ended=ended, states=tuple(states), user=user, name=name)
        return await self._job_list(request)

    async def explain(self, job: str) -> Explanation:
        """Why a job has the slots and the batch that it has: every decision about it.

        Args:
            job: its name, as `submit` returned it.

        Raises:
            UnknownJobError: if there is no such job.
        """
        return await self._explanation(JobId(job))

    async def search(self) -> SearchInfo:
        """How the scheduler stands."""
        return await self._call(GetSearch(), SearchInfo)

    async def cancel(self, job: str) -> JobDetail:
        """End a job; one that has ended stays as it is.

        Args:
            job: its name, as `submit` returned it.

        Returns:
            The job as it stands then; an end that is under way may not show yet.

        Raises:
            UnknownJobError: if there is no such job.
            DeniedError: if it is somebody else's.
        """
        return await self._detail(CancelJob(job=JobId(job)), JobId(job))

    async def resize(
        self,
        job: str,
        slots: int | None = None,
        batch: int | None = None,
        on: Sequence[str] = (),
    ) -> JobDetail:
        """Override the policy for one job: it is followed as soon as slots allow.

        The policy leaves the job alone until `resume` with `auto`.

        Args:
            slots: how many; 0 pauses the job; None: as an order before this one said, without one
                as many as it has.
            batch: global batch, samples per step; None: the same.
            on: exactly these slots, NODE/INDEX; an order for the batch alone keeps those of before.

        Raises:
            BadFieldError: if it could never be followed, naming the field and the bound.
        """
        places = tuple(SlotId(slot) for slot in on)
        request = ResizeJob(job=JobId(job), slots=slots, batch=batch, on=places)
        return await self._detail(request, JobId(job))

    async def pause(self, job: str) -> JobDetail:
        """Take a job's slots away; its state is kept in a checkpoint.

        Args:
            job: its name, as `submit` returned it.

        Raises:
            UnknownJobError: if there is no such job.
            DeniedError: if it is somebody else's.
            BadFieldError: if it has ended.
        """
        return await self._detail(PauseJob(job=JobId(job)), JobId(job))

    async def resume(self, job: str, *, auto: bool = False) -> JobDetail:
        """End a pause; with `auto`, give the job back to the policy.

        Args:
            job: its name, as `submit` returned it.
            auto: False: the slots and the batch that were asked for by hand stay in force.

        Raises:
            UnknownJobError: if there is no such job.
            DeniedError: if it is somebody else's.
            BadFieldError: if it has ended, or was neither resized nor paused by hand.
        """
        return await self._detail(ResumeJob(job=JobId(job), auto=auto), JobId(job))

    async def nodes(self) -> tuple[NodeInfo, ...]:
        """All nodes."""
        return (await self._node_list()).nodes

    async def drain(self, node: str, within_s: float | None = None, reason: str = "") -> NodeInfo:
        """Empty a node: its jobs train on elsewhere or wait with their state kept, and none comes.

        Args:
            within_s: seconds, after which what still runs there is stopped; None: it is not.
            reason: for those whose jobs move.

        Raises:
            DeniedError: if the key is of no operator and no admin.
            UnknownNodeError: if no such node ever joined.
        """
        request = DrainNode(node=NodeId(node), within_s=within_s, reason=reason)
        return (await self._call(request, Nodes)).nodes[0]

    async def undrain(self, node: str) -> NodeInfo:
        """Give a node back that is drained.

        Raises:
            DeniedError: if the key is of no operator and no admin.
            UnknownNodeError: if no such node ever joined.
        """
        return (await self._call(UndrainNode(node=NodeId(node)), Nodes)).nodes[0]

    async def wait(self, job: str, timeout: float | None = None) -> JobDetail:  # noqa: ASYNC109
        """The job when it has ended.

        Args:
            timeout: seconds; None: for ever.

        Raises:
            TimedOutError: if it has not ended after `timeout` seconds.
        """
        await self.wait_state(job, timeout)
        return await self.job(job)

    async def wait_state(self, job: str, timeout: float | None = None) -> JobState:  # noqa: ASYNC109
        """Where a job stands when it has ended, and nothing of its history.

        Args:
            timeout: seconds; None: for ever.

        Raises:
            TimedOutError: if it has not ended after `timeout` seconds.
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
                raise TimedOutError(what, "wait longer, or look with `ones show`")

    async def events(self, from_seq: int = 1, follow: bool = False) -> AsyncIterator[FeedEvent]:
        """Feed events, numbered without gaps from the first one on that the controller keeps.

        Args:
            from_seq: number of the first one, 1-based; if it is not kept any more, the events begin
                with the oldest one that is.
            follow: go on for ever; else end at the last one there is.
        """
        async for page in self.event_pages(from_seq, follow=follow):
            for event in page:
                yield event

    async def tail(
        self, job: str, rank: int | None = None, follow: bool = True
    ) -> AsyncIterator[str]:
        """Lines of a job's output from its start on, without their newlines.

        Args:
            rank: only of this worker; None: of all, as they arrived.
            follow: go on until the job has ended; else end at the last line there is.

        Raises:
            UnknownJobError: if there is no such job.
        """
        async for page in self.output_pages(job, rank, follow=follow):
            for line in page:
                yield line.text

    async def samples(self, job: str) -> AsyncIterator[dict[str, Any]]:
        """Records `{"epoch", "step", "rank", "ids"}` of committed steps, each sample once an epoch.

        Steps that were lost with a worker, and done again from a checkpoint, are left out.

        Raises:
            UnknownJobError: if there is no such job.
            BadFieldError: if its spec does not ask for `record_samples`.
        """
        async for page in self.sample_pages(job):
            for record in page:
                yield record
