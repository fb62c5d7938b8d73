"""Stores of a lease: PostgreSQL, etcd, and a file for several controllers on one host."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from controlplane.service.standby.lease import Held, LeaseError, LeaseStore, Record
from schemas.errors import SettingsError, install_hint
from schemas.host.files import replace_file

if TYPE_CHECKING:
    import ssl

    import httpx
    import psycopg

TIMEOUT_S: Final = 1.0  # for one request
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def open_store(url: str, cluster: str, home: Path) -> LeaseStore:
    """Return the store that a URL names.

    Args:
        url: postgresql://..., etcd://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...], or the path of a
            file. etcds:// uses TLS, with the files of ?cacert=FILE&cert=FILE&key=FILE.
        cluster: name of the lease in the store.
        home: folder where a relative path begins.

    Raises:
        SettingsError: if a library or a file is missing, or the URL is not one of these.
    """
    scheme, separator, _ = url.partition("://")
    try:
        if scheme in {"postgresql", "postgres"}:
            return PostgresLease(url, cluster)
        if scheme in {"etcd", "etcds"}:
            return EtcdLease(url, cluster, home)
    except ImportError as error:
        raise SettingsError(
            f"standby.lease: {error}", install_hint("standby"), "standby.lease"
        ) from None
    if separator:
        what = f"standby.lease: unknown scheme {scheme}://"
        raise SettingsError(what, "use postgresql://, etcd://, etcds:// or a path", "standby.lease")
    return FileLease(home / url)


class PostgresLease:
    """Lease in a row of the table `ones_lease`, which is created on first use.

    An advisory lock would be released by a restart of the database while its holder goes on, so
    the row also says how long the lease lasts.
    """

    CREATE: Final = (
        "CREATE TABLE IF NOT EXISTS ones_lease (cluster text PRIMARY KEY, "
        "version bigint NOT NULL, record bytea NOT NULL, expires timestamptz NOT NULL)"
    )
    READ: Final = (
        "SELECT version, record, expires < clock_timestamp() FROM ones_lease WHERE cluster = %s"
    )
    INSERT: Final = (
        "INSERT INTO ones_lease VALUES "
        "(%(cluster)s, 1, %(record)s, clock_timestamp() + make_interval(secs => %(lease_s)s)) "
        "ON CONFLICT DO NOTHING RETURNING version"
    )
    UPDATE: Final = (
        "UPDATE ones_lease SET version = version + 1, record = %(record)s, "
        "expires = clock_timestamp() + make_interval(secs => %(lease_s)s) "
        "WHERE cluster = %(cluster)s AND version = %(version)s RETURNING version"
    )

    def __init__(self, url: str, cluster: str) -> None:
        import psycopg  # noqa: PLC0415 - an extra

        self._errors = psycopg.Error
        self._exists = psycopg.errors.UniqueViolation, psycopg.errors.DuplicateObject
        self._open = psycopg.AsyncConnection.connect
        self._url = url
        self._cluster = cluster
        self._connection: psycopg.AsyncConnection[Any] | None = None

    async def read(self) -> Held:
        """Return the record."""
        rows = await self._run(self.READ, (self._cluster,))
        if not rows:
            return Held()
        version, record, expired = rows[0]
        return Held(record=_decoded(bytes(record)), version=version, expired=expired)

    async def replace(self, version: int, record: Record, lease_s: float) -> int | None:
        """Replace a version of the record."""
        values = {
            "cluster": self._cluster, "record": msgspec.json.encode(record),
            "lease_s": lease_s, "version": version,
        }  # fmt: skip
        rows = await self._run(self.UPDATE if version else self.INSERT, values)
        return int(rows[0][0]) if rows else None

    async def _run(self, statement: str, values: Any) -> list[tuple[Any, ...]]:
        """Execute a statement in a transaction of its own, and return its rows."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                connection = await self._connected()
                return await (await connection.execute(statement, values)).fetchall()
        except (TimeoutError, OSError, self._errors) as error:
            await self.close()
            text = str(error) or f"no reply within {TIMEOUT_S:g} s"
            raise LeaseError(f"PostgreSQL: {text.splitlines()[0]}", "check the database") from None

    async def _connected(self) -> psycopg.AsyncConnection[Any]:
        if self._connection is None:
            self._connection = await self._open(self._url, autocommit=True)
            await self._connection.execute("SET synchronous_commit = on")
            with contextlib.suppress(*self._exists):  # another connection created it meanwhile
                await self._connection.execute(self.CREATE)
        return self._connection

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class _Stored(msgspec.Struct):
    mod_revision: int
    value: bytes = b""  # msgspec decodes base64; etcd omits empty values


class _Range(msgspec.Struct):
    kvs: list[_Stored] = []


class _Response(msgspec.Struct):
    response_range: _Range


class _Header(msgspec.Struct):
    revision: int


class _TxnReply(msgspec.Struct):
    header: _Header
    succeeded: bool = False


class _ReadReply(msgspec.Struct):
    responses: Annotated[list[_Response], msgspec.Meta(min_length=2, max_length=2)]


class _GrantReply(msgspec.Struct):
    lease: str = msgspec.field(name="ID")


class _LoginReply(msgspec.Struct):
    token: str


Reply = TypeVar("Reply", _TxnReply, _ReadReply, _GrantReply, _LoginReply)


class EtcdLease:
    """Lease in two keys of etcd: the record, and a key that etcd deletes when the lease expires.

    It uses the JSON gateway of etcd's API, because etcd's Python clients are not maintained. The
    version is the revision of the last change of the record.
    """

    def __init__(self, url: str, cluster: str, home: Path) -> None:
        import httpx  # noqa: PLC0415 - an extra

        place = urlsplit(url.replace("[", "%5B").replace("]", "%5D"))
        login, _, hosts = place.netloc.rpartition("@")
        user, _, password = login.partition(":")
        self._login = {"name": unquote(user), "password": unquote(password)} if user else None
        self._token: dict[str, str] = {}
        scheme = "https" if place.scheme == "etcds" else "http"
        self._servers = [f"{scheme}://{unquote(host)}" for host in hosts.split(",")]
        if place.query and scheme == "http":
            raise SettingsError(
                "standby.lease: etcd:// takes no certificates", "write etcds://", "standby.lease"
            )
        try:
            for server in self._servers:
                httpx.URL(server)
        except httpx.InvalidURL as error:
            what, hint = f"standby.lease: {error}", "write etcd://[USER:PASSWORD@]HOST:PORT"
            raise SettingsError(what, hint, "standby.lease") from None
        self._client = httpx.AsyncClient(
            timeout=TIMEOUT_S,
            trust_env=False,
            verify=_tls(dict(parse_qsl(place.query)), home) if scheme == "https" else False,
        )
        self._errors = httpx.HTTPError
        self._record, self._alive = (
            _base64(f"/ones/{cluster}/{key}") for key in ("record", "alive")
        )

    async def read(self) -> Held:
        """Return the record."""
        reads = [{"request_range": {"key": key}} for key in (self._record, self._alive)]
        reply = await self._post("kv/txn", {"success": reads}, _ReadReply)
        record, alive = (one.response_range.kvs for one in reply.responses)
        if not record:
            return Held()
        found = _decoded(record[0].value)
        return Held(record=found, version=record[0].mod_revision, expired=not alive)

    async def replace(self, version: int, record: Record, lease_s: float) -> int | None:
        """Replace a version of the record. etcd rounds `lease_s` up to whole seconds."""
        granted = await self._post("lease/grant", {"TTL": -int(-lease_s // 1)}, _GrantReply)
        same = {
            "key": self._record, "target": "MOD", "result": "EQUAL", "mod_revision": version,
        }  # fmt: skip
        puts = [
            {"key": self._record, "value": _base64(msgspec.json.encode(record))},
            {"key": self._alive, "lease": granted.lease},
        ]
        change = {"compare": [same], "success": [{"request_put": put} for put in puts]}
        reply = await self._post("kv/txn", change, _TxnReply)
        return reply.header.revision if reply.succeeded else None

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()

    async def _post(self, path: str, content: dict[str, Any], kind: type[Reply]) -> Reply:
        """Ask the first server that replies; the next request begins with it."""
        problem = LeaseError("etcd: no server", "check its servers")
        for _ in self._servers:
            try:
                return _content(await self._answer(path, content), kind)
            except LeaseError as error:
                problem = error
            except self._errors as error:
                what = str(error) or type(error).__name__
                problem = LeaseError(f"etcd: {what}", "check its servers")
            self._servers.append(self._servers.pop(0))
        raise problem

    async def _answer(self, path: str, content: dict[str, Any]) -> httpx.Response:
        """Ask the first server, and log in again if it does not know the token any more."""
        if self._login and not self._token:
            await self._log_in()
        answer = await self._send(path, content)
        if self._login and answer.is_client_error:
            await self._log_in()
            answer = await self._send(path, content)
        return answer

    async def _log_in(self) -> None:
        self._token = {}
        answer = await self._send("auth/authenticate", self._login)
        self._token = {"Authorization": _content(answer, _LoginReply).token}

    async def _send(self, path: str, content: Any) -> httpx.Response:
        answer = await self._client.post(
            f"{self._servers[0]}/v3/{path}", json=content, headers=self._token
        )
        if answer.is_server_error:  # such as "etcdserver: leader changed": another one may reply
            answer.raise_for_status()
        return answer


def _content(answer: httpx.Response, kind: type[Reply]) -> Reply:
    """Return the content of an answer.

    Raises:
        LeaseError: if the server refuses, or the reply does not have the form of etcd's.
    """
    found: Any = None
    with contextlib.suppress(ValueError):
        found = answer.json()
    if isinstance(found, dict) and answer.is_error:
        what = found.get("message") or found.get("error") or f"status {answer.status_code}"
        raise LeaseError(f"etcd: {what}", "check the user, its role and the certificate")
    try:  # etcd writes numbers of 64 bits as strings
        return msgspec.convert(found, kind, strict=False)
    except msgspec.ValidationError:
        raise LeaseError("etcd: the reply is not that of etcd", "check the address") from None


def _tls(files: dict[str, str], home: Path) -> ssl.SSLContext:
    """Return a TLS context with the files `cacert`, `cert` and `key`, as etcdctl names them."""
    if unknown := files.keys() - {"cacert", "cert", "key"}:
        what = f"standby.lease: unknown option {min(unknown)!r}"
        raise SettingsError(what, "use cacert, cert and key", "standby.lease")
    import ssl  # noqa: PLC0415 - commands that need no lease start faster

    paths = {name: home / path for name, path in files.items()}
    try:
        context = ssl.create_default_context(cafile=paths.get("cacert"))
        if "cert" in paths:
            context.load_cert_chain(paths["cert"], paths.get("key"))
    except OSError as error:  # ssl.SSLError is one
        what = f"standby.lease: cacert, cert or key: {error.strerror or error}"
        raise SettingsError(what, "check these files", "standby.lease") from None
    return context


class FileLease:
    """Lease in a file, which lasts by the clock of the host since its boot."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._boot = BOOT_ID.read_text(encoding="ascii").strip()

    async def read(self) -> Held:
        """Return the record. The file is replaced as a whole, so this needs no lock."""
        try:
            version, record, until, boot = msgspec.json.decode(
                self._path.read_bytes(), type=tuple[int, Record, float, str]
            )
        except FileNotFoundError:
            return Held()
        except OSError as error:
            raise LeaseError(f"{self._path}: {error.strerror}", "check the path") from None
        except msgspec.MsgspecError as error:
            remedy = "stop all controllers, and remove the file"
            raise LeaseError(f"{self._path}: {error}", remedy) from None
        expired = boot != self._boot or time.clock_gettime(time.CLOCK_BOOTTIME) > until
        return Held(record=record, version=version, expired=expired)

    async def replace(self, version: int, record: Record, lease_s: float) -> int | None:
        """Replace a version of the record."""
        with self._locked():
            if (await self.read()).version != version:
                return None
            until = time.clock_gettime(time.CLOCK_BOOTTIME) + lease_s
            data = msgspec.json.encode((version + 1, record, until, self._boot))
            replace_file(self._path, data)
        return version + 1

    async def close(self) -> None:
        """Do nothing: the file is open only during a call."""

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file against other processes, for some microseconds."""
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self._path.with_suffix(".lock"), flags, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)
        except OSError as error:
            raise LeaseError(f"{self._path}: {error.strerror}", "check the path") from None


def _decoded(data: bytes) -> Record:
    try:
        return msgspec.json.decode(data, type=Record)
    except msgspec.MsgspecError as error:
        raise LeaseError(f"the record of the lease is damaged: {error}", "delete it") from None


def _base64(data: bytes | str) -> str:
    return base64.b64encode(data if isinstance(data, bytes) else data.encode()).decode()
