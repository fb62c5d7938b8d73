"""What the quickstart says at its end: whether growth paid, or why it could not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.messages.client import EpochInfo, JobDetail
from tests.support.schemas_examples import EXAMPLES

DETAIL: Any = EXAMPLES["client.job_detail.3"]
EPOCH: Any = EXAMPLES["client.epoch_info.1"]
HOST = "on this host: its 2 cores have to do the work of all slots, and whatever else runs here; look again when it is idle"


@pytest.fixture(scope="module")
def quickstart() -> Any:
    path = Path(__file__).parents[2] / "examples" / "quickstart.py"
    spec = importlib.util.spec_from_file_location("quickstart", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def epoch(slots: int, speed: float, *, whole: bool = True) -> EpochInfo:
    made: EpochInfo = msgspec.structs.replace(EPOCH, slots=slots, samples_per_s=speed, whole=whole)
    return made


def job(*epochs: EpochInfo) -> JobDetail:
    made: JobDetail = msgspec.structs.replace(DETAIL, epochs=epochs)
    return made


@pytest.mark.parametrize(
    ("epochs", "said"),
    [
        (
            (epoch(1, 100), epoch(2, 180), epoch(2, 190), epoch(2, 9, whole=False), epoch(1, 104)),
            "digits-7 was 1.81 x as fast on 2 slots as on 1: 185 samples/s after 102",
        ),
        ((epoch(1, 100), epoch(4, 105)), f"no job was faster on more slots {HOST}"),
        ((epoch(2, 100), epoch(2, 190)), f"no epoch was measured on two sizes {HOST}"),
        ((), f"no epoch was measured on two sizes {HOST}"),
    ],
)
def test_growth_is_told_as_it_was_measured_or_why_not(
    quickstart: Any, epochs: tuple[EpochInfo, ...], said: str
) -> None:
    assert quickstart.growth([job(*epochs)], 2, "cpu") == [said]


def test_two_quickstarts_draw_into_two_files(quickstart: Any, tmp_path: Path) -> None:
    first, second = quickstart.new_picture(tmp_path), quickstart.new_picture(tmp_path)

    assert first != second
    assert {path.name for path in tmp_path.iterdir()} == {first.name, second.name}
