"""`python -m controlplane.autoscaler.ray_driver ADDRESS NAMESPACE`: calls of Ray, a line each.

An actor is detached and named by the id of its Ray node, so that it outlives this process and is
found again.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final, Literal

import msgspec

from schemas.errors import one_line_error
from schemas.host.reachable import reach

WAIT_S: Final = 1.0  # for first replies of actors
LEAST_LIFE_S: Final = 15.0  # so that the autoscaler sees actors on which no agent joins


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A node of Ray that is alive and has CPUs or GPUs."""

    id: str
    address: str
    cpus: int
    gpus: int
    held: bool  # it has an actor of this cluster
    started: bool  # this actor has its CPUs and GPUs, and runs
    drains: bool  # Ray gives it no more work
    ends_at: float | None  # seconds since the epoch, when Ray ends it


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Something to do."""

    do: Literal["report", "start", "stop"]
    machine: Machine | None = None
    script: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to a call."""

    head: str = ""  # HOST:PORT
    machines: tuple[Machine, ...] = ()
    problem: str = ""  # why the call failed
    hint: str = ""


class Driver:
    """Connection to Ray."""

    def __init__(self, address: str, namespace: str) -> None:
        import ray  # noqa: PLC0415 - optional dependency

        if ":" in address and "://" not in address:
            reach(address)  # Ray tries for five minutes
        ray.init(
            address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR"
        )  # fmt: skip
        self._ray = ray
        self._agent = ray.remote(_agent_class(LEAST_LIFE_S))
        self._first: dict[str, Any] = {}  # reference to the first reply of each actor

    def do(self, call: Call) -> Report:
        """Execute a call."""
        if call.machine is None:
            return self._report()
        if call.do == "start":
            self._start(call.machine, call.script)
        else:
            self._stop(call.machine)
        return Report()

    def _report(self) -> Report:
        from ray._private.state import state  # noqa: PLC0415 - as Ray's own libraries

        names = set(self._ray.util.list_named_actors())
        self._first = {name: self._first.get(name) or self._ask(name) for name in names}
        replies = list(self._first.values())
        ready = []
        if replies:
            ready, _ = self._ray.wait(replies, num_returns=len(replies), timeout=WAIT_S)
        drains = state.get_draining_nodes()
        machines = [
            Machine(
                id=node["NodeID"],
                address=node["NodeManagerAddress"],
                cpus=int(node["Resources"].get("CPU", 0)),
                gpus=int(node["Resources"].get("GPU", 0)),
                held=node["NodeID"] in names,
                started=self._first.get(node["NodeID"]) in ready,
                drains=node["NodeID"] in drains,
                ends_at=drains.get(node["NodeID"], 0) / 1000 or None,
            )
            for node in self._ray.nodes()
            if node["Alive"] and {"CPU", "GPU"} & node["Resources"].keys()
        ]
        machines.sort(key=lambda one: one.id)
        head = self._ray.get_runtime_context().gcs_address
        return Report(head=head, machines=tuple(machines))

    def _ask(self, name: str) -> Any:
        return self._ray.get_actor(name).started.remote()

    def _start(self, machine: Machine, script: str) -> None:
        from ray.util.scheduling_strategies import (  # noqa: PLC0415
            NodeAffinitySchedulingStrategy,
        )

        self._agent.options(
            name=machine.id,
            lifetime="detached",
            num_cpus=machine.cpus,
            num_gpus=machine.gpus,
            scheduling_strategy=NodeAffinitySchedulingStrategy(machine.id, soft=False),
        ).remote(script)

    def _stop(self, machine: Machine) -> None:
        actor = self._ray.get_actor(machine.id)
        if machine.started:
            self._ray.get(actor.stop.remote())
        else:
            self._ray.kill(actor)


def _agent_class(at_least_s: float) -> type:
    """Return the class of the actors, which live for a while even if their script fails at once.

    It is defined inside a function so that it travels by value, and needs Python alone.
    """

    class Agent:
        """Actor that runs a script, and exits when the script has ended."""

        def __init__(self, script: str) -> None:
            import subprocess  # noqa: PLC0415 - on the node
            import threading  # noqa: PLC0415

            # Ray kills children of a process that ends. This one cleans up when its input ends.
            command = ["setsid", "--fork", "bash", "-c", script]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603
            assert child.stdin is not None  # noqa: S101
            assert child.stdout is not None  # noqa: S101
            self.orders = child.stdin
            self.stopped = False
            pid = int(child.stdout.readline())
            threading.Thread(target=self.watch, args=(pid,), daemon=True).start()

        def watch(self, pid: int) -> None:
            import contextlib  # noqa: PLC0415
            import os  # noqa: PLC0415
            import select  # noqa: PLC0415
            import time  # noqa: PLC0415

            began = time.monotonic()
            with contextlib.suppress(ProcessLookupError):  # it has ended
                select.select([os.pidfd_open(pid)], [], [])
            time.sleep(max(0.0, at_least_s - time.monotonic() + began))
            os._exit(0)

        def started(self) -> None:
            """Reply when the actor has started."""

        def stop(self) -> None:
            """Send TERM to the agent once; a second TERM would end it without notice."""
            if not self.stopped:
                self.orders.write(b"stop\n")
                self.orders.flush()
                self.stopped = True

    return Agent


def main() -> None:
    """Execute the calls on standard input."""
    address, namespace = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Ray prints is no reply
    driver: Driver | None = None
    for line in sys.stdin.buffer:
        try:
            driver = driver or Driver(address, namespace)
            report = driver.do(msgspec.json.decode(line, type=Call))
        except ImportError:
            hint = "in a checkout of ONES: pip install '.[ray]'"
            report = Report(problem="its library is not installed", hint=hint)
        except Exception as error:  # noqa: BLE001 - the caller reports it
            report = Report(problem=one_line_error(error))
        answers.write(msgspec.json.encode(report) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
