"""The manifests of deploy/kubernetes: they agree with the settings, and clusters accept and run them.

`bin/check-kubernetes` builds what the tests of an API server and of the image need.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import psutil
import pytest
import yaml

from controlplane.client import BlockingClient, JobSpec
from controlplane.service import settings as controller
from nodeagent.app import TERM_MARGIN_S
from nodeagent.settings import AgentSettings
from schemas.host import settings
from schemas.transport.keys import write_keys
from tests.support import kubernetes
from tests.support.kubernetes import CACHE, COMPONENTS, FOLDER, ROOT, Host, Object, Pod, one, podman

BASE: Final = FOLDER / "base"
NODE: Final = "host-1"
LISTEN: Final = controller.Listen()
OF_AGENTS: Final = {"events", "agents", "clients", "shippers", "metrics"}
RELEASES: Final = (
    "1.25",
    "1.30",
    "1.37",
)  # oldest and newest whose schemas are published, one between
ALL: Final = [
    chosen
    for count in range(len(COMPONENTS) + 1)
    for chosen in itertools.combinations(COMPONENTS, count)
]
AGENT_USER: Final = 10001  # of the image


def objects() -> list[Object]:
    """The objects of the base, before kustomize."""
    files = [
        BASE / name
        for name in yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    ]
    return [each for file in files for each in yaml.safe_load_all(file.read_text())]


def template(kind: str, name: str) -> Object:
    """The pod of an object of the base."""
    found: Object = one(objects(), kind, name)["spec"]["template"]["spec"]
    return found


CONTROLLER: Final = template("StatefulSet", "ones-controller")
AGENT: Final = template("DaemonSet", "ones-agent")


def environ(pod: Object) -> dict[str, str]:
    """The variables of a pod's container."""
    return Host(Path(), NODE, "10.0.0.1", []).environ(pod["containers"][0])


def agent_settings() -> AgentSettings:
    return settings.load(AgentSettings, BASE / "agent.toml", environ(AGENT))


def controller_settings() -> controller.ControllerSettings:
    return settings.load(
        controller.ControllerSettings, BASE / "controller.toml", environ(CONTROLLER)
    )


def mounted(container: Object) -> list[str]:
    """The folders of a container that are not of the image."""
    return [mount["mountPath"] for mount in container["volumeMounts"]]


# --- the manifests against the code


def test_the_agent_of_a_pod_has_the_name_of_its_host_and_its_own_key() -> None:
    found, client = agent_settings(), settings.read_toml(BASE / "client.toml")
    (init,) = AGENT["initContainers"]

    join = Path(client["key"]).stem
    assert (found.node, found.address) == (f"{join}-{NODE}", "10.0.0.1")  # as the join key demands
    assert (
        f'key add "$ONES__NODE" --role node --out {Path(found.key).parents[1]}' in init["args"][0]
    )
    assert Path(found.key).name == f"{found.node}.key_secret"
    assert init["env"] == AGENT["containers"][0]["env"]


def test_jobs_do_not_see_the_join_key() -> None:
    assert "/join" in mounted(AGENT["initContainers"][0])
    assert "/join" not in mounted(AGENT["containers"][0])


@pytest.mark.parametrize("pod", [CONTROLLER, AGENT], ids=["controller", "agent"])
def test_what_a_daemon_writes_lies_in_a_volume(pod: Object) -> None:
    (container,) = pod["containers"]
    found = agent_settings() if pod is AGENT else controller_settings()
    paths = (
        [found.run, found.work, found.checkpoints, found.key, found.controller.key]
        if isinstance(found, AgentSettings)
        else [found.state, found.keys.server, found.keys.authorised]
    )

    inside = [
        any(Path(path).is_relative_to(folder) for folder in mounted(container)) for path in paths
    ]
    assert all(inside), paths
    names = {volume["name"] for volume in pod["volumes"]} | {"state"}
    assert {mount["name"] for mount in container["volumeMounts"]} <= names


def test_ports_are_those_of_the_settings() -> None:
    known = {field: getattr(LISTEN, field) for field in LISTEN.__struct_fields__ if field != "host"}
    service = {
        port["name"]: port["port"]
        for port in one(objects(), "Service", "ones-controller")["spec"]["ports"]
    }
    opened = {port["name"]: port["containerPort"] for port in CONTROLLER["containers"][0]["ports"]}
    (metrics,) = AGENT["containers"][0]["ports"]
    client = settings.read_toml(BASE / "client.toml")["endpoint"]

    assert service == opened == known
    assert metrics["containerPort"] == agent_settings().metrics
    assert client == f"tcp://{agent_settings().controller.host}:{LISTEN.clients}"
    assert agent_settings().controller.agents == LISTEN.agents
    assert controller_settings().listen == msgspec.structs.replace(LISTEN, host="10.0.0.1")


def test_the_network_admits_agents_clients_and_scrapes_only() -> None:
    rules = one(objects(), "NetworkPolicy", "ones-controller")["spec"]["ingress"]
    admitted = [{port["port"] for port in rule["ports"]} for rule in rules]

    assert admitted == [
        {"events", "agents", "clients", "shippers"}, {"clients", "feed", "followers"}, {"metrics"},
    ]  # fmt: skip


def test_a_pod_has_the_time_in_which_its_jobs_move() -> None:
    found = agent_settings()

    wait_s = found.notice.on_term_s + found.kill_grace_s + TERM_MARGIN_S
    assert found.notice.on_term_s > 0
    assert AGENT["terminationGracePeriodSeconds"] > wait_s


def test_a_probe_ends_no_workers_that_the_controller_still_counts() -> None:
    probe = AGENT["containers"][0]["livenessProbe"]

    assert probe["periodSeconds"] * probe["failureThreshold"] > controller.Silence().lost_s


def test_the_agent_has_the_capabilities_of_its_unit() -> None:
    unit = (ROOT / "controlplane" / "cli" / "samples" / "ones-agent.service").read_text()
    bound = unit.partition("CapabilityBoundingSet=")[2].splitlines()[0]

    capabilities = AGENT["containers"][0]["securityContext"]["capabilities"]
    assert [f"CAP_{name}" for name in sorted(capabilities["add"])] == sorted(bound.split())
    assert agent_settings().jobs.run_as == "job"


@pytest.mark.parametrize("pod", [CONTROLLER, AGENT], ids=["controller", "agent"])
def test_a_pod_has_few_rights(pod: Object) -> None:
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod["initContainers"], *pod["containers"]]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"]["drop"] == ["ALL"]


def test_the_images_user_is_that_of_the_manifests() -> None:
    image = (ROOT / "deploy" / "Containerfile").read_text()

    assert f"\nUSER {AGENT_USER}\n" in image
    assert CONTROLLER["securityContext"]["runAsUser"] == AGENT_USER


# --- rendered, against the published schemas


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], list[Object]]:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    return {chosen: kubernetes.render(tmp_path_factory.mktemp("k"), chosen) for chosen in ALL}


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_the_schemas_of_kubernetes_accept_every_combination(
    rendered: dict[tuple[str, ...], list[Object]], release: str
) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate

    for found in rendered.values():
        for each in found:
            if not each["apiVersion"].startswith("kueue."):  # no schema in a package
                validate(each, release, strict=True)


@pytest.mark.slow
def test_the_schemas_refuse_a_misspelt_field(rendered: dict[tuple[str, ...], list[Object]]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    wrong = one(rendered[()], "DaemonSet", "ones-agent")
    wrong = wrong | {"spec": wrong["spec"] | {"nodeSelectors": {}}}

    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, RELEASES[-1], strict=True)


@pytest.mark.slow
def test_components_change_what_they_say(rendered: dict[tuple[str, ...], list[Object]]) -> None:
    for chosen, found in rendered.items():
        kind = "Deployment" if "kueue" in chosen else "DaemonSet"
        owner = one(found, kind, "ones-agent")
        pod = owner["spec"]["template"]
        (container,) = pod["spec"]["containers"]
        variables = Host(Path(), NODE, "10.0.0.1", []).environ(container)
        loaded = settings.load(AgentSettings, BASE / "agent.toml", variables)

        assert ("limits" in container["resources"]) is ("cpu" not in chosen)
        assert loaded.devices == ("cpu" if "cpu" in chosen else "auto")
        assert loaded.jobs.run_as == ("agent" if "one-user" in chosen else "job")
        assert loaded.jobs.trust_each_other is ("one-user" in chosen)
        assert pod["spec"]["securityContext"].get("runAsNonRoot", False) is ("one-user" in chosen)
        assert ("add" in container["securityContext"]["capabilities"]) is ("one-user" not in chosen)
        queued = [
            of["labels"].get("kueue.x-k8s.io/queue-name")
            for of in (owner["metadata"], pod["metadata"])
        ]
        assert queued == (["ones", "ones"] if "kueue" in chosen else [None, None])


@pytest.mark.slow
def test_the_kustomization_of_the_page_is_as_printed(
    rendered: dict[tuple[str, ...], list[Object]], tmp_path: Path
) -> None:
    assert rendered
    page = (ROOT / "docs" / "operations" / "kubernetes.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^ +```yaml\n(.*?)^ +```", page, re.MULTILINE | re.DOTALL)
    printed = yaml.safe_load(text)

    found = kubernetes.render(tmp_path, **{key: printed[key] for key in ("images", "patches")})

    (container,) = one(found, "DaemonSet", "ones-agent")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "REGISTRY/ones-agent:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert printed["resources"] == ["ones/deploy/kubernetes/base"]


# --- on a real API server


VOLUMES: Final = [
    {
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"disk-{mode.lower()}"},
        "spec": {"accessModes": [mode], "capacity": {"storage": "2Ti"}, "hostPath": {"path": "/nowhere"}},
    }
    for mode in ("ReadWriteOnce", "ReadWriteMany")
]  # fmt: skip


@pytest.fixture
def server(tmp_path: Path) -> Iterator[kubernetes.ApiServer]:
    if (
        not (CACHE / "kube-scheduler").exists()
        or not shutil.which("etcd")
        or not shutil.which("kubectl")
    ):
        pytest.skip("needs kubectl, etcd, and an API server of bin/check-kubernetes")
    with kubernetes.ApiServer(tmp_path) as started:
        for name in ("host-1", "host-2"):
            started.add_host(name, gpus=8, **{"ones-agent": "true"})
        started.add_host("host-3", gpus=8)
        started.kubectl("create", "-f", "-", text=yaml.safe_dump_all(VOLUMES))
        yield started


def apply(server: kubernetes.ApiServer, found: list[Object]) -> None:
    """Apply objects as an administrator does. The server is of release 1.20, before policy/v1."""
    known = [each for each in found if not each["apiVersion"].startswith("kueue.")]
    text = yaml.safe_dump_all(known).replace("policy/v1\n", "policy/v1beta1\n")
    server.kubectl("apply", "-f", "-", text=text)


def placed(server: kubernetes.ApiServer) -> dict[str, list[str]]:
    """The hosts of the placed pods, by the name of their application."""
    found: dict[str, list[str]] = {"ones-agent": [], "ones-controller": []}
    for pod in server.get("pods")["items"]:
        found[pod["metadata"]["labels"]["app.kubernetes.io/name"]].append(
            pod["spec"].get("nodeName", "")
        )
    return {name: sorted(hosts) for name, hosts in found.items()}


@pytest.mark.slow
@pytest.mark.root
def test_a_real_api_server_creates_and_places_the_pods(
    server: kubernetes.ApiServer, rendered: dict[tuple[str, ...], list[Object]]
) -> None:
    apply(server, rendered[()])
    server.until(lambda: placed(server)["ones-agent"] == ["host-1", "host-2"])
    server.until(lambda: placed(server)["ones-controller"] != [""])

    # A label adds a host.
    server.kubectl("label", "node", "host-3", "ones-agent=true")
    server.until(lambda: placed(server)["ones-agent"] == ["host-1", "host-2", "host-3"])

    # A second pod finds no GPU on a host that an agent has.
    other = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other", "labels": {"app.kubernetes.io/name": "ones-agent"}},
        "spec": {"containers": [{"name": "c", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]},
    }  # fmt: skip
    server.kubectl("create", "-f", "-", text=yaml.safe_dump(other))
    server.until(
        lambda: "Insufficient nvidia.com/gpu" in server.kubectl("describe", "pod", "other").stdout
    )
    server.kubectl("delete", "pod", "other", "--grace-period=0", "--force")

    # A changed image ends no worker: new pods come when somebody deletes the old ones.
    before = {pod["metadata"]["uid"] for pod in server.get("pods")["items"]}
    server.kubectl("set", "image", "daemonset/ones-agent", "agent=ones-agent:2")
    server.until(lambda: server.get("daemonset", "ones-agent")["status"]["observedGeneration"] == 2)
    assert before == {pod["metadata"]["uid"] for pod in server.get("pods")["items"]}


@pytest.mark.slow
@pytest.mark.root
def test_a_real_api_server_refuses_to_evict_the_controller(
    server: kubernetes.ApiServer, rendered: dict[tuple[str, ...], list[Object]]
) -> None:
    apply(server, rendered[()])
    server.until(lambda: placed(server)["ones-controller"])
    budget = lambda: server.get("poddisruptionbudget", "ones-controller").get("status", {})  # noqa: E731
    server.until(lambda: budget().get("expectedPods") == 1)

    assert (budget()["disruptionsAllowed"], budget()["desiredHealthy"]) == (0, 1)


@pytest.mark.slow
@pytest.mark.root
def test_a_real_api_server_places_the_pods_of_an_allocation_on_different_hosts(
    server: kubernetes.ApiServer, rendered: dict[tuple[str, ...], list[Object]]
) -> None:
    server.kubectl("label", "node", "host-3", "ones-agent=true")
    apply(server, rendered[("kueue",)])
    server.until(lambda: len(set(placed(server)["ones-agent"]) - {""}) == 2)

    server.kubectl("scale", "deployment/ones-agent", "--replicas=4")
    server.until(lambda: len(placed(server)["ones-agent"]) == 4)
    server.until(lambda: len(set(placed(server)["ones-agent"])) == 4)

    assert placed(server)["ones-agent"] == [
        "",
        "host-1",
        "host-2",
        "host-3",
    ]  # one waits for a host


# --- as running pods

SCRIPT: Final = """
import os, time, torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic import ScalingAgent
agent = ScalingAgent.from_env()
seen = [path for path in ("/join", "/run/ones/keys") if os.access(path, os.R_OK)]
print("uid", os.getuid(), "sees", seen, flush=True)
data = TensorDataset(torch.randn(512, 8), torch.randn(512, 1))
model, optimizer, loader = agent.load(
    lambda: nn.Linear(8, 1), lambda p: torch.optim.SGD(p, lr=0.01), data, batch_size=32, lr=0.01
)
for epoch in agent.epochs(1_000_000):
    for x, y in loader:
        time.sleep(0.05)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    agent.report()
"""
QUICK: Final = "\n[silence]\nsuspect_s = 3.0\nlost_s = 5.0\n"  # for a test of a lost node


class Pods:
    """A cluster of pods on this machine, each on a host of its own."""

    def __init__(self, folder: Path, *components: str) -> None:
        self.folder, keys = folder, folder / "home" / "keys"
        pairs = {name: write_keys(keys, name) for name in ("server", "k8s", "admin")}
        listed = "".join(
            f'[[key]]\npublic = "{pairs[name].public.decode()}"\nname = "{name}"\nrole = "{role}"\n'
            for name, role in (("k8s", "join"), ("admin", "admin"))
        )
        (folder / "home" / "client.toml").write_text('endpoint = "tcp://127.0.0.20:7702"\n')
        images = [
            {"name": name, "newName": f"localhost/{name}"}
            for name in ("ones-controller", "ones-agent")
        ]
        (folder / "o").mkdir()
        self.objects = kubernetes.render(folder / "o", ("cpu", *components), images=images)
        self.objects += [
            kubernetes.secret("ones-controller-keys", {
                "server.key_secret": (keys / "server.key_secret").read_text(), "authorised.toml": listed,
            }),
            kubernetes.secret("ones-join-key", {
                "k8s.key_secret": (keys / "k8s.key_secret").read_text(),
                "server.key": (keys / "server.key").read_text(),
            }),
        ]  # fmt: skip
        one(self.objects, "ConfigMap", "ones-controller")["data"]["controller.toml"] += QUICK
        self.started: list[tuple[Host, Pod]] = []
        owner = one(self.objects, "StatefulSet", "ones-controller")["spec"]
        claims = [claim["metadata"]["name"] for claim in owner["volumeClaimTemplates"]]
        self.start("ones-controller-0", 0, owner["template"] | {"claims": claims})
        self.client = BlockingClient(folder / "home")

    def start(self, pod: str, host: int, template: Object | None = None) -> Pod:
        """Start a pod on a host; by default an agent's."""
        folder = self.folder / f"host-{host}"
        names = {"ones-controller": "127.0.0.20"}
        where = Host(folder, f"host-{host}", f"127.0.0.{20 + host}", self.objects, names)
        template = template or one(self.objects, "DaemonSet", "ones-agent")["spec"]["template"]
        started = where.start(pod, template)
        self.started.append((where, started))
        return started

    def end(self, pod: Pod, grace_s: int = AGENT["terminationGracePeriodSeconds"]) -> None:
        (place,) = [each for each in self.started if each[1] is pod]
        self.started.remove(place)
        place[0].end(pod, grace_s)

    def close(self) -> None:
        self.client.close()
        for _, pod in reversed(list(self.started)):
            self.end(pod, 0)

    def nodes(self) -> dict[str, str]:
        """The nodes with their states."""
        return {node.node: node.state for node in self.client.nodes()}

    def until(self, holds: Callable[[], object]) -> None:
        kubernetes.ApiServer.until(holds)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that users of pods can pass through."""
    if shutil.which("podman") is None or not (CACHE / "images").exists():
        pytest.skip("needs podman, and the images of bin/check-kubernetes")
    for parent in tmp_path.parents:
        if not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    tmp_path.chmod(0o755)
    return tmp_path


@pytest.fixture
def pods(folder: Path) -> Iterator[Pods]:
    made = Pods(folder)
    yield made
    made.close()


def probe(host: int, path: str) -> str:
    """The answer of an agent's probe, and its status."""
    words = [
        "curl",
        "-s",
        "--noproxy",
        "*",
        "-w",
        " %{http_code}",
        f"http://127.0.0.{20 + host}:9465/{path}",
    ]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def main_process(pod: Pod) -> psutil.Process:
    """The first process of a pod."""
    (name,) = pod.containers.values()
    return psutil.Process(int(podman("inspect", "-f", "{{.State.Pid}}", name).stdout))


def agent_of(pod: Pod) -> psutil.Process:
    (found,) = [
        child for child in main_process(pod).children() if "ones: agent" in child.cmdline()[0]
    ]
    return found


def workers(pod: Pod) -> set[int]:
    return {
        child.pid for child in main_process(pod).children(recursive=True)
        if re.search(r"rank \d", " ".join(child.cmdline()))
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.root
def test_a_job_trains_in_pods_through_a_crash_of_an_agent_and_the_end_of_a_pod(
    pods: Pods, tmp_path: Path
) -> None:
    first, second = pods.start("ones-agent-a", 1), pods.start("ones-agent-b", 2)
    pods.until(lambda: pods.nodes() == {"k8s-host-1": "up", "k8s-host-2": "up"})
    work = tmp_path / "job"
    work.mkdir()
    (work / "train.py").write_text(SCRIPT)
    job = pods.client.submit(
        JobSpec(
            name="pods", script="train.py", workdir=str(work), batch_size=32, lr=0.01, slots=(6, 6)
        )
    )
    pods.until(lambda: len(workers(first) | workers(second)) == 6)
    pods.until(lambda: pods.client.job(job).summary.epoch > 1)

    # A job has an account of its own, and no key.
    uids = {psutil.Process(pid).uids().real for pid in workers(first)}
    assert len(uids) == 1
    assert 0 not in uids
    said = {line for line in pods.client.tail(job, follow=False) if line.startswith("uid")}
    assert said == {f"uid {uids.pop()} sees []"}

    # The agent crashes: its workers train on, and the next agent finds them.
    before, crashed = workers(first), agent_of(first).pid
    os.kill(crashed, 9)
    pods.until(lambda: not psutil.pid_exists(crashed))
    pods.until(lambda: probe(1, "readyz") == "ok\n 200")
    epoch = pods.client.job(job).summary.epoch
    pods.until(lambda: pods.client.job(job).summary.epoch > epoch)
    assert workers(first) == before

    # The pod ends: its jobs leave in time. A job of six slots waits for slots with its state.
    began = time.monotonic()
    pods.end(second)
    assert time.monotonic() - began < AGENT["terminationGracePeriodSeconds"] - 5
    assert pods.client.job(job).summary.state in {"paused", "queued"}
    epoch = pods.client.job(job).summary.epoch

    # It comes back on another host, which is another node.
    pods.start("ones-agent-c", 3)
    pods.until(lambda: pods.client.job(job).summary.epoch > epoch)
    pods.until(lambda: pods.nodes()["k8s-host-2"] == "lost")
    assert pods.nodes() == {"k8s-host-1": "up", "k8s-host-2": "lost", "k8s-host-3": "up"}
    pods.client.forget_node("k8s-host-2")
    pods.client.cancel(job)


@pytest.mark.slow
@pytest.mark.root
def test_a_pod_takes_over_the_name_of_its_host_and_no_other(pods: Pods) -> None:
    first = pods.start("ones-agent-a", 1)
    pods.until(lambda: probe(1, "readyz") == "ok\n 200")
    owner = one(pods.objects, "DaemonSet", "ones-agent")["spec"]["template"]

    # A second pod on the host, as after a forced deletion: the key of the first one ends.
    (init,) = owner["spec"]["initContainers"]
    other = owner | {"spec": owner["spec"] | {"containers": []}}
    pods.start("ones-agent-b", 1, other)
    pods.until(lambda: probe(1, "readyz").endswith(" 503"))
    assert probe(1, "healthz") == "ok\n 200"  # its workers are not ended for that
    pods.end(first, 0)
    pods.start("ones-agent-c", 1)
    pods.until(lambda: probe(1, "readyz") == "ok\n 200")

    # A pod with a name that the join key does not cover gets no key.
    init = init | {"env": [*init["env"], {"name": "ONES__NODE", "value": "host-1"}]}
    with pytest.raises(AssertionError, match="may only add keys of nodes"):
        pods.start("ones-agent-d", 2, {"spec": owner["spec"] | {"initContainers": [init]}})


@pytest.mark.slow
@pytest.mark.root
def test_an_agent_of_one_user_starts_without_root(folder: Path) -> None:
    pods = Pods(folder, "one-user")
    try:
        started = pods.start("ones-agent-a", 1)
        pods.until(lambda: probe(1, "readyz") == "ok\n 200")
        assert agent_of(started).uids().real == AGENT_USER
    finally:
        pods.close()
