"""A peer knows the controller's current key and, during a rotation, the next one."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.errors import SettingsError
from schemas.transport.keys import ServerKeys, load_public, next_key_path, write_keys


def test_a_learnt_key_is_tried_and_kept_once_the_controller_has_replied_to_it(
    tmp_path: Path,
) -> None:
    old = write_keys(tmp_path, "server").public
    new = write_keys(tmp_path / "elsewhere", "server").public
    path = tmp_path / "server.key"
    keys = ServerKeys(path)
    assert (keys.current, keys.other()) == (old, None)

    keys.learn(new.decode())
    assert (keys.current, keys.other(), keys.other(), keys.other()) == (old, new, old, new)
    assert load_public(path) == old

    keys.confirm()
    assert load_public(path) == new
    assert not next_key_path(path).exists()
    keys.learn(new.decode())
    assert (ServerKeys(path).current, ServerKeys(path).other()) == (new, None)


def test_the_current_key_is_confirmed_without_losing_the_next_one(tmp_path: Path) -> None:
    old = write_keys(tmp_path, "server").public
    new = write_keys(tmp_path / "elsewhere", "server").public
    keys = ServerKeys(tmp_path / "server.key")
    keys.learn(new.decode())

    keys.confirm()

    assert ServerKeys(tmp_path / "server.key").current == old
    assert keys.other() == new


def test_a_key_that_another_process_replaced_is_found(tmp_path: Path) -> None:
    write_keys(tmp_path, "server")
    keys = ServerKeys(tmp_path / "server.key")

    new = write_keys(tmp_path, "server").public

    assert keys.other() == new


def test_a_damaged_next_key_is_neither_stored_nor_used(tmp_path: Path) -> None:
    write_keys(tmp_path, "server")
    keys = ServerKeys(tmp_path / "server.key")

    with pytest.raises(SettingsError, match="not 40 characters"):
        keys.learn("short")
    next_key_path(tmp_path / "server.key").write_text('curve\n    public-key = "short"\n')

    assert keys.other() is None
