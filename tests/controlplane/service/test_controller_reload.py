"""What a controller takes over when its settings file is read again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.service import controller_settings
from controlplane.service.controller_process import Controller
from controlplane.service.controller_settings import Store
from schemas.link import write_keys


@pytest.fixture
async def controller(tmp_path: Path) -> AsyncIterator[Controller]:
    write_keys(tmp_path / "keys", "server")
    (tmp_path / "keys" / "authorised.toml").touch(mode=0o600)
    file = tmp_path / "controller.toml"
    file.touch()
    made = Controller(controller_settings.load(file), tmp_path)
    yield made
    made.close()


async def test_all_that_is_kept_may_change_at_a_reload(
    controller: Controller, tmp_path: Path
) -> None:
    file = tmp_path / "controller.toml"
    fresh = dict.fromkeys(Store.__struct_fields__, 7)
    file.write_text("[store]\n" + "".join(f"{name} = 7\n" for name in fresh))

    controller.settings_of(file).reload()

    assert controller._file_keeper._settings == Store(**fresh)
    assert (controller._logs.max_bytes, controller._snapshots.max_bytes) == (7, 7)
