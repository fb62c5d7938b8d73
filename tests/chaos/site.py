"""A whole cluster on hosts of its own: real controller, agents, search and workers, each host a
namespace, a disk of its own and a clock that can be set."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from controlplane.journal.backup import back_up, restore
from nodeagent import cgroups
from nodeagent.job_cgroups import JobGroups
from schemas.transport.keys import write_keys
from schemas.wire.worker import ZYGOTE_TITLE
from tests.chaos.network import Network
from tests.support.file_trees import opened

CONTROL: Final = "control"
USER: Final = "user"
DISK_BYTES: Final = 256 << 20
PASSABLE, OPEN = 0o711, 0o1777  # jobs with uids of their own reach their folders, and write records
PORTS: Final = {"agents": 7701, "clients": 7702}
MODULES: Final = {"controller": "controlplane.service", "agent": "nodeagent"}
ROOT: Final = Path(__file__).parents[2]
ANNOUNCED: Final = 'ctx.announce("worker.ready", job, place(worker))'  # not by the other build
FAKETIME: Final = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)


@dataclass
class Host:
    """One machine: a folder on a disk of its own, and the daemon that lives there."""

    name: str
    folder: Path
    role: str  # controller, agent
    process: subprocess.Popen[bytes] | None = None
    filler: Path = field(init=False)

    def __post_init__(self) -> None:
        self.filler = self.folder / "filler"

    @property
    def settings(self) -> Path:
        return self.folder / f"{self.role}.toml"

    @property
    def pid(self) -> int | None:
        """Of its daemon, while it runs."""
        running = self.process is not None and self.process.poll() is None
        return self.process.pid if running and self.process else None


class Site:
    """Makes and unmakes everything; a context manager. Needs root.

    `control` has the controller, `node-N` agents of two slots, and `user` those who submit. Nodes share
    one folder of checkpoints, as they would a file server.
    """

    def __init__(
        self,
        base: Path,
        seed: int,
        *,
        nodes: int,
        slots: int,
        policy: str,
        fence_s: float = 0.0,
        own_uids: bool = False,
    ) -> None:
        self.base = base
        self.network = Network((CONTROL, *(f"node-{n + 1}" for n in range(nodes)), USER), seed)
        self.nodes = tuple(f"node-{n + 1}" for n in range(nodes))
        self.hosts = {
            name: Host(name, base / name, "controller" if name == CONTROL else "agent")
            for name in (CONTROL, *self.nodes)
        }
        self.home = base / "home"
        self.records = base / "records"
        self.compiled = base / "compiled"  # by torch
        self._slots, self._policy, self._fence_s = slots, policy, fence_s
        self._own_uids = own_uids
        self._lives = itertools.count()
        self.build = 0  # of the controller
        base.chmod(PASSABLE)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for host in self.hosts.values():
                stack.enter_context(_disk(host.folder))
            stack.enter_context(_disk(self.base / "shared"))
            stack.enter_context(self.network)
            stack.callback(self._end_everything)
            stack.enter_context(_disk(self.base / "lids"))
            for folder in (self.home, self.records, self.compiled):
                folder.mkdir()
            for folder in (self.records, self.compiled):
                folder.chmod(OPEN)
            self._write_settings()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, name: str) -> None:
        """The daemon of a host, as its service manager would."""
        host = self.hosts[name]
        if host.pid is not None:
            return
        command = ["nsenter", f"--net={self.network.namespace(name)}"]
        if self._own_uids and host.role == "agent":
            command += opened(self.base / "lids" / str(next(self._lives)))
        command += [sys.executable, "-P", "-m", MODULES[host.role], "--config"]
        with contextlib.ExitStack() as stack:
            try:
                log = stack.enter_context((host.folder / "daemon.log").open("ab"))
            except OSError:  # no room for a file
                log = stack.enter_context(Path(os.devnull).open("ab"))
            host.process = subprocess.Popen(
                [*command, str(host.settings)], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd="/",
                env={
                    **os.environ, "TORCHINDUCTOR_CACHE_DIR": str(self.compiled),
                    **self._clock(name), **self._code(name),
                },
                start_new_session=True,
            )  # fmt: skip

    def change_build(self) -> None:
        """Let the controller's next process run the other one of two builds."""
        self.build = 1 - self.build
        folder = self.base / "builds" / str(self.build)
        if self.build and not folder.exists():
            for package in ("controlplane", "schemas"):
                shutil.copytree(
                    ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
                )
            version = folder / "schemas" / "__init__.py"
            version.write_text(version.read_text().replace('__version__ = "', '__version__ = "9.'))
            reports = folder / "controlplane" / "core" / "handlers" / "reports.py"
            text = reports.read_text()
            assert ANNOUNCED in text
            reports.write_text(text.replace(ANNOUNCED, f"pass  # {ANNOUNCED}"))

    def restore(self) -> None:
        """Put a copy of the stopped controller's journal in its place, as after a loss of the disk.

        Raises:
            JournalError: if there is no room for a copy.
        """
        journal = self.hosts[CONTROL].folder / "state" / "journal.sqlite"
        copy = self.base / "journal.copy"
        back_up(journal, copy, force=True)
        restore(copy, journal, force=True)

    def set_clock(self, name: str, ahead_s: float) -> None:
        """The wall clock of a host's daemon jumps; what counts up is left alone."""
        fresh = self.base / f"{name}.clock.new"
        fresh.write_text(f"{ahead_s:+.3f}\n")
        fresh.rename(self.base / f"{name}.clock")

    def fill(self, name: str) -> None:
        """Nothing fits on that host's disk any more."""
        host = self.hosts[name]
        with host.filler.open("ab") as file:
            size = os.statvfs(host.folder)
            with contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, size.f_bavail * size.f_frsize)
            with contextlib.suppress(OSError):
                while True:
                    os.write(file.fileno(), bytes(4096))

    def empty(self, name: str) -> None:
        """There is room again."""
        self.hosts[name].filler.unlink(missing_ok=True)

    def pids(self, name: str) -> list[int]:
        """Every process at a host."""
        space = self.network.namespace(name).name
        told = subprocess.run(
            ["ip", "netns", "pids", space], capture_output=True, text=True, check=True
        )
        return [int(word) for word in told.stdout.split()]

    def searches(self) -> list[int]:
        """The process of the policy."""
        return [p for p in self.pids(CONTROL) if _command(p).startswith("ones: search")]

    def zygotes(self, name: str) -> list[int]:
        """Those that fork workers at a node, not the workers."""
        every = {p: _parent(p) for p in self.pids(name) if _command(p).startswith(ZYGOTE_TITLE)}
        return [p for p, parent in every.items() if parent not in every]

    def workers(self, name: str) -> list[int]:
        """Processes that train at a node."""
        zygotes = self.zygotes(name)
        return [p for p in self.pids(name) if _parent(p) in zygotes]

    def sockets(self, name: str) -> list[Path]:
        """The sockets that lie in files at a node."""
        return sorted(path for path in (self.hosts[name].folder / "run").rglob("*.sock"))

    def logs(self, name: str) -> list[Path]:
        """What workers of a node have printed and nobody has shipped to its end."""
        return sorted((self.hosts[name].folder / "run" / "workers").glob("*/log"))

    def _code(self, name: str) -> dict[str, str]:
        if name != CONTROL or not self.build:
            return {}
        return {"PYTHONPATH": str(self.base / "builds" / str(self.build))}

    def _clock(self, name: str) -> dict[str, str]:
        if FAKETIME is None or name != CONTROL:
            return {}
        if not (self.base / f"{name}.clock").exists():
            self.set_clock(name, 0.0)
        return {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(self.base / f"{name}.clock"),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def _write_settings(self) -> None:
        keys = self.home / "keys"
        authorised = []
        write_keys(keys, "server")
        for name, role in (("admin", "admin"), *((node, "node") for node in self.nodes)):
            public = write_keys(keys, name).public.decode()
            authorised.append(f'[[key]]\npublic = "{public}"\nname = "{name}"\nrole = "{role}"\n')
        path = keys / "authorised.toml"
        path.write_text("\n".join(authorised))
        path.chmod(0o600)
        address = self.network.address(CONTROL)
        (self.home / "client.toml").write_text(f'endpoint = "tcp://{address}:7702"\n')
        self.hosts[CONTROL].settings.write_text(
            f'state = "state"\n[listen]\nhost = "{address}"\n'
            f'[keys]\nserver = "{keys}/server.key_secret"\nauthorised = "{path}"\n'
            f'[policy]\nname = "{self._policy}"\n[silence]\nsuspect_s = 1.5\nlost_s = 6.0\n'
        )
        jobs = 'run_as = "job"' if self._own_uids else "trust_each_other = true"
        for node in self.nodes:
            self.hosts[node].settings.write_text(
                f'node = "{node}"\naddress = "{self.network.address(node)}"\ndevices = "cpu"\n'
                f'slots = {self._slots}\nkey = "{keys}/{node}.key_secret"\n'
                f'checkpoints = "{self.base}/shared"\nkill_grace_s = 2.0\n'
                f"fence_s = {self._fence_s}\n"
                f'[controller]\nhost = "{address}"\nkey = "{keys}/server.key"\n'
                f"[jobs]\n{jobs}\n"
            )

    def _end_everything(self) -> None:
        for name in self.hosts:
            with contextlib.suppress(subprocess.CalledProcessError):
                for _ in range(3):  # a zygote may fork meanwhile
                    for pid in self.pids(name):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
        for host in self.hosts.values():
            if host.process is not None:
                host.process.kill()
                host.process.wait()
            JobGroups(cgroups.find(), host.folder / "run").end_everything()
        for memory in Path("/dev/shm").glob("*faketime_*"):  # noqa: S108 - of killed processes
            if not Path("/proc", memory.name.rpartition("_")[2]).exists():
                memory.unlink(missing_ok=True)


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True)
    options = f"size={DISK_BYTES},mode={PASSABLE:o}"
    _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))
    try:
        yield
    finally:
        _run("umount", "-l", str(folder))


def keep(site: Site, target: Path) -> None:
    """Copy what the hosts' disks hold, for a look afterwards."""
    for name, host in site.hosts.items():
        skip = shutil.ignore_patterns("filler", "*.sock", "*.lock")
        shutil.copytree(host.folder, target / name, ignore=skip, symlinks=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
