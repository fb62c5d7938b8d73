"""Replies about jobs and nodes, from the core's state and from telemetry since the last epoch.

`PolicyNotes` and `size_notes` warn if the policy or the cluster lacks something that a job needs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from controlplane.core.handlers.start import OPERATOR, POLICY
from controlplane.core.history import CHANGES, EPOCHS, GROUPS, PROMISES
from controlplane.core.model.job import Job, batch_limit, times
from controlplane.core.model.job_phases import Phase
from controlplane.core.model.node import Node, NodePhase
from controlplane.core.model.usage import usage_now
from controlplane.core.model.worker import Worker, WorkerPhase
from controlplane.core.state import State, Totals
from controlplane.journal.records import JobRecords
from controlplane.policy.api import Reason, SearchStats
from controlplane.policy.registry import Need, job_notes
from controlplane.service.api.views import Rows, numbered, page_of
from controlplane.service.planner.planner import Planner
from controlplane.service.worker_telemetry import Standstill, TelemetryTable
from schemas.ids import JobId, NodeId, Rank, Seconds, SlotId, node_of, slot_id
from schemas.jobs import JobSpec
from schemas.sharing import Sharing
from schemas.wire.agent import StepsReported
from schemas.wire.client import (
    AccountShare,
    Decision,
    Explanation,
    JobDetail,
    JobSummary,
    NodeInfo,
    PlannedJob,
    SearchInfo,
    VersionInfo,
    WorkerInfo,
)

DRAINING: Final = "draining"  # up, and an operator is emptying it
CORDONED: Final = "cordoned"  # up, and no new job starts there
DRAINED: Final = "drained"  # up and empty
UNHEALTHY: Final = "unhealthy"  # up, but cannot start workers
COUNTDOWN: Final = re.compile(r"\bretrying in \d+ s\b")  # in a waiting reason
SLOW_START_S: Final = 60.0  # most scripts start faster
SHOWN_STATS: Final = set(SearchStats.__struct_fields__) & set(SearchInfo.__struct_fields__)
STUCK_S: Final = 60.0  # time without a step; most evaluations are faster
MAX_STRAGGLERS: Final = 3  # ranks that a note names


STARTS: Final = {  # field of a summary -> number of a reason, in seconds from now
    "start_at": "start_s", "start_earliest": "start_earliest_s", "start_latest": "start_latest_s",
}  # fmt: skip


def job_summary(
    job: Job,
    reason: Reason | None,
    telemetry: TelemetryTable,
    now: Seconds,
    *,
    predicted_loss: float | None = None,
) -> JobSummary:
    """Return a row of `ones ps`.

    `reason` is why the job waits according to the latest plan, or None if it does not wait.
    """
    queued_s, running_s = times(job, now)
    live = telemetry.of(job.job) if job.group else None
    live = live if live and job.group and live.group >= job.group.version else None
    loss = live.train_loss if live else None
    waiting = not job.group and not job.ended
    reason = None if job.override else reason  # the operator's order is newer than the plan
    why = job.reason if job.attempts.next_start_at > now else COUNTDOWN.sub("retrying", job.reason)
    starts: dict[str, Any] = {}
    if reason and waiting:
        known = reason.numbers
        starts = {name: now + known[in_s] for name, in_s in STARTS.items() if in_s in known}
        why = reason.text if job.phase is Phase.QUEUED else waiting_reason(why, reason)
    if job.override_wait_reason:
        why = f"{job.reason}; {job.override_wait_reason}"
    slow = _slow_start_note(job, now) or _stuck_note(job, telemetry, now)
    remarks = (_hold_note(job), slow, _loss_note(job))
    why = "; ".join([*filter(None, remarks), why])
    return JobSummary(
        job=job.job,
        name=job.spec.name,
        user=job.user,
        state=shown_state(job),
        reason=why,
        slots=len(job.held_slots()),
        global_batch=job.group.global_batch if job.group and not job.spec.rigid else 0,
        lr=live.lr if live else job.progress.lr or job.spec.lr,
        epoch=job.progress.epoch,
        samples_per_s=(live or job.progress).samples_per_s if job.group else 0.0,
        progress=_progress(job, live),
        train_loss=loss if loss is not None else job.progress.train_loss,
        metrics=job.progress.metrics,
        submitted_at=job.submitted_at,
        queued_s=queued_s,
        running_s=running_s,
        rescales=job.accounting.rescales,
        batch_changes=job.accounting.batch_changes,
        ended_at=job.accounting.since if job.ended else None,
        promised_end=job.promised_end.first if job.promised_end else None,
        expected_end=job.promised_end.latest if job.promised_end else None,
        predicted_loss=predicted_loss if job.group else None,
        project=job.owner.project,
        labels=job.spec.stated_labels,
        exit_code=job.attempts.exit_code,
        **telemetry.use_of(job.job, now)._asdict(),
        kind="sweep" if job.spec.sweep else str(job.spec.kind or "elastic"),
        **starts,
        code=reason.code if reason and waiting else "",
        min_slots=job.spec.slots[0],
        slot_s=job.accounting.slot_s
        + (running_s - job.accounting.running_s) * len(job.held_slots()),
    )


def shown_state(job: Job) -> str:
    """Return the state of a job for users. An array with live elements is running."""
    return Phase.RUNNING.value if job.array and job.array.live else job.phase.value


def waiting_reason(stopped: str, reason: Reason) -> str:
    """Return why a job stopped. If the latest plan's reason to wait differs, add that reason."""
    same = reason.text.removeprefix("waits: ") in stopped
    return stopped if same else f"{stopped}; {reason.text}"


def _slow_start_note(job: Job, now: Seconds) -> str | None:
    if job.phase is not Phase.STARTING or job.spec.rigid:
        return None
    waited_s = now - job.accounting.since
    workers = job.group_workers()
    here = [worker for worker in workers if worker.phase is WorkerPhase.STARTED]
    if not here or waited_s < SLOW_START_S:
        return None
    where = f" on {len(here)} of {len(workers)} slots" if len(workers) > 1 else ""
    return (
        f"not at agent.epochs after {waited_s / 60:.0f} min{where}: "
        "its script prepares, or it never calls ScalingAgent and is not trained by this cluster"
    )


def _stuck_note(job: Job, telemetry: TelemetryTable, now: Seconds) -> str | None:
    runs = job.phase in {Phase.RUNNING, Phase.RESCALING}
    if not runs or job.sweep is not None or job.spec.rigid:
        return None
    if (found := telemetry.standstill(job, now)) is not None:
        return f"no step for {_duration(found.idle_s)}: {_who_is_waited_for(found)}"
    idle_s = telemetry.idle_s(job.job, now)
    if job.phase is Phase.RUNNING:  # the last report might predate a pause
        idle_s = min(idle_s, now - job.accounting.since)
    if idle_s < STUCK_S:
        return None
    return (
        f"no step for {idle_s / 60:.0f} min: its script evaluates, waits or hangs, and changes "
        "of its slots wait for its next step"
    )


def _hold_note(job: Job) -> str | None:
    if not job.held_by or job.group is None:
        return None
    return f"held by {job.held_by}: it goes on, and is not started again"


def _loss_note(job: Job) -> str | None:
    if not job.progress.loss_is_not_finite:
        return None
    return f"the training loss of epoch {job.progress.epoch} was NaN or infinite"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 2 * STUCK_S else f"{seconds / 60:.0f} min"


def _who_is_waited_for(found: Standstill) -> str:
    shown, more = found.stragglers[:MAX_STRAGGLERS], len(found.stragglers) - MAX_STRAGGLERS
    if not shown:
        return "all ranks wait for each other"
    if shown[0].answers:
        places = [f"rank {one.rank} is at {one.at or 'no line of its script'}" for one in shown]
        return ", ".join([*places, f"and {more} more"] if more > 0 else places)
    ranks = ", ".join([*(f"{one.rank}" for one in shown), *([f"{more} more"] if more > 0 else [])])
    if len(shown) == 1:
        return f"rank {ranks} does not answer, the others wait for it"
    return f"ranks {ranks} do not answer, the others wait for them"


def job_detail(
    job: Job, summary: JobSummary, records: JobRecords, telemetry: TelemetryTable, cursor: str
) -> JobDetail:
    """Return one page of `ones show`, which shows everything about a job.

    Raises:
        BadFieldError: if the cursor does not belong to this job.
    """
    live = telemetry.of(job.job) if job.group else None
    ranks = {m.worker: m.rank for m in job.group.members} if job.group else {}
    workers = [_worker_info(w, ranks.get(w.worker, w.rank)) for w in job.workers.values()]
    lists, following = page_of(
        {"workers": numbered(workers), **_lists_of(job.job, records)}, cursor
    )
    return JobDetail(
        summary=summary,
        spec=job.spec,
        snapshot=job.snapshot,
        failures=job.attempts.failures,
        exit_code=job.attempts.exit_code,
        samples_done=_samples_done(job, live),
        version=job.version,
        batch_limit=batch_limit(job),
        epochs_total=_epochs_total(job),
        next=following,
        **lists,
    )


def _epochs_total(job: Job) -> int | None:
    """Return the epochs of the job's stop rule, or else of its script once it has stated them."""
    stop = job.spec.stop
    return job.progress.stated_epochs if stop is None else stop.epochs


def _lists_of(job: JobId, records: JobRecords) -> dict[str, Rows]:
    def versions(after: int) -> Iterator[tuple[int, VersionInfo]]:
        stories = records.decisions(job, after)
        return ((at, story.version) for at, story in stories if story.version is not None)

    return {
        "history": Rows(partial(records.changes, job), records.last(job, CHANGES)),
        "epochs": Rows(partial(records.epochs, job), records.last(job, EPOCHS)),
        "versions": Rows(versions, records.last(job, GROUPS)),
        "promises": Rows(partial(records.promises, job), records.last(job, PROMISES)),
    }


def _worker_info(worker: Worker, rank: Rank) -> WorkerInfo:
    return WorkerInfo(
        rank=rank,
        node=node_of(worker.slot),
        slot=worker.slot,
        pid=worker.pid,
        version=worker.group_version or worker.version,
        phase=worker.phase.value,
        local_batch=worker.local_batch,
        worker=worker.worker,
        step=worker.group_first_step,
    )


def job_explanation(
    job: Job, records: JobRecords, reason: Reason | None, now: Seconds, cursor: str = ""
) -> Explanation:
    """Return a page of the decisions about a job. If it waits, the last entry says why.

    Its time is the time since which the job waits, and `took_s` is the length of the wait.

    Raises:
        BadFieldError: if the cursor does not belong to this job.
    """

    def decided(after: int) -> Iterator[tuple[int, Decision]]:
        return ((at, story.decision) for at, story in records.decisions(job.job, after))

    rows = Rows(decided, records.last(job.job, GROUPS))
    lists, following = page_of({"decisions": rows}, cursor)
    decisions = lists["decisions"]
    if job.override is not None:  # the policy's reason is older than the order
        reason = Reason("operator", job.override_wait_reason or job.reason)
    if reason is not None and job.group is None and not job.ended and not following:
        since = job.accounting.since
        waits = Decision(
            time=since, before=job.size, to=job.size, reason=reason.text, code=reason.code,
            numbers=reason.numbers, outcome="waits", took_s=max(0.0, now - since),
            by=OPERATOR if job.override else POLICY,
        )  # fmt: skip
        decisions = (*decisions, waits)
    return Explanation(job=job.job, state=shown_state(job), decisions=decisions, next=following)


def planned_job(job: Job, batches: Mapping[SlotId, int], reason: Reason) -> PlannedJob:
    """Return what a plan wants for a job that it changes or lets wait."""
    before, after = reason.numbers.get("speed_now"), reason.numbers.get("speed_then")
    return PlannedJob(
        job=job.job, slots=len(batches), batch=sum(batches.values()), reason=reason.text,
        expected_gain=after / before if before and after else None,
    )  # fmt: skip


def search_info(totals: Totals, policy: str, planner: Planner) -> SearchInfo:
    """Return the statistics of the scheduler, for clients and for Prometheus.

    The gains are geometric means of speed-ups. They are None before the first speed-up.
    """
    stats = planner.stats
    return SearchInfo(
        policy=policy,
        running=planner.running,
        restarts=planner.restarts,
        plans=totals.plans_taken,
        **{name: getattr(stats, name) for name in SHOWN_STATS},
        rescales=totals.rescales,
        batch_changes=totals.batch_changes,
        predicted_gain=_geometric_mean([predicted for predicted, _ in totals.gains]),
        realised_gain=_geometric_mean([realised for _, realised in totals.gains]),
        gain_error=_gain_error(totals.gains),
    )


def _gain_error(gains: Sequence[tuple[float, float]]) -> float | None:
    """Return the geometric mean of the factors by which realised and predicted gains differ."""
    sane = [pair for pair in gains if min(pair) > 0.0]
    return _geometric_mean([max(pair) / min(pair) for pair in sane])


def _geometric_mean(values: list[float]) -> float | None:
    positive = [value for value in values if value > 0]
    return math.exp(sum(map(math.log, positive)) / len(positive)) if positive else None


def node_rows(state: State) -> Rows:
    """Return the rows of `ones node list`, one for each node that ever joined, oldest first."""
    nodes = list(state.nodes.values())
    owned: dict[NodeId, dict[SlotId, JobId]] = {}
    for slot, job in state.slot_index.owners().items():
        owned.setdefault(node_of(slot), {})[slot] = job

    def rows_after(after: int) -> Iterator[tuple[int, NodeInfo]]:
        for place, node in enumerate(nodes[after:], after + 1):
            yield place, _node_info(node, owned.get(node.node, {}))

    return Rows(rows_after, len(nodes))


def node_info(state: State, name: NodeId) -> NodeInfo:
    """Return one row of `ones node list`."""
    node, owners = state.nodes[name], state.slot_index.owners()
    slots = [slot_id(name, slot.index) for slot in node.spec.slots]
    return _node_info(node, {slot: owners[slot] for slot in slots if slot in owners})


def _node_info(node: Node, owners: Mapping[SlotId, JobId]) -> NodeInfo:
    slots = [slot_id(node.node, slot.index) for slot in node.spec.slots]
    unknown = ", ".join(f"{slot} ({worker})" for slot, worker in node.foreign_workers.items())
    foreign = f"used by workers that this controller does not know: {unknown}" if unknown else ""
    drained = [] if node.drain is None else [node.drain.text]
    drained += [one.reason for one in node.keeps]
    drained += [window.text for window in node.windows]
    return NodeInfo(
        node=node.node,
        state=node_state(node),
        reason="; ".join(filter(None, (*node.problems, node.suspicion, *drained, foreign))),
        host=node.spec.host,
        address=node.spec.address,
        slots=len(slots),
        free=sum(slot not in owners for slot in slots),
        kind=node.spec.slots[0].kind,
        model=node.spec.slots[0].model,
        jobs=tuple(dict.fromkeys(owners.values())),
        release=node.spec.release,
        labels=node.spec.labels,
        cores=node.spec.cores,
        memory_bytes=node.spec.memory_bytes,
        reservations=tuple(node.reservations),
    )


def node_state(node: Node) -> str:
    """Return the state of a node as `ones node list` shows it."""
    state: str = node.phase.value
    if node.phase is NodePhase.UP and (node.problems or node.is_suspected):
        state = UNHEALTHY
    elif node.phase is NodePhase.UP and node.drain is not None:
        state = DRAINED if node.drain.announced_empty else DRAINING
        state = CORDONED if node.drain.cordon else state
    return state


def _progress(job: Job, live: StepsReported | None) -> float | None:
    if job.sweep is not None:
        left = 0 if job.phase is Phase.SUCCEEDED else job.sweep.units_left
        return job.sweep.units_done / max(1, job.sweep.units_done + left)
    if job.array is not None:
        return job.array.finished / job.array.size
    stop, total = job.spec.stop, job.stop_samples
    if job.spec.rigid or (stop is not None and stop.metric is not None):
        return None
    if job.phase is Phase.SUCCEEDED:
        return 1.0 if job.progress.samples_done else 0.0
    if not total:
        return 0.0
    return min(1.0, _samples_done(job, live) / total)


def _samples_done(job: Job, live: StepsReported | None) -> int:
    """Return the samples done. Ignore a report of a sweep, because it covers one worker only."""
    counts = live is not None and job.sweep is None
    return max(job.progress.samples_done, live.samples_done if live and counts else 0)


def account_shares(
    state: State, rules: Sharing, budgets: Mapping[str, int], now: Seconds
) -> list[AccountShare]:
    """Return a row for each account that has jobs or has used slots lately, by name."""
    holding = [state.jobs[name] for name in state.jobs_with_processes]
    usage = usage_now(state.usage, holding, now, rules.half_life_s)
    slots, running, waiting = Counter[str](), Counter[str](), Counter[str]()
    for name in state.active:
        job = state.jobs[name]
        held = len(job.held_slots())
        slots[job.account] += held
        (running if held else waiting)[job.account] += 1
    found = []
    for account in sorted(slots.keys() | {one for one, used in usage.items() if used >= 1.0}):
        project, _, user = account.partition("/")
        found.append(
            AccountShare(
                project=project,
                user=user,
                slots=slots[account],
                running=running[account],
                waiting=waiting[account],
                budget=budgets.get(account),
                usage_s=usage.get(account, 0.0),
            )
        )
    return found


class PolicyNotes:
    """Notes that warn if the policy lacks something that a job needs."""

    def __init__(self, policy: str, needs: tuple[Need, ...]) -> None:
        self.use(policy, needs)

    def use(self, policy: str, needs: tuple[Need, ...]) -> None:
        """Note from now on what this policy lacks."""
        self._policy = policy
        self._needs = needs

    def of_spec(self, spec: JobSpec) -> tuple[str, ...]:
        """Return the notes on a job that has not started."""
        stated = spec.stated_utility is not None
        return job_notes(self._policy, self._needs, utility_stated=stated)

    def of(self, job: Job, train_loss: float | None = None) -> tuple[str, ...]:
        """Return the notes on a job in its current state. An ended job has none.

        `train_loss` is the latest reported loss, if it is newer than the last epoch.
        """
        if job.ended:
            return ()
        return job_notes(
            self._policy,
            self._needs,
            utility_stated=job.spec.stated_utility is not None,
            epochs=job.progress.epoch,
            train_loss=job.progress.train_loss if train_loss is None else train_loss,
        )


def size_notes(state: State, spec: JobSpec) -> tuple[str, ...]:
    """Return a note if no node fits a job, or if it needs more slots than all nodes have.

    Lost and draining nodes do not count.
    """
    fit = state.slot_index.fit(spec)
    if fit.missing:
        return (f"{fit.missing}: it waits until such a node joins",)
    here = 0
    for node in state.nodes.values():
        if here >= spec.slots[0]:
            return ()
        if node.phase is not NodePhase.LOST and not node.drain:
            slots = [slot_id(node.node, slot.index) for slot in node.spec.slots]
            here += sum(fit.slots is None or slot in fit.slots for slot in slots)
    if here >= spec.slots[0]:
        return ()
    fitting = "" if fit.slots is None else " that fit it"
    what = f"it needs {spec.slots[0]} slots, the cluster has {here}{fitting}"
    return (f"{what}: it waits until nodes join; `slots` in the job file may ask for fewer",)
