"""Zygote: a process that has torch imported, forks workers, and reaps them.

A node has one zygote for each interpreter. The zygote starts no thread, uses no device and never
runs a backward pass, because forked processes would inherit a broken copy of each. A worker whose
job sets variables that Python or torch read when they start becomes a fresh interpreter. The zygote
outlives the agent that started it, and a new agent connects to it. When a worker exits, the zygote
writes the exit status into the worker's folder. If a worker fails before its script starts, the
zygote reports a failed start and writes no exit status.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NoReturn

import torch
import torch.utils.data

from elastic.gc_free_import import gc_free_import
from elastic.worker import run_script
from elastic.worker.run_script import LossyOutput
from schemas.codec import ASSIGNMENT
from schemas.host.fork_server import serve_forks, write_message
from schemas.wire.worker import ExitStatus

with gc_free_import():
    import torch._dynamo  # the first optimizer would import it: 1.5 s in every worker

AT_START: Final = (  # patterns of variables that Python and libraries read when they start
    "PYTHON*", "TORCH*", "PYTORCH*", "TZ", "LANG", "LANGUAGE", "LC_*", "LD_*", "MALLOC_*",
    "GLIBC_*", "OPENBLAS_*", "MKL_*", "KMP_*", "GOMP_*", "OMP_*", "ATEN_*", "DNNL_*", "ONEDNN_*",
)  # fmt: skip
ALSO_LATER: Final = frozenset({  # variables that also act later, or have no effect on workers
    "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "TORCH_HOME",
})  # fmt: skip


def main() -> None:
    """Run the zygote, whose children become workers."""
    parser = argparse.ArgumentParser(prog="elastic.worker.zygote", description=__doc__)
    purpose = parser.add_mutually_exclusive_group(required=True)
    purpose.add_argument("--socket", type=Path)
    purpose.add_argument(
        "--worker", type=Path, help="folder of a worker, which this process becomes"
    )
    arguments = parser.parse_args()
    if arguments.worker is not None:
        _replace_streams(sys.stdout.encoding if "PYTHONIOENCODING" in os.environ else "utf-8")
        _exit_worker(run_script.prepare_worker(arguments.worker)(), arguments.worker)
    torch.save({}, io.BytesIO())  # imports what the first checkpoint needs
    serve_forks(arguments.socket, _prepare, str(torch.__version__))


def _prepare(folder: Path, secrets: Mapping[str, str]) -> Callable[[], NoReturn]:
    os.environ.update(secrets)
    _replace_streams("utf-8")
    _start_afresh_if_needed(folder)
    run = run_script.prepare_worker(folder)
    return lambda: _exit_worker(run(), folder)


def _replace_streams(encoding: str) -> None:
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(LossyOutput(descriptor)),
            encoding=encoding,
            errors="backslashreplace",
            line_buffering=True,
        )
        for descriptor in (1, 2)
    )


def _start_afresh_if_needed(folder: Path) -> None:
    """Replace this process by a fresh interpreter if its job sets variables that act at the start.

    The process keeps its number, session, user and control group. For the zygote, the script has
    started.
    """
    assignment = ASSIGNMENT.decode((folder / "assignment").read_bytes())
    names = {*assignment.spec.env, *assignment.spec.secret_names} - ALSO_LATER
    if not any(fnmatchcase(name, pattern) for name in names for pattern in AT_START):
        return
    os.chdir(assignment.workdir)  # relative paths of PYTHONPATH begin there
    command = [sys.executable, "-P", "-m", "elastic.worker.zygote", "--worker", str(folder)]
    os.execve(sys.executable, command, {**os.environ, **assignment.env})  # noqa: S606 - no shell


def _exit_worker(code: int, folder: Path) -> NoReturn:
    """Exit like the interpreter, but without tearing down imported modules (2.8 s).

    The worker first writes its own exit status, in case the zygote is dead. If the zygote lives, it
    overwrites this status with the kernel's numbers.
    """
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 - waits for a script's threads
    atexit._run_exitfuncs()  # noqa: SLF001 - the interpreter's own order of leaving
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    own = ExitStatus(code=code, signal=None, at=time.time(), max_rss_bytes=0, cpu_s=0.0)
    with contextlib.suppress(OSError):
        write_message(folder / "exit", own)
    os._exit(code)


if __name__ == "__main__":
    main()
