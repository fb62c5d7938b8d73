"""Files and checkpoints of jobs, fetched in verified pieces."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import hashlib
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

import msgspec

from controlplane.client.archive import FETCHED_MARK
from controlplane.client.interpreters import convert_state
from controlplane.client.streams import StreamPages
from schemas.errors import BadFieldError, TooLargeError, UnavailableError
from schemas.ids import JobId, NodeId, node_of
from schemas.wire.client import JobDetail
from schemas.wire.files import CHECKPOINTS, FileInfo, FileList, FilePiece, ListFiles, ReadFile

AGENT_REPLY_S: Final = 10.0  # time limit for an agent's reply
MAX_ATTEMPTS: Final = 3  # attempts to fetch a file that changes during its transfer
MAX_FETCH_BYTES: Final = 10**10  # default limit of one fetch


class JobFile(msgspec.Struct, frozen=True):
    """File that a job created or changed, on one node."""

    name: str  # work/NODE/PATH or checkpoints/NAME: target of a fetch
    node: NodeId
    info: FileInfo

    @property
    def size(self) -> int:
        """Size of the file when it was listed, in bytes."""
        return self.info.size


class JobFiles(NamedTuple):
    """Files of a job, and explanations for files that are unavailable."""

    files: tuple[JobFile, ...]
    refused: tuple[str, ...] = ()  # `NODE: NAME` of links that lead outside, and of non-files
    missing: tuple[str, ...] = ()  # sentences: unreachable nodes, files beyond the list limit


class Fetched(msgspec.Struct, frozen=True):
    """File that was fetched to this host."""

    path: Path
    size: int  # bytes
    sha256: str  # hexadecimal


class Fetch(NamedTuple):
    """Result of a fetch."""

    files: tuple[Fetched, ...]
    refused: tuple[str, ...] = ()  # as in `JobFiles`
    missing: tuple[str, ...] = ()  # as in `JobFiles`, and files that could not be fetched


class FileTransfers(StreamPages):
    """Connection that lists and fetches files of jobs."""

    async def files(self, job: str, pattern: str = "*") -> JobFiles:
        """List the files that a job created or changed on all its nodes, and its checkpoints.

        Files are sorted by name. A checkpoint that several nodes share is listed once.

        Args:
            pattern: pattern for names, such as `*.png` or `checkpoints/*`; it may also match only
                the last part of a name.
        """
        detail = await self.job(job)
        found: dict[str, JobFile] = {}
        refused: list[str] = []
        missing: list[str] = []
        for node in nodes_of(detail):
            request = ListFiles(job=JobId(job), node=node)
            try:
                listed = await self._bulk_call(request, FileList, AGENT_REPLY_S)
            except UnavailableError as error:
                missing.append(error.message)
                continue
            refused += [f"{node}: {name}" for name in listed.refused]
            if listed.left_out:
                missing.append(f"{node}: {listed.left_out} files beyond the limit of a list")
            for info in listed.files:
                name = _target_name(info, node)
                if name and matches(name, pattern):
                    found.setdefault(name, JobFile(name, node, info))
        files = tuple(found[name] for name in sorted(found))
        return JobFiles(files, tuple(refused), tuple(missing))

    async def file_pieces(self, job: str, file: JobFile) -> AsyncIterator[bytes]:
        """Yield the content of a listed file in pieces of at most 1 MiB.

        Raises:
            UnavailableError: if the file changed during the transfer, or its node does not reply.
            BadFieldError: if the file no longer exists.
        """
        offset, stamp = 0, ""
        while True:
            request = ReadFile(
                job=JobId(job),
                node=file.node,
                area=file.info.area,
                path=file.info.path,
                offset=offset,
            )
            piece = await self._bulk_call(request, FilePiece, AGENT_REPLY_S)
            stamp = stamp or piece.stamp
            whole = hashlib.sha256(piece.data).hexdigest() == piece.digest
            if piece.stamp != stamp or piece.offset != offset or not whole:
                raise UnavailableError(f"{file.name} changed during the transfer", "fetch it again")
            offset += len(piece.data)
            if piece.data:
                yield piece.data
            if offset >= piece.size or not piece.data:
                return

    async def fetch_file(
        self,
        job: str,
        file: JobFile,
        target: Path,
        on_bytes: Callable[[int], None] | None = None,
    ) -> Fetched:
        """Fetch a listed file, completely or not at all.

        Args:
            target: the file to write; an existing file is replaced.
            on_bytes: called in the client's event loop with the size of each piece.

        Raises:
            UnavailableError: if the file keeps changing, or its node does not reply.
            BadFieldError: if the file no longer exists, or `target` cannot be written.
        """
        with replacement(target, "choose another --to", "to") as fresh:
            target.parent.mkdir(parents=True, exist_ok=True)
            for left in reversed(range(MAX_ATTEMPTS)):
                try:
                    size, digest = await self._store(job, file, fresh, on_bytes)
                    break
                except UnavailableError:
                    if not left:
                        raise
        return Fetched(target, size, digest)

    async def _store(
        self, job: str, file: JobFile, target: Path, on_bytes: Callable[[int], None] | None
    ) -> tuple[int, str]:
        digest, size = hashlib.sha256(), 0
        with target.open("wb") as out:
            async for data in self.file_pieces(job, file):
                out.write(data)
                digest.update(data)
                size += len(data)
                if on_bytes is not None:
                    on_bytes(len(data))
        return size, digest.hexdigest()

    async def fetch(
        self,
        job: str,
        to: Path,
        pattern: str = "*",
        *,
        most_bytes: int = MAX_FETCH_BYTES,
        on_bytes: Callable[[int, int], None] | None = None,
    ) -> Fetch:
        """Fetch the files of a job to `to`/work/NODE/PATH and `to`/checkpoints/NAME.

        Returns the fetched files, and explanations for files that are unavailable.

        Args:
            to: folder; created if missing.
            pattern: pattern for names, such as `*.png` or `checkpoints/*`.
            most_bytes: limit for all files together.
            on_bytes: called in the client's event loop with the bytes received so far and the
                total.

        Raises:
            TooLargeError: if the files exceed `most_bytes`; then no file is fetched.
            BadFieldError: if `to` cannot be created.
        """
        files, refused, gone = await self.files(job, pattern)
        total = sum(file.size for file in files)
        if total > most_bytes:
            problem = f"{len(files)} files of {total} bytes exceed the limit of {most_bytes}"
            raise TooLargeError(problem, "select fewer with a pattern, or raise the limit", "most")
        if files:
            _create_folder(to, job)
        count = _counter(on_bytes, total)
        fetched, missing = [], list(gone)
        for file in files:
            try:
                fetched.append(await self.fetch_file(job, file, to / file.name, count))
            except (UnavailableError, BadFieldError) as error:
                missing.append(f"{file.name}: {error.message}")
        return Fetch(tuple(fetched), refused, tuple(missing))

    async def export_model(
        self,
        job: str,
        file: JobFile,
        target: Path,
        python: str | None = None,
        on_bytes: Callable[[int, int], None] | None = None,
    ) -> None:
        """Fetch a checkpoint or the state of a trial, and write its `state_dict` to `target`.

        Args:
            python: interpreter with torch; None: this interpreter, or the job's if this one has
                no torch.
            on_bytes: called in the client's event loop with the bytes received so far and the
                total.

        Raises:
            BadFieldError: if the file cannot be read, or `target` cannot be written.
            NoTorchError: if no interpreter on this host has torch.
        """
        own = (await self.job(job)).spec.python
        pythons = [python] if python else [sys.executable, *filter(None, [own])]
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".ones-", dir=target.parent) as folder:
                local = Path(folder, "state")
                await self.fetch_file(job, file, local, _counter(on_bytes, file.size))
                await asyncio.to_thread(convert_state, local, target, pythons)
        except OSError as error:
            hint = "choose another file"
            raise BadFieldError(f"{target}: {error.strerror}", hint, "file") from None

    async def last_checkpoint(self, job: str) -> JobFile:
        """Return the checkpoint from which a job would resume, or with which it ended.

        Raises:
            BadFieldError: if no checkpoint is available.
        """
        detail = await self.job(job)
        there = await self.files(job, f"{CHECKPOINTS}/*.pt")
        files = {file.name: file for file in there.files}
        if chosen := newest_checkpoint([*files], detail.summary.epoch):
            return files[chosen]
        why = "; ".join(there.missing) or f"it finished {detail.summary.epoch} epochs"
        hint = "one is written at the end of each epoch"
        raise BadFieldError(f"{job} has no checkpoint here ({why})", hint, "job")


@contextlib.contextmanager
def replacement(path: Path, hint: str, field: str) -> Iterator[Path]:
    """Yield the path of a new file, which replaces `path` if the block succeeds.

    Raises:
        BadFieldError: with `hint` and `field`, if the file cannot be written.
    """
    fresh = path.with_name(f".{path.name}.part")
    try:
        yield fresh
        fresh.replace(path)
    except OSError as error:
        raise BadFieldError(f"{path}: {error.strerror}", hint, field) from None
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)


def _counter(on_bytes: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    """Return a callback for the sizes of pieces, which calls `on_bytes` with their sum."""
    came = 0

    def count(size: int) -> None:
        nonlocal came
        came += size
        if on_bytes is not None:
            on_bytes(came, max(total, came))

    return count


def _create_folder(to: Path, job: str) -> None:
    """Create and mark a folder for results, so that `pack` omits the folder from later jobs."""
    fresh = not to.exists()
    try:
        to.mkdir(parents=True, exist_ok=True)
        if fresh:
            (to / FETCHED_MARK).write_text(f"{job}\n", encoding="utf-8")
    except OSError as error:
        raise BadFieldError(f"{to}: {error.strerror}", "choose another --to", "to") from None


def nodes_of(detail: JobDetail) -> tuple[NodeId, ...]:
    """Return every node on which a job had a slot."""
    slots = [slot for version in detail.versions for slot in version.slots]
    return tuple(dict.fromkeys(node_of(slot) for slot in slots))


def newest_checkpoint(names: list[str], epoch: int) -> str:
    """Return the newest of `checkpoints/epoch-EPOCH.vVERSION.pt` up to `epoch`, or "".

    Checkpoints of the newest group take precedence, because an older group might have written
    epochs that were repeated later.
    """
    known = []
    for name in names:
        number, _, version = PurePosixPath(name).stem.removeprefix("epoch-").partition(".v")
        if number.isdigit() and version.isdigit() and int(number) <= epoch:
            known.append((int(version), int(number), name))
    return max(known, default=(0, 0, ""))[2]


def matches(name: str, pattern: str) -> bool:
    """True if `pattern` matches a file's name, its path on the node, or the last part."""
    path = PurePosixPath(name)
    inside = "/".join(path.parts[2:])
    return any(fnmatch.fnmatchcase(text, pattern) for text in (name, inside, path.name))


def _target_name(info: FileInfo, node: NodeId) -> str:
    """Return the relative target path of a file, or "" if the path leads outside the folder."""
    parts = PurePosixPath(info.path).parts
    if not parts or info.path.startswith("/") or not {"..", "\0"}.isdisjoint(parts):
        return ""
    if any("\0" in part or "/" in part for part in (*parts, node)) or node in {"", ".", ".."}:
        return ""
    folder = (CHECKPOINTS,) if info.area == CHECKPOINTS else (info.area, node)
    return "/".join((*folder, *parts))
