"""CUDA_VISIBLE_DEVICES is read as CUDA reads it."""

from __future__ import annotations

from typing import Final

import pytest

from nodeagent.devices import Device, Gpu, Selection, select_visible


def whole(uuid: str) -> Gpu:
    return Gpu(uuid, "H100", (Device(uuid, "H100", 80),))


def split(uuid: str, *instances: str) -> Gpu:
    return Gpu(uuid, "A100", tuple(Device(name, "A100 MIG 1g", 5) for name in instances))


HOST: Final = (
    whole("GPU-aa11"),
    whole("GPU-aa22"),
    split("GPU-bb11", "MIG-c1", "MIG-c2"),
    Gpu("", "", ()),  # does not answer
)


def read(value: str) -> tuple[list[str], str | None, str | None]:
    selection = select_visible(value, HOST)
    return [d.uuid for d in selection.devices], selection.ended_by, selection.repeated


@pytest.mark.parametrize(
    ("value", "visible"),
    [
        ("", []),
        ("  ", []),
        ("0", ["GPU-aa11"]),
        ("1,0", ["GPU-aa22", "GPU-aa11"]),
        (" 1 , 0 ", ["GPU-aa22", "GPU-aa11"]),
        ("+1", ["GPU-aa22"]),
        ("1gpu,0x", ["GPU-aa22", "GPU-aa11"]),
        ("2", ["MIG-c1", "MIG-c2"]),
        ("3,0", ["GPU-aa11"]),
        ("GPU-aa22", ["GPU-aa22"]),
        ("GPU-aa2,GPU-b", ["GPU-aa22", "MIG-c1", "MIG-c2"]),
        ("MIG-c2", ["MIG-c2"]),
        ("MIG-c2,MIG-c1", ["MIG-c2", "MIG-c1"]),
    ],
)
def test_these_name_devices(value: str, visible: list[str]) -> None:
    assert read(value) == (visible, None, None)


@pytest.mark.parametrize(
    ("value", "visible", "ended_by"),
    [
        ("-1", [], "-1"),
        ("0,-1,1", ["GPU-aa11"], "-1"),
        ("0,4,1", ["GPU-aa11"], "4"),
        ("0,,1", ["GPU-aa11"], ""),
        ("none", [], "none"),
        ("GPU-a", [], "GPU-a"),  # fits two
        ("GPU-", [], "GPU-"),
        ("GPU-aa11,GPU-ff,GPU-aa22", ["GPU-aa11"], "GPU-ff"),
        ("GPU-aa11,1", ["GPU-aa11"], "1"),
        ("1,GPU-aa11", ["GPU-aa22"], "GPU-aa11"),
        ("MIG-c", [], "MIG-c"),
        ("MIG-c1,GPU-aa11", ["MIG-c1"], "GPU-aa11"),
        ("gpu-aa11", [], "gpu-aa11"),
    ],
)
def test_the_list_ends_at_what_names_nothing(value: str, visible: list[str], ended_by: str) -> None:
    assert read(value) == (visible, ended_by, None)


@pytest.mark.parametrize("value", ["0,0", "0,1,+0", "GPU-aa1,GPU-aa11", "MIG-c1,MIG-c1"])
def test_a_device_that_is_named_twice_hides_all(value: str) -> None:
    assert read(value) == ([], None, value.rpartition(",")[2])


def test_only_indices_depend_on_the_order_of_gpus() -> None:
    assert [select_visible(v, HOST).by_index for v in ("0", "-1", "GPU-aa1", "MIG-c1", "")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_without_gpus_nothing_is_visible() -> None:
    assert select_visible("0", ()) == Selection((), by_index=True, ended_by="0")
