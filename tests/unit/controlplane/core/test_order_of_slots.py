"""Which slots a decision prefers follows from the inputs, not from who asked in between."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controlplane.core.reactor import Reactor
from controlplane.journal.database import input_from
from tests.support.recorded_history import of_jobs, of_sweeps
from tests.support.sizes import examples

MAKERS = {"jobs": of_jobs, "sweeps": of_sweeps}


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=examples(25), deadline=None)
@example(seed=91)
@given(seed=st.integers(0, 10_000))
def test_a_reactor_that_is_looked_at_stays_the_same_as_one_that_is_not(
    kind: str, seed: int
) -> None:
    seen, unseen = Reactor(), Reactor()

    for at, body in MAKERS[kind](seed, 120).history:
        event = input_from(body)
        assert seen.handle(event, at) == unseen.handle(event, at)
        seen.view()

    assert seen.state == unseen.state
    assert seen.state.slot_index.order() == unseen.state.slot_index.order()
