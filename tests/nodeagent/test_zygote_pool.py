"""What a zygote is started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.zygote_pool import _spawn


def test_a_zygote_does_not_inherit_what_would_harm_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_DISTRIBUTED_DEBUG", "WORLD_SIZE", "ONES_HOME", "KEPT"):
        monkeypatch.setenv(name, "DETAIL")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec env\n")
    python.chmod(0o700)

    _spawn(str(python), tmp_path / "socket", tmp_path / "said").wait()

    said = (tmp_path / "said").read_text().splitlines()
    assert [line for line in said if line.endswith("=DETAIL")] == ["KEPT=DETAIL"]
