"""`ones key` against a controller that runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Final

import pytest
import structlog.testing

from controlplane.cli.main import build
from controlplane.client import Client
from controlplane.service import keys as key_table
from controlplane.service.api import fair_queue
from schemas.errors import BadFieldError, DeniedError, OnesError, UnreachableError
from schemas.wire.client import Cluster, EventsPage, GetCluster, ReadEvents
from schemas.wire.feed import ReadLog
from tests.support.service import DENIED, House, Person, heard_by, until

SOON_S: Final = 0.5  # how long a stranger is tried


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_table, "LOOK_S", 0.01)


async def ones(home: Path, *words: str) -> int:
    """A command as somebody gives it, in a thread of its own."""

    def run() -> int:
        line = [*words, "--home", str(home)]
        app = build()
        code = app(line, exit_on_error=False, print_error=False, result_action="return_value")
        return int(code or 0)

    return await asyncio.to_thread(run)


async def test_a_key_is_added_used_listed_and_revoked_without_a_restart(
    house: House, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, folder = house.file.parent, tmp_path / "eve"

    add = ("key", "add", "eve", "--role", "user", "--project", "vision", "--expires", "30d")
    assert await ones(root, *add, "--out", str(folder)) == 0

    async with Client(folder) as eve:
        cluster = await eve.cluster()
        assert (cluster.user, cluster.role, cluster.projects) == ("eve", "user", ("vision",))
        with pytest.raises(DeniedError, match="user eve may not manage keys"):
            await eve.keys()
        capsys.readouterr()
        assert await ones(root, "key", "list", "-o", "json") == 0
        rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
        assert list(rows) == ["root", "ann", "bob", "n1", "eve"]
        assert (rows["eve"]["state"], rows["eve"]["by"], rows["eve"]["kept"]) == (
            "valid", "root", "online",
        )  # fmt: skip

        with structlog.testing.capture_logs() as lines:
            assert await ones(root, "key", "revoke", "eve") == 0
        with pytest.raises(DeniedError, match="no longer authorised"):
            await eve.cluster()

    assert [(line["what"], line["by"]) for line in lines if line["event"] == "audit"] == [
        ("RevokeKey", "admin:root")
    ]
    async with Client(folder, timeout=SOON_S) as eve:
        with pytest.raises(UnreachableError):
            await eve.cluster()
    secret = (folder / "keys" / "eve.key_secret").read_text()
    assert (folder / "keys" / "eve.key_secret").stat().st_mode & 0o777 == 0o600
    kept = (root / "state" / "keys.json").read_text()
    assert secret.partition('secret-key = "')[2].partition('"')[0] not in kept


async def test_a_submission_selects_a_project_of_its_user(
    house: House, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, folder, file = house.file.parent, tmp_path / "eve", tmp_path / "job" / "job.toml"
    file.parent.mkdir()
    (file.parent / "train.py").write_text("pass\n")
    file.write_text('name = "toy"\nscript = "train.py"\nbatch_size = 8\n')
    both = ("--project", "vision", "--project", "speech")
    await ones(root, "key", "add", "eve", "--role", "user", *both, "--out", str(folder))
    capsys.readouterr()

    assert await ones(folder, "submit", str(file), "--project", "speech", "-o", "json") == 0
    job = json.loads(capsys.readouterr().out)["job"]

    async with Client(folder) as eve:
        assert (await eve.job(job)).summary.project == "speech"
    with pytest.raises(BadFieldError, match="'music' is not one of vision, speech"):
        await ones(folder, "submit", str(file), "--project", "music")


async def test_a_name_with_quotes_gets_a_valid_client_folder(house: House, tmp_path: Path) -> None:
    folder = tmp_path / "eve"

    await ones(house.file.parent, "key", "add", 'e"v\\e', "--role", "user", "--out", str(folder))

    async with Client(folder) as eve:
        assert (await eve.cluster()).user == 'e"v\\e'


async def test_a_refused_key_leaves_no_files(house: House, tmp_path: Path) -> None:
    for words, error in (
        (("eve smith", "--role", "user"), OnesError),
        (("eve", "--role", "user", "--project", "a/b"), BadFieldError),
        (("eve", "--role", "user", "--expires", "soon"), BadFieldError),
        (("server", "--role", "user"), BadFieldError),
    ):
        with pytest.raises(error):
            await ones(tmp_path / "cluster", "key", "add", *words, "--out", str(tmp_path / "eve"))

    assert not await asyncio.to_thread((tmp_path / "eve" / "keys" / "eve.key").exists)
    assert len(house.controller._keys.known) == 4


async def test_a_revocation_ends_waiting_requests_at_once(
    house: House, people: tuple[Person, Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_queue, "MAX_WAIT_S", 3600.0)
    ann, bob = people
    await heard_by(house, ann, bob)
    job = next(iter(house.controller._state().jobs))
    asked = ReadEvents(from_seq=house.controller._state().feed_seq + 1, wait_s=3600.0)
    polls = {person: person.begin(asked) for person in (ann, bob)}
    follows = asyncio.create_task(bob.read_log(ReadLog(job=job, wait_s=3600.0)))
    server, relay = house.controller._request_server, house.relay.relay._log_relay
    await until(lambda: (len(server.waiting._tasks), len(relay.waiting._tasks)) == (2, 1))

    house.controller._keys.revoke("bob", "root")

    assert (await bob.answer(polls[bob]), await follows) == (DENIED, DENIED)
    await heard_by(house, ann)  # who waits on, and hears of that
    assert isinstance(await ann.answer(polls[ann]), EventsPage)


async def test_a_session_ends_when_its_key_expires(
    house: House, people: tuple[Person, Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, bob = people
    keys = house.controller._keys
    who = keys.known[house.keys["bob"].public]
    ends = keys._clock() + 3600.0
    keys.reload({**keys._listed, house.keys["bob"].public: type(who)("user", "bob", (), ends)})
    assert isinstance(await bob.ask(GetCluster()), Cluster)
    feed = house.controller._feed._socket

    monkeypatch.setattr(keys, "_clock", lambda: ends)
    monkeypatch.setattr(keys.known, "_clock", lambda: ends)

    assert await bob.ask(GetCluster()) == DENIED
    await until(lambda: house.controller._feed._socket is not feed)
