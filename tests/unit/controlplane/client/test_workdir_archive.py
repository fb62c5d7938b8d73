"""A working directory as an archive: the same files give the same bytes."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.client import archive as workdir_archive
from controlplane.client.archive import digest_of, pack, survey
from schemas.errors import BadFieldError, TooLargeError
from schemas.host.archives import ArchiveBounds
from tests.support.file_trees import PROJECT, laid_out, tree


def packed(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        return {name: file.read() for name, file in files.items() if file is not None}


def test_the_same_files_give_the_same_bytes_whenever_and_wherever_they_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tree(tmp_path / "one", PROJECT)
    other = tree(tmp_path / "other", dict(reversed(PROJECT.items())))
    for path in other.rglob("*"):
        os.utime(path, (1, 1))
    (other / "train.py").chmod(0o600)
    first = pack(one)
    walk = os.walk

    def backwards(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for root, folders, files in walk(folder):
            folders.sort(reverse=True)
            files.sort(reverse=True)
            yield root, folders, files

    monkeypatch.setattr(os, "walk", backwards)
    monkeypatch.setattr(time, "time", lambda: 2e9)

    assert pack(other) == first
    assert packed(first) == {name: text.encode() for name, text in PROJECT.items()}


def test_another_content_or_name_gives_another_digest(tmp_path: Path) -> None:
    folder = tree(tmp_path, PROJECT)
    first = digest_of(pack(folder))
    (folder / "train.py").write_text("print(2)")
    second = digest_of(pack(folder))
    (folder / "train.py").rename(folder / "main.py")

    assert len({first, second, digest_of(pack(folder))}) == 3


def test_an_executable_stays_executable(tmp_path: Path) -> None:
    folder = tree(tmp_path / "in", {"run.sh": "", "train.py": ""})
    (folder / "run.sh").chmod(0o750)
    unpacked = laid_out(pack(folder), tmp_path)

    assert os.access(unpacked / "run.sh", os.X_OK)
    assert not (unpacked / "train.py").stat().st_mode & 0o111


def test_caches_environments_and_keys_are_omitted(tmp_path: Path) -> None:
    names = (
        "train.py", ".git/config", "lib/.git/config", "__pycache__/train.cpython-311.pyc",
        "old.pyc", "node_modules/x.js", "pkg.egg-info/PKG-INFO", "venv/pyvenv.cfg",
        "venv/lib/torch.py", "tools/other-env/pyvenv.cfg", ".ones/controller.toml",
        ".ones/keys/admin.key_secret",
    )  # fmt: skip
    folder = tree(tmp_path, dict.fromkeys(names, ""))

    assert packed(pack(folder)) == {"train.py": b""}


@pytest.mark.parametrize(
    "key", ["keys/admin.key_secret", "home/keys/ann.key_secret"], ids=["itself", "a client's"]
)
def test_keys_are_never_packed(tmp_path: Path, key: str) -> None:
    files = {"train.py": "", "controller.toml": "", "home/client.toml": "", key: "secret"}

    assert key not in packed(pack(tree(tmp_path, files)))


def test_patterns_of_the_ignore_file_match_names_and_paths(tmp_path: Path) -> None:
    names = (
        "train.py", "weights.bin", "lib/more.bin", "corpus/a.txt", "lib/corpus/b.txt",
        "lib/secret.py", "secret.py", "runs/1/log", "runs/1/result",
    )  # fmt: skip
    patterns = "# data\n*.bin\n\ncorpus/\nlib/secret.py\nruns/*/log\n"
    folder = tree(tmp_path, {".onesignore": patterns, **dict.fromkeys(names, "")})

    assert set(packed(pack(folder))) == {".onesignore", "train.py", "secret.py", "runs/1/result"}


def test_links_are_followed_to_files(tmp_path: Path) -> None:
    folder = tree(tmp_path / "in", {"train.py": ""})
    (folder / "here.txt").write_text("content")
    (folder / "linked.txt").symlink_to(folder / "here.txt")
    os.mkfifo(folder / "pipe")

    files = {"here.txt": b"content", "linked.txt": b"content", "train.py": b""}
    assert packed(pack(folder)) == files


@pytest.mark.parametrize("through", ["", "inner"])
def test_a_link_to_the_outside_is_refused_and_named(tmp_path: Path, through: str) -> None:
    folder = tree(tmp_path / "in", {"train.py": ""})
    secret = tree(tmp_path, {"id_rsa": "secret"}) / "id_rsa"
    (folder / "data").symlink_to(folder / through if through else secret)
    if through:
        (folder / through).symlink_to("../id_rsa")
    (folder / ".onesignore").write_text(through)

    for look in (pack, survey):
        with pytest.raises(BadFieldError) as refused:
            look(folder)
        assert (refused.value.message, refused.value.hint) == (
            f"workdir: {folder / 'data'} is a link to {secret}, outside of it",
            "copy it, or list it in .onesignore",
        )

    (folder / ".onesignore").write_text("data\ninner")
    assert packed(pack(folder)).keys() == {".onesignore", "train.py"}


@pytest.mark.parametrize(
    ("bounds", "what"),
    [
        (ArchiveBounds(files=2), "workdir {folder} has more than 2 files"),
        (ArchiveBounds(depth=1), "workdir: a/b/c.py lies more than 1 folders deep"),
        (ArchiveBounds(size=0), "workdir {folder} has 0 MiB of files, more than 0 MiB"),
    ],
)
def test_too_many_too_deep_and_too_large_files_are_refused_before_they_are_read(
    bounds: ArchiveBounds, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workdir_archive, "LIMITS", bounds)
    monkeypatch.setattr(workdir_archive, "_add", None)
    folder = tree(tmp_path, {"train.py": "", "a/b/c.py": "1", "d.py": ""})

    for look in (pack, survey):
        with pytest.raises(TooLargeError) as refused:
            look(folder)
        assert refused.value.message.startswith(what.format(folder=folder))


def test_a_dangling_link_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    folder = tree(tmp_path, {"train.py": ""})
    (folder / "dangling").symlink_to("nowhere")

    for look in (pack, survey):
        with pytest.raises(BadFieldError, match=r"dangling: No such file .*list it in .onesignore"):
            look(folder)
        with pytest.raises(BadFieldError, match="is not a folder; correct the path"):
            look(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (os.urandom(3 << 20), "workdir {folder} packs to more than 2 MiB"),
        (bytes(9 << 20), "workdir {folder} has 10 MiB of files, more than 8 MiB"),
    ],
    ids=["packed", "unpacked"],
)
def test_a_folder_that_is_too_large_is_refused_with_the_limit_and_a_remedy(
    content: bytes, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workdir_archive, "MAX_BYTES", 2 << 20)
    monkeypatch.setattr(workdir_archive, "LIMITS", ArchiveBounds(size=8 << 20))
    files = {"train.py": "", "data/a": content, "data/b": bytes(1 << 20), "model.pt": b"0"}
    folder = tree(tmp_path, files)

    with pytest.raises(TooLargeError) as refused:
        pack(folder)

    largest = f"data/ {(len(content) >> 20) + 1} MiB, model.pt 0 MiB, train.py 0 MiB"
    assert refused.value.message == f"{what.format(folder=folder)} (largest: {largest})"
    assert refused.value.hint == (
        f"list large data in {folder}/.onesignore and read it from its original place"
    )


def test_a_file_that_shrinks_while_it_is_packed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tree(tmp_path, {"train.log": b"0" * 5000})
    add = tarfile.TarFile.addfile

    def shortened(tar: tarfile.TarFile, entry: tarfile.TarInfo, file: io.BufferedReader) -> None:
        os.truncate(folder / "train.log", 10)
        add(tar, entry, file)

    monkeypatch.setattr(tarfile.TarFile, "addfile", shortened)

    said = "train.log: unexpected end of data; correct it, or list it in"
    with pytest.raises(BadFieldError, match=said):
        pack(folder)
