"""Jobs with requirements on a real cluster: an environment is built once, and used by all kinds."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.environments import uv
from tests.support.cluster import Cluster, running

pytestmark = [
    pytest.mark.slow,  # a cluster of its own
    pytest.mark.skipif(uv() is None, reason="uv, of the extra environments, is not installed"),
]

INFO = "tiny-1.0.dist-info"
FILES = {
    "tiny.py": "VALUE = 42\n",
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}
ELASTIC = """
import tiny
from elastic import ScalingAgent
print("elastic", tiny.VALUE, ScalingAgent.__name__)
"""
LINE = 'import tiny; print("command", tiny.VALUE)'


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("o"), slots=2, policy="fifo") as made:
        yield made


@pytest.fixture
def cluster(house: Cluster) -> Iterator[Cluster]:
    yield house
    house.clear()


def folder_with_a_wheel(folder: Path) -> Path:
    name = "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for path, text in FILES.items():
            wheel.writestr(zipfile.ZipInfo(path), text)
        record = "".join(f"{path},,\n" for path in FILES)
        wheel.writestr(zipfile.ZipInfo(f"{INFO}/RECORD"), f"{record}{INFO}/RECORD,,\n")
    (folder / "requirements.txt").write_text(f"./{name}\n")
    (folder / "train.py").write_text(ELASTIC)
    fields = 'workdir = "."\nrequirements = "requirements.txt"\n'
    command = f"kind = 'command'\ncommand = ['python', '-c', '{LINE}']\n"
    gang = f"kind = 'torchrun'\nslots = 2\ncommand = ['python', '-c', '{LINE}']\n"
    elastic = 'script = "train.py"\nbatch_size = 1\n'
    for kind, more in {"command": command, "gang": gang, "elastic": elastic}.items():
        (folder / f"{kind}.toml").write_text(f'name = "{kind}"\n{fields}{more}')
    return folder


def test_a_second_job_uses_the_environment_of_the_first(cluster: Cluster, tmp_path: Path) -> None:
    folder = folder_with_a_wheel(tmp_path)

    outputs = []
    for kind in ("command", "gang", "elastic"):
        done = cluster.ones("submit", str(folder / f"{kind}.toml"), "-o", "quiet", "--wait")
        assert done.code == 0, done.err
        outputs.append(cluster.output(done.out.split()[0]))

    first, gang, elastic = outputs
    assert any("tiny==1.0" in line for line in first), first
    assert first[-1] == "command 42"
    assert gang == ["command 42"] * 2
    assert elastic == ["elastic 42 ScalingAgent"]
    built = list(cluster.home.glob("state/work/*/.environments/*/complete"))
    assert len(built) == 1


def test_the_end_of_uvs_output_is_the_reason_of_a_failure(cluster: Cluster, tmp_path: Path) -> None:
    folder = folder_with_a_wheel(tmp_path)
    (folder / "requirements.txt").write_text("./missing-1.0-py3-none-any.whl\n")

    done = cluster.ones("submit", str(folder / "command.toml"), "-o", "quiet", "--wait")

    reason = cluster.show(done.out.split()[0])["reason"]
    assert done.code == 1
    assert "environment of requirements.txt: uv ended with exit code" in reason
    assert "missing-1.0" in reason
