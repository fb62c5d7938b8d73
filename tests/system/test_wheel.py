"""The wheel without a checkout: each role in an environment of its own, used from another folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from nodeagent.environments import uv
from schemas import __version__
from tests.support.cluster import TOY, toml
from tests.system.box import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(uv() is None, reason="uv, of the extra environments, is not installed"),
]
LIMIT_S = 300.0
ENVIRONMENT = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}


def run(cwd: Path, *command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env={**ENVIRONMENT, **env}, capture_output=True, text=True,
        check=False, timeout=LIMIT_S,
    )  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = run(ROOT, sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ".")
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def environment(folder: Path, wheel: Path, extras: str) -> Path:
    """The programs of an environment with these extras, and the tested build of torch."""
    torch = f"torch=={metadata.version('torch')}"
    (folder / "constraints.txt").write_text(f"{torch}\n")
    words = [
        word
        for one in os.environ.get("PIP_FIND_LINKS", "").split()
        for word in ("--find-links", one)
    ]
    made = folder / "venv"
    run(folder, str(uv()), "venv", "-q", "--python", sys.executable, made)
    done = run(
        folder, str(uv()), "pip", "install", "-q", "--python", made / "bin/python", *words,
        "-c", "constraints.txt", f"ones-scheduler{extras} @ {wheel.as_uri()}",
    )  # fmt: skip
    if "torch" in done.stderr and "No solution found" in done.stderr:
        pytest.skip(f"{torch} cannot be installed here")
    assert done.returncode == 0, done.stderr
    return made / "bin"


def test_a_client_needs_little_and_names_the_extra_of_the_rest(tmp_path: Path, wheel: Path) -> None:
    bin_ = environment(tmp_path, wheel, "")

    assert run(tmp_path, bin_ / "ones", "--version").stdout == f"{__version__}\n"
    missing = run(tmp_path, bin_ / "python", "-c", "import numpy")
    assert "No module named 'numpy'" in missing.stderr
    for command, needs in (
        (("ones", "sim", "run"), "this command needs numpy; pip install 'ones_scheduler-"),
        (("ones", "local", "up"), "a cluster on this host needs scipy; pip install"),
        (("ones-controller", "--help"), "ones-controller needs uvloop; pip install"),
        (("ones-agent", "--help"), "ones-agent needs uvloop; pip install"),
    ):
        done = run(tmp_path, bin_ / command[0], *command[1:])
        assert (done.returncode, needs in done.stderr) == (2, True), done.stderr
    home = tmp_path / "home"
    sample = run(tmp_path, bin_ / "ones", "config", "sample", "--into", home)
    assert sample.returncode == 0, sample.stderr
    doctor = run(tmp_path, bin_ / "ones", "doctor", "--home", home, "-o", "quiet")
    assert (doctor.returncode, "alice.key_secret" in doctor.stdout) == (1, True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Iterator[tuple[Path, Path]]:
    """The program `ones` of an environment with everything, and a folder outside of the checkout."""
    folder = tmp_path_factory.mktemp("c")
    ones = environment(folder, wheel, "[local,sim,web]") / "ones"
    up = run(folder, ones, "local", "up", "--slots", "2", ONES_HOME=str(folder / "home"))
    assert up.returncode == 0, up.stderr
    yield folder, ones
    run(folder, ones, "local", "down", ONES_HOME=str(folder / "home"))


def test_a_job_trains_in_an_interpreter_that_has_the_library_only(
    cluster: tuple[Path, Path], tmp_path: Path, wheel: Path
) -> None:
    folder, ones = cluster
    python = environment(tmp_path, wheel, "[train]") / "python"
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "train.py").write_text(TOY)
    fields = {"name": "toy", "script": "train.py", "batch_size": 20, "python": str(python)}
    (tmp_path / "job" / "job.toml").write_text(toml(fields))

    done = run(tmp_path, ones, "submit", "job/job.toml", "--wait", ONES_HOME=str(folder / "home"))

    assert done.returncode == 0, done.stdout + done.stderr
    assert run(tmp_path, python, "-c", "import uvloop").returncode != 0


def test_the_simulator_the_page_and_the_doctor_work(cluster: tuple[Path, Path]) -> None:
    folder, ones = cluster
    home = str(folder / "home")

    simulated = run(folder, ones, "sim", "run", "--policy", "ones", "--gpus", "4", "--jobs", "3")
    assert simulated.returncode == 0, simulated.stderr
    doctor = run(folder, ones, "doctor", "-o", "json", ONES_HOME=home)
    assert doctor.returncode == 0, json.dumps(json.loads(doctor.stdout), indent=1)
    page = subprocess.Popen(
        [ones, "web"], cwd=folder, env={**ENVIRONMENT, "ONES_HOME": home, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert page.stdout is not None
        address = next(word for word in page.stdout.readline().split() if word.startswith("http"))
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                text = urllib.request.urlopen(f"{address}static/page.js", timeout=5).read()  # noqa: S310
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        assert text
    finally:
        page.terminate()
        page.communicate()


@pytest.mark.skipif(shutil.which("pipx") is None, reason="pipx is not installed")
def test_pipx_installs_the_client(tmp_path: Path, wheel: Path) -> None:
    places = {"PIPX_HOME": str(tmp_path / "home"), "PIPX_BIN_DIR": str(tmp_path / "bin")}

    done = run(tmp_path, "pipx", "install", wheel, **places)

    assert done.returncode == 0, done.stderr
    assert run(tmp_path, tmp_path / "bin" / "ones", "--version").stdout == f"{__version__}\n"


def test_uv_installs_the_client_as_a_tool(tmp_path: Path, wheel: Path) -> None:
    places = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}

    done = run(tmp_path, str(uv()), "tool", "install", wheel, **places)

    assert done.returncode == 0, done.stderr
    assert run(tmp_path, tmp_path / "bin" / "ones", "--version").stdout == f"{__version__}\n"
