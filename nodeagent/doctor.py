"""Checks of `ones doctor` for a node: the settings, and what they need of this host."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from nodeagent import settings_check
from nodeagent.cgroups import MEMORY, PIDS, Hierarchy, find
from nodeagent.devices import (
    DRIVER,
    GPU_REMEDY,
    device_environment,
    driver_version,
    gpu_check,
    inventory,
    logged_xids,
)
from nodeagent.job_cgroups import GROUPS_NEEDED
from nodeagent.settings import AgentSettings, python_of
from nodeagent.settings_check import NAMELESS
from schemas import __version__
from schemas.errors import OnesError, install_hint
from schemas.host.checks import check_file
from schemas.host.findings import (
    Finding,
    clock_synchronised,
    error,
    ok,
    open_files,
    refusal,
    settings_findings,
    space,
    versions,
    warning,
)
from schemas.nodes import SlotSpec
from schemas.transport.handshake import REFUSED, handshake
from schemas.transport.keys import check_pair, load_public

MODULES: Final = ("prometheus_client", "uvloop")
TRIAL: Final = "elastic.connection_check"
TRIAL_LIMIT_S: Final = 180.0
KERNEL_LOG: Final = Path("/dev/kmsg")
LINE_BYTES: Final = 8192  # more than any line
UNIT_GROUP: Final = "/system.slice/ones-jobs.service"  # the unit of the agent names it
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - measured, not used
MIN_SHARED_BYTES: Final = 1 << 30


def diagnose(path: Path, daemon: psutil.Process | None = None) -> Iterator[Finding]:
    """Yield the findings for an agent's settings file on this host, and for its daemon if it runs.

    Raises:
        SettingsError: if the file cannot be read, or is not TOML.
    """
    yield versions("agent", MODULES)
    problems = settings_check.check(path)
    yield from settings_findings(problems)
    _, settings = check_file(AgentSettings, path, {"node": NAMELESS})
    slots: Sequence[SlotSpec] = ()
    if not any(problem.field.startswith("devices") for problem in problems):
        slots = inventory(settings).slots
        yield gpus(settings, slots)
    python = python_of(settings)
    if shutil.which(python) is not None:
        yield from trial_findings(python, try_groups(python, settings.address, slots), slots)
    if not any(problem.field in {"key", "controller.key"} for problem in problems):
        yield _controller(settings, path.parent)
    for name in ("run", "work", "checkpoints"):
        folder = path.parent / getattr(settings, name)
        yield from space(name, folder, settings.disk_reserve_bytes)
    yield (
        shared_memory(os.statvfs(SHARED_MEMORY))
        if SHARED_MEMORY.is_dir()
        else warning(
            "disk", f"{SHARED_MEMORY} is missing", "mount a tmpfs there: data loaders use it"
        )
    )
    group = settings.jobs.cgroup or (UNIT_GROUP if find(UNIT_GROUP) else "")
    yield limits(find(group), group)
    yield open_files(daemon)
    yield clock_synchronised()


def gpus(settings: AgentSettings, slots: Sequence[SlotSpec]) -> Finding:
    """Check the driver and the GPUs of the node's slots."""
    found = Counter(slot.model for slot in slots)
    text = ", ".join(f"{count} x {model}" for model, count in found.items())
    check = gpu_check(slots)
    if check is None:
        if settings.devices == "cpu" or not DRIVER.exists():
            return ok("gpus", f"none, {len(slots)} CPU slots")
        if find_spec("pynvml") is None:
            return error("gpus", "there is a driver, but pynvml is missing", install_hint("gpu"))
        return warning("gpus", "there is a driver, but it shows no GPU", "check nvidia-smi -L")
    what, _, remedy = check.problem(full=False).partition("; ")
    if what:
        return error("gpus", what.removeprefix("devices: "), remedy)
    if xids := logged_xids(_kernel_log()):
        words = ", ".join(f"Xid {xid} of {gpu}" for gpu, xid in xids.items())
        return warning("gpus", f"{text}; in the kernel's log: {words}", GPU_REMEDY)
    return ok("gpus", f"{text}; driver {driver_version()}")


def _kernel_log() -> Iterator[str]:
    """Yield the lines of the kernel's log, if this user may read it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:
                with contextlib.suppress(BrokenPipeError):  # this line was overwritten meanwhile
                    yield os.read(descriptor, LINE_BYTES).decode(errors="replace")
        finally:
            os.close(descriptor)


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `elastic.connection_check`."""

    python: str
    ones: str
    torch: str
    cuda: str
    nccl: str
    gpus: int
    groups: dict[str, dict[str, Any]]  # `seconds` or `error`, by backend


def try_groups(python: str, address: str, slots: Sequence[SlotSpec]) -> Trial | str:
    """Form groups of two processes with an interpreter; return why it cannot be tried, as text."""
    uuids = [slot.uuid for slot in slots if slot.uuid]
    environ = {**os.environ, **device_environment(*slots)}
    command = [python, "-P", "-m", TRIAL, address, *uuids[:2]]
    try:
        done = subprocess.run(  # noqa: S603 - the interpreter of the settings, our module
            command, capture_output=True, text=True, check=False, timeout=TRIAL_LIMIT_S,
            env=environ, cwd="/",
        )  # fmt: skip
        return msgspec.convert(json.loads(done.stdout.splitlines()[-1]), Trial)
    except subprocess.TimeoutExpired:
        return f"no result within {TRIAL_LIMIT_S:.0f} s"
    except OSError as why:
        return why.strerror or str(why)
    except (IndexError, ValueError):
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def trial_findings(python: str, trial: Trial | str, slots: Sequence[SlotSpec]) -> Iterator[Finding]:
    """Judge the interpreter of jobs, and the groups that it could form."""
    if isinstance(trial, str):
        yield error("torch", f"{python}: {trial}", install_hint("train", python))
        return
    build = f"CUDA {trial.cuda}, NCCL {trial.nccl}" if trial.cuda else "for the CPU"
    found = f"torch {trial.torch} {build}, Python {trial.python}, ONES {trial.ones} in {python}"
    wanted = sum(slot.kind == "gpu" for slot in slots)
    if wanted and not trial.cuda:
        yield error("torch", found, "install the build of torch for CUDA there")
    elif trial.ones != __version__:
        found += f"; the agent has {__version__}"
        yield warning(
            "torch", found, f"install this release there, {install_hint('train', python)}"
        )
    elif trial.gpus < min(wanted, 1):
        yield error("torch", f"{found}; it sees no GPU", "install a driver that fits this CUDA")
    else:
        yield ok("torch", found)
    for backend, result in trial.groups.items():
        if why := result.get("error"):
            remedy = "check `address` and the firewall of this host"
            if backend == "nccl":
                remedy = "run it with NCCL_DEBUG=INFO while no job uses the GPUs"
            yield error(backend, f"no group of two processes: {why}", remedy)
        else:
            seconds = result.get("seconds", 0.0)
            yield ok(backend, f"two processes formed a group and added numbers in {seconds} s")


def _controller(settings: AgentSettings, home: Path) -> Finding:
    """Check whether the halves of the node's key fit, and whether a controller admits it."""
    controller = settings.controller
    try:
        keys = check_pair(home / (settings.key or f"keys/{settings.node}.key_secret"))
        server_key = load_public(home / controller.key)
    except OnesError as why:
        return refusal("keys", why)
    answers = {
        host: handshake(address(host, controller.agents), server_key, keys)
        for host in controller.hosts
    }
    return admission(settings.node, answers, controller.agents)


def address(host: str, port: int) -> str:
    """Return the address of a port for ZeroMQ."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def admission(node: str, answers: dict[str, str], port: int) -> Finding:
    """Judge the handshakes with the controllers, of which one is active."""
    for host, why in answers.items():
        if not why:
            return ok("controller", f"{host}:{port} admits the key of {node}")
    found = "; ".join(f"{host}:{port}: {why}" for host, why in answers.items())
    if REFUSED in answers.values():
        return error("controller", found, f"`ones key add {node} --role node`, or authorised.toml")
    return error("controller", found, "start the controller, open the port, or compare server.key")


def shared_memory(status: os.statvfs_result) -> Finding:
    """Judge the size of /dev/shm, through which data loaders pass batches."""
    size = status.f_blocks * status.f_frsize
    found = f"{SHARED_MEMORY} has {size / 2**30:.1f} GiB"
    if size < MIN_SHARED_BYTES:
        remedy = "data loaders need more: mount it with size=50%, or use --shm-size of the engine"
        return warning("disk", found, remedy)
    return ok("disk", found)


def limits(trees: Sequence[Hierarchy], group: str) -> Finding:
    """Judge which limits of jobs the control groups of this host can enforce."""
    bounded = {name for tree in trees for name in tree.controllers}
    where = f"below {group or 'the group of this shell'}"
    if missing := [name for name in (MEMORY, PIDS) if name not in bounded]:
        found = f"no limits of {' and '.join(missing)} {where}"
        return warning("cgroups", found, GROUPS_NEEDED)
    return ok("cgroups", f"limits of {', '.join(sorted(bounded))} {where}")
