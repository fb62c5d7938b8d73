"""Digests and addresses give access to states and archives, so few readers are told them."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from controlplane.core.model.job import JobOwner
from controlplane.service.api.views import View
from schemas.codec import REPLY
from schemas.ids import JobId, NodeId, Seconds, SlotId
from schemas.sweeps import TrialSpec
from schemas.transport.keys import Identity
from schemas.wire.client import JobDetail, Ledger, LedgerUnit
from tests.support.builders import job_spec
from tests.support.schemas_examples import EXAMPLES

SECRETS = {
    "digest",
    "snapshot",
    "sources",
    "token",
    "states_key",
}  # fields that give access to something
OWNER = JobOwner("ada", "vision")
READERS = {
    "its owner": (Identity("user", "ada"), True),
    "an admin": (Identity("admin", "root"), True),
    "a user of its project": (Identity("user", "bob", ("vision",)), True),
    "an operator": (Identity("operator", "olga"), False),
    "a viewer of its project": (Identity("viewer", "vic", ("vision",)), False),
    "a viewer of all": (Identity("viewer", "eve"), False),
}
TRIAL = TrialSpec(
    sweep=JobId("sweep-1"), trial=3, values={}, functions={}, partitions=2, seed=0, epochs=4,
    epochs_done=2, version=4, digest="d" * 64, sources=("10.0.0.7:4000",), states_key="k" * 64,
)  # fmt: skip
UNIT = LedgerUnit(
    trial=3, values_of=3, version=4, epoch=2, partition=1, digest="d" * 64, node=NodeId("n1"),
    slot=SlotId("n1/0"), ended=Seconds(9.0), seconds=1.0, metrics={}, samples=8,
)  # fmt: skip


@pytest.mark.parametrize(("who", "told"), READERS.values(), ids=READERS)
def test_digests_and_addresses_need_the_right_to_files(who: Identity, *, told: bool) -> None:
    view = View(who, lambda _: OWNER)
    detail: Any = EXAMPLES["client.job_detail.3"]
    detail = msgspec.structs.replace(detail, spec=job_spec(trial=TRIAL), snapshot="s" * 64)
    ledger: Any = EXAMPLES["client.ledger.2"]
    ledger = msgspec.structs.replace(ledger, units=(UNIT, UNIT), snapshot="s" * 64)

    shown: JobDetail = view.detail(detail, OWNER)
    page: Ledger = view.ledger(ledger, OWNER)

    trial = shown.spec.stated_trial
    assert trial is not None
    assert trial.states_key == ""
    found = (shown.snapshot, trial.digest, trial.sources, page.snapshot, page.units[1].digest)
    assert found == ("s" * 64, "d" * 64, TRIAL.sources, "s" * 64, "d" * 64) if told else found == (
        "", "", (), "", "",
    )  # fmt: skip


def secrets_in(kind: Any, path: str = "", seen: frozenset[type] = frozenset()) -> set[str]:
    """Return the paths of fields with such names in a type and in the types of its fields."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in seen:
        found = set[str]()
        for name, hint in get_type_hints(kind).items():
            if name in SECRETS:
                found.add(f"{path}{name}")
            found |= secrets_in(hint, f"{path}{name}.", seen | {kind})
        return found
    return {one for part in get_args(kind) for one in secrets_in(part, path, seen)}


def test_each_field_of_a_reply_that_gives_access_is_known() -> None:
    found = {f"{kind.__name__}.{path}" for kind in REPLY.kinds for path in secrets_in(kind)}

    assert found == {
        "SnapshotStored.digest",  # to the sender of the archive
        "JobDetail.snapshot",
        "JobDetail.spec.trial.digest",
        "JobDetail.spec.trial.sources",
        "JobDetail.spec.trial.states_key",  # to nobody
        "Ledger.snapshot",
        "Ledger.units.digest",
    }
