"""Views of the cluster for policies, built incrementally."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from controlplane.core.model.job import Job, JobOwner, batch_limit, local_limit, number_of
from controlplane.core.model.job_phases import JobStatus, Paused, Queued, Rescaling, Running
from controlplane.core.model.node import Node, NodePhase
from controlplane.core.model.report_bounds import clamp_numbers
from controlplane.core.model.worker import WorkerPhase
from controlplane.core.plan_check import bad_for
from controlplane.core.slot_index import Fit
from controlplane.core.state import State
from controlplane.policy.api import ClusterView, JobView, SlotView
from controlplane.policy.sharing.rigid_view import RigidView
from controlplane.policy.sharing.turns import Turns
from schemas.ids import JobId, NodeId, Seconds, SlotId, is_place, node_of, slot_id
from schemas.nodes import SlotSpec
from schemas.wire.agent import SUSPEND

Closings = Mapping[NodeId, tuple[Seconds, str]]  # when nodes close to a job, and for what


class ViewBuilder:
    """Builder of cluster views. It only reads the state, and reuses views of unchanged jobs."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._jobs: dict[JobId, JobView] = {}  # in order of arrival
        self._stale: dict[JobId, None] = {}  # in the order of their changes
        self._all_jobs_stale = True  # any job may have changed
        self._swaps = False  # True: the last view had jobs that trade slots
        self._slot_views: list[SlotView] = []  # of the last view
        self._shown_slots: tuple[SlotView, ...] | None = ()  # as views have them; None: outdated
        self._positions: dict[SlotId, int] = {}
        self._held = 0
        self._dirty = state.slot_index.dirty_slots()
        self._slots: dict[tuple[SlotId, str, str, int, bool, bool, bool], SlotView] = {}
        self._rigid: dict[JobId, tuple[RigidView, Fit] | None] = {}  # None: must not start
        self._closings: dict[JobOwner, Closings] = {}  # one object as long as it stays equal

    def touch(self, jobs: Mapping[JobId, None]) -> None:
        """Mark jobs as possibly changed, so that the next view rebuilds them."""
        for job in jobs:
            self._rigid.pop(job, None)
            if job in self._state.active:
                self._stale[job] = None
            else:
                self._stale.pop(job, None)
                self._jobs.pop(job, None)

    def refresh(self) -> Turns[None]:
        """Update views of changed slots and jobs, so that the next views have less to do."""
        state = self._state
        for slot in list(self._dirty.slots):
            yield
            nodes = state.slot_index.slots()  # brings `_dirty` up to date
            if slot in self._dirty.slots and not self._dirty.everything:
                del self._dirty.slots[slot]
                self._update_slot(slot, nodes)
        for name in list(self._stale):
            yield
            usual = not (self._all_jobs_stale or state.swaps)
            if usual and name in self._stale and name in self._jobs and self._is_shown(name):
                self._jobs[name] = job_view(state.jobs[name])
                del self._stale[name]
        closes: dict[JobOwner, Closings] = {}
        for name in [name for name in state.rigid if name not in self._rigid]:
            yield
            if name in state.rigid and name not in self._rigid:
                self._rigid[name] = self._rigid_view(state.jobs[name], None, closes)

    def view(self) -> ClusterView:
        """Return a view of the active jobs and of the slots of nodes that are not lost.

        Jobs under a manual override and jobs that must not start are left out. If a job under an
        override waits for free slots, the view shows these slots as not usable.
        """
        slots = self._update_slots()
        self._update_jobs()
        return ClusterView(version=self._state.version, slots=slots, jobs=dict(self._jobs))

    def _update_jobs(self) -> None:
        state = self._state
        targets = {name: to for swap in state.swaps for name, to in swap.targets.items()}
        if self._all_jobs_stale or self._returns_an_earlier_job():
            self._jobs = {
                job: job_view(state.jobs[job], targets.get(job))
                for job in state.active
                if self._is_shown(job)
            }
        else:
            for job in self._stale:
                if job in state.active and self._is_shown(job):
                    self._jobs[job] = job_view(state.jobs[job], targets.get(job))
                else:
                    self._jobs.pop(job, None)
        self._stale, self._all_jobs_stale = {}, False

    def _is_shown(self, name: JobId) -> bool:
        """True if policies see this active job."""
        job = self._state.jobs[name]
        return name not in self._state.overrides and not job.spec.rigid and not job.withheld

    def _returns_an_earlier_job(self) -> bool:
        """True if a job has to be inserted into the view before the view's last job.

        This happens when an older job is released, or its manual override ends. New jobs are
        appended.
        """
        state = self._state
        new = [
            number_of(job)
            for job in self._stale
            if job not in self._jobs and job in state.active and self._is_shown(job)
        ]
        last = number_of(next(reversed(self._jobs))) if self._jobs else 0
        return any(number < last for number in new)

    def _update_slots(self) -> tuple[SlotView, ...]:
        """Rebuild the views of changed slots, and return the views of all slots.

        The tuple is the same object if none of them changed.
        """
        state, slot_index = self._state, self._state.slot_index
        held = sum(
            max(0, (job.override.slots or 0) - len(job.members()))
            for job in map(state.jobs.__getitem__, state.overrides)
            if job.override and job.override_wait_reason and job.override.reserves_until
        )
        nodes = slot_index.slots()  # brings `_dirty` up to date
        promised = {slot for swap in state.swaps for slot in swap.slots()}
        if held or self._held or promised or self._swaps or self._dirty.everything:
            self._slot_views = self._rebuild_slots(held, slot_index.releasing(), promised)
            self._positions = {view.slot: place for place, view in enumerate(self._slot_views)}
            self._shown_slots = None
        else:
            for slot in self._dirty.slots:
                self._update_slot(slot, nodes)
        self._held, self._swaps = held, bool(promised)
        self._dirty.slots, self._dirty.everything = {}, False
        if self._shown_slots is None:
            self._shown_slots = tuple(self._slot_views)
        return self._shown_slots

    def _update_slot(self, slot: SlotId, nodes: Mapping[SlotId, Node]) -> None:
        """Rebuild the view of a slot, if views have it."""
        place, index = self._positions.get(slot), self._state.slot_index
        if place is None:
            return
        node, before = nodes[slot], self._slot_views[place]
        usable = node.usable and not index.is_taken(slot)
        self._slot_views[place] = self._slot(
            node, slot, before, usable=usable, leaving=index.is_releasing(slot)
        )
        self._shown_slots = None

    def _rebuild_slots(
        self, held: int, leaving: Mapping[SlotId, JobId], promised: AbstractSet[SlotId]
    ) -> list[SlotView]:
        """Return new views of all slots. Slots kept for an override or a swap are not usable."""
        taken, slots = self._state.slot_index.is_taken, []
        for node in self._state.nodes.values():
            if node.phase is NodePhase.LOST:
                continue
            for slot in node.spec.slots:
                name = slot_id(node.node, slot.index)
                up = node.usable
                usable = up and not taken(name) and name not in promised
                if usable and held > 0:
                    held, usable = held - 1, False
                soon = name in leaving and name not in promised and held <= 0
                slots.append(self._slot(node, name, slot, usable=usable, leaving=soon))
        return slots

    def _slot(
        self,
        node: Node,
        name: SlotId,
        what: SlotSpec | SlotView,
        *,
        usable: bool,
        leaving: bool,
    ) -> SlotView:
        """Return the view of a slot, from a cache if possible. `what` describes the hardware."""
        up = node.usable
        host_cores = node.spec.cores
        key = (name, what.kind, what.model, host_cores, usable, leaving, up)
        known = self._slots.get(key)
        if known is None:
            known = self._slots[key] = SlotView(
                slot=name,
                node=node.node,
                kind=what.kind,
                model=what.model,
                usable=usable,
                leaving=leaving,
                up=up,
                cores=host_cores if what.kind == "cpu" else 0,
                host_cores=host_cores,
            )
        return known

    # --- rigid jobs

    def rigid_views(self) -> list[RigidView]:
        """Return the views of active rigid jobs that run or may start, in the order of arrival.

        Jobs under a manual override only hold slots.
        """
        state, known = self._state, self._rigid
        shaped, planned = state.job_counters.shaped, bool(state.planned)
        closes: dict[JobOwner, Closings] = {}
        for name in state.overrides:
            known.pop(name, None)
        for name in state.rigid:
            # Reservations, and slots that fit requests, change without the job.
            if name not in known or planned or name in shaped:
                known[name] = self._rigid_view(state.jobs[name], known.get(name), closes)
        views = map(known.__getitem__, state.rigid)
        return [view[0] for view in views if view is not None]

    def _rigid_view(
        self, job: Job, known: tuple[RigidView, Fit] | None, closes: dict[JobOwner, Closings]
    ) -> tuple[RigidView, Fit] | None:
        """Return the view of a rigid job, or None if it must not start."""
        if job.withheld:
            return None
        if job.owner not in closes:
            found, before = self._state.closes(job), self._closings.get(job.owner)
            closes[job.owner] = self._closings[job.owner] = found if found != before else before
        fit, closed = self._state.slot_index.fit(job.spec), closes[job.owner]
        if known is None or known[1] is not fit:
            return rigid_view(self._state, job, closed), fit
        return known if known[0].closes is closed else (replace(known[0], closes=closed), fit)


def job_view(job: Job, trades_to: Mapping[SlotId, int] | None = None) -> JobView:
    """Return the view of a job that policies see.

    Args:
        job: job in any phase. During a change, the view shows the slots of the new group.
        trades_to: slots and local batches (samples per step) after a swap in progress. The view
            already shows the job on these slots, and shows that it is not movable.
    """
    spec, status, progress = job.spec, job.status, job.progress
    account, attempts, group = job.accounting, job.attempts, status.group
    runs_on, end = status.change.group if status.change else group, job.promised_end
    least, most = spec.slots
    if job.sweep is not None:  # more slots than trials that can train would be idle
        most = max(least, min(most, job.sweep.trainable))
    running_on = {m.slot: m.local_batch for m in runs_on.members} if runs_on else {}
    view = JobView(
        job=job.job,
        submitted_at=job.submitted_at,
        batch_size=spec.batch_size,
        batch_limit=batch_limit(job),
        local_limit=local_limit(job),
        least=least,
        most=most,
        wanted=min(spec.wanted, most),
        running_on=dict(trades_to) if trades_to is not None else running_on,
        priority=spec.priority,
        family=job.family,
        account=job.account,
        movable=trades_to is None and _is_movable(status),
        ready_at=attempts.next_start_at,
        retry_at=attempts.next_change_at,
        moved_at=account.since,
        placed_at=account.placed_at,
        epoch=progress.epoch,
        epoch_at=progress.epoch_at,
        epoch_samples=progress.epoch_length,
        samples_done=progress.samples_done,
        samples_per_s=progress.samples_per_s,
        stop_samples=job.stop_samples,
        stop=None if spec.stop is None else clamp_numbers(spec.stop),
        noise_scale=progress.noise_scale,
        ran_s=account.running_s,
        slot_s=account.slot_s,
        waited_s=account.queued_s,
        last_batch=group.global_batch if group else progress.last_batch,
        start_s=account.last_start_s,
        utility=spec.stated_utility,
        promised_at=end.first if end else None,
        expected_at=end.latest if end else None,
    )
    return clamp_numbers(view)


def rigid_view(state: State, job: Job, closes: Closings | None = None) -> RigidView:
    """Return the view of a rigid job. `closes` is the result of `state.closes`, if known."""
    spec, status, account = job.spec, job.status, job.accounting
    fit, limit_s = state.slot_index.fit(spec), spec.run_limit_s
    ends_at = None
    if isinstance(status, Rescaling) and status.change.kind == SUSPEND:
        ends_at = status.change.started_at + spec.grace_limit_s
    elif limit_s is not None:
        ends_at = account.since + max(0.0, limit_s - account.running_s) + spec.grace_limit_s
    return RigidView(
        job=job.job,
        account=job.account,
        submitted_at=job.submitted_at,
        slots=spec.slots[0],
        family=job.family,
        one_node=spec.single,
        fits=fit.slots,
        shares=_without_bad_nodes(job, fit.shares) if not spec.slots[0] else fit.shares,
        exclusive=spec.exclusive is True,
        missing=fit.missing,
        ready_at=job.attempts.next_start_at,
        run_limit_s=None if limit_s is None else limit_s - account.running_s + spec.grace_limit_s,
        waits=isinstance(status, Queued | Paused) and job.job not in state.overrides,
        holds=tuple(job.held_slots()),
        closes=state.closes(job) if closes is None else closes,
        began_at=account.since,
        ends_at=None if ends_at is None else Seconds(ends_at),
        preemptible=isinstance(status, Running)
        and not spec.fails_on_loss
        and job.job not in state.overrides,
    )


def _without_bad_nodes(job: Job, nodes: Mapping[NodeId, float]) -> Mapping[NodeId, float]:
    """Leave out nodes where workers of the job died repeatedly, unless there are no others."""
    bad = bad_for(job)
    return {node: part for node, part in nodes.items() if node not in bad} or nodes


def places(state: State) -> dict[NodeId, dict[SlotId, float]]:
    """Return the places that jobs without slots have on each usable node.

    The values are parts of what the node has set aside for such jobs.
    """
    found: dict[NodeId, dict[SlotId, float]] = {
        name: {} for name, node in state.nodes.items() if node.usable
    }
    for job in map(state.jobs.__getitem__, state.jobs_with_processes):
        if job.spec.slots[1]:
            continue
        parts = state.slot_index.fit(job.spec).shares
        for worker in job.workers.values():
            node = node_of(worker.slot)
            if worker.phase is not WorkerPhase.EXITED and node in found:
                found[node][worker.slot] = parts.get(node, 1.0)
    for node, slots in found.items():  # of workers that this controller does not know
        slots.update((s, 1.0) for s in state.nodes[node].foreign_workers if is_place(s))
    return found


def _is_movable(status: JobStatus) -> bool:
    """True if a plan may start the job or change its group."""
    if isinstance(status, Running):
        return not status.script.finished
    return isinstance(status, Queued | Paused)
