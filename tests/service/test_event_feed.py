"""The feed's port: what subscribers may cost the controller."""

from __future__ import annotations

import pytest

from controlplane.service import event_feed
from schemas.wire.client import Cluster, GetCluster
from tests.support.service import House, Person, heard_by, until


async def test_too_many_subscriptions_disconnect_their_sender(
    house: House, people: tuple[Person, Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_feed, "MAX_SUBSCRIPTION_BYTES", 4096)
    watch = house.controller._link._flood_guard
    refused: list[tuple[str, str]] = []
    monkeypatch.setattr(
        house.controller._feed._audit, "refused", lambda what, _, peer: refused.append((what, peer))
    )
    other, flood = people
    await heard_by(house, flood, other)
    for number in range(100):
        flood.feed.subscribe(b"node/%d" % number + b"x" * 200)

    await until(lambda: refused)
    assert refused[0] == ("flood", "user:bob")
    assert max(watch.keys._kept_bytes.values()) <= 4096 + event_feed.MAX_TOPIC + 1
    assert isinstance(await other.ask(GetCluster()), Cluster)
    await heard_by(house, other)
