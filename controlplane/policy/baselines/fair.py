"""Equal shares: the same number of slots for every job, as far as each job can use them."""

from __future__ import annotations

from controlplane.policy.api import ClusterView, ImmediatePolicy, JobView, Plan, PolicyEvent
from controlplane.policy.options import NotNegative, Options
from controlplane.policy.placement.free_slots import Moves
from controlplane.policy.placement.placers import PlacerName, make_placer
from controlplane.policy.placement.sizes import RoundRobin, shares
from controlplane.policy.placement.slot_partition import partition_of, slots_in_words
from schemas.ids import Seconds


class FairOptions(Options, frozen=True):
    """Options of policy `fair`, table `[policy.options]` of the controller's settings."""

    # duration of turns if not all jobs fit; 0: the oldest run to the end
    quantum_s: NotNegative = 0.0
    placer: PlacerName = "consolidate"
    moves: Moves = "elastic"


class Fair(ImmediatePolicy):
    """Policy with max-min fair shares of all slots; batches stay as the users set them.

    Every job gets its minimum, then the smallest shares are raised together. Remaining slots stay
    with the jobs that already have them, or else go to the oldest jobs.

    If not all jobs can have their minimum, the oldest jobs get it. Each job then waits only until
    older jobs have ended. With `quantum_s`, jobs take turns: a job that ran this long queues behind
    the waiting jobs, so that no job starves even if others never end.
    """

    def __init__(self, options: FairOptions | None = None) -> None:
        self.options = options or FairOptions()
        self._placer = make_placer(self.options.placer, self.options.moves)
        self._round_robin = RoundRobin(self.options.quantum_s)

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Pass the event to the placer."""
        self._placer.observe(event, now)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the plan with fair shares."""
        partition = partition_of(view, now)
        self._round_robin.follow(view, now)
        sizes = shares(self._round_robin.queue(partition), partition)

        def why(job: JobView, slots: int) -> tuple[str, dict[str, float]]:
            numbers = {"jobs": float(len(sizes)), "room": float(partition.room)}
            if slots:
                return f"its share of {slots_in_words(partition.room)} among {len(sizes)}", numbers
            turn = "whose turn it is" if self.options.quantum_s else "that came before it"
            words = f"needs {slots_in_words(job.least)}, jobs {turn} leave no room for it"
            return words, {**numbers, "needs": float(job.least)}

        wake_at = self._round_robin.next_at(partition, sizes)
        return self._placer.plan(partition, sizes, why, wake_at)
