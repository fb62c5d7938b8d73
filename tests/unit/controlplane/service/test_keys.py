"""Keys of authorised.toml, keys that admins add and revoke, and their expiry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import zmq

from controlplane.service.keys import KeyFile, KeyTable
from schemas.errors import (
    BadFieldError,
    DeniedError,
    SettingsError,
    TooLargeError,
    UnavailableError,
)
from schemas.ids import Seconds
from schemas.transport.keys import Identity, load_authorised
from schemas.wire.client import AddKey, KeyInfo

ROOT: Final = Identity("admin", "root")
NOW: Final = 1_000_000.0


def public() -> bytes:
    return zmq.curve_keypair()[0]


P, Q = public(), public()


class Table(KeyTable):
    """One whose clock is told, and what it tells."""

    def __init__(self, folder: Path, listed: dict[bytes, Identity] | None = None) -> None:
        self.now = NOW
        super().__init__(
            KeyFile(folder / "keys.json"), {P: ROOT} if listed is None else listed, lambda: self.now
        )
        self.ended: list[Identity] = []
        self.on_revoked = self.ended.extend


def asked(key: bytes = Q, name: str = "ann", role: Any = "user", **more: Any) -> AddKey:
    return AddKey(public=key.decode(), name=name, role=role, **more)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


def test_a_key_that_is_added_is_valid_at_once_and_after_a_restart(tmp_path: Path) -> None:
    table = Table(tmp_path)
    request = asked(projects=("vision",), expires=Seconds(NOW + 60.0))

    row = table.add(request, ROOT)
    again = table.add(request, ROOT)

    who = Identity("user", "ann", ("vision",), NOW + 60.0)
    assert row == again
    assert row == KeyInfo(
        public=Q.decode(), name="ann", role="user", projects=("vision",),
        expires=Seconds(NOW + 60.0), by="root", at=Seconds(NOW),
    )  # fmt: skip
    assert table.known.get(Q) == Table(tmp_path).known.get(Q) == who
    assert ((tmp_path / "keys.json").stat().st_mode & 0o777, table.ended) == (0o600, [])
    (stored,) = json.loads((tmp_path / "keys.json").read_text())["keys"]
    assert (stored["name"], stored["role"], stored["state"]) == ("ann", "user", "valid")


def test_a_revocation_overrides_the_file_permanently(tmp_path: Path) -> None:
    ann = Identity("user", "ann")
    table = Table(tmp_path, {P: ROOT, Q: ann})

    (row,) = table.revoke("ann", "root")

    assert (row.state, row.kept, row.by, row.at) == ("revoked", "file", "root", NOW)
    assert table.ended == [ann]
    for one in (table, Table(tmp_path, {P: ROOT, Q: ann})):
        one.reload({P: ROOT, Q: ann})
        assert Q not in one.known
        with pytest.raises(BadFieldError, match="this key was revoked"):
            one.add(asked(), ROOT)
    assert table.revoke(Q.decode(), "root") == (row,)


def test_keys_of_file_and_online_table_expire(tmp_path: Path) -> None:
    bob = Identity("user", "bob", expires=NOW + 10.0)
    other = public()
    table = Table(tmp_path, {P: ROOT, other: bob})
    table.add(asked(expires=Seconds(NOW + 5.0)), ROOT)

    table.now = NOW + 5.0
    assert set(table.known) == {P, other}
    table._refresh()
    table.now = NOW + 10.0
    assert set(table.known) == {P}
    table._refresh()
    table._refresh()

    assert [who.name for who in table.ended] == ["ann", "bob"]
    states = {row.name: row.state for row in table.rows()}
    assert states == {"root": "valid", "bob": "expired", "ann": "expired"}


def test_the_last_admin_cannot_be_revoked(table: Table) -> None:
    for key in ("root", P.decode()):
        with pytest.raises(BadFieldError, match="no admin would be left"):
            table.revoke(key, "root")
    with pytest.raises(BadFieldError, match="no key or owner 'nobody'"):
        table.revoke("nobody", "root")

    table.add(asked(role="admin", name="eve", expires=Seconds(NOW + 5.0)), ROOT)
    table.revoke("root", "eve")

    assert [who.name for who in table.known.values()] == ["eve"]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (asked(name=""), "name"),
        (asked(name="a/b"), "name"),
        (asked(name="a b"), "name"),
        (asked(name="\x1b[2J"), "name"),
        (asked(name="a" * 65), "name"),
        (asked(projects=("a\nb",)), "project"),
        (asked(projects=("p",) * 101), "projects"),
        (asked(name=".."), "name"),
        (asked(expires=Seconds(NOW)), "expires"),
        (asked(expires=Seconds(1e18)), "expires"),
        (asked(expires=Seconds(float("nan"))), "expires"),
        (asked(b"\xc3\xa9".decode().encode() * 20), "public"),
        (asked(b"~" * 40), "public"),
        (asked(P, "mallory"), "public"),
    ],
)
def test_an_invalid_key_is_refused_without_a_change(
    table: Table, wrong: AddKey, field: str
) -> None:
    with pytest.raises(BadFieldError) as refused:
        table.add(wrong, ROOT)

    assert refused.value.field == field
    assert dict(table.known) == {P: ROOT}


def test_a_full_disk_prevents_additions_but_not_revocations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(tmp_path, {P: ROOT, Q: Identity("user", "ann")})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("schemas.host.files.os.fsync", full)
    with pytest.raises(UnavailableError, match="nothing was changed"):
        table.add(asked(public()), ROOT)
    with pytest.raises(UnavailableError, match="holds until the controller restarts"):
        table.revoke("ann", "root")

    assert dict(table.known) == {P: ROOT}


@pytest.mark.parametrize("damage", ["", "{", '{"keys": 7}', '{"keys": [{"type": "x"}]}'])
def test_a_damaged_key_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "keys.json"
    path.touch(0o600)
    path.write_text(damage)

    with pytest.raises(SettingsError, match=r"keys\.json"):
        Table(tmp_path)


@pytest.mark.parametrize(
    ("line", "expires"),
    [
        ("expires = 1000.5", 1000.5),
        ("expires = 1970-01-01T00:16:40Z", 1000.0),
        ('expires = "1970-01-01T00:16:40+00:00"', 1000.0),
    ],
)
def test_authorised_toml_supports_projects_and_expiry(
    tmp_path: Path, line: str, expires: float
) -> None:
    path = tmp_path / "authorised.toml"
    path.touch(0o600)
    said = f'[[key]]\npublic = "{P.decode()}"\nname = "ann"\nrole = "user"\nprojects = ["a", "b"]\n'
    path.write_text(f"{said}{line}\n")

    assert load_authorised(path) == {P: Identity("user", "ann", ("a", "b"), expires)}


@pytest.mark.parametrize(
    "line", ["expires = 2027-01-01T00:00:00", "project = 'a/b'", "expires = nan"]
)
def test_an_invalid_line_of_authorised_toml_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "authorised.toml"
    path.touch(0o600)
    path.write_text(f'[[key]]\npublic = "{P.decode()}"\nname = "ann"\nrole = "user"\n{line}\n')

    with pytest.raises(SettingsError, match=line.split(" ", maxsplit=1)[0]):
        load_authorised(path)


ANN: Final = Identity("user", "ann", ("vision",))
LOGIN: Final = {"projects": ("vision",), "expires": Seconds(NOW + 3600.0)}


def test_a_user_adds_a_key_for_a_login_with_the_same_rights(tmp_path: Path) -> None:
    table = Table(tmp_path, {P: ROOT, public(): ANN})

    row = table.add(asked(**LOGIN), ANN)

    assert row == KeyInfo(
        public=Q.decode(), name="ann", role="user", by="ann", at=Seconds(NOW), **LOGIN
    )
    assert table.known.get(Q) == Identity("user", "ann", ("vision",), NOW + 3600.0)


@pytest.mark.parametrize(
    ("by", "told"),
    [
        (Identity("user", "ann", ()), ("ann",)),  # her only project is her own
        (Identity("operator", "ann", ("vision",)), ()),  # sees all projects
    ],
    ids=str,
)
def test_a_login_may_state_the_projects_that_the_controller_replied(
    table: Table, by: Identity, told: tuple[str, ...]
) -> None:
    wanted = LOGIN | {"projects": told, "role": by.role}

    assert table.add(asked(**wanted), by).projects == told


@pytest.mark.parametrize(
    "more",
    [
        {"name": "bob"},
        {"role": "operator"},
        {"projects": ("vision", "speech")},
        {"projects": ()},
        {"expires": None},
        {"expires": Seconds(NOW + 86_401.0)},
    ],
    ids=str,
)
def test_a_user_adds_no_other_key(table: Table, more: dict[str, Any]) -> None:
    with pytest.raises(DeniedError, match="user:ann may only add keys with the same name"):
        table.add(asked(**(LOGIN | more)), ANN)

    assert Q not in table.known


def test_a_key_of_a_login_adds_no_key_that_outlives_it(table: Table) -> None:
    login = Identity("user", "ann", ("vision",), NOW + 60.0)

    with pytest.raises(DeniedError):
        table.add(asked(**(LOGIN | {"expires": Seconds(NOW + 61.0)})), login)

    assert table.add(asked(**(LOGIN | {"expires": Seconds(NOW + 60.0)})), login).state == "valid"


def test_keys_of_old_logins_are_forgotten_and_a_user_has_fifty_at_most(table: Table) -> None:
    for _ in range(50):
        table.add(asked(public(), **LOGIN), ANN)

    with pytest.raises(TooLargeError, match="ann has 50 keys for logins"):
        table.add(asked(**LOGIN), ANN)
    table.now = NOW + 3600.0
    table.add(asked(**(LOGIN | {"expires": Seconds(NOW + 7200.0)})), ANN)

    assert [row.public for row in table.rows()] == [P.decode(), Q.decode()]


def test_a_revoked_login_is_kept_after_its_end(tmp_path: Path) -> None:
    table = Table(tmp_path, {P: ROOT, public(): ROOT})
    table.add(asked(name="root", role="admin", expires=Seconds(NOW + 60.0)), ROOT)
    table.revoke(Q.decode(), "root")

    table.now = NOW + 61.0
    table.add(asked(public()), ROOT)

    assert [row.state for row in table.rows() if row.public == Q.decode()] == ["revoked"]


SLURM: Final = Identity("join", "slurm")


def test_a_join_key_replaces_the_key_that_it_added_for_a_node(tmp_path: Path) -> None:
    table = Table(tmp_path)
    table.add(asked(name="slurm-n1", role="node"), SLURM)

    table.add(asked(second := public(), "slurm-n1", "node"), SLURM)
    table.add(asked(third := public(), "slurm-n2", "node"), SLURM)

    assert table.ended == [Identity("node", "slurm-n1")]
    assert dict(Table(tmp_path).known) == {
        P: ROOT, second: Identity("node", "slurm-n1"), third: Identity("node", "slurm-n2"),
    }  # fmt: skip


def test_a_join_key_replaces_no_key_that_an_admin_added(table: Table) -> None:
    table.add(asked(name="slurm-n1", role="node"), ROOT)

    table.add(asked(other := public(), "slurm-n1", "node"), SLURM)

    assert {Q, other} <= set(table.known)


@pytest.mark.parametrize(
    "more",
    [
        {"name": "node-1"},
        {"name": "slurm"},
        {"role": "admin"},
        {"role": "join"},
        {"projects": ("vision",)},
    ],
    ids=str,
)
def test_a_join_key_adds_keys_of_its_nodes_only(table: Table, more: dict[str, Any]) -> None:
    request: dict[str, Any] = {"name": "slurm-n1", "role": "node", **more}

    with pytest.raises(DeniedError, match="join:slurm may only add keys of nodes"):
        table.add(asked(**request), SLURM)

    assert Q not in table.known
