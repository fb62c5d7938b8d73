"""Process of a zygote: its start, its recognition in /proc, and its error output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, Final

import psutil

from nodeagent.accounts import PRLIMIT, SETPRIV, Account
from nodeagent.errors import NodeStartError, StartError
from nodeagent.owned_files import open_regular
from nodeagent.process_identity import belongs_to, start_ticks
from nodeagent.settings import Jobs
from schemas.wire.worker import ZYGOTE_TITLE

NODE_SIGNALS: Final = frozenset({signal.SIGKILL, signal.SIGTERM})  # sent by the node
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
MODULE: Final = "elastic.worker.zygote"
WAITING_SHELL: Final = ("/bin/sh", "-c", 'read -r _ && exec "$@" </dev/null', "sh")
MAX_OUTPUT_BYTES: Final = 1 << 16  # bytes at the end of the output
REMOVED_VARIABLES: Final = (
    "CREDENTIALS_DIRECTORY",
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "RANK",
    "WORLD_SIZE",
    "TORCH_DISTRIBUTED_DEBUG",  # DETAIL aborts the process when a peer is lost
)
AGENT_VARIABLES: Final = (  # of the agent's account; removed for other accounts
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    "LOGS_DIRECTORY",
    "MAIL",
    "RUNTIME_DIRECTORY",
    "STATE_DIRECTORY",
    "CONFIGURATION_DIRECTORY",
    "SSH_AUTH_SOCK",
    "DBUS_SESSION_BUS_ADDRESS",
    "XDG_RUNTIME_DIR",
    "XDG_CONFIG_HOME",
    "XDG_CACHE_HOME",
    "TMPDIR",
)


def starting_zygotes(path: Path, workers: Container[int], uid: int) -> list[tuple[int, int, float]]:
    """Return pid, start time and age (seconds) of zygotes for this socket that do not reply yet.

    A worker that starts has its zygote's command line, but also a mark; and processes forked by a
    worker lead no session. Only processes of `uid` count, since any user can fake a command line.
    """
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.pid in workers or not is_zygote(process, str(path)):
            continue
        if not belongs_to(process.pid, uid):
            continue
        ticks = start_ticks(process.pid)
        with contextlib.suppress(OSError):
            if os.getsid(process.pid) == process.pid and ticks is not None:
                found.append((process.pid, ticks, now_s - ticks / TICKS_PER_S))
    return found


def is_zygote(process: psutil.Process, where: str) -> bool:
    """True if a process is a zygote with a socket path that begins with `where`.

    A serving zygote has its title instead of its command line. `process` has `cmdline` in `info`.
    """
    arguments = process.info["cmdline"] or [""]
    begins = MODULE in arguments and any(one.startswith(where) for one in arguments)
    return begins or arguments[0].startswith(f"{ZYGOTE_TITLE} {where}")


def spawn(
    python: str,
    path: Path,
    output: Path,
    account: Account | None = None,
    *,
    limits: Jobs | None = None,
    enter: Callable[[int], None] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a zygote as an account (None: the agent's), with limits for it and its workers.

    `output` must not be in a folder of that account. `enter` moves the process into its control
    group before its interpreter starts.

    Raises:
        StartError: if it cannot be started.
        OSError: if `enter` fails.
    """
    environ = {key: value for key, value in os.environ.items() if not key.startswith("ONES_")}
    for name in REMOVED_VARIABLES:
        environ.pop(name, None)
    environ["OPENBLAS_NUM_THREADS"] = "1"  # threads would not survive the fork
    # torch's store resolves the name of every peer; a lost reply should not cost 5 s.
    environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the library itself reports lost peers
    if account is not None:
        for name in AGENT_VARIABLES:
            environ.pop(name, None)
        environ.update(HOME=account.home, USER=account.name, LOGNAME=account.name)
    zygote = [python, "-P", "-m", MODULE, "--socket", str(path)]
    command = [*_limited(limits), *_restricted(account), *zygote]
    if enter is not None:
        command = [*WAITING_SHELL, *command]
    try:
        sink = output.open("wb")
    except OSError as error:
        raise NodeStartError(f"cannot write {output}: {error.strerror}") from None
    try:
        with sink:
            process = subprocess.Popen(  # noqa: S603 - an interpreter that the job's owner named
                command,
                stdin=subprocess.DEVNULL if enter is None else subprocess.PIPE,
                stdout=sink,
                stderr=sink,
                env=environ,
                start_new_session=True,
                **_identity(account),
            )
    except OSError as error:
        hint = "give an interpreter that exists on every node and has torch and ONES"
        raise StartError(f"python {python!r}: {error.strerror}", hint) from None
    if enter is not None:
        _release_shell(process, enter)
    return process


def _release_shell(process: subprocess.Popen[bytes], enter: Callable[[int], None]) -> None:
    """Release the waiting shell; without this input it exits."""
    if (told := process.stdin) is None:
        return
    with told:
        enter(process.pid)
        with contextlib.suppress(BrokenPipeError):
            told.write(b"\n")
            told.flush()


def _limited(limits: Jobs | None) -> list[str]:
    if limits is None:
        return []
    words = [f"--nofile={limits.files}:{limits.files}"] if limits.files else []
    words += [f"--nproc={limits.pids}:{limits.pids}"] if limits.pids else []
    return [PRLIMIT, *words, "--"] if words else []


def _restricted(account: Account | None) -> list[str]:
    """Return the command prefix that keeps jobs from gaining rights by setuid files."""
    return [SETPRIV, "--no-new-privs", "--"] if account is not None else []


def _identity(account: Account | None) -> dict[str, Any]:
    if account is None:
        return {}
    uid, gid = account.owner
    return {
        "user": uid, "group": gid, "extra_groups": list(account.groups), "umask": 0o077, "cwd": "/"
    }  # fmt: skip


def start_error(python: str, output: Path) -> StartError:
    """Return the error of a zygote that exited during its start."""
    descriptor = open_regular(output)
    try:
        start = max(0, os.fstat(descriptor).st_size - MAX_OUTPUT_BYTES)
        said = os.pread(descriptor, MAX_OUTPUT_BYTES, start).decode(errors="replace")
    finally:
        os.close(descriptor)
    lines = said.strip().splitlines()
    said = lines[-1] if lines else "no output"
    hint = f"in a checkout of ONES: {python} -m pip install '.[train]'"
    return StartError(f"python {python!r} cannot run workers: {said}", hint)
