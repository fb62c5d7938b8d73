"""Dispatch of inputs to their handlers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from controlplane.core import inputs
from controlplane.core.commands import Command, RequestPlan
from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers import (
    drains,
    lifecycle,
    nodes,
    overrides,
    plans,
    recovery,
    relations,
    reports,
    start,
    submission,
    sweeps,
)
from controlplane.core.history import Record
from controlplane.core.ledgers import Ledgers
from controlplane.core.policy_view import ViewBuilder
from controlplane.core.state import State, Totals
from controlplane.core.timers import JobTimers
from controlplane.policy.api import ClusterView
from controlplane.policy.sharing.caps import Ledger
from controlplane.policy.sharing.rigid_view import RigidView
from controlplane.policy.sharing.turns import Turns
from schemas.ids import Seconds

HANDLERS: Final[Mapping[type, Callable[[HandlerContext, Any], None]]] = {
    inputs.ControllerStarted: nodes.on_controller_started,
    inputs.NodeGreeted: nodes.on_node_greeted,
    inputs.NodeHeard: nodes.on_node_heard,
    inputs.NodeSuspected: nodes.on_node_suspected,
    inputs.NodeLost: nodes.on_node_lost,
    inputs.NodeForgotten: nodes.on_node_forgotten,
    inputs.InputSkipped: nodes.on_input_skipped,
    inputs.CommitsResumed: nodes.on_commits_resumed,
    inputs.NodeReported: reports.on_node_reported,
    inputs.JobSubmitted: submission.on_job_submitted,
    inputs.CancelRequested: submission.on_cancel_requested,
    inputs.OrderTooLarge: lifecycle.on_order_too_large,
    inputs.PlanProposed: plans.on_plan_proposed,
    inputs.StartExpired: start.on_start_expired,
    inputs.RescaleExpired: recovery.on_rescale_expired,
    inputs.JoinStalled: recovery.on_join_stalled,
    inputs.ResizeRequested: overrides.on_resize_requested,
    inputs.PauseRequested: overrides.on_pause_requested,
    inputs.ResumeRequested: overrides.on_resume_requested,
    inputs.HoldRequested: relations.on_hold_requested,
    inputs.ReleaseRequested: relations.on_release_requested,
    inputs.StartDue: relations.on_start_due,
    inputs.OverrideDue: overrides.on_override_due,
    inputs.DrainRequested: drains.on_drain_requested,
    inputs.NodesReserved: drains.on_nodes_reserved,
    inputs.ReservationCancelled: drains.on_reservation_cancelled,
    inputs.UndrainRequested: drains.on_undrain_requested,
    inputs.DrainExpired: drains.on_drain_expired,
    inputs.DrainDue: drains.on_drain_due,
    inputs.UnitExpired: sweeps.on_unit_expired,
    inputs.RunExpired: lifecycle.on_run_expired,
    inputs.SweepChangeRequested: submission.on_sweep_change_requested,
    inputs.SharingChanged: submission.on_sharing_changed,
    inputs.PolicyChosen: submission.on_policy_chosen,
    inputs.SchedulingPaused: submission.on_scheduling_paused,
}


class Reactor:
    """Owner of the cluster's state. `handle` is the only way to change the state.

    A reactor continues from `state`. If `state` is None, the reactor begins with an empty state.
    """

    def __init__(self, state: State | None = None, totals: Totals | None = None) -> None:
        self.state = State() if state is None else state
        # The totals are only displayed; no decision reads them.
        self.totals = Totals() if totals is None else totals
        self._ctx = HandlerContext(self.state, self.totals)
        self._views = ViewBuilder(self.state)
        self._ledgers = Ledgers(self.state)
        self._run_ends = JobTimers(self.state, lifecycle.next_run_check)
        self._starts = JobTimers(self.state, relations.next_start)
        self.state.note_changes({})  # from now on

    @property
    def records(self) -> list[Record]:
        """Records of the last input, for the history of jobs."""
        return self._ctx.records

    def refresh_views(self) -> Turns[None]:
        """Update what depends on changed jobs, so that the methods below have less to do."""
        yield from self._views.refresh()
        yield from self._ledgers.refresh()

    def view(self) -> ClusterView:
        """Return the view of the current state for policies."""
        return self._views.view()

    def rigid_views(self) -> list[RigidView]:
        """Return the views of rigid jobs, which no policy sees."""
        return self._views.rigid_views()

    def ledger(self, now: Seconds) -> Ledger:
        """Return the usage of accounts, and their slots that the view does not show."""
        return self._ledgers.ledger(now)

    def handle(self, event: inputs.Input, now: Seconds) -> list[Command]:
        """Apply one input and return the commands to carry out, in order.

        Args:
            now: seconds since 1970. It must not be earlier than the time of an earlier input.

        Raises:
            CoreError: if the input is impossible. The state must not be used any more.
            UnknownJobError: if the input names a job that does not exist.
        """
        ctx = self._ctx
        ctx.begin(now)
        self.state.version += 1
        if self.state.leaving_jobs:
            lifecycle.remove_leaving(ctx)
        HANDLERS[type(event)](ctx, event)
        if ctx.ended or self.state.arrays:
            relations.reconcile(ctx)
        if self.state.swaps:
            plans.reconcile_all(ctx)
        if self.state.overrides:
            overrides.reconcile_all(ctx)
        if self.state.draining:
            drains.reconcile_all(ctx)
        if self.state.sweeps:
            sweeps.reconcile(ctx, event)
        if ctx.ended:  # also by the steps above
            relations.reconcile(ctx)
        self.state.slot_index.keep_up()  # later queries must not change the order of entries
        self.state.note_changes(ctx.changed_jobs)
        for reader in (self._views, self._ledgers, self._run_ends, self._starts):
            reader.touch(ctx.changed_jobs)
        if ctx.plan_needed:
            ctx.out.append(RequestPlan())
        return ctx.out

    def due(self, now: Seconds) -> list[inputs.Input]:
        """Return one input for each deadline that has passed by `now`. Do not change the state.

        An input reports that a start, a change, a drain or a unit took too long, that an earliest
        start has come, or that an operator's order is due for another attempt.
        """
        state = self.state
        passed = state.deadlines.passed(now, state.jobs_with_processes)
        again: list[inputs.Input] = [
            inputs.OverrideDue(job=name)
            for name in state.overrides
            if overrides.is_due(state.jobs[name], now)
        ]
        ended = [n for n in self._run_ends.passed(now) if lifecycle.is_expired(state.jobs[n], now)]
        runs = [inputs.RunExpired(job=name) for name in ended]
        starts = [inputs.StartDue(job=name) for name in self._starts.passed(now)]
        units = sweeps.expired_units(state, now)
        return [*passed, *runs, *starts, *again, *drains.due(state, now), *units]
