"""Slots of a host: its driver, which is a stand-in that `pynvml` loads, and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from nodeagent.devices import (
    OWN_CGROUP,
    Device,
    Gpu,
    Selection,
    device_environment,
    inventory,
    select_visible,
    usable_cores,
    usable_memory,
)
from nodeagent.settings import AgentSettings, Containers, Places
from schemas.errors import SettingsError
from schemas.nodes import SlotSpec
from tests.unit.nodeagent.fake_nvml import Hosts, broken_driver, build_driver

GIB: Final = 2**30
H100: Final = f"gpu|GPU-aa11|NVIDIA H100|{80 * GIB}|0|0"
SECOND: Final = f"gpu|GPU-aa22|NVIDIA H100|{80 * GIB}|0|-1"
SPLIT: Final = f"""gpu|GPU-bb11|NVIDIA A100|{40 * GIB}|0|1
mig|MIG-c1|NVIDIA A100 MIG 1g.5gb|{5 * GIB}
mig|-|-|0
mig|MIG-c2|NVIDIA A100 MIG 2g.10gb|{10 * GIB}"""
UNMADE: Final = f"gpu|GPU-bb22|NVIDIA A100|{40 * GIB}|0|1"
LOST: Final = "gpu|GPU-ff|NVIDIA H100|0|15|0"
CPU: Final = [(0, "cpu", ""), (1, "cpu", "")]
BOTH: Final = [(0, "gpu", "GPU-aa11"), (1, "gpu", "GPU-aa22")]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(build_driver(tmp_path_factory.mktemp("driver"))) as hosts:
        yield hosts


def offered(answer: dict[str, Any]) -> list[tuple[int, str, str]]:
    assert not answer["open"]
    return [(slot["index"], slot["kind"], slot["uuid"]) for slot in answer["slots"]]


@pytest.mark.slow
def test_each_gpu_is_a_slot(hosts: Hosts) -> None:
    answer = hosts.inventory(f"{H100}\n{SECOND}")

    shared = {"kind": "gpu", "model": "NVIDIA H100", "memory_bytes": 80 * GIB}
    slots = [
        {**shared, "index": i, "uuid": uuid} for i, uuid in enumerate(("GPU-aa11", "GPU-aa22"))
    ]
    assert answer == {"slots": slots, "logged": [], "open": False}


@pytest.mark.slow
def test_each_mig_instance_is_a_slot_of_its_own_size(hosts: Hosts) -> None:
    answer = hosts.inventory(f"{H100}\n{SPLIT}\n{SECOND}")

    assert [(s["index"], s["uuid"], s["memory_bytes"] // GIB) for s in answer["slots"]] == [
        (0, "GPU-aa11", 80),
        (1, "MIG-c1", 5),
        (2, "MIG-c2", 10),
        (3, "GPU-aa22", 80),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver", "slots", "logged"),
    [
        (f"{UNMADE}\n{H100}", [(1, "gpu", "GPU-aa11")], ["MIG is enabled without instances, GPU not offered"]),
        (f"{H100}\n{LOST}\n{SECOND}", [*BOTH[:1], (2, "gpu", "GPU-aa22")], ["GPU does not respond, not offered"]),
    ],
)  # fmt: skip
def test_a_gpu_that_cannot_be_used_is_left_out_and_the_others_keep_their_numbers(
    hosts: Hosts, driver: str, slots: list[tuple[int, str, str]], logged: list[str]
) -> None:
    answer = hosts.inventory(driver)

    assert (offered(answer), answer["logged"]) == (slots, logged)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver", "why"),
    [
        ("init|18", "RM has detected an NVML/RM version mismatch"),
        (LOST, "none of its 1 GPUs responds"),
    ],
)
def test_a_failing_driver_is_not_a_host_without_gpus(hosts: Hosts, driver: str, why: str) -> None:
    assert hosts.inventory(driver)["error"] == [
        "devices",
        f"devices: the GPU driver cannot be used: {why}",
        'check nvidia-smi, or offer CPU slots with devices = "cpu"',
    ]


@pytest.mark.slow
def test_a_host_without_driver_or_gpu_has_cpu_slots(
    hosts: Hosts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for driver in ("init|9", ""):
        assert offered(hosts.inventory(driver, CUDA_VISIBLE_DEVICES="0")) == CPU
    with Hosts(broken_driver(tmp_path_factory.mktemp("none"))) as broken:
        assert offered(broken.inventory(H100)) == CPU


# --- the agent's own CUDA_VISIBLE_DEVICES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "slots", "logged"),
    [
        ("0", BOTH[:1], []), ("1", BOTH[1:], []), ("1,0", BOTH, []), ("1,-1,0", BOTH[1:], []), ("GPU-aa2", BOTH[1:], []),
        ("", CPU, []), ("-1", CPU, []), ("1,7,0", BOTH[1:], ["entry of CUDA_VISIBLE_DEVICES names no GPU"]),
    ],
)  # fmt: skip
def test_an_agent_offers_the_devices_that_its_environment_shows(
    hosts: Hosts, value: str, slots: list[tuple[int, str, str]], logged: list[str]
) -> None:
    answer = hosts.inventory(f"{H100}\n{SECOND}", CUDA_VISIBLE_DEVICES=value)

    assert (offered(answer), answer["logged"]) == (slots, logged)


@pytest.mark.slow
def test_mig_instances_are_named_one_by_one_or_by_their_gpu(hosts: Hosts) -> None:
    for value, slots in (("MIG-c2", ["MIG-c2"]), ("GPU-bb", ["MIG-c1", "MIG-c2"])):
        answer = hosts.inventory(f"{H100}\n{SPLIT}", CUDA_VISIBLE_DEVICES=value)
        assert [slot["uuid"] for slot in answer["slots"]] == slots


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "what", "remedy"),
    [
        ("7", "it names no usable GPU", "nvidia-smi -L lists their UUIDs"),
        ("GPU-ff", "it names no usable GPU", "nvidia-smi -L lists their UUIDs"),
        ("0,0", "0 is listed twice, and CUDA then shows no GPU", "name each GPU once"),
    ],
)
def test_a_value_that_shows_nothing_by_mistake_is_refused(
    hosts: Hosts, value: str, what: str, remedy: str
) -> None:
    assert hosts.inventory(f"{H100}\n{SECOND}", CUDA_VISIBLE_DEVICES=value)["error"] == [
        "CUDA_VISIBLE_DEVICES",
        f"CUDA_VISIBLE_DEVICES={value}: {what}",
        remedy,
    ]


@pytest.mark.slow
def test_indices_among_gpus_of_several_models_need_an_order(hosts: Hosts) -> None:
    mixed = f"{H100}\ngpu|GPU-dd|NVIDIA T4|{15 * GIB}|0|-1"

    assert hosts.inventory(mixed, CUDA_VISIBLE_DEVICES="1")["error"] == [
        "CUDA_VISIBLE_DEVICES",
        "CUDA_VISIBLE_DEVICES=1: CUDA counts GPUs of several models by speed, the driver by bus",
        "set CUDA_DEVICE_ORDER=PCI_BUS_ID beside it, or name UUIDs",
    ]
    ordered = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert offered(hosts.inventory(mixed, **ordered)) == [(1, "gpu", "GPU-dd")]


# --- what a worker sees


def test_a_worker_sees_only_the_device_of_its_slot() -> None:
    gpu, cpu = SlotSpec(index=3, kind="gpu", uuid="MIG-c2"), SlotSpec(index=0, kind="cpu")

    shown = [device_environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in (gpu, cpu)]
    assert (shown, device_environment(gpu)["CUDA_DEVICE_ORDER"]) == (["MIG-c2", ""], "PCI_BUS_ID")


# --- cores


def control_group(root: Path, *limits: str) -> Path:
    """Control groups, one in the other, with these limits; and where this process is in them."""
    own = OWN_CGROUP.read_text(encoding="utf-8").strip().rpartition("::")[2].lstrip("/")
    for place, limit in zip([root, root / own], limits, strict=False):
        place.mkdir(parents=True, exist_ok=True)
        (place / "cpu.max").write_text(limit, encoding="ascii")
    return root


def test_cores_are_those_of_the_affinity_or_of_a_smaller_quota(tmp_path: Path) -> None:
    mine = len(os.sched_getaffinity(0))

    assert usable_cores(tmp_path) == mine
    assert usable_cores(control_group(tmp_path, "max 100000\n")) == mine
    for limit in ("100000 100000", "50000 100000"):
        assert usable_cores(control_group(tmp_path, limit)) == 1


def test_memory_is_that_of_the_host_or_of_a_smaller_limit(tmp_path: Path) -> None:
    group = control_group(tmp_path, "max 100000\n")
    host = usable_memory(group)

    for limit, usable in (("max\n", host), (f"{host * 2}\n", host), ("4096\n", 4096)):
        (group / "memory.max").write_text(limit, encoding="ascii")
        assert usable_memory(group) == usable


# --- what operators state


def test_a_node_reports_its_labels_and_what_it_sets_aside() -> None:
    stated = Places(cpus=3.0, memory_bytes=1 << 30)
    settings = AgentSettings(
        node="n1", devices="cpu", cores=64, labels={"zone": "a"}, places=stated
    )

    usual = inventory(msgspec.structs.replace(settings, places=Places()))
    found = inventory(settings)

    assert (found.labels, found.place_cores, found.place_memory_bytes) == (
        {"zone": "a"}, 3.0, 1 << 30,
    )  # fmt: skip
    assert (usual.place_cores, usual.place_memory_bytes) == (4.0, usual.memory_bytes // 16)


def test_a_label_that_no_job_can_name_is_refused() -> None:
    with pytest.raises(SettingsError) as refused:
        inventory(AgentSettings(node="n1", devices="cpu", labels={"a b": "yes"}))

    assert (refused.value.field, refused.value.message) == (
        "labels", "labels: 'a b' is not a name",
    )  # fmt: skip


# --- CUDA_VISIBLE_DEVICES as CUDA reads it


def whole(uuid: str) -> Gpu:
    return Gpu(uuid, "H100", (Device(uuid, "H100", 80),))


def split_gpu(uuid: str, *instances: str) -> Gpu:
    return Gpu(uuid, "A100", tuple(Device(name, "A100 MIG 1g", 5) for name in instances))


HOST: Final = (
    whole("GPU-aa11"),
    whole("GPU-aa22"),
    split_gpu("GPU-bb11", "MIG-c1", "MIG-c2"),
    Gpu("", "", ()),  # does not answer
)


VISIBLE: Final[dict[str, tuple[list[str], str | None, str | None]]] = {
    **{
        value: (visible, None, None)
        for value, visible in {
            "": [], "  ": [], "0": ["GPU-aa11"], "1,0": ["GPU-aa22", "GPU-aa11"], " 1 , 0 ": ["GPU-aa22", "GPU-aa11"],
            "+1": ["GPU-aa22"], "1gpu,0x": ["GPU-aa22", "GPU-aa11"], "2": ["MIG-c1", "MIG-c2"], "3,0": ["GPU-aa11"],
            "GPU-aa22": ["GPU-aa22"], "GPU-aa2,GPU-b": ["GPU-aa22", "MIG-c1", "MIG-c2"], "MIG-c2": ["MIG-c2"],
            "MIG-c2,MIG-c1": ["MIG-c2", "MIG-c1"],
        }.items()
    },
    **{
        value: (visible, ended_by, None)
        for value, visible, ended_by in (
            ("-1", [], "-1"), ("0,-1,1", ["GPU-aa11"], "-1"), ("0,4,1", ["GPU-aa11"], "4"), ("0,,1", ["GPU-aa11"], ""),
            ("none", [], "none"), ("GPU-a", [], "GPU-a"),  # fits two
            ("GPU-", [], "GPU-"), ("GPU-aa11,GPU-ff,GPU-aa22", ["GPU-aa11"], "GPU-ff"), ("GPU-aa11,1", ["GPU-aa11"], "1"),
            ("1,GPU-aa11", ["GPU-aa22"], "GPU-aa11"), ("MIG-c", [], "MIG-c"), ("MIG-c1,GPU-aa11", ["MIG-c1"], "GPU-aa11"),
            ("gpu-aa11", [], "gpu-aa11"),
        )
    },
    **{
        value: ([], None, repeated)
        for value, repeated in (("0,0", "0"), ("0,1,+0", "+0"), ("GPU-aa1,GPU-aa11", "GPU-aa11"), ("MIG-c1,MIG-c1", "MIG-c1"))
    },
}  # fmt: skip


@pytest.mark.parametrize(("value", "expected"), VISIBLE.items())
def test_a_value_shows_devices_until_an_unknown_or_repeated_name(
    value: str, expected: tuple[list[str], str | None, str | None]
) -> None:
    selection = select_visible(value, HOST)

    found = [device.uuid for device in selection.devices], selection.ended_by, selection.repeated
    assert found == expected


def test_only_indices_depend_on_the_order_of_gpus() -> None:
    by_index = {v: select_visible(v, HOST).by_index for v in ("0", "-1", "GPU-aa1", "MIG-c1", "")}
    assert by_index == {"0": True, "-1": True, "GPU-aa1": False, "MIG-c1": False, "": False}
    assert select_visible("0", ()) == Selection((), by_index=True, ended_by="0")


def test_an_engine_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    settings = AgentSettings(node="n", devices="cpu", containers=Containers(engine="podman"))

    with pytest.raises(SettingsError, match="there is no program podman on this host"):
        inventory(settings)
