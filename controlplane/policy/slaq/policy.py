"""SLAQ: slots go where the loss is expected to fall most (Zhang et al., SoCC '17)."""

from __future__ import annotations

from msgspec.structs import replace

from controlplane.policy.api import ClusterView, EpochSeen, JobEnded, Plan, PolicyEvent, StepsSeen
from controlplane.policy.immediate_policy import ImmediatePolicy
from controlplane.policy.planning.placers import placer_of
from controlplane.policy.planning.slot_partition import compose_plan, partition_of
from controlplane.policy.planning.slot_placer import with_user_batches
from controlplane.policy.planning.turns import Turns
from controlplane.policy.slaq.decision import decide
from controlplane.policy.slaq.observed_jobs import ObservedJobs
from controlplane.policy.slaq.options import SlaqOptions
from schemas.ids import Seconds


class Slaq(ImmediatePolicy):
    """Maximise the sum of normalised falls of the loss over the next scheduling epoch.

    Every job has its least; then each slot goes to the job whose predicted loss falls most by it.
    A job whose losses tell no curve has its fair share. See the README of this room.
    """

    def __init__(self, options: SlaqOptions | None = None) -> None:
        """Begin with nothing learnt.

        Args:
            options: of its settings; None for the defaults.
        """
        self.options = options or SlaqOptions()
        self._observed = ObservedJobs(self.options)
        self._placer = placer_of(self.options.placer)
        self._turns = Turns(self.options.quantum_s)

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn losses and speeds."""
        self._placer.observe(event, now)
        match event:
            case EpochSeen() | StepsSeen():
                self._observed.observe(event, now)
            case JobEnded():
                self._observed.forget(event.job)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Share out what there is, beginning with the sizes of now."""
        partition = partition_of(view, now)
        self._turns.follow(view, now)
        decision = decide(self._turns.line(partition), partition, self._observed, self.options)
        placed = self._placer.place(partition, decision.sizes)
        turn_ends = self._turns.next_at(partition, decision.sizes)
        next_epoch = Seconds(now + self.options.interval_s) if view.jobs else None
        wakes = [at for at in (turn_ends, next_epoch) if at is not None]
        plan = compose_plan(
            partition,
            with_user_batches(partition, placed),
            decision.why,
            wake_at=min(wakes, default=None),
        )
        return replace(plan, predicted_loss=decision.forecast.losses())
