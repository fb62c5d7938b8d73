"""A process that takes the inventory of hosts whose GPU driver is a stand-in.

`pynvml` loads the stand-in as it would load the driver's own library. That is a matter of the
process: so one process answers for all hosts, a line of JSON for each.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import pytest
from structlog.testing import capture_logs

SOURCE: Final = Path(__file__).with_suffix(".c")
LIBRARY: Final = "libnvidia-ml.so.1"


def build_driver(folder: Path) -> Path:
    """A folder with the stand-in in it; the test is skipped on hosts without a C compiler."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), "")
    if not compiler:
        pytest.skip("no C compiler here to build the stand-in of the GPU driver with")
    command = [
        compiler,
        "-Wall",
        "-Werror",
        "-shared",
        "-fPIC",
        "-o",
        str(folder / LIBRARY),
        str(SOURCE),
    ]
    subprocess.run(command, check=True)
    return folder


def broken_driver(folder: Path) -> Path:
    """A folder whose library cannot be loaded: a host without a driver."""
    (folder / LIBRARY).touch()
    return folder


class Hosts:
    """Hosts whose drivers are asked by one process, which loads the library in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.nodeagent.fake_nvml"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._process.communicate()

    def inventory(self, driver: str, **environ: str) -> dict[str, Any]:
        """`slots` and what was `logged`, or the `error`; whether the driver was left `open`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([driver, environ]), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def _take(driver: str, environ: Mapping[str, str]) -> dict[str, Any]:
    import pynvml  # noqa: PLC0415 - only in this process, which has a library for it

    from nodeagent.devices import inventory  # noqa: PLC0415
    from nodeagent.settings import AgentSettings  # noqa: PLC0415
    from schemas.errors import SettingsError  # noqa: PLC0415

    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        os.environ.pop(name, None)
    os.environ.update(environ, FAKE_NVML=driver)
    with capture_logs() as logged:
        try:
            slots = inventory(AgentSettings(node="n1", slots=2)).slots
            answer: dict[str, Any] = {"slots": msgspec.to_builtins(slots)}
        except SettingsError as error:
            answer = {"error": [error.field, error.message, error.hint]}
    answer["logged"] = [entry["event"] for entry in logged]
    try:
        pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError_Uninitialized:
        answer["open"] = False
    else:
        answer["open"] = True
    return answer


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_take(*json.loads(line))) + "\n")
        sys.stdout.flush()
