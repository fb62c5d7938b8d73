from __future__ import annotations

import structlog.testing

from schemas.logging_and_watchdog import Audit


def test_a_second_of_refusals_whoever_refuses_is_a_bounded_number_of_lines() -> None:
    now = [10.0]
    audit = Audit(limit_per_s=3, clock=lambda: now[0])

    with structlog.testing.capture_logs() as lines:
        for what in ("request", "key", "hello") * 2:
            audit.refused(what, "no", peer="ann")
        now[0] = 11.0
        audit.refused("key", "no")

    assert [(line["what"], line.get("lines")) for line in lines] == [
        ("request", None),
        ("key", None),
        ("hello", None),
        ("suppressed", 3),
        ("key", None),
    ]
