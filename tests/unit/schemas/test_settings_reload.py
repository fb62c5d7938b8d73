"""Settings that are read again while a daemon runs."""

from __future__ import annotations

import asyncio
import os
import signal

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


def test_changes_are_applied_if_they_are_safe_and_refused_otherwise(daemon: Daemon) -> None:
    daemon.file = Settings(listen=Listen(port=2), grace_s=3.0, name="m")

    with capture_logs() as lines:
        daemon.reload.reload()

    restart = "setting not changed: needs a restart"
    assert daemon.used == [Settings(grace_s=3.0)]
    assert daemon.reload.current == Settings(grace_s=3.0)
    assert lines == [
        {"event": restart, "field": "listen.port", "log_level": "warning"},
        {"event": restart, "field": "name", "log_level": "warning"},
        {
            "event": "settings reloaded", "changed": ["grace_s"], "refused": ["listen.port", "name"],
            "log_level": "info",
        },
    ]  # fmt: skip


def test_an_invalid_file_changes_nothing(daemon: Daemon) -> None:
    daemon.file = SettingsError("grace_s: Expected `float`", "correct this key", "grace_s")

    with capture_logs() as lines:
        daemon.reload.reload()

    assert (daemon.used, daemon.keys, daemon.reload.current) == ([], 0, Settings())
    assert [(line["event"], line["why"]) for line in lines] == [
        ("settings not reloaded: nothing was changed", "grace_s: Expected `float`; correct this key")
    ]  # fmt: skip


def test_files_that_settings_name_are_read_each_time(daemon: Daemon) -> None:
    daemon.reload.reload()
    daemon.reload.reload()
    assert (daemon.used, daemon.keys) == ([], 2)

    def fail(_: Settings) -> None:
        raise SettingsError("too open", "chmod 600", "keys.authorised")

    daemon.reload._always = [fail]
    with capture_logs() as lines:
        daemon.reload.reload()
    assert (lines[0]["field"], lines[0]["why"]) == ("keys.authorised", "too open; chmod 600")


async def test_a_hangup_reloads_and_systemd_is_notified(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[str] = []
    monkeypatch.setattr("schemas.host.reload.notify", states.append)
    daemon.reload.listen()
    daemon.file = Settings(grace_s=2.0)

    os.kill(os.getpid(), signal.SIGHUP)
    while len(states) < 2:
        await asyncio.sleep(0)
    asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)

    assert daemon.used == [Settings(grace_s=2.0)]
    assert states[0].startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert states[1:] == ["READY=1"]
