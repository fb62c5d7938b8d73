"""The command line in processes of its own that need not import it anew each time.

A server with everything imported forks for every command. What is forked is what `ones` runs: its
own arguments, environment and output, and `main`. It leaves without taking every imported module
apart, which would take longer than most commands.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

LIMIT_S: Final = 120.0
SELDOM: Final = (  # what has torch or scikit-learn: more than all the rest, and few commands need it
    "controlplane.sim.learning",
    "controlplane.sim.models.recorded_curves",
)


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its standard output."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """Its standard output, a JSON document a line."""
        return [json.loads(line) for line in self.out.splitlines()]


class _Server:
    """The process that forks; one for each process of tests, started by the first command."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # read when numpy is imported
        )

    def run(
        self, arguments: tuple[str, ...], env: Mapping[str, str], limit_s: float, cwd: Path | None
    ) -> Finished:
        """Run `ones` with these arguments; a command that takes longer is an error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            asked = {
                "arguments": ["ones", *arguments], "env": dict(env), "out": str(out),
                "err": str(err), "limit_s": limit_s, "cwd": str(cwd or Path.cwd()),
            }  # fmt: skip
            try:
                self._process.stdin.write(json.dumps(asked) + "\n")
                self._process.stdin.flush()
                code = json.loads(self._process.stdout.readline())
            except (
                KeyboardInterrupt
            ):  # it may be on its way down: nobody deletes its files meanwhile
                stop_server()  # after this command; the next one shall not read its answer
                raise
            said = out.read_text(), err.read_text()
        if code is None:
            raise subprocess.TimeoutExpired(["ones", *arguments], limit_s, *said)
        return Finished(code, *said)

    def close(self) -> None:
        """End the server, if it has not ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


_servers: list[_Server] = []


def ones(
    *arguments: str, limit_s: float = LIMIT_S, cwd: Path | None = None, **env: str
) -> Finished:
    """Run a command of `ones`, here or in `cwd`; `env` is added to the environment."""
    if not _servers:
        _servers.append(_Server())
        atexit.register(stop_server)
    wide = {"COLUMNS": "200"}  # whatever pytest's terminal has
    return _servers[0].run(arguments, {**os.environ, **wide, **env}, limit_s, cwd)


def stop_server() -> None:
    """End the server of this process, if there is one."""
    while _servers:
        _servers.pop().close()


# --- in the server


def _serve() -> None:
    """Fork for every line that comes."""
    import select  # noqa: PLC0415 - in the server alone
    import signal  # noqa: PLC0415

    _import_what_commands_import()
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(asked)
        pidfd = os.pidfd_open(pid)
        in_time = select.select([pidfd], [], [], asked["limit_s"])[0]
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status) if in_time else None
        sys.stdout.write(json.dumps(code) + "\n")
        sys.stdout.flush()


def _import_what_commands_import() -> None:
    import gc  # noqa: PLC0415
    import importlib  # noqa: PLC0415
    import pkgutil  # noqa: PLC0415

    for room in (
        "controlplane.cli",
        "controlplane.client",
        "controlplane.policy",
        "controlplane.sim",
    ):
        package = importlib.import_module(room)
        for found in pkgutil.walk_packages(package.__path__, f"{room}."):
            if not found.name.startswith(SELDOM):
                importlib.import_module(found.name)
    gc.freeze()


def _become(asked: dict[str, Any]) -> NoReturn:
    """Be the command."""
    for name, descriptor in (("out", 1), ("err", 2)):
        opened = os.open(asked[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.argv = asked["arguments"]

    from controlplane.cli.main import main  # noqa: PLC0415 - which is imported

    code: object = 1
    try:
        main()
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:  # noqa: BLE001 - what the interpreter would do about it
        traceback.print_exc()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    _serve()
