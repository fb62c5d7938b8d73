"""States that are tracked beside model and optimizer."""

from __future__ import annotations

from typing import Any

from elastic.state.tracked_states import TrackedStates


class Counter:
    """Something with a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_what_is_tracked_after_a_copy_goes_back_to_what_it_was_when_it_was_tracked() -> None:
    tracked, new, resumed = TrackedStates(), Counter(), Counter()
    tracked.load({"resumed": {"count": 5}})
    copy = tracked.states()
    tracked.add("new", new)
    tracked.add("resumed", resumed)
    new.count, resumed.count = 1, 6

    tracked.load(copy)

    assert (new.count, resumed.count) == (0, 5)
