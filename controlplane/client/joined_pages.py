"""Replies that come in pages, joined: whoever asks sees one reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from controlplane.client.cluster_connection import ClusterConnection
from schemas.errors import UnreachableError
from schemas.ids import JobId
from schemas.messages import Message
from schemas.messages.client import (
    ExplainJob,
    Explanation,
    GetJob,
    JobDetail,
    Jobs,
    JobState,
    ListJobs,
    ListNodes,
    Nodes,
    WaitJob,
)

Page = TypeVar("Page", Jobs, JobDetail, Explanation, Nodes)
OF_A_JOB: Final = ("workers", "history", "epochs", "versions", "promises")


class JoinedPages(ClusterConnection):
    """Lists and details of any length."""

    async def some_job_names(self) -> list[str]:
        """Return names of jobs, oldest first: all, or of many the oldest and the live ones.

        Never asks for more than two pages.
        """
        page = await self._call(ListJobs(ended=True), Jobs)
        live = (await self._call(ListJobs(), Jobs)).jobs if page.next else ()
        return [job.job for job in (*page.jobs, *live)]

    async def job(self, job: str) -> JobDetail:
        """Everything about one job.

        Args:
            job: its name, as `submit` returned it.

        Raises:
            UnknownJobError: if there is no such job.
        """
        return await self._detail(GetJob(job=JobId(job)), JobId(job))

    async def state(self, job: str, wait_s: float = 0.0) -> JobState:
        """Only where a job stands.

        Args:
            job: its name, as `submit` returned it.
            wait_s: the answer is held back so long, at most 30 s, while the job has not ended.

        Raises:
            UnknownJobError: if there is no such job.
        """
        return await self._call(WaitJob(job=JobId(job), wait_s=wait_s), JobState, wait_s)

    async def _detail(self, request: Message, job: JobId) -> JobDetail:
        """The answer to a request that has a job's detail, with the pages that follow."""
        first = await self._call(request, JobDetail)
        return await self._joined(first, lambda cursor: GetJob(job=job, cursor=cursor), *OF_A_JOB)

    async def _explanation(self, job: JobId) -> Explanation:
        first = await self._call(ExplainJob(job=job), Explanation)
        return await self._joined(
            first, lambda cursor: ExplainJob(job=job, cursor=cursor), "decisions"
        )

    async def _job_list(self, request: ListJobs) -> Jobs:
        first = await self._call(request, Jobs)
        return await self._joined(
            first, lambda cursor: msgspec.structs.replace(request, cursor=cursor), "jobs"
        )

    async def _node_list(self) -> Nodes:
        first = await self._call(ListNodes(), Nodes)
        return await self._joined(first, lambda cursor: ListNodes(cursor=cursor), "nodes")

    async def _joined(self, first: Page, ask: Callable[[str], Message], *lists: str) -> Page:
        page, rows = first, {name: list(getattr(first, name)) for name in lists}
        while cursor := page.next:
            page = await self._call(ask(cursor), type(first))
            if page.next == cursor:
                what = f"the controller gives the page at {cursor} again and again"
                raise UnreachableError(what, "compare releases")
            for name in lists:
                rows[name] += getattr(page, name)
        return msgspec.structs.replace(page, **{name: tuple(rows[name]) for name in lists})
