"""`ones local`: a complete cluster in one folder of one host."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from controlplane.cli.output import COMMON, Common, say
from controlplane.cli.progress import progress
from controlplane.client import BlockingClient, find_home
from controlplane.client.connection import home_folder
from controlplane.service.planner.policy_check import check_policy
from schemas.errors import MissingExtraError, OnesError, SettingsError, UnreachableError
from schemas.host.files import pid_of
from schemas.host.settings import read_toml
from schemas.transport.keys import write_keys

PORTS: Final = range(20_000, 32_000)  # below the kernel's range for outgoing connections
ROLES: Final = ("events", "agents", "clients", "feed", "shippers", "followers", "metrics")
DIR_HELP: Final = "folder of the cluster (default: $ONES_HOME, else ~/.ones)"
DEFAULT_POLICY: Final = "ones"
AUTOSCALER_FILE: Final = "autoscaler.toml"
PAGE_PID_FILE: Final = "web.pid"  # in `run`, of `ones web`
REQUIRED_BYTES: Final = 128 << 20  # on disk; an agent refuses work with less than half of this
DISK_FULL_HINT: Final = "free disk space, or choose another --dir"
READY_S: Final = 60.0
STOP_S: Final = 15.0
POLL_S: Final = 0.05  # between two checks of the processes


class OtherClusterError(OnesError):
    """The settings of the existing cluster differ from the requested ones."""

    code = "other_cluster"


@dataclass(frozen=True, slots=True)
class Part:
    """One daemon of the cluster in a folder."""

    name: str
    module: str
    config: Path
    pid_file: Path

    @property
    def log(self) -> Path:
        """File of its output."""
        return self.config.parent / "logs" / f"{self.name}.log"

    def pid(self) -> int | None:
        """Return the process id, which is 0 if unknown, or None if the process does not run."""
        if (pid := pid_of(self.pid_file)) is not None:
            return pid
        # Older releases did not lock the file.
        with contextlib.suppress(OSError, ValueError):
            pid = int(self.pid_file.read_text(encoding="ascii"))
            return pid if self.is_named_in(_command(pid)) else None
        return None

    def is_named_in(self, command: bytes) -> bool:
        """True if a command line has the path of its settings."""
        paths = (self.config, self.config.resolve())  # a daemon's title has the resolved path
        return any(str(path).encode() in command for path in paths)

    def start(self) -> subprocess.Popen[bytes]:
        """Start the daemon in a session of its own."""
        with self.log.open("ab") as log:
            return subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-P", "-m", self.module, "--config", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )


def up(
    *,
    dir_: Annotated[Path | None, Parameter(name="--dir", help=DIR_HELP)] = None,
    slots: Annotated[
        int | None,
        Parameter(help="CPU slots of each agent (default: one slot per GPU, else 4 CPU slots)"),
    ] = None,
    agents: Annotated[int, Parameter(help="number of agents, all on this host")] = 1,
    policy: Annotated[str | None, Parameter(help="scheduling policy (default: ones)")] = None,
    common: Common = COMMON,
) -> None:
    """Start the cluster's processes that are not running; create the cluster if it is missing."""
    for name, count in (("slots", slots), ("agents", agents)):
        if count is not None and count < 1:
            raise SettingsError(f"{name}: {count} is below 1", "give 1 or more", name)
    for package in ("scipy", "uvloop"):  # the daemons would fail one after the other
        if find_spec(package) is None:
            raise MissingExtraError("a cluster on this host", package, "local")
    home = home_folder(dir_ or common.home).resolve()
    if policy is not None and not (home / "client.toml").exists():
        check_policy(policy, {})
    try:
        with progress(common.output, "starting the cluster"):
            pids = _bring_up(home, slots, agents, policy)
    except OSError as error:
        where = error.filename or home
        problem = f"{where}: {error.strerror}"
        raise SettingsError(problem, _remedy(error, home), "dir") from None
    endpoint = find_home(home).endpoint
    summary: dict[str, Any] = {
        "dir": str(home),
        "endpoint": endpoint,
        "pids": {
            "controller": pids["controller"],
            "agents": [pid for name, pid in pids.items() if name != "controller"],
        },
    }
    lines = [f"cluster in {home} is up at {endpoint}", f"export ONES_HOME={home}"]
    say(common, summary, *lines, quiet=lines)


def _bring_up(
    home: Path, slots: int | None, agents: int, policy: str | None
) -> dict[str, int | None]:
    parts = parts_of(home)
    if not (home / "client.toml").exists() or any(part.pid() is None for part in parts):
        _require_disk_space(home)
    with lock(home):
        if not (home / "client.toml").exists():
            _create(home, slots, agents, policy or DEFAULT_POLICY)
        else:
            _require_same_settings(home, slots, agents, policy)
        parts = parts_of(home)
        _refuse_shared_pid_files(parts)
        started = {part.name: part.start() for part in parts if part.pid() is None}
        await_ready(home, parts, started)
        return {part.name: part.pid() or None for part in parts}


def _refuse_shared_pid_files(parts: Sequence[Part]) -> None:
    owners: dict[Path, Part] = {}
    for part in parts:
        owner = owners.setdefault(part.pid_file, part)
        if owner is not part:
            problem = f"{part.config}: pid_file: {part.pid_file} is also that of {owner.name}"
            remedy = "give each its own; `ones node template NAME` prints settings of a new node"
            raise SettingsError(problem, remedy, "pid_file")


def _require_disk_space(home: Path) -> None:
    folder = next(path for path in (home, *home.parents) if path.exists())
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if free < REQUIRED_BYTES:
        need = f"a cluster needs {REQUIRED_BYTES >> 20} MiB"
        problem = f"{home}: only {free >> 20} MiB free on its disk; {need}"
        raise SettingsError(problem, DISK_FULL_HINT, "dir")


def _remedy(error: OSError, home: Path) -> str:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return DISK_FULL_HINT
    return f"choose another --dir, or give {home} to {getpass.getuser()}"


def down(
    *,
    dir_: Annotated[Path | None, Parameter(name="--dir", help=DIR_HELP)] = None,
    common: Common = COMMON,
) -> None:
    """Stop the cluster in a folder and its workers; the next `ones local up` resumes the jobs."""
    home = home_folder(dir_ or common.home).resolve()
    if not (home / "controller.toml").exists():
        raise SettingsError(f"no cluster in {home}", "give the folder of `ones local up`", "dir")
    if (home / AUTOSCALER_FILE).exists():
        problem = f"the nodes of the cluster in {home} come from another engine"
        raise SettingsError(problem, f"`ones cluster down --dir {home}` returns them", "dir")
    with progress(common.output, "stopping the cluster"), lock(home):
        parts = parts_of(home)
        page = Part("web", "", home, home / "run" / PAGE_PID_FILE)
        left = [stop(part) for part in (*parts, page)] + [_end_workers(part) for part in parts[1:]]
    if any(left):
        problem = f"cluster in {home} is not down: {'; '.join(filter(None, left))}"
        raise SettingsError(problem, "resolve this, then run `ones local down` again")
    text = f"cluster in {home} is down"
    say(common, {"dir": str(home), "state": "down"}, text, quiet=[text])


@contextlib.contextmanager
def lock(home: Path) -> Iterator[None]:
    """Hold a file lock, so that only one `up` or `down` runs at a time."""
    for name in ("", "run", "state", "logs", "keys"):
        (home / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(home / "run" / "local.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def parts_of(home: Path) -> list[Part]:
    """Return the daemons that the folder has settings of: controller, agents, autoscaler."""
    agents = sorted(home.glob("agent-*.toml"), key=lambda path: (len(path.stem), path.stem))
    parts = [
        (home / "controller.toml", "controlplane.service"),
        *((a, "nodeagent") for a in agents),
        *((a, "controlplane.autoscaler") for a in home.glob(AUTOSCALER_FILE)),
    ]
    return [Part(path.stem, module, path, _pid_file(path)) for path, module in parts]


def _pid_file(config: Path) -> Path:
    """Return the path of a part's pid file, or the default path if its settings cannot be read."""
    name = None
    with contextlib.suppress(SettingsError):
        name = read_toml(config).get("pid_file")
    usual = f"run/{config.stem}.pid"
    return config.parent / (name if name and isinstance(name, str) else usual)


def _create(home: Path, slots: int | None, agents: int, policy: str) -> None:
    nodes = [f"node-{n}" for n in range(1, agents + 1)]
    ports = create_controller(home, "127.0.0.1", policy, nodes)
    devices = f'devices = "cpu"\nslots = {slots}\n' if slots is not None else 'devices = "auto"\n'
    for number, node in enumerate(nodes, start=1):
        write_settings(
            home / f"agent-{number}.toml",
            f'node = "{node}"\n{devices}run = "run/{node}"\nwork = "state/work/{node}"\n'
            f'checkpoints = "state/checkpoints"\npid_file = "run/agent-{number}.pid"\n\n'
            f'[controller]\nhost = "127.0.0.1"\nagents = {ports["agents"]}\n',
        )


def create_controller(
    home: Path, host: str, policy: str = DEFAULT_POLICY, nodes: Sequence[str] = ()
) -> dict[str, int]:
    """Write settings of a controller at an address, with keys of an admin and of nodes.

    Return its ports by role.
    """
    keys = home / "keys"
    authorised = ["# authorised keys; read when the controller starts, and at a reload (SIGHUP)\n"]
    write_keys(keys, "server")
    for name, role in (("admin", "admin"), *((node, "node") for node in nodes)):
        public = write_keys(keys, name).public.decode()
        person = getpass.getuser() if role == "admin" else name
        authorised.append(f'[[key]]\npublic = "{public}"\nname = "{person}"\nrole = "{role}"\n')
    write_settings(keys / "authorised.toml", "\n".join(authorised))
    ports = dict(zip(ROLES, _free_ports(len(ROLES), host), strict=True))
    listen = "\n".join(f"{role} = {port}" for role, port in ports.items())
    write_settings(
        home / "controller.toml",
        f'state = "state"\npid_file = "run/controller.pid"\n\n'
        f'[listen]\nhost = "{host}"\n{listen}\n\n[policy]\nname = "{policy}"\n',
    )
    write_settings(home / "client.toml", f'endpoint = "tcp://{host}:{ports["clients"]}"\n')
    return ports


def _require_same_settings(home: Path, slots: int | None, agents: int, policy: str | None) -> None:
    made = sorted(home.glob("agent-*.toml"))
    own_slots = read_toml(made[0]).get("slots", "auto") if made else "auto"
    section = read_toml(home / "controller.toml").get("policy", {})
    own_policy = section.get("name", DEFAULT_POLICY) if isinstance(section, dict) else policy
    for name, asked, own, file in (
        ("slots", slots, own_slots, "agent-N.toml"),
        ("agents", None if agents == 1 else agents, len(made), "agent-N.toml"),
        ("policy", policy, own_policy, "controller.toml"),
    ):
        if asked not in {None, own}:
            problem = f"the cluster in {home} has {name} = {own}, not {asked}"
            hint = f"edit {file} and restart, or give another --dir"
            raise OtherClusterError(problem, hint, name)


def write_settings(path: Path, text: str) -> None:
    """Replace a file, which only its owner may read."""
    fresh = path.with_suffix(".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    fresh.rename(path)


def _free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return `count` free ports outside the range that the kernel uses for outgoing connections."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise SettingsError(f"no free ports on {host}", "stop other services")


def await_ready(
    home: Path, parts: Sequence[Part], started: Mapping[str, subprocess.Popen[bytes]]
) -> None:
    """Wait until all parts run, the controller replies and the agents have joined.

    Raises:
        UnreachableError: if a part ends, or this takes too long.
    """
    agents = sum(part.module == "nodeagent" for part in parts)
    deadline = time.monotonic() + READY_S
    why = ""
    while time.monotonic() < deadline:
        for part in parts:
            process = started.get(part.name)
            if process is not None and process.poll() is not None:
                said = part.log.read_text(encoding="utf-8", errors="replace").splitlines()
                raise UnreachableError(f"{part.name} did not start: {said[-1] if said else ''}")
        if all(part.pid() is not None for part in parts):
            try:
                with BlockingClient(home, timeout=2.0) as client:
                    nodes = client.nodes()
            except OnesError as error:
                why = error.message
            else:
                up_now = sum(node.state in {"up", "unhealthy"} for node in nodes)
                if up_now >= agents:
                    for node in nodes:
                        if node.state == "unhealthy":
                            text = f"ones: {node.node} accepts no work: {node.reason}\n"
                            sys.stderr.write(text)
                    return
                why = f"{up_now} of {agents} agents have joined"
        time.sleep(POLL_S)
    raise UnreachableError(f"not ready after {READY_S:.0f} s: {why}", f"see {home / 'logs'}")


def stop(part: Part) -> str:
    """Stop a part of the cluster; return the reason if this fails, else ""."""
    pid, number, deadline = None, int(signal.SIGTERM), time.monotonic() + STOP_S
    try:
        while (pid := part.pid()) is not None:
            command = _command(pid)  # empty while the process exits
            if pid <= 0:
                return f"{part.pid_file} is locked by a process that cannot be identified"
            if command and not part.is_named_in(command):
                return f"{part.pid_file} is locked by process {pid}, which is not {part.name}"
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number if command else 0)
            number = signal.SIGKILL if time.monotonic() > deadline else 0
            time.sleep(POLL_S)
    except PermissionError:
        return f"{part.name}{f', process {pid},' if pid else ''} belongs to another user"
    return ""


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _end_workers(agent: Part) -> str:
    """Stop the workers of an agent; return the reason if some may still run, else ""."""
    command = [sys.executable, "-P", "-m", agent.module, "--config", str(agent.config)]
    done = subprocess.run(  # noqa: S603 - our own interpreter and module
        [*command, "--end-workers"], capture_output=True, text=True, check=False, cwd="/"
    )
    said = done.stderr.strip().rpartition("\n")[2].removeprefix("ones-agent: ")
    return f"workers of {agent.name} may be left ({said})" if done.returncode else ""
