"""Rolling upgrades across two releases, back and forth, while a job trains.

The release before is built as a wheel from its commit. Its own site-packages come first; what it
depends on is taken from this environment.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from schemas.host.files import pid_of
from tests.support.cluster import (
    RESIZED,
    Cluster,
    assert_nothing_lost,
    await_gone,
    further,
    looked,
    resize,
    running,
    training_job,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
BEFORE = "db6a3ea021b93aca1f596d5aef793b2ca9917fe4"  # commit that stands for the release before; 0.2.0 is the first release


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a virtual environment with the wheel of the release before."""
    folder = tmp_path_factory.mktemp("before")
    archive = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"needs commit {BEFORE} in the history of this clone")
    source, wheels, home = folder / "source", folder / "wheels", folder / "venv"
    source.mkdir()
    subprocess.run(["tar", "-x", "-C", str(source)], input=archive.stdout, check=True)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(wheels),
        str(source),
    ]
    subprocess.run(build, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (site,) = home.glob("lib/python3*/site-packages")
    (wheel,) = wheels.glob("*.whl")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(install, check=True)
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    return home / "bin" / "python"


_STARTED: Final[list[subprocess.Popen[bytes]]] = []


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running(tmp_path, agents=2, slots=2) as made:
        yield made
    while _STARTED:
        _STARTED.pop().wait()


TIMED: Final = RESIZED.replace(
    "        scheduler.step()\n",
    "        scheduler.step()\n"
    "        if agent.rank == 0:\n"
    "            open(os.environ['STEPS'], 'a').write(f'{time.time()}\\n')\n",
)


def step_times(path: Path, windows: list[tuple[float, float]]) -> list[list[float]]:
    """Return the times between successive steps in each window, in seconds."""
    times = [float(line) for line in path.read_text().split()]
    return [
        [later - one for one, later in itertools.pairwise(times) if began <= later and one <= ended]
        for began, ended in windows
    ]


def replace(cluster: Cluster, name: str, python: Path | str, *, sign: int = signal.SIGTERM) -> None:
    """End a daemon of the cluster, and start it with the code of an interpreter."""
    pid = int((cluster.home / "run" / f"{name}.pid").read_text())
    os.kill(pid, sign)
    await_gone(pid)
    module = "controlplane.service" if name == "controller" else "nodeagent"
    with (cluster.home / "logs" / f"{name}.log").open("ab") as log:
        _STARTED.append(subprocess.Popen(
            [str(python), "-P", "-m", module, "--config", str(cluster.home / f"{name}.toml")],
            stdout=log, stderr=log, cwd="/", start_new_session=True,
        ))  # fmt: skip
    looked(lambda: pid_of(cluster.home / "run" / f"{name}.pid"))
    cluster.up()  # waits until all are in session


@pytest.mark.parametrize("parts", [
    ("controller", "agent-1", "agent-2"),  # as recommended
    ("agent-2", "agent-1", "controller"),
], ids="-".join)  # fmt: skip
def test_a_job_trains_on_while_all_parts_change_their_release_and_return(
    cluster: Cluster, before: Path, parts: tuple[str, ...], tmp_path: Path
) -> None:
    for name in parts:
        replace(cluster, name, before)
    steps = tmp_path / "steps"
    env = {"OMP_NUM_THREADS": "1", "STEPS": str(steps)}
    job = training_job(cluster, slots=4, script=TIMED, env=env)
    cluster.until(job, lambda shown: shown["slots"] == 4)
    further(cluster, job)
    restarts: list[tuple[float, float]] = []
    quiet: list[tuple[float, float]] = []
    for python in (sys.executable, before, sys.executable):
        groups = cluster.show(job)["versions"]
        for name in parts:
            began = time.time()
            replace(cluster, name, python)
            ended = time.time()
            further(cluster, job)
            restarts.append((began, ended))
            quiet.append((ended, time.time()))
        assert cluster.show(job)["versions"] == groups  # no restart disturbed the group
        resize(cluster, job, 2)
        resize(cluster, job, 4)
        further(cluster, job)

    during, after = step_times(steps, restarts), step_times(steps, quiet)
    assert all(len(gaps) > 1 for gaps in during)  # it trained on during each restart
    for what, found in (("restarts", during), ("else", after)):
        gaps = list(itertools.chain.from_iterable(found))
        sys.stdout.write(
            f"{what}: {len(gaps)} steps, median {statistics.median(gaps):.3f} s, "
            f"longest {max(gaps):.3f} s\n"
        )
    assert_nothing_lost(cluster, job)
