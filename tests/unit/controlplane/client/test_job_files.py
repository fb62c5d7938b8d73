"""Files of jobs are fetched completely, to paths inside the target folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.client.archive import survey
from controlplane.client.files import (
    Fetch,
    Fetched,
    FileTransfers,
    matches,
    newest_checkpoint,
    nodes_of,
)
from schemas.errors import BadFieldError, TooLargeError, UnavailableError
from schemas.wire.client import JobDetail, VersionInfo
from schemas.wire.files import FileInfo, FileList, FilePiece, ListFiles, ReadFile
from tests.support.schemas_examples import EXAMPLES

DETAIL = EXAMPLES["client.job_detail.3"]
PIECE = 4  # bytes, of the nodes here


class Nodes(FileTransfers):
    """A client whose nodes are dictionaries: {node: {(area, path): content}}."""

    def __init__(self, nodes: dict[str, dict[tuple[str, str], bytes]]) -> None:
        self.nodes = nodes
        self.refused: tuple[str, ...] = ()
        self.left_out = 0
        self.spoil: dict[int, str] = {}  # which piece is spoilt, and how
        self.reads = 0

    async def job(self, job: str) -> JobDetail:
        assert isinstance(DETAIL, JobDetail)
        slots = tuple(f"{node}/0" for node in self.nodes)
        version: Any = VersionInfo(version=1, resumed_epoch=0, slots=slots)  # type: ignore[arg-type]
        return msgspec.structs.replace(DETAIL, versions=(version, version))

    async def _bulk_call(self, request: Any, kind: Any, wait_s: float) -> Any:
        files = self.nodes[request.node]
        if ("away", "") in files:
            raise UnavailableError(f"node {request.node} is away", "")
        if isinstance(request, ListFiles):
            infos = tuple(
                FileInfo(area=area, path=path, size=len(data), stamp="1")  # type: ignore[arg-type]
                for (area, path), data in files.items()
            )
            return FileList(request="", files=infos, refused=self.refused, left_out=self.left_out)
        assert isinstance(request, ReadFile)
        content = files[request.area, request.path]
        data = content[request.offset : request.offset + PIECE]
        self.reads += 1
        spoilt = self.spoil.get(self.reads, "")
        return FilePiece(
            request="", offset=request.offset, data=data, size=len(content),
            stamp="2" if spoilt == "stamp" else "1",
            digest=hashlib.sha256(b"x" if spoilt == "data" else data).hexdigest(),
        )  # fmt: skip


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def test_files_are_fetched_by_node_and_shared_checkpoints_once(tmp_path: Path) -> None:
    shared = {("checkpoints", "epoch-000001.v1.pt"): b"state"}
    nodes = Nodes({
        "n1": {("work", "out/a.txt"): b"one and more", **shared},
        "n2": {("work", "a"): b"", **shared},
    })  # fmt: skip
    seen: list[tuple[int, int]] = []

    done = await nodes.fetch("j-1", tmp_path, on_bytes=lambda *both: seen.append(both))

    assert done == Fetch(
        (
            Fetched(tmp_path / "checkpoints/epoch-000001.v1.pt", 5, sha(b"state")),
            Fetched(tmp_path / "work/n1/out/a.txt", 12, sha(b"one and more")),
            Fetched(tmp_path / "work/n2/a", 0, sha(b"")),
        )
    )
    assert seen == [(4, 17), (5, 17), (9, 17), (13, 17), (17, 17)]
    assert files_in(tmp_path) == {
        "checkpoints/epoch-000001.v1.pt": b"state",
        "work/n1/out/a.txt": b"one and more",
        "work/n2/a": b"",
    }  # fmt: skip


async def test_an_absent_node_costs_only_its_own_files(tmp_path: Path) -> None:
    nodes = Nodes({"n1": {("away", ""): b""}, "n2": {("work", "a"): b"1"}})
    nodes.refused, nodes.left_out = ("link: leads out",), 3

    done = await nodes.fetch("j-1", tmp_path)

    assert [file.path for file in done.files] == [tmp_path / "work/n2/a"]
    assert done.refused == ("n2: link: leads out",)
    assert done.missing == ("node n1 is away", "n2: 3 files beyond the limit of a list")


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/x", "a\0b", ""])
async def test_a_name_outside_the_folder_is_omitted(path: str) -> None:
    nodes = Nodes({"n1": {("work", path): b"1", ("work", "good"): b""}})

    assert [file.name for file in (await nodes.files("j-1")).files] == ["work/n1/good"]


@pytest.mark.parametrize("how", ["stamp", "data"])
async def test_a_changed_or_damaged_file_is_fetched_again(tmp_path: Path, how: str) -> None:
    nodes = Nodes({"n1": {("work", "a"): b"123456"}})
    nodes.spoil = {2: how}

    done = await nodes.fetch("j-1", tmp_path)

    assert done == Fetch((Fetched(tmp_path / "work/n1/a", 6, sha(b"123456")),))
    assert nodes.reads == 4


async def test_a_file_that_keeps_changing_is_named_and_removed(tmp_path: Path) -> None:
    nodes = Nodes({"n1": {("work", "a"): b"123456", ("work", "b"): b"1"}})
    nodes.spoil = dict.fromkeys((2, 4, 6), "stamp")

    done = await nodes.fetch("j-1", tmp_path)

    assert done.missing == ("work/n1/a: work/n1/a changed during the transfer",)
    assert files_in(tmp_path) == {"work/n1/b": b"1"}


async def test_too_much_and_a_target_that_cannot_be_made_are_refused_before_the_transfer(
    tmp_path: Path,
) -> None:
    nodes = Nodes({"n1": {("work", "a"): b"123456"}})
    (tmp_path / "file").write_text("")

    with pytest.raises(TooLargeError, match="1 files of 6 bytes exceed the limit of 5"):
        await nodes.fetch("j-1", tmp_path / "to", most_bytes=5)
    with pytest.raises(BadFieldError, match="file: File exists; choose another --to"):
        await nodes.fetch("j-1", tmp_path / "file")
    assert (nodes.reads, (tmp_path / "to").exists()) == (0, False)


async def test_fetched_files_are_not_uploaded_with_the_next_job(tmp_path: Path) -> None:
    nodes = Nodes({"n1": {("work", "a"): b"123456"}})
    (tmp_path / "train.py").write_text("")
    (tmp_path / "own").mkdir()

    await nodes.fetch("j-1", tmp_path / "j-1")
    await nodes.fetch("j-1", tmp_path / "own")

    assert [file.path for file in survey(tmp_path)] == ["train.py", "own/work/n1/a"]


async def test_a_target_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "work").write_text("a file where a folder should be")
    nodes = Nodes({"n1": {("work", "a"): b"1"}})

    done = await nodes.fetch("j-1", tmp_path)

    assert done.missing == (f"work/n1/a: {tmp_path}/work/n1/a: Not a directory",)


async def test_the_last_checkpoint_is_of_the_last_group_and_a_finished_epoch() -> None:
    epoch = (await Nodes({}).job("j-1")).summary.epoch
    made = ((epoch, 2), (epoch - 1, 1), (epoch + 1, 1))
    names = [f"epoch-{number:06d}.v{version}.pt" for number, version in made]
    nodes = Nodes({"n1": {("checkpoints", name): b"" for name in names}})

    assert (await nodes.last_checkpoint("j-1")).name == f"checkpoints/{names[0]}"
    nodes.nodes = {"n1": {("away", ""): b""}}
    with pytest.raises(BadFieldError, match=r"j-1 has no checkpoint here \(node n1 is away\)"):
        await nodes.last_checkpoint("j-1")


def test_the_newer_group_wins_for_repeated_epochs() -> None:
    names = ["checkpoints/epoch-000005.v1.pt", "checkpoints/epoch-000004.v3.pt", "checkpoints/x.pt"]

    assert newest_checkpoint(names, 5) == "checkpoints/epoch-000004.v3.pt"
    assert newest_checkpoint(names, 3) == ""


@pytest.mark.parametrize(
    ("name", "pattern", "meant"),
    [
        ("work/n1/out/a.png", "*.png", True), ("work/n1/out/a.png", "out/*", True),
        ("work/n1/out/a.png", "work/n1/*", True), ("work/n1/out/a.png", "a.png", True),
        ("work/n1/out/a.png", "n1/*", False), ("work/n1/out/a.png", "*.PNG", False),
        ("checkpoints/e.pt", "checkpoints/*", True), ("model.pt", "*", True),
        ("model.pt", "*.png", False),
    ],
)  # fmt: skip
def test_a_pattern_matches_a_name_a_path_or_its_last_part(
    name: str, pattern: str, *, meant: bool
) -> None:
    assert matches(name, pattern) is meant


async def test_nodes_of_all_groups_of_a_job_are_asked() -> None:
    assert nodes_of(await Nodes({"n2": {}, "n1": {}}).job("j-1")) == ("n2", "n1")
