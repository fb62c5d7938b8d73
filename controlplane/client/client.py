"""Async client: submit, inspect, wait for and follow jobs across restarts of the controller."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from controlplane.client.archive import digest_of, pack
from controlplane.client.attachments import Attachments
from controlplane.client.job_file import checked
from controlplane.client.rows import Rows
from controlplane.client.secret_env import read_secrets, secret_file, separated
from controlplane.client.streams import POLL_S
from controlplane.client.sweeps.runs import SweepRun
from controlplane.client.sweeps.sweep import Sweep
from schemas.errors import BadFieldError, TimedOutError
from schemas.ids import JobId, NodeId, Seconds, SlotId
from schemas.jobs import ENDED, JobSpec
from schemas.nodes import Reservation
from schemas.sharing import Sharing
from schemas.sweeps import Value
from schemas.wire import client as wire
from schemas.wire.feed import FeedEvent

Whole = TypeVar("Whole", wire.SweepDetail, wire.Ledger)
Change = Literal["add", "stop", "pause", "resume", "delete"]  # changes of a trial


class Client(Attachments):
    """Connection to one cluster, used as an async context manager.

    A call raises `UnreachableError` if no reply arrives within `timeout`. If the controller refuses
    a call, nothing has changed, and the call raises the controller's error: `UnknownJobError` or
    `UnknownNodeError` for an unknown name; `DeniedError` if the job belongs to another user or the
    role of the key does not allow the call; `BadFieldError` with the field for an invalid value.
    Calls that wait or follow (`wait`, `tail`, `events`) tolerate an absent controller for a minute
    and continue when it returns.

    Args:
        home: folder of the cluster; default: $ONES_HOME, else ~/.ones.
        timeout: seconds; default: $ONES_TIMEOUT_S, else 10. With the default of 10 s, a call fails
            after at most 2 s if no process listens at the endpoint.

    Raises:
        SettingsError: if the folder has no cluster, or its keys cannot be used.
    """

    async def submit(self, spec: JobSpec, key: str | None = None, *, project: str = "") -> JobId:
        """Upload the working directory, submit a job and return its name.

        Arguments and errors are those of `submit_accepted`.
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
    ) -> wire.JobAccepted:
        """Submit a job; return its name, its state, and notes on values that the policy lacks.

        Args:
            spec: relative paths are relative to the current directory.
            key: idempotency key; the same key returns the same job. None: a new job each time.
            on_sent: called in the client's event loop during the upload, with the number of bytes
                that the controller has received and the size of the archive.
            project: a project of the key; its members see the job. Empty: the first project.

        Raises:
            TooLargeError: if the packed working directory exceeds the limits of the cluster.
        """
        spec = checked(spec, Path.cwd())
        archive = await asyncio.to_thread(pack, Path(spec.workdir), secret_file(spec))
        digest = digest_of(archive)
        await self._upload(digest, archive, on_sent)
        return await self.submit_stored(spec, digest, key, project=project)

    async def submit_stored(
        self, spec: JobSpec, snapshot: str, key: str | None = None, *, project: str = ""
    ) -> wire.JobAccepted:
        """Submit a job with a working directory that the cluster already stores.

        Args:
            spec: its `workdir` is informational; `secret_env` names a file here.
            snapshot: digest of the archive, as in `job` and in the manifest of a sweep.
            key: idempotency key; the same key returns the same job. None: a new job each time.
            project: a project of the key; its members see the job. Empty: the first project.

        Raises:
            BadFieldError: if the archive is not stored; the field is `snapshot`.
        """
        key = key or uuid.uuid4().hex
        spec, secrets = separated(spec)
        request = wire.SubmitJob(
            spec=spec, snapshot=snapshot, key=key, project=project, secrets=secrets
        )
        return await self._call(request, wire.JobAccepted)

    async def check(self, spec: JobSpec) -> tuple[str, ...]:
        """Check a job without submitting it.

        Returns notes on values that the policy needs but the job lacks, and on the values that are
        used instead.
        """
        request = wire.CheckJob(spec=separated(checked(spec, Path.cwd())).spec)
        return (await self._call(request, wire.JobChecked)).notes

    async def expected_start(self, spec: JobSpec, *, project: str = "") -> wire.ExpectedStart:
        """Return when a job would start if it were submitted now, with an 80% interval.

        The prediction rests on the present state, and runs no policy. It knows no later jobs.

        Args:
            spec: as for `check`, which checks the same.
            project: a project of the key. Empty: that of the job file, or the first one.
        """
        request = wire.CheckJob(spec=checked(spec, Path.cwd()), when=True, project=project)
        return (await self._call(request, wire.JobChecked)).start or wire.ExpectedStart()

    async def jobs(self, *, ended: bool = False) -> Rows[wire.JobSummary]:
        """Return summaries of jobs, oldest first. Include ended jobs only if `ended`."""
        return Rows((await self._joined(wire.ListJobs(ended=ended), wire.Jobs, "jobs")).jobs)

    async def find_jobs(
        self,
        *,
        ended: bool = False,
        states: Sequence[str] = (),
        user: str = "",
        name: str = "",
        labels: Mapping[str, str] | None = None,
        older_s: float = 0.0,
    ) -> wire.Jobs:
        """Return the jobs that match all filters, oldest first.

        Args:
            ended: include ended jobs.
            states: only jobs in one of these states, ended or not; empty: any state.
            user: owner; empty: any.
            name: name in the job file, name of the job, or a pattern such as `lr-*`; empty: any.
            labels: only jobs that have all of these labels.
            older_s: only jobs that were submitted at least so many seconds ago.
        """
        request = wire.ListJobs(
            ended=ended, states=tuple(states), user=user, name=name, labels=dict(labels or {}),
            older_s=older_s,
        )  # fmt: skip
        return await self._joined(request, wire.Jobs, "jobs")

    async def history(
        self,
        most: int = 50,
        *,
        states: Sequence[str] = (),
        user: str = "",
        name: str = "",
        labels: Mapping[str, str] | None = None,
        older_s: float = 0.0,
    ) -> Rows[wire.JobSummary]:
        """Return the latest jobs that have ended and match all filters, newest submission first.

        The filters are those of `find_jobs`.

        Args:
            most: largest number of jobs.

        Raises:
            BadFieldError: if one of `states` is not a final state.
        """
        for state in states:
            if state not in ENDED:
                remedy = f"use {', '.join(sorted(ENDED))}"
                raise BadFieldError(f"state: {state!r} is not a final state", remedy, "state")
        request = wire.ListJobs(
            states=tuple(states or sorted(ENDED)), user=user, name=name, labels=dict(labels or {}),
            older_s=older_s, newest_first=True, limit=most,
        )  # fmt: skip
        found: list[wire.JobSummary] = []
        while len(found) < most:
            page = await self._call(request, wire.Jobs)
            found += page.jobs
            if not page.next:
                break
            request = msgspec.structs.replace(request, cursor=page.next, limit=most - len(found))
        return Rows(found)

    async def usage(self, since: float, until: float | None = None) -> wire.Usage:
        """Return the slot time that visible jobs used, in order of acceptance.

        Args:
            since: begin, seconds since the epoch.
            until: end; None: now.
        """
        request = wire.GetUsage(
            since=Seconds(since), until=None if until is None else Seconds(until)
        )
        return await self._joined(request, wire.Usage, "jobs")

    async def explain(self, job: str) -> wire.Explanation:
        """Return every decision about a job's slots and batch, with its reason."""
        return await self._joined(wire.ExplainJob(job=JobId(job)), wire.Explanation, "decisions")

    async def search(self) -> wire.SearchInfo:
        """Return statistics of the scheduler."""
        return await self._call(wire.GetSearch(), wire.SearchInfo)

    async def cancel(self, job: str) -> wire.JobDetail:
        """Cancel a job. An ended job does not change.

        Returns the job after the request. Its state might not show the cancellation yet.
        """
        return await self._detail(wire.CancelJob(job=JobId(job)), JobId(job))

    async def resize(
        self,
        job: str,
        slots: int | None = None,
        batch: int | None = None,
        on: Sequence[str] = (),
    ) -> wire.JobDetail:
        """Override the policy for one job. The override applies as soon as slots allow.

        The policy does not change the job until `resume(auto=True)`. An override that can never be
        applied raises an error with the field and the bound.

        Args:
            slots: number of slots; 0 pauses the job; None: those of the previous override, or the
                current slots without an override.
            batch: global batch, samples per step; None: unchanged.
            on: exactly these slots, NODE/INDEX; if only `batch` is given, the slots of the previous
                override are kept.
        """
        places = tuple(SlotId(slot) for slot in on)
        request = wire.ResizeJob(job=JobId(job), slots=slots, batch=batch, on=places)
        return await self._detail(request, JobId(job))

    async def pause(self, job: str) -> wire.JobDetail:
        """Release the slots of a job that has not ended. A checkpoint keeps the training state."""
        return await self._detail(wire.PauseJob(job=JobId(job)), JobId(job))

    async def resume(self, job: str, *, auto: bool = False) -> wire.JobDetail:
        """Resume a job that was resized or paused by an override and has not ended.

        Args:
            auto: True returns the job to the policy's control; False keeps the slots and the batch
                of the override.
        """
        return await self._detail(wire.ResumeJob(job=JobId(job), auto=auto), JobId(job))

    async def hold(self, job: str) -> wire.JobDetail:
        """Keep a job from starting until `release`. It keeps slots that it has."""
        return await self._detail(wire.HoldJob(job=JobId(job)), JobId(job))

    async def release(self, job: str) -> wire.JobDetail:
        """End a hold."""
        return await self._detail(wire.ReleaseJob(job=JobId(job)), JobId(job))

    async def rerun(
        self, job: str, key: str | None = None, *, secret_env: str | Path = ""
    ) -> wire.JobAccepted:
        """Submit the spec and the working directory of your job again, even if it has ended.

        The new job waits neither for other jobs nor for a time.

        Args:
            key: idempotency key; the same key returns the same job. None: a new job each time.
            secret_env: file of secret variables; required if the job had some.

        Raises:
            BadFieldError: if the working directory is no longer stored, or `secret_env` is missing.
        """
        secrets = read_secrets(Path(secret_env)) if secret_env else {}
        request = wire.RerunJob(job=JobId(job), key=key or uuid.uuid4().hex, secrets=secrets)
        return await self._call(request, wire.JobAccepted)

    async def nodes(self) -> Rows[wire.NodeInfo]:
        """Return all nodes."""
        return Rows((await self._joined(wire.ListNodes(), wire.Nodes, "nodes")).nodes)

    async def drain(
        self, node: str, within_s: float | None = None, reason: str = ""
    ) -> wire.NodeInfo:
        """Drain a node. Its jobs move, or wait without losing state, and no new job starts on it.

        Only operators and admins may call this.

        Args:
            within_s: seconds after which remaining workers are stopped; None: never.
            reason: shown to the owners of the jobs that move.
        """
        request = wire.DrainNode(node=NodeId(node), within_s=within_s, reason=reason)
        return (await self._call(request, wire.Nodes)).nodes[0]

    async def cordon(self, node: str, reason: str = "") -> wire.NodeInfo:
        """Start no new job on a node; its jobs stay. Only operators and admins may call this."""
        request = wire.DrainNode(node=NodeId(node), reason=reason, cordon=True)
        return (await self._call(request, wire.Nodes)).nodes[0]

    async def reserve(
        self, nodes: Sequence[str], reservation: Reservation
    ) -> tuple[wire.NodeInfo, ...]:
        """Reserve nodes, all of them or none, for jobs of projects and users, or for maintenance.

        Only operators and admins may call this. `cancel_reservation` ends it earlier.
        """
        request = wire.ReserveNodes(nodes=tuple(map(NodeId, nodes)), reservation=reservation)
        return (await self._call(request, wire.Nodes)).nodes

    async def cancel_reservation(self, reservation: str) -> tuple[wire.NodeInfo, ...]:
        """Cancel a reservation, which `nodes` shows, on all its nodes. Return these nodes."""
        return (await self._call(wire.CancelReservation(id=reservation), wire.Nodes)).nodes

    async def undrain(self, node: str) -> wire.NodeInfo:
        """Return a drained node to service. Only operators and admins may call this."""
        return (await self._call(wire.UndrainNode(node=NodeId(node)), wire.Nodes)).nodes[0]

    async def forget_node(self, node: str) -> wire.NodeInfo:
        """Remove a lost node that will not come back. Only operators and admins may call this."""
        return (await self._call(wire.ForgetNode(node=NodeId(node)), wire.Nodes)).nodes[0]

    async def sharing(self) -> wire.SharingInfo:
        """Return the rules of sharing, and the accounts that the key may see."""
        return await self._call(wire.GetSharing(), wire.SharingInfo)

    async def change_sharing(self, sharing: Sharing, based_on: int) -> wire.SharingInfo:
        """Replace the rules of sharing. Only admins may call this.

        Args:
            based_on: revision of the rules that were read. A BadFieldError is raised if the rules
                have changed since then.
        """
        return await self._call(
            wire.ChangeSharing(sharing=sharing, based_on=based_on), wire.SharingInfo
        )

    async def policy(self) -> wire.PolicyInfo:
        """Return the policy that plans, and who chose it."""
        return await self._call(wire.GetPolicy(), wire.PolicyInfo)

    async def choose_policy(
        self, name: str, options: Mapping[str, Any] | None = None
    ) -> wire.PolicyInfo:
        """Let another policy plan (admins). Jobs go on.

        Raises:
            OnesError: if there is no such policy, or an option is unknown or out of its range.
        """
        text = msgspec.json.encode(options or {}).decode()
        return await self._call(wire.ChoosePolicy(name=name, options=text), wire.PolicyInfo)

    async def pause_scheduling(self, paused: bool, reason: str = "") -> wire.SharingInfo:
        """Pause all starts and growths, or resume them. Only operators and admins may call this."""
        return await self._call(
            wire.PauseScheduling(paused=paused, reason=reason), wire.SharingInfo
        )

    async def keys(self) -> tuple[wire.KeyInfo, ...]:
        """Return all keys, including expired and revoked ones. Only admins may call this."""
        return (await self._joined(wire.ListKeys(), wire.Keys, "keys")).keys

    async def add_key(
        self,
        public: str,
        name: str,
        role: str,
        projects: Sequence[str] = (),
        expires: float | None = None,
    ) -> wire.KeyInfo:
        """Authorise a key that belongs to no other user and was not revoked.

        Only admins may add any key. Others may add keys with their own name and rights that expire
        within a day, as `ones web login` does.

        Args:
            public: the owner's public key, Z85; the secret key stays with the owner.
            name: name of the owner or of the node.
            role: admin, operator, user, viewer, node or join.
            projects: the key may see the jobs of these projects; new jobs belong to the first one.
            expires: seconds since the epoch; None: never.
        """
        asked = {
            "type": "keys.add.1", "public": public, "name": name, "role": role,
            "projects": tuple(projects), "expires": expires,
        }  # fmt: skip
        try:
            request = msgspec.convert(asked, wire.AddKey)
        except msgspec.ValidationError as error:
            raise BadFieldError(str(error), "see docs/operations/keys.md, Roles", "role") from None
        return (await self._call(request, wire.Keys)).keys[0]

    async def revoke_key(self, key: str) -> tuple[wire.KeyInfo, ...]:
        """Revoke keys permanently and close their sessions. Only admins may call this.

        Args:
            key: a public key, or the name of an owner, which revokes all keys of this owner. The
                last key of an admin cannot be revoked.
        """
        return (await self._call(wire.RevokeKey(key=key), wire.Keys)).keys

    async def submit_sweep(
        self, sweep: Sweep, workdir: Path | str | None = None, key: str | None = None
    ) -> SweepRun:
        """Upload the working directory and submit a sweep.

        Args:
            workdir: folder of the sweep's functions; None: the folder that `sweep` names.
            key: idempotency key; the same key returns the same sweep. None: a new sweep each time.

        Raises:
            TooLargeError: if the packed working directory exceeds the limits of the cluster.
        """
        spec = sweep.job_spec()
        if workdir is not None:
            spec = msgspec.structs.replace(spec, workdir=str(workdir))
        return SweepRun(self, await self.submit(spec, key))

    def sweep_run(self, job: str) -> SweepRun:
        """Return a handle for the sweep of this name; no request is sent."""
        return SweepRun(self, JobId(job))

    async def sweep(self, job: str) -> wire.SweepDetail:
        """Return the state of a sweep, with all its trials."""
        return await self._whole(wire.GetSweep(job=JobId(job)), wire.SweepDetail, "trial")

    async def _whole(
        self, request: wire.GetSweep | wire.GetLedger, kind: type[Whole], item: str
    ) -> Whole:
        """Return a reply with all its items. Later requests set `from_ITEM` to get the rest."""
        whole = await self._call(request, kind)
        items = list(getattr(whole, f"{item}s"))
        while len(items) < getattr(whole, f"{item}s_total"):
            following = msgspec.structs.replace(request, **{f"from_{item}": len(items)})
            page = getattr(await self._call(following, kind), f"{item}s")
            if not page:
                break
            items += page
        return msgspec.structs.replace(whole, **{f"{item}s": tuple(items)})

    async def change_sweep(
        self,
        job: str,
        change: Change,
        trial: int | None = None,
        *,
        values: Mapping[str, Value] | None = None,
        parent: int | None = None,
        key: str | None = None,
    ) -> wire.SweepChanged:
        """Change one trial of a sweep, or add a trial. The change is durable when this returns.

        Args:
            trial: required unless `change` is `add`.
            values: for `add`: the configuration; with `parent`, only values that differ from the
                parent's.
            parent: for `add`: the new trial continues from the state of this trial.
            key: idempotency key; None: a new change each time.
        """
        request = wire.ChangeSweep(
            job=JobId(job),
            change=change,
            trial=trial,
            values=dict(values or {}),
            parent=parent,
            key=key or uuid.uuid4().hex,
        )
        return await self._call(request, wire.SweepChanged)

    async def ledger(self, job: str) -> wire.Ledger:
        """Return the units of work that a sweep has recorded, in the order in which they ended."""
        return await self._whole(wire.GetLedger(job=JobId(job)), wire.Ledger, "unit")

    async def wait(
        self,
        job: str,
        timeout: float | None = None,  # noqa: ASYNC109
        on_failure: Callable[[str], None] | None = None,
    ) -> wire.JobDetail:
        """Wait until a job has ended and return the job; see `wait_state`."""
        await self.wait_state(job, timeout, on_failure)
        return await self.job(job)

    async def wait_state(
        self,
        job: str,
        timeout: float | None = None,  # noqa: ASYNC109
        on_failure: Callable[[str], None] | None = None,
    ) -> wire.JobState:
        """Wait until a job has ended and return its state, without its history.

        Args:
            timeout: seconds; None waits without limit.
            on_failure: called when a try of the job has failed that `retries` let it repeat, with
                a text that has the number of the try and the cause.

        Raises:
            TimedOutError: if the job has not ended after `timeout` seconds.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout if timeout is not None else None
        failures = 0
        while True:
            left = POLL_S if deadline is None else max(0.0, min(POLL_S, deadline - loop.time()))
            found = await self.state(job, left, None if on_failure is None else failures)
            if found.state in ENDED:
                return found
            if on_failure is not None and found.failures > failures:
                on_failure(found.failure)
            failures = found.failures
            if deadline is not None and loop.time() >= deadline:
                problem = f"{job} is {found.state} after {timeout:g} s"
                raise TimedOutError(problem, "wait longer, or inspect the job with `ones show`")

    async def events(self, from_seq: int = 1, follow: bool = False) -> AsyncIterator[FeedEvent]:
        """Yield feed events, numbered without gaps.

        Args:
            from_seq: number of the first event, 1-based; if the controller no longer stores this
                event, the first yielded event is the oldest stored event.
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
        """
        async for page in self.output_pages(job, rank, follow=follow):
            for line in page:
                yield line.text

    async def samples(self, job: str) -> AsyncIterator[dict[str, Any]]:
        """Yield a record `{"epoch", "step", "rank", "ids"}` for each committed step.

        Each sample occurs once per epoch. Steps that were lost with a worker and repeated from a
        checkpoint are omitted. The spec must set `record_samples`.
        """
        async for page in self.sample_pages(job):
            for record in page:
                yield record
