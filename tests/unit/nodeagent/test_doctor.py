"""Findings of `ones doctor` about a node, from measured values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nodeagent.cgroups import Hierarchy
from nodeagent.devices import GpuCheck, logged_xids
from nodeagent.doctor import Trial, admission, gpus, limits, trial_findings
from nodeagent.settings import AgentSettings
from schemas import __version__
from schemas.nodes import SlotSpec
from schemas.transport.handshake import CLOSED, REFUSED
from tests.unit.nodeagent.test_gpu_check import Driver

CPU = SlotSpec(index=0, kind="cpu", model="CPU", memory_bytes=1)
GPU = SlotSpec(index=0, kind="gpu", model="H100", memory_bytes=1, uuid="GPU-a")
SETTINGS = AgentSettings(node="node-1")


def trial(**fields: Any) -> Trial:
    usual = {
        "python": "3.11.2", "ones": __version__, "torch": "2.13.0", "cuda": "", "nccl": "",
        "gpus": 0, "groups": {"gloo": {"seconds": 2.0}},
    }  # fmt: skip
    return Trial(**{**usual, **fields})


def states(found: Any) -> list[tuple[str, str]]:
    return [(one.check, one.state) for one in found]


def test_an_interpreter_that_trains_on_the_cpu() -> None:
    assert states(trial_findings("py", trial(), [CPU])) == [("torch", "ok"), ("gloo", "ok")]


def test_an_interpreter_without_the_library_says_how_to_install_it() -> None:
    (one,) = trial_findings("/opt/py", "No module named 'torch'", [CPU])

    assert one.found == "/opt/py: No module named 'torch'"
    assert one.remedy.startswith("/opt/py -m pip install 'ones_scheduler-")


@pytest.mark.parametrize("fields", [{}, {"cuda": "13.0", "gpus": 0}])
def test_gpus_that_torch_cannot_use_are_an_error(fields: dict[str, Any]) -> None:
    assert states(trial_findings("py", trial(**fields), [GPU]))[0] == ("torch", "error")


def test_another_release_of_the_library_is_a_warning() -> None:
    assert states(trial_findings("py", trial(ones="0.1.0"), [CPU]))[0] == ("torch", "warning")


def test_a_group_that_fails_names_its_backend_and_the_reason() -> None:
    groups = {"gloo": {"seconds": 1.0}, "nccl": {"error": "unhandled system error"}}
    found = [*trial_findings("py", trial(cuda="13.0", gpus=1, groups=groups), [GPU])]

    assert states(found) == [("torch", "ok"), ("gloo", "ok"), ("nccl", "error")]
    assert found[-1].found == "no group of two processes: unhandled system error"


def test_one_controller_of_several_has_to_admit_the_node() -> None:
    assert admission("n", {"a": CLOSED, "b": ""}, 7701).found == "b:7701 admits the key of n"
    assert "ones key add n --role node" in admission("n", {"a": CLOSED, "b": REFUSED}, 1).remedy
    assert admission("n", {"a": CLOSED}, 7701).found == f"a:7701: {CLOSED}"


def test_limits_that_no_control_group_can_enforce_are_named() -> None:
    tree = Hierarchy(Path("/x"), frozenset({"memory"}), unified=True)

    assert limits([tree], "").found == "no limits of pids below the group of this shell"
    assert limits([], "/a").found == "no limits of memory and pids below /a"


def test_hardware_errors_in_the_kernels_log() -> None:
    log = [
        "4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",
        "4,1,2,-;NVRM: Xid (PCI:0000:5e:00): 31, pid=9, name=python",  # a program's own error
        "6,1,2,-;usb 1-1: new device",
    ]

    assert logged_xids(log) == {"0000:3b:00": 79}


def test_a_gpu_with_memory_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    driver: Any = Driver()
    driver.ecc["GPU-a"] = 2
    monkeypatch.setattr("nodeagent.doctor.gpu_check", lambda _: GpuCheck(["GPU-a"], driver))

    found = gpus(SETTINGS, [GPU])

    assert (found.state, found.found) == ("error", "GPU GPU-a: 2 uncorrected memory errors")
    assert found.remedy.startswith("drain the node")


def test_a_host_without_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("nodeagent.doctor.DRIVER", tmp_path / "none")

    assert gpus(SETTINGS, [CPU]).found == "none, 1 CPU slots"
