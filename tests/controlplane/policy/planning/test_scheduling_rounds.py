"""What the last round decided, as far as it still fits."""

from __future__ import annotations

from controlplane.policy.planning.scheduling_rounds import fit_targets
from controlplane.policy.planning.slot_partition import partition_of
from schemas.ids import NodeId, Seconds, slot_id
from tests.support.builders import A, B, cluster_view, job_view, slot_view

SLOTS = [slot_view(slot_id(NodeId("n1"), at)) for at in range(4)]


def test_a_job_that_lost_its_group_starts_on_no_more_slots_than_have_a_sample_each() -> None:
    waits = job_view(A, slots=(1, 4), batch_size=2)

    assert fit_targets(partition_of(cluster_view(*SLOTS, waits), Seconds(0.0)), {A: 4}) == {A: 2}


def test_who_grows_does_it_when_all_of_it_fits() -> None:
    runs = job_view(A, slots=(1, 4), running_on={SLOTS[0].slot: 4})
    waits = job_view(B, slots=(2, 2))
    partition = partition_of(cluster_view(*SLOTS, runs, waits), Seconds(0.0))

    assert fit_targets(partition, {A: 3, B: 2}) == {A: 3}
    assert fit_targets(partition, {A: 2, B: 2}) == {A: 2, B: 2}
    assert fit_targets(partition, {B: 2}) == {A: 1, B: 2}
