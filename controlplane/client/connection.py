"""Connection to one cluster: folder, keys, sockets and request channels.

A request is sent again until a reply arrives, so every request must be harmless to repeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import msgspec

from schemas.codec import LOG_REPLY, REPLY, Codec, encode
from schemas.errors import OnesError, SettingsError, UnreachableError, error_from_code
from schemas.host import settings
from schemas.transport.keys import ServerKeys, load_keys, next_key_path
from schemas.transport.sockets import Link, Socket
from schemas.wire import Message
from schemas.wire.client import Cluster, Failed, GetCluster, PutSnapshot, SnapshotStored


class RequestChannel:
    """The requests and replies over one DEALER socket, matched by id."""

    def __init__(self, socket: Socket, codec: Codec[Any]) -> None:
        self._socket = socket
        self._codec = codec
        self._waiting: dict[bytes, asyncio.Future[Any]] = {}
        self._task = asyncio.create_task(self._receive())

    async def call(self, request: Message, reply_timeout_s: float, limit_s: float) -> Any:
        """Send `request` and return its reply.

        The request is sent again after `reply_timeout_s` seconds without a reply, so it may be
        executed twice.

        Raises:
            UnreachableError: if no reply arrives within `limit_s` seconds.
            OnesError: the controller's error, if it refused the request.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        data = encode(request)
        while True:
            key = uuid.uuid4().bytes
            answer = self._waiting[key] = loop.create_future()
            try:
                async with asyncio.timeout_at(deadline):
                    while not self._socket.send(key, data):
                        await asyncio.sleep(0.02)
                async with asyncio.timeout(reply_timeout_s):  # wait_for may lose a cancellation
                    reply = await answer
            except TimeoutError:
                if loop.time() > deadline:
                    hint = "check that the cluster is running"
                    raise UnreachableError("the controller does not reply", hint) from None
                continue
            finally:
                del self._waiting[key]
            if isinstance(reply, Failed):
                raise error_from_code(reply.code, reply.message, reply.hint, reply.field)
            return reply

    async def _receive(self) -> None:
        async for incoming in self._socket:
            if len(incoming.frames) != 2:  # noqa: PLR2004 - id and message
                continue
            answer = self._waiting.get(incoming.frames[0])
            if answer is not None and not answer.done():
                with contextlib.suppress(OnesError):
                    answer.set_result(self._codec.decode(incoming.frames[1]))

    def close(self) -> None:
        """Stop receiving. The owner of the context closes the socket."""
        self._task.cancel()


DEFAULT_FOLDER = ".ones"
CLIENT_FILE = "client.toml"
CONTROLLER_FILE = "controller.toml"  # exists in a folder of `ones local up`


class _ClientFile(msgspec.Struct, frozen=True, kw_only=True):
    endpoint: str  # tcp://HOST:PORT of the client port; with standbys several, with commas between
    server_key: str = "keys/server.key"
    key: str = "keys/admin.key_secret"


@dataclass(frozen=True, slots=True)
class Home:
    """Address and keys of one cluster."""

    folder: Path
    endpoint: str
    server_key: Path
    key: Path

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of the controllers, of which one is active."""
        return tuple(
            one.strip().removeprefix("tcp://").rpartition(":")[0]
            for one in self.endpoint.split(",")
        )

    @property
    def remedy(self) -> str:
        """Remedy for a controller that does not reply."""
        if (self.folder / CONTROLLER_FILE).is_file():
            return f"`ones local up --dir {self.folder}` starts it"
        return "check that the controller runs and that its port is reachable from this host"


def home_folder(folder: Path | str | None = None) -> Path:
    """Return `folder`, else $ONES_HOME, else ~/.ones. The folder need not exist."""
    return Path(folder or os.environ.get("ONES_HOME") or Path.home() / DEFAULT_FOLDER).expanduser()


def find_home(folder: Path | str | None = None) -> Home:
    """Find the cluster in `folder`, else in $ONES_HOME, else in ~/.ones.

    Raises:
        SettingsError: if the folder has no cluster.
    """
    chosen = home_folder(folder)
    path = chosen / CLIENT_FILE
    if not path.is_file():
        hint = f"set ONES_HOME or --home, or start one with `ones local up --dir {chosen}`"
        raise SettingsError(f"no cluster in {chosen}", hint, "ONES_HOME")
    loaded = settings.load(_ClientFile, path)
    return Home(chosen, loaded.endpoint, chosen / loaded.server_key, chosen / loaded.key)


PIECE_BYTES: Final = 1 << 20
RETRY_LIMIT_S: Final = 60.0  # how long calls that wait or follow tolerate an absent controller
REPLY_TIMEOUT_S: Final = 3.0  # time until a request is repeated, beyond the wait of a long poll
TIMEOUT_VARIABLE: Final = "ONES_TIMEOUT_S"
TIMEOUT_S: Final = 10.0  # default timeout if the controller listens
KEY_TIMEOUT_S: Final = 1.0  # for a reply while the server's key is being rotated
PROBE_DELAY_S: Final = 0.2  # time without a reply after which the client probes the endpoint
PROBE_TIMEOUT_S: Final = 0.5  # timeout of the probe
R = TypeVar("R", bound=Message)


class ClusterConnection:
    """Connection to one cluster, and async context manager. `Client` describes its arguments."""

    def __init__(self, home: Home | Path | str | None = None, timeout: float | None = None) -> None:
        self._home = home if isinstance(home, Home) else find_home(home)
        asked = os.environ.get(TIMEOUT_VARIABLE) if timeout is None else timeout
        self._timeout = TIMEOUT_S if asked is None else float(asked)
        self._probes = asked is None  # True: fail early if no process listens
        self._link = Link(load_keys(self._home.key))
        self._server_keys = ServerKeys(self._home.server_key)
        self._calls: RequestChannel | None = None
        self._logs: RequestChannel | None = None

    async def __aenter__(self) -> Self:
        """Open the socket. The first call discovers whether a controller is running."""
        self._calls = self._open_channel(self._home.endpoint, REPLY)
        if next_key_path(self._home.server_key).exists():
            await self._choose_key()
        return self

    async def _choose_key(self) -> None:
        """Use the server's next key if the controller does not reply to the current one."""
        for _ in range(2):
            try:
                await self._channel.call(GetCluster(), KEY_TIMEOUT_S, KEY_TIMEOUT_S)
            except UnreachableError:
                if not self._try_other_key():
                    return
            else:
                self._server_keys.confirm()
                return

    def _try_other_key(self) -> bool:
        """Connect with the server's other key. Return False if there is none."""
        if self._server_keys.other() is None:
            return False
        for channel in (self._calls, self._logs):
            if channel is not None:
                channel.close()
        self._calls, self._logs = self._open_channel(self._home.endpoint, REPLY), None
        return True

    async def __aexit__(self, *_: object) -> None:
        """Close all sockets."""
        for channel in (self._calls, self._logs):
            if channel is not None:
                channel.close()
        await asyncio.sleep(0)
        self._link.close()

    async def cluster(self) -> Cluster:
        """Return facts about the cluster, with the user and the role of this client's key."""
        found = await self._call(GetCluster(), Cluster)
        if found.next_key:
            self._server_keys.learn(found.next_key)
        return found

    async def _upload(
        self, digest: str, archive: bytes, on_sent: Callable[[int, int], None] | None = None
    ) -> None:
        offset = 0
        while True:
            piece = archive[offset : offset + PIECE_BYTES]
            request = PutSnapshot(digest=digest, offset=offset, data=piece, total=len(archive))
            stored = await self._call(request, SnapshotStored)
            offset = stored.size
            if on_sent is not None:
                on_sent(offset, len(archive))
            if offset >= len(archive):
                await self.cluster()  # every client that submits learns of a new server key
                return

    async def _call(
        self, request: Message, kind: type[R], wait_s: float = 0.0, *, bulk: bool = False
    ) -> R:
        """Send a request, to the port for output and files if `bulk`; connect on the first call."""
        try:
            reply = await self._ask(request, wait_s, bulk)
        except UnreachableError:
            if not self._try_other_key():
                raise
            reply = await self._ask(request, wait_s, bulk)
            self._server_keys.confirm()
        if not isinstance(reply, kind):
            problem = f"the controller replied with {type(reply).__name__}"
            raise UnreachableError(problem, "compare releases")
        return reply

    @property
    def _channel(self) -> RequestChannel:
        if self._calls is None:
            raise UnreachableError("the client is not open", "use `async with Client() as client`")
        return self._calls

    async def _ask(self, request: Message, wait_s: float, bulk: bool) -> Any:
        channel = await self._log_channel() if bulk else self._channel
        reply_timeout_s = wait_s + REPLY_TIMEOUT_S
        if wait_s:
            return await channel.call(request, reply_timeout_s, RETRY_LIMIT_S)
        reply = channel.call(request, reply_timeout_s, self._timeout)
        return await (self._fail_if_absent(reply) if self._probes else reply)

    async def _fail_if_absent(self, reply: Coroutine[Any, Any, Any]) -> Any:
        """Await the reply, but fail early if no process listens at the endpoint."""
        answer = asyncio.ensure_future(reply)
        try:
            await asyncio.wait([answer], timeout=PROBE_DELAY_S)
            if not answer.done() and not await _listens(self._home.endpoint):
                problem = f"no controller replies at {self._home.endpoint}"
                raise UnreachableError(problem, self._home.remedy)
            return await answer
        finally:
            answer.cancel()

    async def _bulk_call(self, request: Message, kind: type[R], wait_s: float) -> R:
        return await self._call(request, kind, wait_s, bulk=True)

    async def _log_channel(self) -> RequestChannel:
        if self._logs is None:
            self._logs = RequestChannel(await self._log_socket(), LOG_REPLY)
        return self._logs

    async def _log_socket(self) -> Socket:
        """Return a new socket to the port for output, files and streams."""
        port = (await self.cluster()).log_port
        endpoint = ",".join(f"tcp://{host}:{port}" for host in self._home.hosts)
        return self._link.connect("DEALER", endpoint, self._server_keys.current)

    def _open_channel(self, endpoint: str, codec: Codec[Any]) -> RequestChannel:
        return RequestChannel(
            self._link.connect("DEALER", endpoint, self._server_keys.current), codec
        )


async def _listens(endpoint: str) -> bool:
    """True if a process accepts connections at one of the addresses."""
    return any(await asyncio.gather(*map(_accepts, endpoint.split(","))))


async def _accepts(address: str) -> bool:
    host, _, port = address.strip().removeprefix("tcp://").rpartition(":")
    try:
        opening = asyncio.open_connection(host.strip("[]"), int(port))
        _, writer = await asyncio.wait_for(opening, PROBE_TIMEOUT_S)
    except (OSError, ValueError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
