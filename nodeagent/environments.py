"""Cached environments of jobs with `requirements`, built by uv as the account of the job.

The agent names the folder of an environment after all that determines its content. The first worker
builds it under a lock, and the others wait. An environment belongs to one user and one account: a
shared one could be changed by every job that uses it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from nodeagent.errors import NodeStartError, StartError
from nodeagent.owned_files import read_small
from schemas.errors import OnesError, install_hint

BUILD_LIMIT_S: Final = 900.0
MAX_FILE_BYTES: Final = 1 << 20
TAIL_BYTES: Final = 2000
TAIL_LINES: Final = 3
PLAIN: Final = re.compile(rb"\s*(#.*)?|[A-Za-z0-9][\w.-]*\s*(\[[^]]*\])?\s*([<>=!~;#(].*)?")
EDITABLE: Final = re.compile(rb"^\s*(-e|--editable)\b", re.MULTILINE)
SITES: Final = "import site; print(*site.getsitepackages(), sep='\\n')"
BASE_PACKAGES: Final = "_ones_base.pth"  # makes the packages of the base interpreter importable


class BuildError(OnesError):
    """An environment that could not be built."""

    code = "environment"


def uv() -> str | None:
    """Return the path of uv, beside this interpreter or on the path. None: not installed."""
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else shutil.which("uv")


def name_of(file: Path, python: str, *, user: str, snapshot: str, env: Mapping[str, str]) -> str:
    """Return a name for the environment of a requirements file and a base interpreter.

    The digest of the working directory counts if the file refers to other files.
    """
    if uv() is None:
        hint = f"beside the agent: {install_hint('environments')}"
        raise NodeStartError("uv, which builds the environments of jobs, is not installed", hint)
    try:
        text = read_small(file, MAX_FILE_BYTES)
    except OSError as error:
        raise StartError(f"{file.name}: {error.strerror}") from None
    if (found := shutil.which(python)) is None:
        what = f"python {python!r}, on which the environment is based, is no program of this node"
        raise StartError(what, "give an interpreter that exists on every node")
    base = Path(found).resolve()
    status = base.stat()
    if EDITABLE.search(text):
        what = f"{file.name}: the environment outlives the working directory of one job"
        raise StartError(what, "write the path without --editable")
    plain = all(map(PLAIN.fullmatch, text.splitlines()))
    options = sorted(item for item in env.items() if item[0].startswith("UV_"))
    stamp = f"{python} {base} {status.st_ino} {status.st_mtime_ns}"
    parts = (text.decode(errors="replace"), stamp, user, "" if plain else snapshot, options)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def build(folder: Path, requirements: str, python: str, environ: Mapping[str, str]) -> Path:
    """Build an environment in `folder`, unless it is there; return its interpreter.

    The working directory is the job's. The output of uv goes to the output of this process.
    """
    venv, complete = folder / "venv", folder / "complete"
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            shutil.rmtree(venv, ignore_errors=True)
            _build(venv, requirements, python, {**environ, "UV_CACHE_DIR": str(folder / "cache")})
            shutil.rmtree(folder / "cache", ignore_errors=True)  # its files are linked into venv
            complete.touch()
    finally:
        os.close(lock)
    return venv / "bin" / "python"


def _build(venv: Path, requirements: str, python: str, environ: Mapping[str, str]) -> None:
    program, own, until = uv() or "uv", venv / "bin" / "python", time.monotonic() + BUILD_LIMIT_S
    install = ["pip", "install", "--python", str(own), "--requirement", requirements]
    for words in (["venv", "--python", python, str(venv)], install):
        command = [program, "--no-progress", *words]
        try:
            done = subprocess.run(  # noqa: S603 - as the job's account
                command, env=environ, check=False, timeout=until - time.monotonic()
            )
        except subprocess.TimeoutExpired:
            raise BuildError(f"not complete after {BUILD_LIMIT_S:.0f} s") from None
        if done.returncode:
            raise BuildError(f"uv ended with exit code {done.returncode}")
    sites, mine = (
        subprocess.run(  # noqa: S603
            [one, "-c", SITES], env=environ, capture_output=True, text=True, check=True
        ).stdout.split("\n")
        for one in (python, own)
    )
    lines = [f"import site; site.addsitedir({site!r})\n" for site in sites if site]
    Path(mine[0], BASE_PACKAGES).write_text("".join(lines), encoding="utf-8")


def last_lines(log: Path) -> str:
    """Return the last lines of a worker's output as one."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    return " ".join(line.strip() for line in [one for one in lines if one.strip()][-TAIL_LINES:])
