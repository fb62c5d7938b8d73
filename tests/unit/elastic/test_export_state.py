"""Export of a trial's state as a plain `state_dict`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic.export_state import export_state
from elastic.sweep_worker.unit import digest, to_frames
from schemas.host.state_files import DamagedStateError, StateFile, write_state

MODEL = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)}
FILE = StateFile(trial=3, version=12, attempt=7)


def kept(folder: Path) -> Path:
    frames = to_frames({"model": MODEL, "optimizer": {"state": {}, "lr": 0.1}})
    write_state(folder, FILE, frames, digest(frames))
    return folder / FILE.name


def test_a_trials_state_becomes_a_plain_state_dict(tmp_path: Path) -> None:
    count = export_state(kept(tmp_path), tmp_path / "model.pt")

    exported = torch.load(tmp_path / "model.pt", weights_only=True)
    assert count == 2
    assert {name: value.tolist() for name, value in exported.items()} == {
        name: value.tolist() for name, value in MODEL.items()
    }


def test_a_damaged_state_is_not_exported(tmp_path: Path) -> None:
    path = kept(tmp_path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    with pytest.raises(DamagedStateError, match="the digest of the state is"):
        export_state(path, tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()
