"""A host of its own: systemd booted in a container on an overlay of this host's root."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

from nodeagent.cgroups import find, remove

ROOT = Path(__file__).parents[2]
CGROUP = Path("/sys/fs/cgroup/systemd")
BOOT_S = 120.0
BOOT = """#!/bin/sh
# A container may not bound anything by groups of version 1 where nobody lets it.
for controller in memory pids; do
    mount -o remount,bind,rw /sys/fs/cgroup/$controller 2>/dev/null
done
exec /lib/systemd/systemd systemd.unit=multi-user.target
"""
PACKAGES = ("schemas", "controlplane", "nodeagent", "elastic", "bin", "docs", "README.md")


class Box:
    """One booted container without network but loopback; the software is in `prefix`."""

    def __init__(self, base: Path, name: str, prefix: str = "/opt/ones") -> None:
        self.base = base
        self.root = base / "root"
        self.name = name
        self.prefix = prefix
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._leader = 0
        bounding = [tree.base for tree in find() if not tree.unified]
        self._cgroups = [path / name for path in (CGROUP, *bounding)]

    def __enter__(self) -> Self:
        layers = self.base / "layers"
        for path in (layers, self.root):
            path.mkdir()
        _run("mount", "-t", "tmpfs", "tmpfs", str(layers))
        self._lay(Path("/"), "root", self.root)
        try:
            self._prepare()
            self._boot()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _lay(self, lower: Path, name: str, over: Path) -> None:
        """Show a folder at another place, where it can be changed and stays as it is."""
        upper, work = (self.base / "layers" / f"{name}-{part}" for part in ("upper", "work"))
        for path in (upper, work):
            path.mkdir()
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        _run("mount", "-t", "overlay", "overlay", "-o", options, str(over))

    def _prepare(self) -> None:
        (self.root / "etc/machine-id").write_text(uuid.uuid4().hex + "\n")
        for wants in self.root.glob("etc/systemd/system/*.wants/*.service"):
            wants.unlink()
        target = self.root / self.prefix.lstrip("/")
        target.mkdir(parents=True)
        for name in PACKAGES:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, target / name)
        # A virtual environment as `python3 -m venv` makes it, filled with what is installed here.
        python = Path(sys.executable).resolve()
        prefix = Path(sys.base_prefix)
        shutil.copytree(prefix, target / "python", symlinks=True, ignore=_no_packages)
        own = target / "python/bin" / python.name
        _run("chroot", str(self.root), f"{self.prefix}/python/bin/{own.name}", "-m", "venv",
             "--without-pip", f"{self.prefix}/.venv")  # fmt: skip
        packages = Path(sysconfig.get_path("purelib"))
        inside = target / f".venv/lib/{packages.parent.name}/site-packages"
        self._lay(packages, "packages", inside)
        for editable in inside.glob("*ones*.pth"):
            editable.write_text(f"{self.prefix}\n")
        for program, module in (
            ("ones", "controlplane.cli.main"),
            ("ones-controller", "controlplane.service.__main__"),
            ("ones-agent", "nodeagent.__main__"),
        ):
            script = target / ".venv/bin" / program
            script.write_text(
                f"#!{self.prefix}/.venv/bin/python\nfrom {module} import main\nmain()\n"
            )
            script.chmod(0o755)

    def _boot(self) -> None:
        for cgroup in self._cgroups:
            with contextlib.suppress(OSError):
                cgroup.mkdir(exist_ok=True)
        enter = "".join(f"echo $$ > {path}/cgroup.procs 2>/dev/null; " for path in self._cgroups)
        (self.root / "sbin/boot-box").write_text(BOOT)
        (self.root / "sbin/boot-box").chmod(0o755)
        command = (
            f"{enter} exec systemd-nspawn --quiet "
            f"--register=no --keep-unit -D {self.root} --machine={self.name} "
            "--kill-signal=SIGRTMIN+3 --private-network --console=pipe /sbin/boot-box"
        )
        with (self.base / "boot.log").open("wb") as log:
            self._nspawn = subprocess.Popen(
                ["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + BOOT_S
        while not self._is_up():
            assert self._nspawn.poll() is None, (self.base / "boot.log").read_text()
            assert time.monotonic() < deadline, "the box did not boot"

    def _is_up(self) -> bool:
        found = subprocess.run(
            ["pgrep", "-P", str(self._nspawn.pid)], capture_output=True, text=True, check=False
        )
        if not found.stdout.split():
            return False
        self._leader = int(found.stdout.split()[0])
        done = self.run("systemctl", "is-system-running", check=False)
        return done.stdout.strip() in {"running", "degraded"}

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command inside."""
        done = subprocess.run(
            ["nsenter", "-t", str(self._leader), "-a", *command], capture_output=True, text=True,
            check=False, timeout=240,
        )  # fmt: skip
        if check and done.returncode:
            said = self.run("journalctl", "-n", "60", "--no-pager", "-o", "cat", check=False).stdout
            raise AssertionError(f"{command}: {done.stdout}{done.stderr}\n{said}")
        return done

    def write(self, path: str, text: str) -> None:
        """Write a file inside."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def journal(self, unit: str) -> str:
        """What a unit wrote."""
        return self.run("journalctl", "-u", unit, "--no-pager", "-o", "cat", check=False).stdout

    def _end(self) -> None:
        if self._nspawn is not None:
            self._nspawn.send_signal(signal.SIGTERM)
            try:
                self._nspawn.wait(20)
            except subprocess.TimeoutExpired:
                self._nspawn.kill()
                self._nspawn.wait()
        for path in (self.root, self.base / "layers"):
            subprocess.run(["umount", "-l", str(path)], check=False)
        for cgroup in self._cgroups:
            remove(cgroup)


def _no_packages(_folder: str, names: list[str]) -> set[str]:
    return {name for name in names if name in {"site-packages", "test", "__pycache__"}}


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
