"""Policies of each kind change jobs on a real cluster, with jobs of some seconds.

All of them do in `bin/bench live_policies`, which takes a minute for each.
"""

from __future__ import annotations

import pytest

from tests.bench.live_policies import run
from tests.bench.live_sleepers import sleepers

CHANGES = {  # what they have to do
    "tiresias": {"pause"},  # users' sizes, and an order of its own
    "goodput": {"grow", "shrink"},  # sizes and batches, in rounds
    "optimus": {"grow", "shrink", "restart"},  # sizes, by a restart
}
SIZES = {"grow", "shrink", "restart"}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("policy", CHANGES)
def test_a_policy_acts(policy: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.mktemp("a")

    did = run(policy, sleepers(2, 2.0, many=6), base, base / "h")

    assert did.failed == 0
    assert CHANGES[policy] & did.changes.keys(), did.changes
    if policy == "tiresias":
        assert not SIZES & did.changes.keys(), did.changes
