"""Workers are packed by all that they use, where it is known."""

from __future__ import annotations

import msgspec

from controlplane.policy.api import JobView, StepsSeen
from controlplane.policy.placement.placers import SlotPlacer, make_placer
from controlplane.policy.placement.slot_partition import partition_of
from schemas.ids import JobId, SlotId
from tests.support.builders import A, B, C, job_view
from tests.support.views import NOW, row_of, view_of


def used(job: JobId, cores: float, sent: float) -> StepsSeen:
    return StepsSeen(
        job=job, family=str(job), group=1, slots=1, nodes=1, global_batch=64, step=1,
        samples_done=64, samples_per_s=100.0, cpu_cores=cores, sent_bytes_per_s=sent,
    )  # fmt: skip


def running(job: JobId, *slots: str) -> JobView:
    held = {SlotId(slot): 64 for slot in slots}
    return job_view(job, family=str(job), slots=(1, 4), running_on=held)


def where(placer: SlotPlacer, *jobs: JobView) -> list[SlotId]:
    """Slots of C beside these on three nodes of 2 slots and 8 cores."""
    slots = [msgspec.structs.replace(slot, host_cores=8) for slot in row_of(2, 2, 2)]
    partition = partition_of(view_of(slots, *jobs, job_view(C, family="c")), NOW)
    return placer.place(partition, {**{job.job: 1 for job in jobs}, C: 1})[C]


def packing(**of_c: float) -> SlotPlacer:
    """A uses 6 cores, B sends 1 GB/s, and a relative of C what is given."""
    placer = make_placer("tetris-resources")
    placer.observe(used(A, 6.0, 0.0), NOW)
    placer.observe(used(B, 1.0, 1e9), NOW)
    if of_c:
        seen = used(JobId("d-4"), of_c["cores"], of_c["sent"])
        placer.observe(msgspec.structs.replace(seen, family="c"), NOW)
    return placer


BUSY = (running(A, "n1/0"), running(B, "n2/0"))


def test_where_nothing_is_reported_nodes_in_use_are_filled_first() -> None:
    assert where(make_placer("tetris-resources"), *BUSY) == ["n1/1"]


def test_a_worker_goes_where_its_cores_have_room() -> None:
    assert where(packing(cores=4.0, sent=0.0), *BUSY) == ["n2/1"]


def test_among_nodes_with_room_the_best_aligned_is_filled() -> None:
    """Two cores fit on both, and there are more free beside B."""
    assert where(packing(cores=2.0, sent=0.0), *BUSY) == ["n2/1"]


def test_bandwidth_is_what_was_ever_used_on_a_node() -> None:
    """B alone had 1 GB/s; with as much again C would be too much there."""
    placer = packing(cores=1.0, sent=1e9)
    placer.place(partition_of(view_of(row_of(2, 2, 2), *BUSY), NOW), {A: 1, B: 1})

    assert where(placer, *BUSY) == ["n1/1"]


def test_who_fits_on_no_node_in_use_begins_another_one() -> None:
    placer = packing(cores=7.5, sent=0.0)

    assert where(placer, *BUSY) == ["n3/0"]
