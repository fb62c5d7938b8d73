from __future__ import annotations

import structlog.testing

from schemas.host.logging import Audit


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


def test_one_who_floods_takes_no_line_from_others() -> None:
    audit = Audit(limit_per_s=20, of_one_per_s=2, clock=lambda: 10.0)

    with structlog.testing.capture_logs() as lines:
        for _ in range(1000):
            audit.refused("request", "no", peer="user:eve")
        audit.refused("request", "no", peer="user:ann")

    assert [line["peer"] for line in lines] == ["user:eve", "user:eve", "user:ann"]


def test_what_was_left_out_is_said_when_nothing_more_is_refused() -> None:
    now = [10.0]
    audit = Audit(limit_per_s=1, clock=lambda: now[0])

    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            audit.refused("key", "no", peer="10.0.0.9")
        now[0] = 11.0
        audit._begin_second()

    assert [(line["what"], line.get("lines")) for line in lines] == [
        ("key", None),
        ("suppressed", 2),
    ]


def test_what_was_done_is_never_left_out() -> None:
    audit = Audit(limit_per_s=1, clock=lambda: 10.0)

    with structlog.testing.capture_logs() as lines:
        for _ in range(10):
            audit.refused("key", "no", peer="10.0.0.9")
            audit.done("RevokeKey", "admin:root", key="eve")

    done = [line for line in lines if line["what"] == "RevokeKey"]
    assert (len(done), done[0]["by"], done[0]["of_key"]) == (10, "admin:root", "eve")
