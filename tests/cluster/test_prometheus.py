"""A real Prometheus scrapes a cluster, and evaluates the alert rules of the docs."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import tomllib
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import LIMIT_S, LOOK_S, Cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's prometheus"),
]
RULES = Path(__file__).parents[2] / "docs" / "alerts.yml"
DASHBOARD = RULES.with_name("grafana.json")
NOT_YET = {"ones_user_slots", "ones_gain_predicted_ratio", "ones_gain_realised_ratio"}  # need jobs
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: ones
    static_configs: [{{targets: ["{target}"]}}]
  - job_name: agents
    static_configs: [{{targets: ["{agent}"]}}]
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=10) as reply:
        return json.load(reply)["data"]


def value(port: int, query: str) -> float | None:
    found = read(port, f"query?query={urllib.parse.quote(query)}")["result"]
    return float(found[0]["value"][1]) if found else None


def queries() -> list[str]:
    """The queries of the dashboard, over a short time."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(found) > len(panels) > 10
    return [query.replace("$__rate_interval", "1m") for query in found]


def answered(port: int, query: str) -> bool:
    """Whether Prometheus has a series for a query, within some time."""
    deadline = time.monotonic() + LIMIT_S
    while not read(port, f"query?query={urllib.parse.quote(query)}")["result"]:
        if time.monotonic() > deadline or query in NOT_YET:
            return query in NOT_YET
        time.sleep(LOOK_S)
    return True


def test_prometheus_scrapes_a_cluster_and_evaluates_every_rule(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "home", tmp_path / "jobs")
    cluster.up()
    cluster.down()
    agent, settings = free_port(), tmp_path / "home" / "agent-1.toml"
    settings.write_text(f"metrics = {agent}\n{settings.read_text()}")
    cluster.up()
    listen = tomllib.loads((tmp_path / "home" / "controller.toml").read_text())["listen"]
    config, port = tmp_path / "prometheus.yml", free_port()
    target = f"127.0.0.1:{listen['metrics']}"
    config.write_text(CONFIG.format(rules=RULES, target=target, agent=f"127.0.0.1:{agent}"))
    subprocess.run(["promtool", "check", "config", config], check=True, capture_output=True)
    prometheus = subprocess.Popen(
        [
            "prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                rules = [rule for group in read(port, "rules")["groups"] for rule in group["rules"]]
                done = (
                    value(port, "ones_slots")
                    and value(port, "ones_node_slots")
                    and {rule["health"] for rule in rules} == {"ok"}
                )
            except OSError:
                done = None
            if done:
                break
            assert time.monotonic() < deadline, "prometheus has no figures"
            time.sleep(LOOK_S)
        firing = {rule["name"] for rule in rules if rule["state"] == "firing"}

        assert value(port, 'up{job="ones"}') == 1.0
        assert value(port, 'ones_nodes{state="up"}') == 1.0
        assert firing == set()
        unanswered = [query for query in queries() if not answered(port, query)]
        assert unanswered == []
    finally:
        prometheus.terminate()
        prometheus.wait()
        cluster.down()
