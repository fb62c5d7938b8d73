"""`ones cluster` where its engine is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.autoscaler.slurm import SlurmError
from controlplane.cli import cluster


@pytest.mark.slow  # it looks for a program
def test_a_folder_is_left_without_settings_if_slurm_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(SlurmError, match="install Slurm's client commands"):
        cluster.up(slurm=True, dir_=tmp_path)

    assert not list(tmp_path.glob("*.toml"))
