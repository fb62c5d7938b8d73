"""Containers of jobs with `image`, run by podman as the account of the job.

The engine's process is the worker: it has the signals and the exit code of the program. Its monitor
(conmon) is not its child and outlives it, so the agent removes the container when the worker ends.
A worker of an elastic job runs inside with the library of the image, and with its folders and the
agent's socket at the same paths.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from nodeagent.errors import NodeStartError
from nodeagent.settings import Containers
from schemas.ids import JobId, Rank, Version
from schemas.wire.worker import Assignment

LIMIT_S: Final = 60.0  # of a command of the engine
ENGINE_FAILED: Final = 125  # exit code of the engine if it could not run a container
SIGNALLED: Final = 128  # the engine adds the number of the signal that ended the program
OF_THE_NODE: Final = (  # patterns of variables of the node for groups of workers
    "PYTHONHASHSEED", "RES_OPTIONS", "TORCH_CPP_LOG_LEVEL", "NCCL_*", "GLOO_*", "UCX_*", "FI_*",
)  # fmt: skip
LOOK: Final = """
import importlib.util, sys
sys.exit(next((f"no module {one!r}" for one in ("torch", "elastic")
               if importlib.util.find_spec(one) is None), 0))
"""


def container_name(journal: str, job: JobId, version: Version, rank: Rank) -> str:
    """Return the name of the container of a worker."""
    return f"ones-{journal[:8]}-{job}-v{version}-r{rank}"


def engine_words(
    settings: Containers, name: str, folder: str, *, uid: int, own_uid: bool, tty: bool
) -> tuple[str, ...]:
    """Return the beginning of the command that runs a container.

    The working directory `folder` has the same path inside. The container has the network and the
    shared memory of the host (NCCL), and its own processes. The engine keeps no log, which would
    have no bound.

    Raises:
        NodeStartError: if the node runs no containers.
    """
    if not settings.engine:
        hint = 'set engine = "podman" in [containers] of its agent'
        raise NodeStartError("image: this node runs no containers", hint)
    if own_uid:
        what = "image: the jobs of this node have uids of their own, which have no images"
        raise NodeStartError(what, 'set jobs.run_as = "submitter" (or "agent") for its agent')
    return (
        settings.engine, "run", "--rm", "--init", "--name", name, "--cgroups=no-conmon",
        "--log-driver=none", "--network=host", "--ipc=host",
        *(("--userns=keep-id",) if uid else ()),
        *(("--interactive", "--tty") if tty else ()), "--workdir", folder,
        f"--volume={folder}:{folder}", *settings.options,
    )  # fmt: skip


def in_container(
    words: tuple[str, ...], image: str, argv: tuple[str, ...], names: Iterable[str]
) -> tuple[str, ...]:
    """Return the command that runs a program in a container.

    Variables are passed by name, because others can read the values in a command.
    """
    return (*words, *(f"--env={name}" for name in sorted(names)), image, *argv)


def passed_names(
    assignment: Assignment, environ: Iterable[str], secrets: Iterable[str]
) -> list[str]:
    """Return the names of the variables that a container gets, which has a PATH of its own."""
    spec = assignment.spec
    own = (assignment.env.keys() - {"PATH"}) | spec.env.keys() | set(secrets)
    shared = OF_THE_NODE if not spec.rigid else ()
    return [
        name
        for name in environ
        if name in own or name not in os.environ or any(fnmatchcase(name, one) for one in shared)
    ]


def worker_volumes(assignment: Assignment, folder: Path) -> tuple[str, ...]:
    """Return the options that show an elastic worker its folders, and its agent's socket."""
    socket = Path(assignment.socket.removeprefix("ipc://")).parent
    folders = [str(folder), assignment.checkpoints, *filter(None, [assignment.states])]
    for one in folders:
        Path(one).mkdir(mode=0o700, parents=True, exist_ok=True)
    return (*(f"--volume={one}:{one}" for one in folders), f"--volume={socket}:{socket}:ro")


def pull(engine: str, image: str, environ: Mapping[str, str]) -> bool:
    """Pull an image, unless the account has it. Return whether it is there."""
    for action in (("image", "exists"), ("pull", "--quiet")):
        command = [engine, *action, image]
        if subprocess.run(command, env=environ, check=False).returncode == 0:  # noqa: S603
            return True
    return False


def open_namespace(engine: str, uid: int) -> None:
    """Have the engine open the user namespace of an account, unless it is open.

    Jobs cannot: it takes a program with a setuid bit, and these give jobs no rights.

    Raises:
        NodeStartError: if it cannot be opened.
    """
    if _run_as(uid, engine, "unshare", "true"):
        what = f"image: {engine} cannot open a user namespace for uid {uid}"
        raise NodeStartError(what, "install uidmap, and check /etc/subuid and /etc/subgid")


def remove(engine: str, name: str, uid: int | None) -> None:
    """End the processes of a container, and remove it. It may be gone."""
    _run_as(uid, engine, "rm", "--force", "--ignore", "--time", "0", name)


def _run_as(uid: int | None, *words: str) -> int:
    """Run a command of the engine as an account (None: the agent's), and return its exit code."""
    identity: dict[str, Any] = {}
    entry = pwd.getpwuid(os.geteuid() if uid is None else uid)
    if uid is not None:
        groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
        identity = {"user": uid, "group": entry.pw_gid, "extra_groups": groups, "cwd": "/"}
    environ = {"PATH": os.environ.get("PATH", os.defpath), "HOME": entry.pw_dir}
    null = subprocess.DEVNULL
    options = {"stdin": null, "stdout": null, "stderr": null, "env": environ, **identity}
    return subprocess.run(words, check=False, timeout=LIMIT_S, **options).returncode  # noqa: S603
