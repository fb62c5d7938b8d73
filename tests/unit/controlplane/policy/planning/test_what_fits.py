"""What fits: targets of the last round, and what placers leave."""

from __future__ import annotations

from typing import get_args

import pytest

from controlplane.policy.placement.placers import PlacerName, make_placer
from controlplane.policy.placement.rounds import fit_targets
from controlplane.policy.placement.slot_partition import partition_of
from schemas.ids import NodeId, Seconds, slot_id
from tests.support.builders import A, B, cluster_view, job_view, slot_view

SLOTS = [slot_view(slot_id(NodeId("n1"), at)) for at in range(4)]


def test_a_job_that_lost_its_group_starts_on_no_more_slots_than_have_a_sample_each() -> None:
    waits = job_view(A, slots=(1, 4), batch_size=2)

    partition = partition_of(cluster_view(*SLOTS, waits), Seconds(0.0))
    assert fit_targets(partition, {A: 4}, fixed_batches=True) == {A: 2}


def test_who_grows_does_it_when_all_of_it_fits() -> None:
    runs = job_view(A, slots=(1, 4), running_on={SLOTS[0].slot: 4})
    waits = job_view(B, slots=(2, 2))
    partition = partition_of(cluster_view(*SLOTS, runs, waits), Seconds(0.0))

    assert fit_targets(partition, {A: 3, B: 2}) == {A: 3}
    assert fit_targets(partition, {A: 2, B: 2}) == {A: 2, B: 2}
    assert fit_targets(partition, {B: 2}) == {A: 1, B: 2}


def test_who_shrinks_has_a_sample_for_each_slot_that_it_keeps() -> None:
    had = {slot.slot: 1 for slot in SLOTS}  # of a policy that changes batches
    runs = job_view(A, slots=(1, 4), batch_size=2, running_on=had)
    partition = partition_of(cluster_view(*SLOTS, runs), Seconds(0.0))

    assert fit_targets(partition, {A: 3}, fixed_batches=True) == {A: 2}
    assert fit_targets(partition, {A: 4}, fixed_batches=True) == {A: 4}
    assert fit_targets(partition, {A: 3}) == {A: 3}


@pytest.mark.parametrize("name", get_args(PlacerName))
def test_what_a_placer_gives_is_free_no_more(name: PlacerName) -> None:
    partition = partition_of(cluster_view(*SLOTS, job_view(A)), Seconds(0.0))

    ((taken,),) = make_placer(name, "elastic").place(partition, {A: 1}).values()

    assert partition.free == {NodeId("n1"): [s.slot for s in SLOTS if s.slot != taken]}
