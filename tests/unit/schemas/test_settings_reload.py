"""Settings that are read again while a daemon runs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import msgspec
import pytest
from structlog.testing import capture_logs

from schemas.errors import SettingsError
from schemas.host.reload import SettingsReload


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    port: int = 1
    host: str = "a"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    listen: Listen = Listen()
    grace_s: float = 1.0
    name: str = "n"


class Daemon:
    """What a daemon does with its settings."""

    def __init__(self) -> None:
        self.file: Settings | SettingsError = Settings()
        self.used: list[Settings] = []
        self.keys = 0
        self.reload = SettingsReload(
            Settings(), self.load, {"grace_s": self.used.append}, [self.read_keys]
        )

    def load(self) -> Settings:
        if isinstance(self.file, SettingsError):
            raise self.file
        return self.file

    def read_keys(self, _: Settings) -> None:
        self.keys += 1


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def said() -> Iterator[list[dict[str, object]]]:
    with capture_logs() as lines:
        yield lines  # type: ignore[misc]


def test_safe_changes_are_taken_over_and_others_named_and_left(
    daemon: Daemon, said: list[dict[str, object]]
) -> None:
    daemon.file = Settings(listen=Listen(port=2), grace_s=3.0, name="m")

    daemon.reload.reload()

    assert daemon.used == [Settings(grace_s=3.0)]
    assert daemon.reload.current == Settings(grace_s=3.0)
    assert said == [
        {
            "event": "setting not changed: needs a restart",
            "field": "listen.port",
            "log_level": "warning",
        },
        {"event": "setting not changed: needs a restart", "field": "name", "log_level": "warning"},
        {
            "event": "settings reloaded",
            "changed": ["grace_s"],
            "refused": ["listen.port", "name"],
            "log_level": "info",
        },
    ]  # fmt: skip


def test_a_file_that_is_wrong_changes_nothing(
    daemon: Daemon, said: list[dict[str, object]]
) -> None:
    daemon.file = SettingsError("grace_s: Expected `float`", "correct this key", "grace_s")

    daemon.reload.reload()

    assert (daemon.used, daemon.keys, daemon.reload.current) == ([], 0, Settings())
    assert [(line["event"], line["why"]) for line in said] == [
        (
            "settings not reloaded: nothing was changed",
            "grace_s: Expected `float`; correct this key",
        )
    ]


def test_what_did_not_change_is_left_alone_and_files_are_read_again(daemon: Daemon) -> None:
    daemon.reload.reload()
    daemon.reload.reload()

    assert (daemon.used, daemon.keys) == ([], 2)


def test_a_file_that_settings_name_is_refused_by_its_field(
    daemon: Daemon, said: list[dict[str, object]]
) -> None:
    def fail(_: Settings) -> None:
        raise SettingsError("too open", "chmod 600", "keys.authorised")

    daemon.reload._always = [fail]
    daemon.reload.reload()

    assert (said[0]["field"], said[0]["why"]) == ("keys.authorised", "too open; chmod 600")


async def test_a_hangup_is_how_it_is_asked_for(daemon: Daemon) -> None:
    daemon.reload.listen()
    daemon.file = Settings(grace_s=2.0)

    os.kill(os.getpid(), signal.SIGHUP)
    while not daemon.used:
        await asyncio.sleep(0)
    asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)

    assert daemon.used == [Settings(grace_s=2.0)]


async def test_the_manager_of_services_hears_when_it_is_done(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("schemas.host.reload.notify", told.append)

    daemon.reload.reload()

    assert told[0].startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert told[1:] == ["READY=1"]
