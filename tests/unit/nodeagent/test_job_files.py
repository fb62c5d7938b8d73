"""What a job made on a node: listed without what it was given, read without a way out."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from controlplane.client.archive import digest_of, pack
from nodeagent import job_folders
from nodeagent.folders import NodeFolders
from nodeagent.job_folders import PIECE, answer, lay_out
from schemas.ids import JobId
from schemas.wire.files import Area, AskFiles, AskPiece, FileList, FilePiece, FilesRefused
from tests.support.file_trees import PROJECT, tree

JOB = JobId("digits-1")


@pytest.fixture
def node(tmp_path: Path) -> NodeFolders:
    """A node on which a job was laid out from PROJECT."""
    folders = NodeFolders(tmp_path / "run", tmp_path / "work", tmp_path / "checkpoints")
    archive = pack(tree(tmp_path / "in", PROJECT))
    (tmp_path / "archive").write_bytes(archive)
    lay_out(tmp_path / "archive", folders.job(JOB), digest_of(archive))
    return folders


def listed(node: NodeFolders) -> FileList:
    found = answer(AskFiles(request="r", job=JOB), node)
    assert isinstance(found, FileList), found
    return found


def sizes(found: FileList) -> dict[tuple[str, str], int]:
    return {(file.area, file.path): file.size for file in found.files}


def piece(node: NodeFolders, path: str, area: Area = "work", offset: int = 0) -> FilePiece:
    found = answer(AskPiece(request="r", job=JOB, area=area, path=path, offset=offset), node)
    assert isinstance(found, FilePiece), found
    return found


def refused(node: NodeFolders, path: str, job: str = JOB) -> str:
    asked = AskPiece(request="r", job=JobId(job), area="work", path=path, offset=0)
    found = answer(asked, node)
    assert isinstance(found, FilesRefused), found
    assert (found.request, found.code) == ("r", "bad_field")
    return found.message


def test_a_job_that_made_nothing_has_nothing(node: NodeFolders) -> None:
    assert listed(node) == FileList(request="r", files=())
    assert answer(AskFiles(request="r", job=JobId("other-1")), node) == FileList(
        request="r", files=()
    )


def test_new_and_changed_files_and_checkpoints_are_listed_and_nothing_else(
    node: NodeFolders,
) -> None:
    work = node.job(JOB)
    tree(work, {"out/plot.png": b"png", "data/small.txt": "8", "__pycache__/x.pyc": "1"})
    tree(work, {"lib/model.py": PROJECT["lib/model.py"] + "y"})
    tree(node.checkpoints / JOB, {"epoch-000001.v1.pt": "12", "epoch-000002.v1.new": "1"})

    assert sizes(listed(node)) == {
        ("work", "data/small.txt"): 1,  # of the same size
        ("work", "lib/model.py"): 6,
        ("work", "out/plot.png"): 3,
        ("checkpoints", "epoch-000001.v1.pt"): 2,
    }


def test_a_job_that_damages_its_own_notes_has_all_files_listed(node: NodeFolders) -> None:
    (node.job(JOB) / ".ones-snapshot").write_text("x\n{[")

    assert len(listed(node).files) == len(PROJECT)


def test_links_are_followed_inside_of_the_folder_and_named_where_they_lead_out(
    node: NodeFolders, tmp_path: Path
) -> None:
    work = node.job(JOB)
    tree(tmp_path / "elsewhere", {"secret": "s"})
    tree(work, {"out/a.txt": "12345"})
    (work / "latest").symlink_to("out/a.txt")
    (work / "away").symlink_to(tmp_path / "elsewhere" / "secret")
    (work / "folder").symlink_to(tmp_path / "elsewhere")
    (work / "gone").symlink_to("nowhere")
    os.mkfifo(work / "pipe")

    found = listed(node)

    assert sizes(found) == {("work", "latest"): 5, ("work", "out/a.txt"): 5}
    assert found.refused == (
        "away: a link that leads out of the job's folder",
        "folder: a link that leads out of the job's folder",
        "gone: broken link",
        "pipe: not a regular file",
    )
    assert piece(node, "latest").data == b"12345"


def test_a_list_is_bounded_and_counts_what_it_leaves_out(
    node: NodeFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_folders, "MAX_FILES", 2)
    tree(node.job(JOB), {f"new-{n}": "" for n in range(5)})

    found = listed(node)

    assert ([file.path for file in found.files], found.left_out) == (["new-0", "new-1"], 3)


def test_a_file_is_read_in_pieces_each_with_its_digest(node: NodeFolders) -> None:
    content = os.urandom(PIECE + 3)
    tree(node.checkpoints / JOB, {"epoch-000001.v1.pt": content})

    first = piece(node, "epoch-000001.v1.pt", "checkpoints")
    rest = piece(node, "epoch-000001.v1.pt", "checkpoints", PIECE)

    assert (first.data + rest.data, first.size, rest.offset) == (content, PIECE + 3, PIECE)
    assert first.stamp == rest.stamp == listed(node).files[0].stamp
    assert rest.digest == hashlib.sha256(content[PIECE:]).hexdigest()
    assert piece(node, "epoch-000001.v1.pt", "checkpoints", 2 * PIECE).data == b""


def test_a_file_that_changed_has_another_stamp(node: NodeFolders) -> None:
    path = node.job(JOB) / "train.py"
    before = piece(node, "train.py").stamp

    os.utime(path, ns=(1, 1))

    assert piece(node, "train.py").stamp != before


OUTSIDE = (
    "../../secret", "/etc/passwd", "lib/../../../secret", "away", "folder/secret", "", ".", "lib/..",
)  # fmt: skip


@pytest.mark.parametrize(
    ("path", "job", "why"),
    [
        *((path, JOB, f"{path} leads out of the job's folder") for path in OUTSIDE),
        ("none.txt", JOB, "none.txt is not on this node any more"),
        ("train.py/x", JOB, "train.py/x is not on this node any more"),
        ("lib", JOB, "lib is not a regular file"),
        ("pipe", JOB, "pipe is not a regular file"),
        ("a\0b", JOB, "invalid path: embedded null byte"),
        ("circle", JOB, "invalid path: "),
        *(("train.py", job, f"{job!r} is not a job") for job in ("", "..", ".", "a/b", "../work", ".digits-1.new")),
    ],
)  # fmt: skip
def test_a_path_outside_the_jobs_folder_or_to_no_file_is_refused(
    node: NodeFolders, tmp_path: Path, path: str, job: str, why: str
) -> None:
    work = node.job(JOB)
    (tmp_path / "secret").write_text("s")
    (work / "away").symlink_to(tmp_path / "secret")
    (work / "folder").symlink_to(tmp_path)
    (work / "circle").symlink_to("circle")
    os.mkfifo(work / "pipe")

    assert refused(node, path, job).startswith(why)


def test_a_link_that_is_put_in_between_the_look_and_the_opening_is_not_followed(
    node: NodeFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(tmp_path / "elsewhere", {"x.txt": "secret"})
    tree(node.job(JOB), {"out/x.txt": "mine"})
    opened = os.open

    def swapping(path: str, flags: int, **options: int) -> int:
        if path == "out":
            (node.job(JOB) / "out").rename(tmp_path / "aside")
            (node.job(JOB) / "out").symlink_to(tmp_path / "elsewhere")
        return opened(path, flags, **options)

    monkeypatch.setattr(os, "open", swapping)

    assert refused(node, "out/x.txt") == "out/x.txt is not on this node any more"
