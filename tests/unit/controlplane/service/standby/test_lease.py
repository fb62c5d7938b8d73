"""Rules for claiming the lease."""

from __future__ import annotations

from typing import Any

from controlplane.service.standby.lease import Held, Record, claim
from schemas.ids import Term
from tests.unit.controlplane.policy.tables import cases

A, B = "10.0.0.1", "10.0.0.2"


def held(*, expired: bool = True, **fields: Any) -> Held:
    """A lease of A in term 4, with all inputs on A and B."""
    record = {"holder": A, "term": Term(4), "complete": (A, B), **fields}
    return Held(record=Record(**record), version=9, expired=expired)


@cases(
    "lease, host, has_inputs, is_first, found",
    a_new_cluster_is_begun_by_the_first_host=(Held(), A, False, True, (1, (A,))),
    a_new_cluster_waits_for_the_first_host=(
        Held(), B, False, False, "the first of standby.hosts begins a new cluster"),
    a_cluster_that_had_one_controller_so_far=(Held(), B, True, False, (1, (B,))),
    the_holder_is_alive=(held(expired=False), B, True, False, f"{A} holds the lease"),
    the_holder_was_restarted=(held(expired=False), A, True, True, (5, (A,))),
    a_complete_host_after_the_expiry=(held(), B, True, False, (5, (B,))),
    an_incomplete_host_after_the_expiry=(
        held(complete=(A,)), B, True, False, f"only {A} has all acknowledged inputs"),
    a_host_that_lost_its_disk=(
        held(), B, False, False,
        "the journal is empty, although the lease says that it has all inputs"),
    a_first_host_that_died_before_its_first_commit=(held(complete=(A,)), A, False, True, (5, (A,))),
    a_released_lease=(held(holder="", expired=False), B, True, False, (5, (B,))),
    a_released_lease_with_another_successor=(
        held(holder="", successor=A, expired=False), B, True, False, f"{A} takes over"),
    a_released_lease_for_its_successor=(
        held(holder="", successor=B, expired=False), B, True, False, (5, (B,))),
    a_successor_that_never_came=(held(holder="", successor=A), B, True, False, (5, (B,))),
)  # fmt: skip
def test_who_may_claim_a_lease(
    *, lease: Held, host: str, has_inputs: bool, is_first: bool, found: Any
) -> None:
    claimed = claim(lease, host, has_inputs=has_inputs, is_first=is_first)

    if isinstance(found, str):
        assert claimed == found
    else:
        term, complete = found
        assert claimed == Record(holder=host, term=Term(term), complete=complete)
