"""Ray as the engine: each node is an actor that holds all CPUs and GPUs of one Ray node.

Ray's library runs in a process of its own, `controlplane.autoscaler.ray_driver`: Ray ends the
processes that use it when its head is gone, and handles their signals.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from controlplane.autoscaler.decision import Allocation
from controlplane.autoscaler.machine_script import machine_script
from controlplane.autoscaler.ray_driver import Call, Machine, Report
from controlplane.autoscaler.settings import AutoscalerSettings
from schemas.errors import OnesError

PREFIX: Final = "ray"
CALL_S: Final = 60.0  # limit of one call, which may have to connect
ID_DIGITS: Final = 12  # of Ray's 56, in names of nodes
HEAD: Final = """\
echo $$
exec 3<&0 < /dev/null >> {log} 2>&1
machine={machine} address={address} slots={slots} cores={cpus}
"""
# A line is an order to end with notice. The end of the input means that the actor is lost: Ray may
# give its CPUs and GPUs to others. (Ray kills children of a lost actor, but not theirs.)
AFTER: Final = """\
{
  while read -r _ <&3; do told=yes; kill -TERM $child; done
  [ "$told" ] || kill -TERM $child  # a second TERM would end it at once
  sleep 10; kill -KILL $child
} & watch=$!
trap 'kill $watch 2> /dev/null' EXIT
exec 3<&-
"""


class RayError(OnesError):
    """Raised when a call of Ray fails."""

    code = "ray"


class Ray:
    """Machines from Ray: its nodes, as far as nobody else uses their CPUs and GPUs."""

    prefix = PREFIX

    def __init__(self, settings: AutoscalerSettings, home: Path) -> None:
        self._settings = settings
        self._home = home
        self._driver: Process | None = None
        self._machines: tuple[Machine, ...] = ()
        self._excluded: set[str] = set()  # names of nodes that operators have drained

    async def allocations(self) -> list[Allocation]:
        """Return the nodes of Ray that have an actor of this cluster."""
        self._machines = (await self._call(Call(do="report"))).machines
        return [
            Allocation(id=one.id, note="its CPUs and GPUs are in use")
            if not one.started
            else Allocation(
                id=one.id, node=_node(one), ends_at=one.ends_at,
                leaves="Ray drains it" if one.drains else "",
            )
            for one in self._machines
            if one.held
        ]  # fmt: skip

    @property
    def most(self) -> int:
        """Number of nodes of Ray that have or may have an agent."""
        return sum(one.held and not one.drains for one in self._machines) + len(self._free())

    def _free(self) -> list[Machine]:
        return [
            one for one in self._machines
            if not one.held and not one.drains and _node(one) not in self._excluded
        ]  # fmt: skip

    async def request(self, count: int, exclude: Sequence[str]) -> None:
        """Start agents on `count` nodes of Ray that have none."""
        self._excluded |= set(exclude)
        for one in self._free()[:count]:
            short = one.id[:ID_DIGITS]
            head = HEAD.format(
                log=shlex.quote(f"{self._home}/logs/ray-{short}.log"), machine=short,
                address=one.address, cpus=one.cpus, slots=one.gpus or one.cpus,
            )  # fmt: skip
            script = machine_script(
                head, after=AFTER, prefix=PREFIX, name=self._settings.name, home=self._home,
                python=self._settings.python,
            )  # fmt: skip
            await self._call(Call(do="start", machine=one, script=script))

    async def release(self, allocation: str) -> None:
        """End an agent, after TERM, or withdraw its actor."""
        for one in self._machines:
            if one.id == allocation:
                await self._call(Call(do="stop", machine=one))

    async def controller_host(self) -> str:
        """Return the address of Ray's head, by which this host's own address is found."""
        return (await self._call(Call(do="report"))).head.rpartition(":")[0]

    async def on_term_s(self) -> float:
        """Return the seconds that jobs have to leave a node."""
        return self._settings.ray.notice_s

    async def aclose(self) -> None:
        """End the process with Ray's library."""
        if self._driver is not None:
            driver, self._driver = self._driver, None
            if driver.returncode is None:
                driver.kill()
            await driver.wait()

    async def _call(self, call: Call) -> Report:
        """Send a call to the process with Ray's library.

        Raises:
            RayError: if the call fails or takes too long.
        """
        if self._driver is None:
            command = (sys.executable, "-P", "-m", "controlplane.autoscaler.ray_driver")
            where = (self._settings.ray.address, self._settings.name)
            self._driver = await asyncio.create_subprocess_exec(
                *command, *where, stdin=PIPE, stdout=PIPE
            )
        assert self._driver.stdin is not None  # noqa: S101
        assert self._driver.stdout is not None  # noqa: S101
        try:
            async with asyncio.timeout(CALL_S):
                self._driver.stdin.write(msgspec.json.encode(call) + b"\n")
                await self._driver.stdin.drain()
                line = await self._driver.stdout.readline()
            report = msgspec.json.decode(line, type=Report)
        except (TimeoutError, OSError, ValueError) as error:
            await self.aclose()
            problem = f"gave no reply for {CALL_S:.0f} s"
            if not isinstance(error, TimeoutError):
                problem = "closed the connection"
            raise RayError(f"Ray {problem}", "check `ray status`") from None
        except asyncio.CancelledError:
            await self.aclose()  # a late reply would be that of the next call
            raise
        if report.problem:
            await self.aclose()
            raise RayError(f"Ray: {report.problem}", report.hint)
        return report


def _node(machine: Machine) -> str:
    return f"{PREFIX}-{machine.id[:ID_DIGITS]}"
