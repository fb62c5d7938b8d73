"""Files of the past go by age and size; what a job still needs stays."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.service.file_keeper import GRACE_S, ArchiveKeeper, OutputKeeper
from controlplane.service.relay.log_store import LogStore
from controlplane.service.settings import Store
from controlplane.service.uploads import SnapshotStore, excess_archives
from schemas.host.files import AgedFile, expired_files
from schemas.ids import JobId, Seconds
from tests.support.builders import S0, cancelled
from tests.support.controller import Controller, cluster_of, starting

NOW: Final = Seconds(10_000_000.0)
DAY: Final = 86_400.0
UNLIMITED: Final = 1 << 40
WHO: Final = (1, 0)

FILES = st.lists(
    st.builds(
        AgedFile,
        name=st.text("abc", min_size=1, max_size=3),
        size=st.integers(0, 100),
        at=st.floats(0, 100),
    ),
    max_size=8,
    unique_by=lambda file: file.name,
)


@given(files=FILES, keep_s=st.floats(0, 100), keep_bytes=st.integers(0, 300))
def test_outdated_files_are_the_fewest_that_satisfy_the_bounds(
    files: list[AgedFile], keep_s: float, keep_bytes: int
) -> None:
    gone = expired_files(files, keep_s, keep_bytes, 100.0)

    left = [file for file in files if file not in gone]
    assert sum(file.size for file in left) <= keep_bytes
    assert all(100.0 - file.at <= keep_s for file in left)
    if gone:
        last = gone[-1]
        assert 100.0 - last.at > keep_s or sum(f.size for f in [*left, last]) > keep_bytes
    assert all(one.at <= other.at for one in gone for other in left)


SENDERS = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.sets(st.sampled_from("xyz"), max_size=3)
)


@given(files=FILES, most=st.integers(0, 300), senders=SENDERS)
def test_a_user_within_a_fair_share_loses_no_archive(
    files: list[AgedFile], most: int, senders: dict[str, set[str]]
) -> None:
    gone = excess_archives(files, most, senders)

    left = [file for file in files if file not in gone]
    assert sum(file.size for file in left) <= most
    if gone:
        assert sum(file.size for file in [*left, gone[-1]]) > most
    owners = {file.name: senders.get(file.name) or {""} for file in files}
    users = set().union(*owners.values()) if owners else set()
    for who in users:
        mine = [file for file in files if owners[file.name] == {who}]
        alone = all(owners[file.name] in ({who}, owners[file.name] - {who}) for file in files)
        if alone and sum(file.size for file in mine) <= most / len(users):
            assert not [file for file in mine if file in gone and file.size]


class Folders:
    """Output and archives of one controller."""

    def __init__(self, base: Path, controller: Controller, **settings: Any) -> None:
        self.logs = LogStore(base / "logs", UNLIMITED)
        self.archives = SnapshotStore(base / "snapshots", UNLIMITED)
        bounds = {"keep_logs_s": DAY, "keep_archives_s": DAY, **settings}
        store = Store(**bounds)
        self._keepers = (
            OutputKeeper(lambda: controller.state, self.logs, store),
            ArchiveKeeper(lambda: controller.state, self.archives, store),
        )

    async def tidy(self) -> None:
        for keeper in self._keepers:
            await keeper.tidy(NOW)

    def output_of(self, job: str, days_ago: float, size: int = 10) -> None:
        self.logs.append(JobId(job), "log", WHO, 0, b"x" * size)
        when = NOW - days_ago * DAY
        for file in (self.logs.folder / f"{job}.log").iterdir():
            os.utime(file, (when, when))

    async def archive(self, content: bytes, days_ago: float, who: str = "ann") -> str:
        digest = hashlib.sha256(content).hexdigest()
        await self.archives.put(who, digest, 0, content, len(content))
        self.touched(digest, days_ago)
        return digest

    def touched(self, name: str, days_ago: float) -> None:
        when = NOW - days_ago * DAY
        (self.archives.folder / name).touch()
        os.utime(self.archives.folder / name, (when, when))

    @property
    def left(self) -> set[str]:
        return {
            file.name for file in (*self.logs.folder.iterdir(), *self.archives.folder.iterdir())
        }


@pytest.fixture
def controller() -> Controller:
    """Job a-1 starts, b-2 ended long ago, c-3 ended half a day ago."""
    made = starting(cluster_of(n1=1))
    for name, days_ago in (("b", 3.0), ("c", 0.5)):
        made.now = float(NOW - days_ago * DAY)
        made.submit(name)
        made.take(cancelled(JobId(f"{name}-{made.state.jobs_accepted}")))
    return made


async def test_output_is_deleted_long_after_the_end_of_its_job(
    controller: Controller, tmp_path: Path
) -> None:
    folders = Folders(tmp_path, controller)
    for job in ("a-1", "b-2", "c-3", "gone-4"):
        folders.output_of(job, days_ago=5.0)
    folders.output_of("gone-5", days_ago=0.5)

    await folders.tidy()

    assert folders.left == {"a-1.log", "c-3.log", "gone-5.log"}
    assert folders.logs.stored(JobId("b-2"), "log", WHO) == (0, False)
    assert folders.logs.append(JobId("b-2"), "log", WHO, 0, b"late") == 4


async def test_output_of_ended_jobs_is_deleted_earlier_beyond_its_bound(
    controller: Controller, tmp_path: Path
) -> None:
    folders = Folders(tmp_path, controller, keep_logs_bytes=250)
    folders.output_of("a-1", days_ago=0.9, size=1000)
    for job, days_ago in (("gone-4", 0.8), ("gone-5", 0.7), ("gone-6", 0.6)):
        folders.output_of(job, days_ago, size=100)

    await folders.tidy()

    assert folders.left == {"a-1.log", "gone-5.log", "gone-6.log"}


async def test_unneeded_archives_and_abandoned_uploads_are_deleted(
    controller: Controller, tmp_path: Path
) -> None:
    folders = Folders(tmp_path, controller)
    used = await folders.archive(b"used", days_ago=9.0)
    old = await folders.archive(b"old", days_ago=9.0)
    asked = await folders.archive(b"asked for", days_ago=9.0)
    young = await folders.archive(b"young", days_ago=0.5)
    folders.touched(f"{old}.0123456789abcdef.part", days_ago=1.1 / 24)
    folders.touched("under-way.part", days_ago=0.9 / 24)
    job = controller.state.jobs[JobId("a-1")]
    controller.state.jobs[job.job] = msgspec.structs.replace(job, snapshot=used)
    assert folders.archives.has(asked)

    await folders.tidy()

    assert folders.left == {used, asked, young, "under-way.part"}
    assert S0 in controller.state.slot_index.owners(), "the job that uses it goes on"


async def test_a_recent_archive_is_kept_beyond_the_bound(
    controller: Controller, tmp_path: Path
) -> None:
    folders = Folders(tmp_path, controller, keep_archives_s=0.0, keep_archives_bytes=0)
    young = await folders.archive(b"young", days_ago=0.9 * GRACE_S / DAY)
    await folders.archive(b"older", days_ago=1.1 * GRACE_S / DAY)

    await folders.tidy()

    assert folders.left == {young}


async def test_the_user_with_the_most_archives_loses_the_oldest(
    controller: Controller, tmp_path: Path
) -> None:
    folders = Folders(tmp_path, controller, keep_archives_bytes=500)
    anns = [await folders.archive(b"a%099d" % number, 0.9) for number in range(2)]
    bobs = [
        await folders.archive(b"b%099d" % number, 0.5 - number / 100, who="bob")
        for number in range(10)
    ]

    await folders.tidy()

    assert folders.left == {*anns, *bobs[-3:]}
