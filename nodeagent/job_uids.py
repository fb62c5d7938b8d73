"""Which uids the workers of this node hold; a job's own is emptied when its last worker is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

from nodeagent.job_accounts import Account, JobAccounts
from nodeagent.process_identity import end_all_of
from nodeagent.zygote_pool import ZygotePool
from schemas.ids import WorkerId


class JobUids:
    """Ends what a job with a uid of its own leaves running: its zygotes, and whatever it started.

    Args:
        accounts: say which uids are a job's alone; None: none.
    """

    def __init__(self, accounts: JobAccounts | None, zygotes: ZygotePool) -> None:
        self._accounts = accounts
        self._zygotes = zygotes
        self._held: dict[WorkerId, int] = {}
        self._ending: dict[int, asyncio.Task[None]] = {}

    def hold(self, worker: WorkerId, uid: int) -> None:
        """A worker runs, or is about to."""
        self._held[worker] = uid

    async def take(self, worker: WorkerId, account: Account) -> None:
        """Hold an account for a worker that begins, once those before it are all gone."""
        uid = account.owner.uid
        self.hold(worker, uid)
        if (ending := self._ending.get(uid)) is not None:
            await ending

    async def release(self, worker: WorkerId) -> None:
        """A worker is gone, or did not begin.

        Args:
            worker: its name; one that holds nothing is passed over.
        """
        if (uid := self._held.pop(worker, None)) is not None:
            await self._empty(uid)

    async def end_unused(self, sockets: Path) -> None:
        """End the zygotes of jobs that have no worker here, of a former life of the agent.

        Args:
            sockets: folder of the node that has a folder for each uid.
        """
        found = await asyncio.to_thread(lambda: [path.name for path in sockets.iterdir()])
        for uid in (int(name) for name in found if name.isdigit()):
            await self._empty(uid)

    async def _empty(self, uid: int) -> None:
        alone = self._accounts is not None and self._accounts.is_own(uid)
        if not alone or uid in self._held.values() or uid in self._ending:
            return
        self._zygotes.forget(uid)
        self._ending[uid] = asyncio.create_task(asyncio.to_thread(end_all_of, uid))
        try:
            await self._ending[uid]
        finally:
            del self._ending[uid]
