"""Fork server of rigid jobs and shells, and the launcher that each of its children is.

A worker of an elastic job with an environment or an image is such a child, too.

A launcher prepares nothing: it reports ready, waits until the whole gang may start, reports that it
has joined, and executes the job's program. The process keeps its pid, session and control group.
A command has one process on all its slots. The launchers of its other slots only hold them, and
wait to be stopped. The program of an interactive job gets a terminal (`terminals`). A shell is
another program in the environment of a worker, without reports.

Run as `python -P -m nodeagent.launcher --socket PATH`, with the interpreter of the agent.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from setproctitle import setproctitle

from nodeagent import terminals
from nodeagent.containers import (
    ENGINE_FAILED,
    LOOK,
    in_container,
    passed_names,
    pull,
    worker_volumes,
)
from nodeagent.environments import BuildError, build, last_lines
from schemas.codec import ASSIGNMENT, SHELL_ORDER, TO_WORKER, encode
from schemas.errors import OnesError, install_hint
from schemas.host.fork_server import NO_SECRETS, framed, serve_forks
from schemas.ids import index_of, is_place, node_of
from schemas.transport.sockets import ThreadDealer
from schemas.wire.agent import SWITCH, GroupFormed, ScriptFailed, ScriptReport, WorkerReady
from schemas.wire.worker import Assignment, GroupOrder, Reported, SlotGranted, WorkerHello

PORTS: Final = range(20_000, 30_000)  # below the ports that the kernel gives to clients
SLOTS_APART: Final = 512  # the ports of two slots of a node differ by less than this
POLL_S: Final = 1.0
WORKER_MODULE: Final = "elastic.worker.zygote"
TERM: Final = "xterm"  # unless the client names its terminal
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # exit codes, as those of a shell
IGNORED_BY_PYTHON: Final = (signal.SIGPIPE, signal.SIGXFSZ)  # a program expects the defaults


class Launcher:
    """Process of a rigid job before it becomes the job's program."""

    def __init__(self, folder: Path, secrets: Mapping[str, str]) -> None:
        self._folder = folder
        self._secrets = secrets
        self._assignment = ASSIGNMENT.decode((folder / "assignment").read_bytes())
        self._reports = 0
        os.chdir(self._assignment.workdir)

    def run(self) -> NoReturn:
        """Report ready, wait for the order to start, and execute the program."""
        assignment = self._assignment
        owner = f"{assignment.user}/" if assignment.user else ""
        setproctitle(f"ones: {owner}{assignment.job} rank {assignment.rank} waits for its gang")
        gang = assignment.spec.kind == "torchrun"
        holds_only = assignment.spec.single and assignment.rank > 0
        if assignment.container and not holds_only:
            self._pull(assignment.container[0])
            if not assignment.spec.rigid:
                self._train_in_container()
        found = self._build() if assignment.environment and not holds_only else {}
        port = free_port(assignment.slot) if gang and assignment.rank == 0 else 0
        self._report(WorkerReady, epoch_samples=0, resumed_epoch=0, parameters=0, store_port=port)
        dealer = ThreadDealer(assignment.socket)
        order = self._await_order(dealer)
        self._report(GroupFormed, group=order.version, epoch=0, step=0)
        dealer.send(encode(Reported(count=self._reports, **self._identity)))
        dealer.close()
        if holds_only:
            setproctitle(f"ones: {owner}{assignment.job} holds slot {assignment.slot}")
            while True:
                signal.pause()
        environ = environment(assignment, order, port, self._secrets) | found
        if assignment.spec.kind == "interactive":
            environ = {"TERM": TERM, **environ}
            terminals.start(self._folder)
        self._execute(environ)

    def _pull(self, engine: str) -> None:
        image = self._assignment.spec.stated_image
        if not pull(engine, image, os.environ):
            said = last_lines(self._folder / "log")
            self._report(ScriptFailed, error=f"image {image}: {said}", where="")
            os._exit(1)

    def _train_in_container(self) -> NoReturn:
        """Become an elastic worker in a container, if its image has the library."""
        assignment, spec = self._assignment, self._assignment.spec
        python = spec.python or "python3"
        environ = {**os.environ, **assignment.env, **self._secrets}
        volumes = worker_volumes(assignment, self._folder)
        argv = self._in_container((python, "-P", "-c", LOOK), environ, volumes)
        if code := subprocess.run(argv, env=environ, check=False).returncode:  # noqa: S603
            problem = f"image {spec.stated_image}: {last_lines(self._folder / 'log')}"
            if code != ENGINE_FAILED:
                remedy = install_hint("train", python)
                problem += f"; an elastic job needs torch and ONES in it, {remedy}"
            self._report(ScriptFailed, error=problem, where="")
            os._exit(1)
        argv = (python, "-P", "-m", WORKER_MODULE, "--worker", str(self._folder))
        _, code = execute(self._in_container(argv, environ, volumes), environ)
        os._exit(code)

    def _in_container(
        self, argv: tuple[str, ...], environ: Mapping[str, str], options: tuple[str, ...] = ()
    ) -> tuple[str, ...]:
        one = self._assignment
        names = passed_names(one, environ, self._secrets)
        return in_container((*one.container, *options), one.spec.stated_image, argv, names)

    def _build(self) -> dict[str, str]:
        """Build the job's environment, and return the variables that lead programs to it.

        An elastic job becomes a worker with the environment's interpreter, and does not return.
        """
        assignment, spec = self._assignment, self._assignment.spec
        setproctitle(f"ones: {assignment.job} rank {assignment.rank} builds its environment")
        environ = {**os.environ, **assignment.env, **self._secrets}
        try:
            folder = Path(assignment.environment)
            python = build(folder, spec.stated_requirements, assignment.python, environ)
        except (BuildError, OSError, subprocess.SubprocessError) as error:
            said = last_lines(self._folder / "log")
            problem = f"environment of {spec.stated_requirements}: {error}: {said}"
            self._report(ScriptFailed, error=problem, where=spec.stated_requirements)
            os._exit(1)
        path = f"{python.parent}{os.pathsep}{environ.get('PATH', os.defpath)}"
        found = {"PATH": path, "VIRTUAL_ENV": str(python.parent.parent)}
        if not spec.rigid:
            argv = (str(python), "-P", "-m", WORKER_MODULE, "--worker", str(self._folder))
            _, code = execute(argv, environ | found)
            os._exit(code)
        return found

    @property
    def _identity(self) -> dict[str, Any]:
        one = self._assignment
        return {"job": one.job, "version": one.version, "rank": one.rank}

    def _await_order(self, dealer: ThreadDealer) -> GroupOrder:
        """Return the order that lets the gang start, once the slot is free, too."""
        assignment, order = self._assignment, None
        granted, greeted, hinted = assignment.granted, False, False
        hello = encode(WorkerHello(pid=os.getpid(), token=assignment.token, **self._identity))
        while order is None or not granted:
            messages, connected = dealer.poll(POLL_S)
            if connected or not greeted:
                greeted, hinted = dealer.send(hello), False
            if greeted and not hinted:
                hinted = dealer.send(encode(Reported(count=self._reports, **self._identity)))
            for data in messages:
                try:
                    message = TO_WORKER.decode(data)
                except OnesError:
                    continue
                if isinstance(message, SlotGranted):
                    granted = True
                elif isinstance(message, GroupOrder) and message.stage >= SWITCH:
                    order = message
        return order

    def _report(self, kind: type[ScriptReport], **fields: Any) -> None:
        """Append a report to the worker's file, from which the agent sends it."""
        self._reports += 1
        data = framed(kind(**self._identity, index=self._reports, **fields))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        file = os.open(self._folder / "reports", flags, 0o600)
        os.write(file, data)
        os.close(file)

    def _execute(self, environ: Mapping[str, str]) -> NoReturn:
        assignment, argv = self._assignment, self._assignment.spec.argv
        if assignment.container:
            argv = self._in_container(argv, environ)
        problem, code = execute(argv, environ)
        self._report(ScriptFailed, error=f"cannot execute {argv[0]!r}: {problem}", where="")
        os._exit(code)


def execute(argv: tuple[str, ...], environ: Mapping[str, str]) -> tuple[str, int]:
    """Become a program. If that fails, print the problem, and return it with an exit code."""
    for ignored in IGNORED_BY_PYTHON:
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, environ)  # noqa: S606 - no shell
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        where = "on the node" if "/" not in argv[0] else "in the working directory"
        problem = f"there is no program {argv[0]!r} {where}" if missing else str(error.strerror)
        os.write(2, f"ones: {argv[0]}: {problem}\n".encode())
        return problem, NOT_FOUND if missing else NOT_EXECUTABLE


def run_shell(folder: Path, secrets: Mapping[str, str]) -> NoReturn:
    """Run the program of a `ShellOrder` on a terminal, with the environment of a worker."""
    order = SHELL_ORDER.decode((folder / "order").read_bytes())
    assignment = ASSIGNMENT.decode((folder / "assignment").read_bytes())
    leader, inherited = None, {}
    if order.worker is not None:
        leader = os.pidfd_open(order.worker)
        data = Path(f"/proc/{order.worker}/environ").read_bytes()
        pairs = (one.partition("=") for one in data.decode(errors="surrogateescape").split("\0"))
        inherited = {name: value for name, _, value in pairs if name}
    own = {"ONES_JOB": assignment.job, "ONES_RANK": str(assignment.rank)}
    environ = {"TERM": TERM, **os.environ, **inherited, **assignment.env}
    environ |= {**secrets, **own, **order.env}
    os.chdir(assignment.workdir)
    terminals.start(folder, terminals.Bounds(terminals.KEEP_SHELL_S, order.limit_s, leader))
    _, code = execute(order.argv, environ)
    os._exit(code)


def free_port(slot: int) -> int:
    """Return a free port for the rendezvous of the gang whose rank 0 has this slot of the node.

    A slot has one job, and its ports are its own: no other gang of the node chooses the same one.
    """
    mine = range(PORTS.start + slot % SLOTS_APART, PORTS.stop, SLOTS_APART)
    for port in mine:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"ports {', '.join(map(str, mine))} are all in use")


def environment(
    assignment: Assignment, order: GroupOrder, port: int, secrets: Mapping[str, str] = NO_SECRETS
) -> dict[str, str]:
    """Return the variables of the program, which for torchrun are those of torch's launcher."""
    members = assignment.group.members
    slots = [member for member in members if not is_place(member.slot)]
    here = node_of(members[assignment.rank].slot)
    local = [member.rank for member in members if node_of(member.slot) == here]
    nodes = list(dict.fromkeys(node_of(member.slot) for member in members))
    own = {
        "ONES_JOB": assignment.job,
        "ONES_RANK": str(assignment.rank),
        "ONES_SLOTS": str(len(slots)),
        "ONES_SLOT_INDICES": ",".join(
            str(index_of(member.slot)) for member in slots if member.rank in local
        ),
    }
    if assignment.spec.kind == "torchrun":
        host, _, shared = (order.store or f"127.0.0.1:{port}").rpartition(":")
        own |= {
            "MASTER_ADDR": host.strip("[]"),
            "MASTER_PORT": shared,
            "RANK": str(assignment.rank),
            "WORLD_SIZE": str(len(members)),
            "LOCAL_RANK": str(local.index(assignment.rank)),
            "LOCAL_WORLD_SIZE": str(len(local)),
            "GROUP_RANK": str(nodes.index(here)),
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "TORCHELASTIC_RUN_ID": assignment.job,
        }
    return {"PYTHONUNBUFFERED": "1", **os.environ, **assignment.env, **secrets, **own}


def main() -> None:
    """Run the fork server, whose children become launchers and shells."""
    parser = argparse.ArgumentParser(prog="nodeagent.launcher", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    arguments = parser.parse_args()
    serve_forks(arguments.socket, _prepare)


def _prepare(folder: Path, secrets: Mapping[str, str]) -> Callable[[], NoReturn]:
    is_shell = (folder / "order").exists()
    return partial(run_shell, folder, secrets) if is_shell else Launcher(folder, secrets).run


if __name__ == "__main__":
    main()
