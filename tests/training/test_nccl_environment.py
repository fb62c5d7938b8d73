"""Environment of GPU workers before the first process group."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Final

import msgspec
import psutil
import pytest

from elastic.collectives.nccl import (
    DEFAULT_VARIABLES,
    INTERFACE_VARIABLE,
    REQUIRED_VARIABLES,
    interface_of,
    nccl_environment,
)
from elastic.worker import run_script
from schemas.codec import encode
from schemas.jobs import CLUSTER_VARIABLES
from tests.support.builders import A, assignment, run
from tests.training.peers import run_forked

ADDRESS: Final = "10.0.0.7"


def wanted(**present: str) -> dict[str, str]:
    return nccl_environment(ADDRESS, present, {ADDRESS: "eth0"}.__getitem__)


ALL: Final = {**REQUIRED_VARIABLES, **DEFAULT_VARIABLES, INTERFACE_VARIABLE: "=eth0"}
CHOSEN: Final = {INTERFACE_VARIABLE: "ib0,ib1", "NCCL_RUNTIME_CONNECT": "1"}
WRONG: Final = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_NCCL_DESYNC_DEBUG": "1"}


@pytest.mark.parametrize(("present", "changed"), [
    ({}, ALL),
    (ALL, {}),
    ({**ALL, **WRONG}, dict.fromkeys(WRONG, "0")),
    (CHOSEN, REQUIRED_VARIABLES),
], ids=["bare", "set already", "required variables", "defaults"])  # fmt: skip
def test_required_variables_override_present_ones(
    present: dict[str, str], changed: dict[str, str]
) -> None:
    assert wanted(**present) == changed


def test_an_unknown_address_leaves_the_interface_to_nccl() -> None:
    assert INTERFACE_VARIABLE not in nccl_environment("192.0.2.1", {}, lambda _: "")


def test_a_job_file_cannot_set_required_variables() -> None:
    assert REQUIRED_VARIABLES.keys() <= CLUSTER_VARIABLES.keys()


def test_each_address_has_its_interface() -> None:
    by_address: dict[str, set[str]] = {}
    for name, found in psutil.net_if_addrs().items():
        for one in found:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                by_address.setdefault(one.address, set()).add(name)

    assert all(interface_of(address) in names for address, names in by_address.items())
    loopback = {interface_of(name) for name in ("127.0.0.1", "127.0.1.1", "::1", "localhost")}
    assert len(loopback) == 1
    assert [interface_of(name) for name in ("192.0.2.1", "no such host")] == ["", ""]


# --- where it is set

SCRIPT: Final = """
import json, os, pathlib
pathlib.Path("found").write_text(json.dumps(dict(os.environ)))
"""


def work(folder: Path, device: str) -> None:
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "1"  # of the host's operator
    os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)
    (folder / "train.py").write_text(SCRIPT)
    given = msgspec.structs.replace(
        assignment(run(A)), workdir=str(folder), env={"CUDA_VISIBLE_DEVICES": device}
    )
    (folder / "assignment").write_bytes(encode(given))
    sys.exit(run_script.prepare_worker(folder)())


def found_by_script(folder: Path, device: str) -> dict[str, str]:
    assert run_forked(work, folder, device) == 0
    return json.loads((folder / "found").read_text())


@pytest.mark.slow
def test_a_gpu_worker_has_the_environment_before_its_script(tmp_path: Path) -> None:
    found = found_by_script(tmp_path, "GPU-aa11")

    assert {name: found.get(name) for name in REQUIRED_VARIABLES} == REQUIRED_VARIABLES
    assert found[INTERFACE_VARIABLE] == f"={interface_of('127.0.0.1')}"


@pytest.mark.slow
def test_a_cpu_worker_keeps_its_environment(tmp_path: Path) -> None:
    found = found_by_script(tmp_path, "")

    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in found
    assert found["TORCH_NCCL_ENABLE_MONITORING"] == "1"
