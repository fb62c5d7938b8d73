"""The manifests of `deploy/kubernetes`: rendered by kustomize, and run by podman as a kubelet would.

A `Host` starts the containers of a pod's template with its commands, variables, volumes and security
context. It knows what these manifests use and nothing else, and raises an error at the rest. An
`ApiServer` is a real one without hosts.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import yaml

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "deploy" / "kubernetes"
COMPONENTS: Final = sorted(path.name for path in (FOLDER / "components").iterdir())
CACHE: Final = Path.home() / ".cache" / "ones-kubernetes"  # of `bin/check-kubernetes`
INIT_TRIES: Final = 10
WAIT_S: Final = 120.0
LIMITS: Final = ("--ulimit=nofile=10000:10000", "--ulimit=nproc=10000:10000")  # no higher than here
Object = dict[str, Any]


def render(folder: Path, components: Iterable[str] = (), **more: object) -> list[Object]:
    """Return the objects of the base with these components, by `kubectl kustomize`.

    `more` are further keys of the kustomization that is written into `folder`.
    """
    inside = lambda path: os.path.relpath(path, folder)  # noqa: E731 - kustomize takes no absolute paths
    text = {
        "resources": [inside(FOLDER / "base")],
        "components": [inside(FOLDER / "components" / name) for name in components],
        **more,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    words = ["kubectl", "kustomize", str(folder), "--load-restrictor=LoadRestrictionsNone"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # deprecations
    return list(yaml.safe_load_all(done.stdout))


def one(objects: Iterable[Object], kind: str, name: str) -> Object:
    """Return the object of this kind and name."""
    (found,) = [
        each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return found


def secret(name: str, files: Mapping[str, str]) -> Object:
    """Return a Secret with these files, as `kubectl create secret generic` makes it."""
    data = {file: base64.b64encode(text.encode()).decode() for file, text in files.items()}
    return {"kind": "Secret", "metadata": {"name": name}, "data": data}


@dataclass
class Pod:
    """Running containers of a pod, by name."""

    name: str
    containers: dict[str, str]


@dataclass
class Host:
    """Host that runs pods of rendered manifests with podman, on the network of this machine.

    Attributes:
        folder: of its volumes.
        name: `spec.nodeName` of its pods.
        address: `status.podIP` of its pods, on loopback.
    """

    folder: Path
    name: str
    address: str
    objects: list[Object]
    names: Mapping[str, str] = field(default_factory=dict)  # addresses by host name, as of DNS

    def start(self, pod: str, template: Object) -> Pod:
        """Run the init containers of a pod one after the other, then start its containers."""
        spec = template["spec"]
        folder = self.folder / pod
        volumes = {one["name"]: self._volume(folder, one, spec) for one in spec["volumes"]}
        for claim in template.get("claims", ()):
            volumes[claim] = self._made(self.folder / "claims" / claim, spec)
        for each in spec.get("initContainers", ()):
            words = ("run", "--rm", *self._options(f"{pod}-{each['name']}", each, spec, volumes))
            for _ in range(INIT_TRIES):  # the controller may start at the same time
                if podman(*words, check=False).returncode == 0:
                    break
            else:
                podman(*words)
        started = Pod(pod, {})
        for each in spec["containers"]:
            name = f"{pod}-{each['name']}"
            podman("run", "--detach", *self._options(name, each, spec, volumes))
            started.containers[each["name"]] = name
        return started

    def end(self, pod: Pod, grace_s: int) -> None:
        """End a pod: TERM, KILL after the grace period, and the loss of its volumes."""
        for name in pod.containers.values():
            podman("stop", "--time", str(grace_s), name, check=False)
            podman("rm", "--force", name, check=False)
        shutil.rmtree(self.folder / pod.name)

    def _volume(self, folder: Path, volume: Object, spec: Object) -> Path:
        path = folder / volume["name"]
        (kind,) = volume.keys() - {"name"}
        match kind, volume[kind]:
            case "emptyDir", _:
                return self._made(path, spec)
            case "persistentVolumeClaim", {"claimName": claim}:
                return self._made(self.folder.parent / "claims" / claim, spec)
            case (("configMap" | "secret"), source):
                return self._files(path, [{kind: source}], 0o644, spec)
            case "projected", {"sources": sources, "defaultMode": mode}:
                return self._files(path, sources, mode, spec)
        raise NotImplementedError(volume)

    def _files(self, path: Path, sources: list[Object], mode: int, spec: Object) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        for source in sources:
            ((kind, which),) = source.items()
            name = which.get("secretName") or which["name"]
            wanted = {"configMap": "ConfigMap", "secret": "Secret"}[kind]
            for file, text in one(self.objects, wanted, name).get("data", {}).items():
                data = base64.b64decode(text) if wanted == "Secret" else text.encode()
                (path / file).write_bytes(data)
                (path / file).chmod(which.get("defaultMode", mode))
                os.chown(path / file, 0, spec["securityContext"].get("fsGroup", 0))
        path.chmod(0o755)
        return path

    def _made(self, path: Path, spec: Object) -> Path:
        """Make a folder with the mode of an emptyDir, and the group of the pod."""
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o2777 if "fsGroup" in spec["securityContext"] else 0o777)
        os.chown(path, 0, spec["securityContext"].get("fsGroup", 0))
        return path

    def _options(
        self, name: str, container: Object, spec: Object, volumes: Mapping[str, Path]
    ) -> list[str]:
        """Return the words of `podman run` after its own options: those of the container."""
        context = spec["securityContext"] | container["securityContext"]
        groups = [f"--group-add={context['fsGroup']}"] if "fsGroup" in context else []
        words = [
            f"--name={name}", "--pull=never", "--network=host", "--cgroups=no-conmon", *LIMITS, *groups,
            f"--hostname={name}", f"--user={context['runAsUser']}:{context['runAsGroup']}",
            *(f"--add-host={host}:{address}" for host, address in self.names.items()),
        ]  # fmt: skip
        words += [
            f"--cap-{do}={each}"
            for do in ("drop", "add")
            for each in context["capabilities"].get(do, ())
        ]
        words += (
            ["--security-opt=no-new-privileges"]
            if context["allowPrivilegeEscalation"] is False
            else []
        )
        words += (
            ["--read-only", "--read-only-tmpfs=false"] if context["readOnlyRootFilesystem"] else []
        )
        words += [f"--env={key}={value}" for key, value in self.environ(container).items()]
        for mount in container["volumeMounts"]:
            source = volumes[mount["name"]] / mount.get("subPath", "")
            if not source.exists():
                self._made(source, spec)
            how = "ro" if mount.get("readOnly") else "rw"
            words.append(f"--volume={source}:{mount['mountPath']}:{how}")
        command = [*container["command"], *container.get("args", ())]
        return [*words, container["image"], *command]

    def environ(self, container: Object) -> dict[str, str]:
        """Return the variables of a container on this host."""
        known: dict[str, str] = {}
        for variable in container.get("env", ()):
            known[variable["name"]] = self._value(variable, known)
        return known

    def _value(self, variable: Object, known: Mapping[str, str]) -> str:
        if "valueFrom" in variable:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            return {"spec.nodeName": self.name, "status.podIP": self.address}[path]
        text = str(variable["value"])
        for key, value in known.items():
            text = text.replace(f"$({key})", value)
        return text


def podman(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run podman on the images of `bin/check-kubernetes`, with its output as text."""
    own = ["--root", str(CACHE / "images"), "--cgroup-manager=cgroupfs", "--runtime=runc"]
    done = subprocess.run(["podman", *own, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, f"{words}\n{done.stdout}\n{done.stderr}"
    return done


class ApiServer:
    """API server on loopback, with etcd, the controllers that these manifests need, and a scheduler.

    Hosts are objects without a kubelet: pods are created and placed, but no container is started.
    """

    CONTROLLERS: Final = (
        "daemonset,statefulset,deployment,replicaset,disruption,persistentvolume-binder"
    )

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []
        self.config = folder / "config"

    def __enter__(self) -> Self:
        """Start everything, and wait until the server is ready."""
        etcd, peer, port = free_port(), free_port(), free_port()
        store, member = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"
        key, tokens = self._folder / "account.key", self._folder / "tokens"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        tokens.write_text("token,admin,1,system:masters\n")
        user = {
            "cluster": {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
        }
        self.config.write_text(yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", **user}],
            "users": [{"name": "u", "user": {"token": "token"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }))  # fmt: skip
        self._start(
            "etcd", f"--data-dir={self._folder / 'etcd'}", "--name=one", f"--initial-cluster=one={member}",
            f"--listen-client-urls={store}", f"--advertise-client-urls={store}",
            f"--listen-peer-urls={member}", f"--initial-advertise-peer-urls={member}",
        )  # fmt: skip
        self._start(
            str(CACHE / "kube-apiserver"), f"--etcd-servers={store}", "--bind-address=127.0.0.1",
            f"--secure-port={port}", "--insecure-port=0", "--advertise-address=127.0.0.1",
            f"--cert-dir={self._folder}", f"--token-auth-file={tokens}", "--authorization-mode=RBAC",
            f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://ones.test", "--service-cluster-ip-range=10.96.0.0/16",
            "--endpoint-reconciler-type=none", "--disable-admission-plugins=ServiceAccount",
        )  # fmt: skip
        self.until(lambda: self.kubectl("get", "--raw", "/readyz", check=False).returncode == 0)
        own = (f"--kubeconfig={self.config}", "--leader-elect=false", "--port=0")
        self._start(
            str(CACHE / "kube-controller-manager"), *own, "--secure-port=0",
            f"--controllers={self.CONTROLLERS}",
        )  # fmt: skip
        self._start(str(CACHE / "kube-scheduler"), *own, "--secure-port=0")
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes."""
        for process in reversed(self._started):
            process.kill()
            process.wait()

    def kubectl(
        self, *words: str, text: str = "", check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl against this server, with `text` as its input."""
        done = subprocess.run(
            ["kubectl", f"--kubeconfig={self.config}", "--namespace=ones", *words],
            input=text, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0 or not check, done.stderr
        return done

    def get(self, *words: str) -> Any:
        """Return what `kubectl get` shows, as an object."""
        return json.loads(self.kubectl("get", *words, "-o", "json").stdout)

    def add_host(self, name: str, gpus: int, **labels: str) -> None:
        """Add a ready host with labels and GPUs."""
        labels["kubernetes.io/hostname"] = name
        meta = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        size = {"cpu": "64", "memory": "512Gi", "pods": "100", "nvidia.com/gpu": str(gpus)}
        ready = {"type": "Ready", "status": "True"}
        status = {"status": {"capacity": size, "allocatable": size, "conditions": [ready]}}
        self.kubectl("create", "-f", "-", text=json.dumps(meta))
        words = ("patch", "node", name, "--subresource=status", "--type=merge", "-p")
        self.kubectl(*words, json.dumps(status))
        self.kubectl("taint", "node", name, "node.kubernetes.io/not-ready-", check=False)

    @staticmethod
    def until(holds: Callable[[], object]) -> None:
        """Wait for something, with a limit that only ends a hanging test."""
        end = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end, holds
            time.sleep(0.2)

    def _start(self, *words: str) -> None:
        log = (self._folder / f"{Path(words[0]).name}.log").open("wb")
        with log:
            self._started.append(subprocess.Popen(words, stdout=log, stderr=log))


def free_port() -> int:
    """Return a port of loopback that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
