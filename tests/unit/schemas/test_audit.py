"""Audit lines: refusals are limited, in total and per peer; privileged actions are not."""

from __future__ import annotations

import structlog.testing

from schemas.host.logging import Audit


def test_refusals_are_limited_per_second_and_the_others_counted() -> None:
    now = [10.0]
    audit = Audit(limit_per_s=3, clock=lambda: now[0])

    with structlog.testing.capture_logs() as lines:
        for what in ("request", "key", "hello") * 2:
            audit.refused(what, "no", peer="ann")
        now[0] = 11.0
        audit.refused("key", "no")
        audit.refused("key", "no")
        now[0] = 12.0
        audit._begin_second()
        for _ in range(5):
            audit.refused("key", "no")
        now[0] = 13.0
        audit._begin_second()

    assert [(line["what"], line.get("lines")) for line in lines] == [
        ("request", None), ("key", None), ("hello", None), ("suppressed", 3), ("key", None), ("key", None),
        ("key", None), ("key", None), ("key", None), ("suppressed", 2),
    ]  # fmt: skip


def test_a_flood_of_one_peer_takes_no_line_from_others() -> None:
    audit = Audit(limit_per_s=20, of_one_per_s=2, clock=lambda: 10.0)

    with structlog.testing.capture_logs() as lines:
        for _ in range(1000):
            audit.refused("request", "no", peer="user:eve")
        audit.refused("request", "no", peer="user:ann")

    assert [line["peer"] for line in lines] == ["user:eve", "user:eve", "user:ann"]


def test_privileged_actions_are_never_suppressed() -> None:
    audit = Audit(limit_per_s=1, clock=lambda: 10.0)

    with structlog.testing.capture_logs() as lines:
        for _ in range(10):
            audit.refused("key", "no", peer="10.0.0.9")
            audit.done("RevokeKey", "admin:root", key="eve")

    done = [line for line in lines if line["what"] == "RevokeKey"]
    assert (len(done), done[0]["by"], done[0]["of_key"]) == (10, "admin:root", "eve")
