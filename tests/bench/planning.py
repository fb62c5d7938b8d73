"""Costs of a plan in the controller: processor time of each part, while many jobs wait.

The core of a controller gets nodes of 8 slots and jobs of 20 users. A first plan fills the cluster. Then, again and
again, a node restarts, and the parts of the next plan are measured. `fifo` stands for a policy: how long a search
takes is measured by `bin/bench decision`, in a process of its own. `longest step` is the longest time for which claims,
or view and division, keep the event loop from other work. It is measured in plans of their own.

kinds of jobs: `elastic` (1 to 16 slots each), `programs` (1 to 16), and `limited` (programs with time limits).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any, Final, TypeVar

from controlplane.core.inputs import ControllerStarted, Input, PlanProposed, SharingChanged
from controlplane.core.plan_check import difference
from controlplane.core.plan_cycle import PlanCycle
from controlplane.core.reactor import Reactor
from controlplane.policy.api import ClusterView, Plan
from controlplane.policy.registry import make
from controlplane.policy.sharing.turns import Turns, at_once
from controlplane.service.planner.search_messages import view_delta
from schemas.host.memory import collect_garbage_seldom
from schemas.ids import NodeId, Seconds, Term
from schemas.sharing import Sharing
from tests.bench import report
from tests.support import builders

KINDS: Final = ("elastic", "programs", "limited")
SLOTS: Final = 8
SIZES: Final = (1, 2, 4, 8, 16)  # slots of jobs
USERS: Final = 20
REPEATS: Final = 9
PARTS: Final = (
    "claims",
    "view and division",
    "difference for the search",
    "check",
    "due",
    "longest step",
)
Result = TypeVar("Result")


class Cluster:
    """Core of a controller, with the times of what it does in ms."""

    def __init__(self, kind: str, nodes: int, jobs: int) -> None:
        self.reactor, self._now = Reactor(), Seconds(1e9)
        self._sent: ClusterView | None = None
        self._longest_s: float | None = None  # None: steps are not measured
        self._cycle, self._policy = PlanCycle(lambda: self.reactor), make("fifo", {})
        self.ms: dict[str, list[float]] = defaultdict(list)
        self._handle(ControllerStarted(term=Term(1), release=""))
        self._handle(SharingChanged(sharing=Sharing()))
        for number in range(nodes):
            self._handle(builders.greeting(NodeId(f"n{number}"), slots=SLOTS))
        for number in range(jobs):
            size = SIZES[number // USERS % len(SIZES)]
            self._handle(submission(kind, size, f"user-{number % USERS}"))

    def _handle(self, event: Input) -> None:
        self.reactor.handle(event, self._now)

    def _timed(self, part: str, work: Callable[[], Result]) -> Result:
        began = time.process_time()
        result = work()
        self.ms[part].append((time.process_time() - began) * 1e3)
        return result

    def _done(self, part: str, work: Turns[Result]) -> Result:
        """Return the result of a computation, and measure the whole or its longest step."""
        if self._longest_s is None:
            return self._timed(part, lambda: at_once(work))
        began = time.process_time()
        try:
            while True:
                next(work)
                now = time.process_time()
                self._longest_s, began = max(self._longest_s, now - began), now
        except StopIteration as end:
            self._longest_s = max(self._longest_s, time.process_time() - began)
            result: Result = end.value
            return result

    def plan_in_steps(self) -> None:
        """Make a plan and carry it out, and measure the longest step."""
        self._longest_s = 0.0
        self.plan()
        self.ms["longest step"].append(self._longest_s * 1e3)
        self._longest_s = None

    def plan(self) -> None:
        """Make a plan and carry it out."""
        self._now = Seconds(self._now + 1.0)
        now, cycle = self._now, self._cycle
        self._apply(self._done("claims", cycle.serve_claims(now)), whole=False)
        view = self._done("view and division", cycle.view(now))
        if (sent := self._sent) is not None:
            self._timed("difference for the search", lambda: view_delta(sent, view))
        self._sent = view
        plan = self._policy.plan(view, now)
        self._apply(cycle.merged(plan), whole=True)
        self._timed("due", lambda: self.reactor.due(now))

    def _apply(self, plan: Plan, *, whole: bool) -> None:
        state, now = self.reactor.state, self._now
        part = "check" if whole else "check of claims"
        changes = self._timed(part, lambda: difference(plan, state, now, whole=whole))
        if not changes.empty:
            self._timed("plan taken", lambda: self._handle(PlanProposed(plan=changes, stats=None)))

    def restart(self, node: str, boot: str) -> None:
        """Let a node restart, so that its jobs begin again."""
        self._handle(builders.greeting(NodeId(node), slots=SLOTS, boot=boot))


def submission(kind: str, slots: int, user: str) -> Any:
    """Return a submission of a job of this kind."""
    if kind == "elastic":
        return builders.submission("job", slots=(1, slots), user=user)
    fields: dict[str, Any] = {"kind": "torchrun", "script": "", "command": ("python", "train.py")}
    fields |= {"slots": slots, "batch_size": slots, "user": user}
    fields |= {"max_run_s": 3600.0} if kind == "limited" else {}
    return builders.submission("job", **fields)


def measure(kind: str, nodes: int, jobs: int, repeats: int) -> dict[str, float]:
    """Return the median of each part, and the time of the plan that fills the cluster, in ms."""
    cluster = Cluster(kind, nodes, jobs)
    cluster.plan()
    first = {part: sum(cluster.ms.pop(part, [0.0])) for part in list(cluster.ms)}
    for number in range(repeats):
        cluster.restart(f"n{number}", f"boot-{number + 2}")
        cluster.plan()
        cluster.restart(f"n{number}", f"boot-{number + 2}-again")
        cluster.plan_in_steps()
    return {part: median(cluster.ms[part]) for part in PARTS} | {"fills": sum(first.values())}


def main() -> None:
    chosen = report.arguments(
        __doc__, "100 nodes, 500 jobs",
        agents=(str, "1000,5000", "numbers of nodes"), jobs=(int, 10_000, "jobs"),
    )  # fmt: skip
    collect_garbage_seldom()
    sizes = [100] if chosen.quick else [int(one) for one in chosen.agents.split(",")]
    jobs, repeats = (500, 3) if chosen.quick else (chosen.jobs, REPEATS)
    rows, figures = [], dict[str, float]()
    for kind in KINDS:
        for nodes in sizes:
            report.now(f"{kind} jobs on {nodes} nodes")
            found = measure(kind, nodes, jobs, repeats)
            rows.append([f"{kind}, {nodes} nodes", *found.values()])
            figures |= {
                f"{kind}_{nodes}_{name.replace(' ', '_')}_ms": ms for name, ms in found.items()
            }
    report.table(
        f"processor time of a plan with {jobs} jobs, ms",
        ["jobs, nodes", *PARTS, "first plan"],
        rows,
    )
    report.write(figures, chosen.json)


if __name__ == "__main__":
    main()
