"""Leases in real stores: a file, PostgreSQL and etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from controlplane.service.standby.lease import Held, LeaseError, LeaseStore, Record
from controlplane.service.standby.lease_stores import open_store
from schemas.errors import SettingsError
from schemas.ids import Term
from tests.support.lease_servers import LeaseServer, etcd, make_certificates, postgresql

pytestmark = [pytest.mark.slow, pytest.mark.asyncio, pytest.mark.timeout(120)]
ONE = Record(holder="h1", term=Term(1), complete=("h1",))
TWO = Record(holder="h2", term=Term(2), complete=("h2",))
LONG_S, SHORT_S = 60.0, 1.0
Opened = Callable[[], LeaseStore]


@asynccontextmanager
async def opening(url: str, folder: Path) -> AsyncIterator[Opened]:
    """Open stores that are closed at the end."""
    async with AsyncExitStack() as stack:

        def opened() -> LeaseStore:
            store = open_store(url, "c", folder)
            stack.push_async_callback(store.close)
            return store

        yield opened


@pytest_asyncio.fixture(params=["file", "postgresql", "etcd"])
async def opened(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opened]:
    servers = {"postgresql": postgresql, "etcd": etcd}
    with servers[request.param](tmp_path) if request.param in servers else nullcontext() as server:
        async with opening(server.url if server else "lease", tmp_path) as opened:
            yield opened


async def test_one_of_several_claims_wins(opened: Opened) -> None:
    stores = [opened() for _ in range(8)]

    versions = await asyncio.gather(*(store.replace(0, ONE, LONG_S) for store in stores))

    won = [version for version in versions if version is not None]
    assert len(won) == 1
    assert await stores[0].read() == Held(record=ONE, version=won[0], expired=False)


async def test_an_outdated_version_changes_nothing(opened: Opened) -> None:
    store, other = opened(), opened()
    first = await store.replace(0, ONE, LONG_S)
    assert first is not None
    second = await other.replace(first, TWO, LONG_S)
    assert second is not None

    assert await store.replace(first, ONE, LONG_S) is None
    assert await store.read() == Held(record=TWO, version=second, expired=False)


async def test_a_lease_expires_unless_it_is_renewed(opened: Opened) -> None:
    store = opened()
    version = await store.replace(0, ONE, SHORT_S)
    assert version is not None

    while not (held := await store.read()).expired:
        await asyncio.sleep(0.1)
    assert held == Held(record=ONE, version=version, expired=True)
    renewed = await store.replace(version, ONE, LONG_S)
    assert await store.read() == Held(record=ONE, version=renewed or 0, expired=False)


async def first_reply(store: LeaseStore) -> Held:
    while True:
        with suppress(LeaseError):
            return await store.read()
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("serve", [postgresql, etcd])
async def test_a_record_outlives_a_killed_server(
    serve: Callable[[Path], AbstractContextManager[LeaseServer]], tmp_path: Path
) -> None:
    with serve(tmp_path) as server:
        async with opening(server.url, tmp_path) as opened:
            store = opened()
            version = await store.replace(0, ONE, LONG_S)
            server.kill()
            with pytest.raises(LeaseError):
                await store.read()
            server.start()

            held = await first_reply(store)
            assert (held.record, held.version) == (ONE, version)


async def test_etcd_is_used_with_certificates(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "certificates")
    with etcd(tmp_path, certificates=certificates) as server:
        async with opening(server.url, tmp_path) as opened:
            store = opened()
            version = await store.replace(0, ONE, LONG_S)
            assert await store.read() == Held(record=ONE, version=version, expired=False)
        stranger = server.url.partition("&")[0]  # without a certificate of its own
        async with opening(stranger, tmp_path) as opened:
            with pytest.raises(LeaseError, match="etcd: "):
                await opened().read()


async def test_etcd_is_used_with_a_password_and_after_its_restart(tmp_path: Path) -> None:
    with etcd(tmp_path) as server:
        address = server.url.removeprefix("etcd://")
        await _require_passwords(f"http://{address}/v3/auth")
        async with opening(f"etcd://root:s%40crt@{address}", tmp_path) as opened:
            store = opened()
            version = await store.replace(0, ONE, LONG_S)
            server.kill()
            server.start()  # it forgets the tokens that it gave
            assert await store.read() == Held(record=ONE, version=version, expired=False)
        for login in ("", "root:wrong@"):
            async with opening(f"etcd://{login}{address}", tmp_path) as opened:
                with pytest.raises(LeaseError, match=r"etcd: .*(user|auth)"):
                    await opened().read()


@asynccontextmanager
async def replying(status: str, body: bytes) -> AsyncIterator[str]:
    """Serve the same reply to every request; yields its HOST:PORT."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status.encode(), len(body)))
        writer.write(body)
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_another_member_of_etcd_replies_when_the_first_one_cannot(tmp_path: Path) -> None:
    changing = replying("503 Unavailable", b'{"message": "etcdserver: leader changed"}')
    with etcd(tmp_path) as server:
        able = server.url.removeprefix("etcd://")
        async with changing as unable, opening(f"etcd://{unable},{able}", tmp_path) as opened:
            store = opened()
            version = await store.replace(0, ONE, LONG_S)
            assert await store.read() == Held(record=ONE, version=version, expired=False)


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"responses": [7]}', b'{"ID": null}'])
async def test_a_reply_that_is_not_that_of_etcd_is_refused(body: bytes, tmp_path: Path) -> None:
    async with replying("200 OK", body) as host, opening(f"etcd://{host}", tmp_path) as opened:
        store = opened()
        for answer in (store.read, partial(store.replace, 0, ONE, LONG_S)):
            with pytest.raises(LeaseError, match="the reply is not that of etcd"):
                await answer()


async def _require_passwords(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        for path, content in {
            "user/add": {"name": "root", "password": "s@crt"},
            "role/add": {"name": "root"},
            "user/grant": {"user": "root", "role": "root"},
            "enable": {},
        }.items():
            (await client.post(f"{url}/{path}", json=content)).raise_for_status()


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("?cacert=missing.crt", "standby.lease: cacert, cert or key: No such file or directory"),
        ("?ca=ca.crt", "standby.lease: unknown option 'ca'"),
    ],
)
async def test_unusable_files_for_tls_are_refused(query: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        open_store(f"etcds://127.0.0.1:1{query}", "c", tmp_path)

    assert (refused.value.message, refused.value.field) == (said, "standby.lease")
