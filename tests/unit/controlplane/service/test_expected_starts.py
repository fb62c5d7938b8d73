"""When a waiting job is expected to start, in words."""

from __future__ import annotations

import pytest

from controlplane.policy.api import Reason, StartForecast
from controlplane.service.planner.plan_coordinator import with_start_forecast
from schemas.ids import Seconds

WAITS = Reason("waits", "waits for 1 slot", {"needs": 1.0})
SAID = StartForecast(at=Seconds(400.0), earliest=Seconds(220.0), latest=Seconds(100.0 + 7200.0))


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (100.0, "expected to start in 5.0 min (80%: 2.0 min to 2.0 h)"),
        (390.0, "expected to start in 10 s (80%: 0 s to 1.9 h)"),
        (8000.0, "expected to start at any moment"),
    ],
)
def test_a_reason_includes_the_expected_start(now: float, words: str) -> None:
    found = with_start_forecast(WAITS, SAID, Seconds(now))

    assert found == Reason(
        "waits",
        f"waits for 1 slot; {words}",
        {
            "needs": 1.0,
            "start_s": max(0.0, 400.0 - now),
            "start_earliest_s": max(0.0, 220.0 - now),
            "start_latest_s": max(0.0, 7300.0 - now),
        },
    )
