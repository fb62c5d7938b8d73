"""Each policy that can change jobs does so on a real cluster, with jobs of some seconds."""

from __future__ import annotations

import pytest

from controlplane.policy.registry import POLICIES
from tests.bench.live_policies import run
from tests.bench.live_sleepers import sleepers

CHANGES = {  # what those that keep to users' sizes may do; the others choose sizes
    "fifo": set[str](),
    "tiresias": {"pause"},
    "gittins": {"pause"},
    "harmony": set[str](),  # there is one node, and nobody disturbs anybody
    "harmony-drl": set[str](),
}
SIZES = {"grow", "shrink", "restart"}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("policy", [name for name, one in POLICIES.items() if one.oracle != "must"])
def test_a_policy_acts(policy: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.mktemp("a")

    did = run(policy, sleepers(2, 2.0, many=6), base, base / "h")

    assert did.failed == 0
    may = CHANGES.get(policy, SIZES)
    assert may & did.changes.keys() or not may, did.changes
    if policy in CHANGES:
        assert not SIZES & did.changes.keys(), did.changes
