"""Settings: TOML files, variables, and reloads."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
import pytest
from structlog.testing import capture_logs

from schemas.errors import SettingsError
from schemas.host.reload import SettingsReload
from schemas.host.settings import convert, load, read_toml


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 7700


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    retry_s: float = 2.0
    range: tuple[int, int] = (1, 8)
    listen: Listen = Listen()


class Jobs(msgspec.Struct, frozen=True, kw_only=True):
    run_as: Literal["", "agent", "job"] = ""


class Example(msgspec.Struct, frozen=True, kw_only=True):
    EXAMPLES: ClassVar = {"node": '"ash"'}

    node: str
    slots: int = 4
    verbose: bool = False
    listen: Listen = Listen()
    limits: Limits | None = None
    env: dict[str, str] = {}
    words: tuple[str, ...] = ()
    mode: Literal["a", "b"] = "a"
    jobs: Jobs = Jobs()
    modes: tuple[Literal["", "a", "b"], ...] = ()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "agent.toml"


def loaded(file: Path, text: str, **environ: str) -> Example:
    file.write_text(text, encoding="utf-8")
    return load(Example, file, environ)


def refusal(file: Path, text: str | bytes, **environ: str) -> SettingsError:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingsError) as refused:
        load(Example, file, environ)
    return refused.value


# --- what a file says


def test_a_file_sets_its_keys_and_the_others_keep_their_defaults(file: Path) -> None:
    text = """
    node = "agent-1"
    [listen]
    port = 7800
    [limits]
    retry_s = 3
    range = [2, 4]
    [limits.listen]
    host = "10.0.0.7"
    [env]
    ANY_NAME = "1"
    """

    assert loaded(file, text) == Example(
        node="agent-1",
        listen=Listen(port=7800),
        limits=Limits(retry_s=3.0, range=(2, 4), listen=Listen(host="10.0.0.7")),
        env={"ANY_NAME": "1"},
    )


@pytest.mark.parametrize(
    ("text", "unknown", "hint"),
    [
        ("nod = 'a'", "nod", "did you mean node?"),
        ("slot = 3", "slot", "did you mean slots?"),
        (
            "zebra = 3",
            "zebra",
            "known keys: env, jobs, limits, listen, mode, modes, node, slots, verbose, words",
        ),
        ("[listen]\nprot = 3", "listen.prot", "did you mean port?"),
        ("[listen]\nzebra = 3", "listen.zebra", "known keys: host, port"),
        ("[limits.listen]\nhosts = 3", "limits.listen.hosts", "did you mean host?"),
        ("[limit]\nretry_s = 3", "limit", "did you mean limits?"),
        ("retry_s = 3", "retry_s", "did you mean limits.retry_s?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(
    file: Path, text: str, unknown: str, hint: str
) -> None:
    error = refusal(file, text)

    assert str(error) == f"{file}: unknown key {unknown}; {hint}"
    assert (error.field, error.hint) == (unknown, hint)


@pytest.mark.parametrize(
    ("text", "field", "what", "written"),
    [
        ("node = 3", "node", "Expected `str`, got `int`", 'node = "ash"'),
        ("slots = '3'", "slots", "Expected `int`, got `str`", "slots = 4"),
        ("slots = 3.5", "slots", "Expected `int`, got `float`", "slots = 4"),
        ("verbose = 1", "verbose", "Expected `bool`, got `int`", "verbose = true"),
        ("mode = 'c'", "mode", "Invalid enum value 'c'", 'mode = "a" or "b"'),
        ("jobs = 3", "jobs", "Expected `object`, got `int`", 'jobs = { run_as = "agent" }'),
        ("modes = 3", "modes", "Expected `array`, got `int`", 'modes = ["a"]'),
        ("listen = 1", "listen", "Expected `object`, got `int`", 'listen = { host = "127.0.0.1" }'),
        ("[listen]\nport = '1'", "listen.port", "Expected `int`, got `str`", "port = 7700"),
        ("[limits.listen]\nport = '1'", "limits.listen.port", "Expected `int`, got `str`", "port = 7700"),
        ("[limits]\nrange = [1, 'b']", "limits.range[1]", "Expected `int`, got `str`", "range = [1, 8]"),
        ("[limits]\nrange = [1]", "limits.range", "Expected `array` of length 2, got 1", "range = [1, 8]"),
        ("[env]\nA = 1", "env[...]", "Expected `str`, got `int`", 'env = { NAME = "text" }'),
        ("words = 'x'", "words", "Expected `array`, got `str`", 'words = ["text"]'),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_named_with_an_example(
    file: Path, text: str, field: str, what: str, written: str
) -> None:
    error = refusal(file, text if text.startswith("node") else f"node = 'a'\n{text}")

    assert str(error) == f"{file}: {field}: {what}; write {written}"
    assert error.field == field


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slots = 3", 'node: is missing; write node = "ash"'),
        ("nod = 'a'", "unknown key nod; did you mean node?"),  # before the missing key
        ("node = 'a'".encode("utf-16"), "the file is in UTF-16; save the file as UTF-8"),
        (b"slots = 3\nnode = '\xff'", "line 2 is not in UTF-8; save the file as UTF-8"),
        (f"node = {'[' * 5000}", "arrays nested too deep; correct the TOML"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_named_with_the_remedy(
    file: Path, text: str | bytes, message: str
) -> None:
    assert str(refusal(file, text)) == f"{file}: {message}"


@pytest.mark.parametrize(
    "text", ["node = ", "node = 'a'\nnode = 'b'", "[listen", "slots = 3\nnode = a\n"]
)
def test_invalid_toml_is_named_with_its_place(file: Path, text: str) -> None:
    error = refusal(file, text)

    assert str(error).startswith(f"{file}: ")
    assert ("line 2" in str(error)) is text.endswith("\n")
    assert error.hint == "correct the TOML"


def test_a_byte_order_mark_is_ignored(file: Path) -> None:
    assert loaded(file, "\ufeffnode = 'a'") == Example(node="a")


def test_a_file_that_cannot_be_read_is_named(file: Path) -> None:
    for path, why in ((file, "No such file or directory"), (file.parent, "Is a directory")):
        with pytest.raises(SettingsError) as refused:
            read_toml(path)
        assert str(refused.value) == f"{path}: {why}; check the path"


def test_a_table_is_checked_like_a_file(file: Path) -> None:
    with pytest.raises(SettingsError, match=r"unknown key listen\.prot; did you mean port\?"):
        convert(Example, {"node": "a", "listen": {"prot": 1}}, file)


# --- what the environment says


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("ONES__NODE", "agent-2", Example(node="agent-2")),
        ("ONES__NODE", "'7'", Example(node="7")),
        ("ONES__NODE", "", Example(node="")),
        ("ONES__NODE", "two words = 1", Example(node="two words = 1")),
        ("ONES__SLOTS", "8", Example(node="agent-1", slots=8)),
        ("ONES__VERBOSE", "true", Example(node="agent-1", verbose=True)),
        ("ONES__LISTEN__PORT", "7800", Example(node="agent-1", listen=Listen(port=7800))),
        ("ONES__LISTEN__HOST", "10.0.0.7", Example(node="agent-1", listen=Listen(host="10.0.0.7"))),
        ("ONES__LIMITS__RANGE", "[2, 4]", Example(node="agent-1", limits=Limits(range=(2, 4)))),
        ("ONES__LIMITS__LISTEN__PORT", "1", Example(node="agent-1", limits=Limits(listen=Listen(port=1)))),
        ("ONES__NODE", "[" * 5000, Example(node="[" * 5000)),
        *((name, "agent-2", Example(node="agent-1")) for name in ("ONES_NODE", "ONES_HOME", "NODE", "ones__node", "XONES__NODE")),
    ],
)  # fmt: skip
def test_a_variable_overrides_a_key(file: Path, name: str, value: str, expected: Example) -> None:
    assert loaded(file, "node = 'agent-1'", **{name: value}) == expected


def test_a_variable_changes_one_key_and_may_replace_a_missing_one(file: Path) -> None:
    text = "node = 'agent-1'\n[listen]\nport = 1\nhost = 'ash'"

    assert loaded(file, text, ONES__LISTEN__PORT="2").listen == Listen(port=2, host="ash")
    assert loaded(file, "", ONES__NODE="agent-1") == Example(node="agent-1")


@pytest.mark.parametrize(
    ("name", "value", "message", "field"),
    [
        ("ONES__NOD", "a", "unknown key nod; did you mean node?", "nod"),
        ("ONES__LISTEN__PROT", "1", "unknown key listen.prot; did you mean port?", "listen.prot"),
        ("ONES__SLOTS", "many", "slots: Expected `int`, got `str`; write slots = 4", "slots"),
        ("ONES__LISTEN__PORT", "x", "listen.port: Expected `int`, got `str`; write port = 7700", "listen.port"),
    ],
)  # fmt: skip
def test_a_variable_without_a_key_is_refused(
    file: Path, name: str, value: str, message: str, field: str
) -> None:
    error = refusal(file, "node = 'agent-1'", **{name: value})

    assert str(error) == f"{file}: {message}"
    assert error.field == field


def test_without_an_environment_the_file_stands(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONES__NODE", "agent-2")
    file.write_text("node = 'agent-1'", encoding="utf-8")

    assert load(Example, file) == Example(node="agent-1")


# --- reload


class ListenSettings(msgspec.Struct, frozen=True, kw_only=True):
    port: int = 1
    host: str = "a"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    listen: ListenSettings = ListenSettings()
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
    daemon.file = Settings(listen=ListenSettings(port=2), grace_s=3.0, name="m")

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
