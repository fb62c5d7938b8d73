"""`ones attach`, `shell` and `forward`: terminals and ports of running jobs, on this host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Callable, Coroutine, Iterator
from typing import Annotated, Any, Final

from cyclopts import Parameter

from controlplane.cli.output import COMMON, Common, Exit, print_error
from controlplane.cli.terminal import write_raw
from controlplane.client import Client
from controlplane.client.attachments import Attachment
from schemas.errors import BadFieldError, OnesError, UnreachableError
from schemas.jobs import ENDED
from schemas.wire.client import JobState

NOT_RUN: Final = 125  # exit code if the cluster could not run the program, as of timeout(1)
CANCELLED: Final = 130
TERMINATED: Final = 128 + signal.SIGTERM
READ: Final = 16 << 10
END_OF_INPUT: Final = b"\x04"  # Ctrl-D, for programs that read from a terminal
END_S: Final = 30.0  # from the end of a terminal to that of its job
MAX_PORT: Final = 65_535
Rank = Annotated[int, Parameter(help="rank of the worker, in the job's current group")]


def attach(job: str, *, common: Common = COMMON) -> int:
    """Attach to the terminal of an interactive job: Enter ~ . detaches, and the job goes on."""
    return _guarded(lambda: attached(job, common), common)


def shell(
    job: str,
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    rank: Rank = 0,
    common: Common = COMMON,
) -> int:
    """Open a terminal beside a worker of a running job: ones shell JOB [-- PROGRAM ARGUMENTS].

    Its program (default: bash) has the worker's account, folder, variables and limits.
    Exits with the program's code. Enter ~ . leaves it, and ends the program after 30 s.
    """

    async def run() -> int:
        rows, cols = _window()
        async with (
            Client(common.home) as client,
            client.shell(job, command, rank=rank, rows=rows, cols=cols) as stream,
        ):
            left = await LocalTerminal(stream).run()
        if left:
            return Exit.OK
        if stream.code is None:
            sys.stderr.write(f"ones: {stream.reason or 'the terminal was closed'}\n")
        return NOT_RUN if stream.code is None else stream.code

    return _guarded(run, common)


def forward(
    job: str,
    port: Annotated[str, Parameter(help="PORT of the job, or PORT:LOCAL")],
    *,
    rank: Rank = 0,
    common: Common = COMMON,
) -> int:
    """Forward a port of 127.0.0.1 to a port at which a running job listens, until Ctrl-C."""

    async def run() -> int:
        remote, local = _ports(port)
        async with Client(common.home) as client:
            state = await client.state(job)
            if state.state in ENDED:
                raise BadFieldError(f"{job} has {state.state}", "see `ones ps`", "job")
            return await _forward(client, job, remote, local, rank)

    return _guarded(run, common)


def _guarded(run: Callable[[], Coroutine[Any, Any, int]], common: Common) -> int:
    try:
        return asyncio.run(run())
    except OnesError as error:
        print_error(error, common.output)
        return NOT_RUN


async def attached(job: str, common: Common) -> int:
    """Attach this terminal to that of a job. Return the job's exit code, or 0 after `~.`."""
    rows, cols = _window()
    async with Client(common.home) as client:
        async with client.attach(job, rows=rows, cols=cols) as stream:
            left = await LocalTerminal(stream).run()
        if left:
            sys.stderr.write(f"ones: detached from {job}; `ones attach {job}` returns\n")
            return Exit.OK
        if stream.code is None and stream.reason:
            sys.stderr.write(f"ones: {stream.reason}\n")
        return code_of(job, await client.wait_state(job, END_S))


def code_of(job: str, end: JobState) -> int:
    """Return the exit code of `ones run` for the end of a job. Say why it did not succeed."""
    if end.state == "succeeded":
        return Exit.OK
    sys.stderr.write(f"ones: {job} {end.state}: {end.reason}\n")
    if end.state == "cancelled":
        return CANCELLED
    return NOT_RUN if end.exit_code is None else end.exit_code


class Escapes:
    """Filter of keyboard input that finds `~.` at the start of a line; `~~` is one tilde."""

    def __init__(self) -> None:
        self._line_begins = True
        self._tilde = False  # a tilde was typed at the start of a line, and not sent yet

    def take(self, data: bytes) -> tuple[bytes, bool]:
        """Return the bytes to send, and True if the user wants to detach."""
        out = bytearray()
        for byte in data:
            if self._tilde:
                self._tilde = False
                if byte == ord("."):
                    return bytes(out), True
                out += b"~" if byte != ord("~") else b""
            elif self._line_begins and byte == ord("~"):
                self._tilde = True
                continue
            out.append(byte)
            self._line_begins = byte in b"\r\n"
        return bytes(out), False


class LocalTerminal:
    """This process's terminal, or its standard input and output, while a stream is attached."""

    def __init__(self, stream: Attachment) -> None:
        self._stream = stream
        self._input, self._output = sys.stdin.fileno(), sys.stdout.fileno()
        self._is_terminal = os.isatty(self._input)

    async def run(self) -> bool:
        """Pass bytes on until the stream ends. Return True if the user detached before."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGWINCH, self._resize)
        if not self._is_terminal:
            loop.add_signal_handler(signal.SIGINT, self._stream.signal, "INT")
        typing = asyncio.create_task(self._type())
        with self._raw():
            try:
                showing = asyncio.create_task(self._show())
                await asyncio.wait({typing, showing}, return_when=asyncio.FIRST_COMPLETED)
                if typing.done() and typing.result():
                    showing.cancel()
                    return True
                await showing
                return False
            finally:
                typing.cancel()
                loop.remove_reader(self._input)
                loop.remove_signal_handler(signal.SIGWINCH)
                loop.remove_signal_handler(signal.SIGINT)

    @contextlib.contextmanager
    def _raw(self) -> Iterator[None]:
        """Set the terminal to raw mode in the block, and restore it also on TERM and HUP."""
        if not self._is_terminal:
            yield
            return
        before = termios.tcgetattr(self._input)

        def restore() -> None:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._input, termios.TCSADRAIN, before)

        def end(number: int) -> None:
            restore()
            os._exit(128 + number)

        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(name, end, name)
        try:
            tty.setraw(self._input)
            yield
        finally:
            restore()
            for name in (signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(name)

    def _resize(self) -> None:
        self._stream.resize(*_window())

    async def _type(self) -> bool:
        """Send what is typed. Return True if the user detaches, False at the end of the input."""
        escapes, last = Escapes(), b"\n"
        while data := await self._typed():
            left, last = False, data[-1:]
            if self._is_terminal:
                data, left = escapes.take(data)
            await self._stream.write(data)
            if left:
                return True
        # At the start of a line it ends the input, elsewhere it only passes the line on.
        await self._stream.write(END_OF_INPUT if last == b"\n" else 2 * END_OF_INPUT)
        return False

    async def _typed(self) -> bytes:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        try:
            loop.add_reader(self._input, ready.set)
        except PermissionError:  # a file, which is always ready
            ready.set()
        try:
            await ready.wait()
            return os.read(self._input, READ)
        except OSError:  # the terminal is gone
            return b""
        finally:
            loop.remove_reader(self._input)

    async def _show(self) -> None:
        while data := await self._stream.read():
            await asyncio.to_thread(write_raw, self._output, data)
        if self._stream.missed:
            sys.stderr.write(f"\r\nones: {self._stream.missed} bytes of output were lost\r\n")


def _window() -> tuple[int, int]:
    size = shutil.get_terminal_size()
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):
            size = os.get_terminal_size(descriptor)
            break
    return max(1, min(size.lines, 10_000)), max(1, min(size.columns, 10_000))


def _ports(text: str) -> tuple[int, int]:
    remote, _, local = text.partition(":")
    numbers = [int(one) if one.isdecimal() else 0 for one in (remote, local or remote)]
    if not all(0 < one <= MAX_PORT for one in numbers):
        raise BadFieldError(
            f"{text!r} is not PORT or PORT:LOCAL", "as in 6006 or 6006:8080", "port"
        )
    return numbers[0], numbers[1]


async def _forward(client: Client, job: str, remote: int, local: int, rank: int) -> int:
    # Else a local program that leaves ends the process.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with client.port(job, remote, rank=rank) as stream:
                await stream.join(reader, writer)
                while not stream.over:  # the node has yet to pass on the last bytes
                    await stream.wait()
        except OnesError as error:
            sys.stderr.write(f"ones: {error}\n")
        except OSError:
            pass  # the local program closed its connection
        finally:
            writer.close()

    async def ended() -> None:
        while True:
            with contextlib.suppress(UnreachableError):  # the controller restarts
                state = await client.wait_state(job)
                sys.stderr.write(f"ones: {job} {state.state}: {state.reason}\n")
                return

    try:
        server = await asyncio.start_server(serve, "127.0.0.1", local)
    except OSError as error:
        what = f"port {local} of this host: {error.strerror}"
        raise BadFieldError(what, f"choose another: {remote}:LOCAL", "port") from None
    sys.stderr.write(f"ones: 127.0.0.1:{local} is port {remote} of {job}, until Ctrl-C\n")
    waiting = asyncio.create_task(ended())
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, waiting.cancel)
    async with server:
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
    return Exit.OK
