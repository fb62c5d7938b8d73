"""Metrics of a node."""

from __future__ import annotations

from collections import Counter

from nodeagent.metrics import NodeFigures, NodeMetrics


def test_a_page_shows_the_latest_figures_of_the_node() -> None:
    metrics = NodeMetrics()
    for workers in ({"alive": 2, "ended": 1}, {"alive": 3}):
        metrics.write(
            NodeFigures(
                slots=4,
                workers=Counter(workers),
                problems=1,
                events_waiting=7,
                unconfirmed_s=0.5,
            )
        )

    page = metrics.registry.page("")[0].decode()

    lines = [line for line in page.splitlines() if line.startswith("ones_node_")]
    assert lines == [
        "ones_node_slots 4.0",
        'ones_node_workers{phase="alive"} 3.0',
        "ones_node_problems 1.0",
        "ones_node_events_waiting 7.0",
        "ones_node_unconfirmed_seconds 0.5",
        "ones_node_event_loop_lag_seconds 0.0",
    ]
    assert "process_resident_memory_bytes" in page
