"""Jobs in containers on a real cluster: their output, signals and ends, with podman.

The image has only busybox. Elastic jobs find Python, torch and the library of this host in it.
"""

from __future__ import annotations

import hashlib
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from schemas.errors import install_hint
from tests.support.cluster import (
    Cluster,
    assert_nothing_lost,
    further,
    kill,
    kinds,
    looked,
    resize,
    running,
    training_job,
)

pytestmark = [pytest.mark.slow, pytest.mark.root]  # a cluster of its own; images are imported

CHECKOUT = Path(__file__).parents[2]
BUSYBOX = Path("/bin/busybox")  # of Debian's busybox-static
IMAGE = "localhost/ones-test:1"
WORDS = ("sh", "cat", "cut", "echo", "env", "id", "sha256sum", "sleep", "true")
MOST = 10_000  # open files and processes of a container
TOKEN = "7c1f-correct-horse-battery"  # noqa: S105 - of this test
SAVES = "trap 'echo saved; exit 0' TERM; echo up; while true; do sleep 0.1; done"


def podman(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["podman", *words], capture_output=True, text=True, check=False)


def limits() -> list[str]:
    """Options with limits below those of this process, which may not be able to raise them."""
    found = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    hard = {name: resource.getrlimit(which)[1] for name, which in found.items()}
    most = {name: min(limit, MOST) if limit > 0 else MOST for name, limit in hard.items()}
    return [f"--ulimit={name}={limit}:{limit}" for name, limit in most.items()]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which("podman") is None or not BUSYBOX.exists():
        pytest.skip("podman or busybox-static is not installed")
    root = tmp_path_factory.mktemp("image")
    for folder in ("bin", "etc", "proc", "tmp"):
        (root / folder).mkdir()
    shutil.copy(BUSYBOX, root / "bin" / "busybox")
    for word in WORDS:
        (root / "bin" / word).symlink_to("busybox")
    for folder in ("lib", "lib64"):
        (root / folder).symlink_to(f"usr/{folder}")
    (root / "bin" / "python3").symlink_to(f"{sys.base_prefix}/bin/python3")
    tar = root.with_suffix(".tar")
    subprocess.run(["tar", "-C", str(root), "-cf", str(tar), "."], check=True)
    podman("import", str(tar), IMAGE)
    words = ("--rm", "--init", "--cgroups=no-conmon", "--network=host", *limits())
    tried = podman("run", *words, IMAGE, "/bin/true")
    if tried.returncode:
        pytest.skip(f"podman cannot run here: {tried.stderr.strip()[-200:]}")
    yield IMAGE
    podman("rmi", "--force", IMAGE)


@contextmanager
def house(folder: Path, *options: str) -> Iterator[Cluster]:
    with running(folder, slots=2, policy="fifo") as made:
        made.down()
        with (made.home / "agent-1.toml").open("a") as file:
            file.write(f'[containers]\nengine = "podman"\noptions = {[*limits(), *options]}\n')
        made.up()
        yield made


@pytest.fixture(scope="module")
def plain(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    assert image == IMAGE
    with house(tmp_path_factory.mktemp("o")) as made:
        yield made


@pytest.fixture(scope="module")
def able(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    assert image == IMAGE
    shown = dict.fromkeys(("/usr", sys.base_prefix, sys.prefix, str(CHECKOUT)))
    volumes = [f"--volume={one}:{one}:ro" for one in shown]
    with house(tmp_path_factory.mktemp("e"), *volumes) as made:
        yield made


@pytest.fixture
def cluster(plain: Cluster) -> Iterator[Cluster]:
    yield plain
    plain.clear()
    assert containers() == []


@pytest.fixture
def trains(able: Cluster) -> Iterator[Cluster]:
    """A cluster whose containers can import torch and the library."""
    yield able
    able.clear()
    assert containers() == []


def containers() -> list[str]:
    return podman("ps", "--all", "--filter", "name=ones-", "--format", "{{.Names}}").stdout.split()


def submit(cluster: Cluster, folder: Path, text: str, image: str = IMAGE, more: str = "") -> str:
    fields = f'name = "box"\nkind = "command"\nimage = "{image}"\n{more}'
    (folder / "job.toml").write_text(f'{fields}command = ["sh", "-c", "{text}"]\n')
    done = cluster.ones("submit", str(folder / "job.toml"), "-o", "quiet")
    assert done.code == 0, done.err
    return done.out.strip()


def test_a_program_sees_its_folder_its_variables_and_its_secrets(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "my.env").write_text(f"TOKEN={TOKEN}\n")
    (tmp_path / "my.env").chmod(0o600)
    (tmp_path / "words.txt").write_text("of the folder\n")
    says = "cat words.txt; echo $ONES_JOB $A; echo -n $TOKEN | sha256sum | cut -c-64; exit 3"

    job = submit(cluster, tmp_path, says, more='secret_env = "my.env"\nenv = { A = "1" }\n')
    cluster.wait(job)

    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    assert cluster.output(job) == ["of the folder", f"{job} 1", digest]
    assert cluster.show(job)["reason"] == "the program ended with exit code 3"


def test_term_reaches_the_program_of_a_cancelled_job(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, SAVES)
    cluster.until(job, lambda _: cluster.output(job) == ["up"])
    assert len(containers()) == 1

    cluster.ones("cancel", job)
    cluster.until(job, lambda shown: not shown["workers"])

    assert cluster.output(job) == ["up", "saved"]
    assert containers() == []


def test_a_killed_engine_leaves_no_container(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, SAVES)
    cluster.until(job, lambda _: cluster.output(job) == ["up"])

    kill(cluster.show(job)["workers"][0]["pid"])
    cluster.wait(job)

    looked(lambda: containers() == [])


def test_an_image_that_does_not_exist_is_the_reason(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, "true", image="localhost/ones-missing:1")
    cluster.wait(job)

    assert cluster.show(job)["reason"].startswith("image localhost/ones-missing:1: ")


def elastic_job(cluster: Cluster, slots: int, **fields: object) -> str:
    return training_job(cluster, slots, image=IMAGE, python=sys.executable, **fields)


def test_an_elastic_job_grows_shrinks_and_pauses_in_containers(trains: Cluster) -> None:
    job = elastic_job(trains, 1)
    further(trains, job, 1)

    resize(trains, job, 2)
    assert len(containers()) == 2
    further(trains, job, 1)
    resize(trains, job, 1)
    looked(lambda: len(containers()) == 1)
    assert trains.ones("pause", job).code == 0
    trains.until(job, lambda shown: shown["state"] == "paused")
    looked(lambda: containers() == [])
    assert trains.ones("resume", job).code == 0
    trains.until(job, lambda shown: shown["state"] == "running")
    further(trains, job, 1)

    assert_nothing_lost(trains, job)


def rank_in_container(job: str, rank: int) -> int:
    """Return the process of a rank, which is not the engine's."""
    titles = {one.pid: one.info["cmdline"] for one in psutil.process_iter(["cmdline"])}
    (found,) = (
        pid for pid, words in titles.items() if f"{job} rank {rank}" in " ".join(words or ())
    )
    return found


def recovered(cluster: Cluster, job: str, times: int) -> dict[str, Any]:
    """Return a job when it trains on 2 slots again, after so many recoveries."""
    again = times * [("recover", "formed")]

    def whole(shown: dict[str, Any]) -> bool:
        found = [one for one in kinds(shown) if one[0] == "recover"]
        return found == again and shown["slots"] == 2 and shown["state"] == "running"

    cluster.until(job, whole)
    return further(cluster, job, 1)


def test_an_elastic_job_outlives_its_agent_and_ranks_in_containers(trains: Cluster) -> None:
    job = elastic_job(trains, 2)
    kill(trains.up()["agents"][0])
    trains.up()
    recovered(trains, job, 0)

    kill(rank_in_container(job, 1))
    shown = recovered(trains, job, 1)
    kill(shown["workers"][0]["pid"])
    shown = recovered(trains, job, 2)

    assert [one for one in kinds(shown) if one[0] == "start"] == [("start", "formed")]
    assert_nothing_lost(trains, job)


def test_an_image_without_torch_is_the_reason(trains: Cluster) -> None:
    job = trains.submit(image=IMAGE)
    trains.wait(job)

    needs = "an elastic job needs torch and ONES in it"
    remedy = install_hint("train", "python3")
    reason = f"image {IMAGE}: no module 'torch'; {needs}, {remedy} (exit code 1)"
    assert trains.show(job)["reason"] == reason
