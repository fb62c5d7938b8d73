"""`ones doctor` on a real cluster: nothing to do, and what it says when something is broken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.host.findings import Finding
from schemas.transport.keys import write_keys
from tests.support.cluster import Cluster, running

pytestmark = pytest.mark.slow  # a cluster of its own, and groups of processes with torch


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("o"), slots=2) as made:
        yield made


def errors(rows: list[dict[str, str]]) -> dict[tuple[str, str], str]:
    return {(row["role"], row["check"]): row["found"] for row in rows if row["state"] == "error"}


def test_a_cluster_that_works_has_no_errors(cluster: Cluster) -> None:
    before = {path for path in cluster.home.rglob("*") if "logs" not in path.parts}
    done = cluster.ones("doctor", "-o", "json")
    after = {path for path in cluster.home.rglob("*") if "logs" not in path.parts}

    assert done.code == 0, done.out
    assert errors(done.json) == {}
    assert set(done.json[0]) == {"role", *Finding.__struct_fields__}
    checks = {(row["role"], row["check"]): row["found"] for row in done.json}
    assert checks["client", "release"].startswith("the controller has")
    assert checks["controller", "ports"].endswith("with these settings")
    assert "two processes formed a group" in checks["agent-1", "gloo"]
    assert checks["agent-1", "controller"].endswith("admits the key of node-1")
    assert before - after == set()
    assert not any("doctor" in path.name for path in after - before)


def test_what_is_wrong_comes_with_its_remedy(cluster: Cluster, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys", "node-9")
    text = (cluster.home / "agent-1.toml").read_text().replace("node-1", "node-9")
    file = tmp_path / "agent.toml"
    file.write_text(
        f'address = "127.9.9.9"\npython = "/bin/false"\n{text}key = "{cluster.home}/keys/server.key"\n'
    )

    done = cluster.ones("doctor", "--agent", str(file), "-o", "json")

    assert done.code == 1
    found = errors(done.json)
    assert set(found) == {("agent", "torch"), ("agent", "controller")}
    assert found["agent", "torch"] == "/bin/false: exit code 1"
    assert found["agent", "controller"].endswith("does not know this key, or it has expired")


def test_an_absent_controller_is_an_error_of_the_client(cluster: Cluster, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "keys").symlink_to(cluster.home / "keys")
    (home / "client.toml").write_text('endpoint = "tcp://127.0.0.1:1"\n')

    done = cluster.ones("doctor", "--home", str(home), "-o", "quiet")

    assert done.code == 1
    assert done.out.startswith("client: tcp://127.0.0.1:1: no connection: nothing listens there")
