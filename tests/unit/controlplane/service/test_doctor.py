"""Findings of `ones doctor` about a controller."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from controlplane.cli.local import ROLES, _free_ports
from controlplane.service.doctor import SOON_S, diagnose, keys_finding, lease_finding
from controlplane.service.standby.lease import Held, Record
from schemas.errors import SettingsError
from schemas.host.findings import Finding
from schemas.transport.keys import Identity, check_pair, write_keys

NOW = 1e9
ADMIN = Identity("admin", "ann")


def test_keys_that_expired_or_will_soon() -> None:
    known = {
        b"a": ADMIN,
        b"b": Identity("node", "node-1", expires=NOW - 1),
        b"c": Identity("user", "bob", expires=NOW + SOON_S / 2),
        b"d": Identity("user", "eve", expires=NOW + SOON_S * 2),
    }

    found = keys_finding(known, NOW)

    assert (found.state, found.found) == (
        "warning", "expired: node-1; expire within 14 days: bob",
    )  # fmt: skip
    assert keys_finding({b"a": ADMIN}, NOW).found == "1 admin"
    assert keys_finding({}, NOW).state == "warning"


def test_a_standby_that_lacks_inputs() -> None:
    record = Record(holder="a", term=3, complete=("a",))

    assert lease_finding(Held(record=record, expired=False), ("a", "b")).found == (
        "a holds it, term 3; without all inputs: b"
    )
    assert lease_finding(Held(record=record, expired=False), ("a",)).state == "ok"
    assert lease_finding(Held(record=record, expired=True), ("a",)).state == "warning"


def test_halves_that_do_not_fit(tmp_path: Path) -> None:
    write_keys(tmp_path, "server")
    write_keys(tmp_path, "other")
    assert check_pair(tmp_path / "server.key_secret").public
    (tmp_path / "other.key").replace(tmp_path / "server.key")

    with pytest.raises(SettingsError, match=r"server\.key is not the public half"):
        check_pair(tmp_path / "server.key_secret")


def written(home: Path) -> Path:
    write_keys(home / "keys", "server")
    public = write_keys(home / "keys", "ann").public.decode()
    authorised = home / "keys" / "authorised.toml"
    authorised.touch(mode=0o600)
    authorised.write_text(f'[[key]]\npublic = "{public}"\nname = "ann"\nrole = "admin"\n')
    (home / "state").mkdir()
    ports = zip(ROLES, _free_ports(len(ROLES)), strict=True)
    listen = "[listen]\n" + "\n".join(f"{role} = {port}" for role, port in ports)
    (home / "controller.toml").write_text(listen)
    return home / "controller.toml"


def by_check(path: Path) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for one in diagnose(path):
        found.setdefault(one.check, []).append(one)
    return found


def test_a_host_is_checked_and_not_changed(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = sorted(tmp_path.rglob("*"))

    found = by_check(path)

    assert list(found) == ["versions", "settings", "ports", "keys", "disk", "limits", "clock"]
    assert found["keys"][0].found == "1 admin"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_a_key_that_the_service_cannot_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    os.chown(tmp_path / "state", 4711, 4711)

    (one, _) = by_check(path)["keys"]

    assert one.state == "error"
    assert one.remedy.startswith(f"chown 4711 {tmp_path}/keys/server.key_secret")
