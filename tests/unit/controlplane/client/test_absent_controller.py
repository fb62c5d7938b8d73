"""An absent controller is distinguished from a slow one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.client import Client, connection
from schemas.errors import UnreachableError
from schemas.transport.keys import write_keys


@pytest.fixture
def port() -> Iterator[socket.socket]:
    """A port of this host that nobody listens at yet."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


@pytest.fixture
def home(tmp_path: Path, port: socket.socket, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a cluster at that port."""
    monkeypatch.delenv("ONES_TIMEOUT_S", raising=False)
    for name in ("server", "admin"):
        write_keys(tmp_path / "keys", name)
    (tmp_path / "client.toml").write_text(f'endpoint = "tcp://127.0.0.1:{port.getsockname()[1]}"\n')
    return tmp_path


async def refusal(home: Path, timeout: float | None = None) -> str:  # noqa: ASYNC109
    async with Client(home, timeout) as client:
        with pytest.raises(UnreachableError) as caught:
            await client.jobs()
    return str(caught.value)


@pytest.mark.slow
async def test_a_port_without_a_process_is_reported_before_the_timeout(
    home: Path, port: socket.socket
) -> None:
    async with asyncio.timeout(connection.TIMEOUT_S / 2):
        said = await refusal(home)

    assert said == (
        f"no controller replies at tcp://127.0.0.1:{port.getsockname()[1]}; "
        "check that the controller runs and that its port is reachable from this host"
    )


async def test_the_command_that_starts_a_local_cluster_is_named(home: Path) -> None:
    (home / "controller.toml").touch()

    assert (await refusal(home)).endswith(f"; `ones local up --dir {home}` starts it")


@pytest.mark.parametrize("listens", [True, False])
async def test_a_slow_controller_or_a_stated_timeout_is_awaited_in_full(
    home: Path, port: socket.socket, monkeypatch: pytest.MonkeyPatch, *, listens: bool
) -> None:
    monkeypatch.setattr(connection, "TIMEOUT_S", 0.6)
    monkeypatch.setattr(connection, "REPLY_TIMEOUT_S", 0.6)
    if listens:
        port.listen()
    loop = asyncio.get_running_loop()

    began = loop.time()
    said = await refusal(home, None if listens else 0.6)

    assert said == "the controller does not reply; check that the cluster is running"
    assert loop.time() - began >= 0.6
