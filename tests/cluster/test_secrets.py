"""Secret variables of jobs on a real cluster: they reach programs, and lie in no file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, running

pytestmark = pytest.mark.slow  # a cluster of its own

TOKEN = "7c1f-correct-horse-battery"  # noqa: S105 - of this test
DIGEST = hashlib.sha256(TOKEN.encode()).hexdigest()
SAYS = 'printf %s "$TOKEN" | sha256sum | cut -c-64'
ELASTIC = """
import hashlib, os
print(hashlib.sha256(os.environ["TOKEN"].encode()).hexdigest(), flush=True)
while not os.path.exists(os.environ["HOLD"]):
    pass
"""
GANG = "import hashlib, os; print(hashlib.sha256(os.environ['TOKEN'].encode()).hexdigest())"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("o"), slots=2, policy="fifo") as made:
        yield made


@pytest.fixture
def cluster(house: Cluster) -> Iterator[Cluster]:
    yield house
    house.clear()


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    file = tmp_path / "secrets.env"
    file.write_text(f"# of the registry\nTOKEN={TOKEN}\n")
    file.chmod(0o600)
    return file


def holders(cluster: Cluster) -> list[str]:
    """Return the files below the cluster's folder that contain the secret."""
    files = (path for path in cluster.home.rglob("*") if path.is_file())
    token = TOKEN.encode()
    return [str(path.relative_to(cluster.home)) for path in files if token in path.read_bytes()]


@pytest.mark.parametrize(
    "line",
    [("sh", "-c", SAYS), ("torchrun", "--nproc-per-node", "2", "gang.py")],
    ids=["command", "torchrun"],
)
def test_a_program_has_the_secret_variables(
    cluster: Cluster, secrets: Path, tmp_path: Path, line: tuple[str, ...]
) -> None:
    (tmp_path / "gang.py").write_text(GANG)

    done = cluster.ones("run", "--secret-env", str(secrets), "--", *line, cwd=tmp_path)

    assert (done.code, {word[-64:] for word in done.out.split()} - {"[0]", "[1]"}) == (0, {DIGEST})


def test_only_the_controllers_private_file_has_the_secret(
    cluster: Cluster, secrets: Path, tmp_path: Path
) -> None:
    hold = tmp_path / "go"
    fields = {"secret_env": secrets.name, "env": {"HOLD": str(hold)}}
    file = cluster.write(ELASTIC, **fields)
    secrets.rename(file.parent / secrets.name)
    job = cluster.ones("submit", str(file), "-o", "quiet").out.strip()
    cluster.until(job, lambda _: cluster.output(job))

    beside = cluster.ones("shell", job, "--", "sh", "-c", SAYS)
    kept = holders(cluster)
    cluster.down()  # ends its worker
    cluster.up()
    cluster.until(job, lambda _: len(cluster.output(job)) > 1)
    said = [
        cluster.ones(*words, "-o", "json").out
        for words in (("show", job), ("ps",), ("events",), ("explain", job), ("logs", job))
    ]
    backup = tmp_path / "backup.tar"
    cluster.ones("admin", "backup", "--all", str(backup))
    again = cluster.ones("shell", job, "--", "sh", "-c", SAYS)
    hold.touch()

    assert cluster.wait(job).code == 0
    assert cluster.output(job) == [DIGEST] * 2
    assert (beside.out.strip(), again.out.strip()) == (DIGEST, DIGEST)
    assert len(kept) == 1
    assert kept[0].startswith("state/secrets/")
    assert backup.stat().st_size > 0
    assert TOKEN not in "".join(said)
    assert TOKEN.encode() not in backup.read_bytes()
    assert holders(cluster) == []


def test_a_rerun_needs_the_file_again(cluster: Cluster, secrets: Path, tmp_path: Path) -> None:
    run = ("run", "-d", "--secret-env", str(secrets), "--name", "once", "--", "sh", "-c", SAYS)
    job = cluster.ones(*run, cwd=tmp_path).out.strip()
    cluster.wait(job)

    refused = cluster.ones("rerun", job)
    again = cluster.ones("rerun", job, "--secret-env", str(secrets)).out.strip()

    assert "secret_env: the values of TOKEN are needed" in refused.err
    assert "--secret-env FILE" in refused.err
    assert cluster.wait(again).code == 0
    assert cluster.output(again) == [DIGEST]
    assert holders(cluster) == []
