"""Every partition has its nodes, loads are even, and little moves when nodes come and go."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.sweeps.replicas import partition_holders
from schemas.ids import NodeId
from tests.support.sizes import examples

N0, N1, N2 = NodeId("n0"), NodeId("n1"), NodeId("n2")
workers = st.dictionaries(st.sampled_from([N0, N1, N2]), st.integers(1, 4), min_size=1)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(workers, min_size=1, max_size=5), st.integers(1, 12), st.integers(1, 4))
def test_each_partition_has_its_replicas_and_loads_are_even(
    changes: list[dict[NodeId, int]], partitions: int, replicas: int
) -> None:
    held: dict[NodeId, set[int]] = {}
    for now in changes:
        before, held = held, partition_holders(now, partitions, replicas, held)

        holders = [[n for n in now if p in held[n]] for p in range(partitions)]
        assert [len(some) for some in holders] == [min(replicas, len(now))] * partitions
        if replicas == 1:
            for one in now:
                for other in now:
                    more = (len(held[other]) + 1) / now[other]
                    assert len(held[one]) / now[one] <= max(more, len(held[other]) / now[other])
        if now.keys() == before.keys():
            assert partition_holders(now, partitions, replicas, held) == held, "nothing moves"


def test_partitions_follow_the_number_of_workers_and_leave_lost_and_unable_nodes() -> None:
    held = partition_holders({N0: 1, N1: 1, N2: 1}, 6, 1, {})
    after = partition_holders({N0: 1, N1: 1}, 6, 1, held)
    assert {node: len(some) for node, some in after.items()} == {N0: 3, N1: 3}
    assert all(held[node] <= after[node] for node in after)

    held = partition_holders({N0: 4, N1: 2}, 6, 1, {})
    assert {node: len(some) for node, some in held.items()} == {N0: 4, N1: 2}

    held = partition_holders({N0: 1, N1: 1}, 2, 2, {}, lambda node, p: (node, p) != (N1, 0))
    assert held == {N0: {0, 1}, N1: {1}}
