"""Every request of the wire, sent by every kind of key: the answer and the audit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from controlplane.service.relay.log_relay import FOLLOWER_RIGHTS
from controlplane.service.rights import permit
from schemas.codec import REPLY, REQUEST, encode
from schemas.errors import OnesError
from schemas.transport.keys import Identity
from schemas.transport.sockets import Incoming
from schemas.wire import Message
from schemas.wire.client import Failed
from tests.support import builders
from tests.support.builders import N1, S0, A
from tests.support.schemas_examples import EXAMPLES
from tests.support.service import LiveService

OWNER, MATE, STRANGER = "its owner", "a user of its project", "another user"
OPERATOR, ADMIN = "an operator", "an admin"
VIEWER, OTHER_VIEWER, ALL_VIEWER = "its viewer", "a viewer of another project", "a viewer of all"
NODE, JOINER, NOBODY = "a node", "a provider of nodes", "nobody"
KEYS: Final = {
    OWNER: Identity("user", "ann", ("vision",)),
    MATE: Identity("user", "bob", ("vision",)),
    STRANGER: Identity("user", "eve"),
    OPERATOR: Identity("operator", "olga"),
    ADMIN: Identity("admin", "root"),
    VIEWER: Identity("viewer", "vic", ("vision",)),
    OTHER_VIEWER: Identity("viewer", "val", ("speech",)),
    ALL_VIEWER: Identity("viewer", "wall"),
    NODE: Identity("node", N1),
    JOINER: Identity("join", "slurm"),
    NOBODY: Identity("", ""),
}
USERS, PEOPLE = [OWNER, MATE, STRANGER, OPERATOR, ADMIN], list(KEYS)[:8]
SEE_IT = [OWNER, MATE, OPERATOR, ADMIN, VIEWER, ALL_VIEWER]
MAY: Final = {  # who may send a request; the others are denied, or told that there is no such job
    **dict.fromkeys(
        [
            "GetCluster",
            "GetSearch",
            "CheckJob",
            "ListJobs",
            "ListNodes",
            "GetUsage",
            "ReadEvents",
            "GetSharing",
            "GetPolicy",
        ],
        PEOPLE,
    ),
    **dict.fromkeys(["GetJob", "WaitJob", "ExplainJob", "GetSweep", "GetLedger"], SEE_IT),
    "ReadLog": (OWNER, MATE, ADMIN, VIEWER),
    **dict.fromkeys(["ListFiles", "ReadFile"], (OWNER, MATE, ADMIN)),
    "OpenStream": (OWNER,),
    **dict.fromkeys(
        ["CancelJob", "ResizeJob", "PauseJob", "ResumeJob", "ChangeSweep"], (OWNER, ADMIN)
    ),
    **dict.fromkeys(["HoldJob", "ReleaseJob"], (OWNER, ADMIN)),
    "RerunJob": (OWNER,),
    **dict.fromkeys(["PutSnapshot", "SubmitJob"], USERS),
    **dict.fromkeys(
        [
            "DrainNode",
            "UndrainNode",
            "ReserveNodes",
            "CancelReservation",
            "ForgetNode",
            "PauseScheduling",
        ],
        (OPERATOR, ADMIN),
    ),
    **dict.fromkeys(["AddKey", "ListKeys", "RevokeKey", "ChangeSharing", "ChoosePolicy"], (ADMIN,)),
}
ON_A_JOB: Final = set(MAY) - {
    "GetCluster", "GetSearch", "CheckJob", "ListJobs", "ListNodes", "GetUsage", "ReadEvents",
    "PutSnapshot", "SubmitJob", "DrainNode", "UndrainNode", "ForgetNode", "AddKey", "ListKeys",
    "ReserveNodes", "CancelReservation",
    "RevokeKey", "GetSharing", "ChangeSharing", "PauseScheduling", "GetPolicy", "ChoosePolicy",
}  # fmt: skip
REQUESTS: Final = {
    kind.__name__: kind for kind in dict.fromkeys([*REQUEST.kinds, *FOLLOWER_RIGHTS])
}


def expected(request: str, who: str) -> str:
    if who in MAY[request]:
        return "permitted"
    reader = who in PEOPLE
    writer = who in USERS
    changes = MAY[request] == (OWNER, ADMIN)
    if request in ON_A_JOB and reader and who not in SEE_IT and not (changes and not writer):
        return "unknown_job"
    return "denied"


def example(kind: type[Message]) -> Message:
    (found,) = (one for one in EXAMPLES.values() if type(one) is kind)
    changes: dict[str, Any] = {"job": A, "wait_s": 0.0, "node": N1}
    known = {name: value for name, value in changes.items() if name in kind.__struct_fields__}
    return msgspec.structs.replace(found, **known)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[LiveService]:
    made = LiveService(tmp_path)
    made.take(builders.greeting(N1))
    made.take(builders.submission("a", user="ann", project="vision"))
    made.place({A: S0})
    await made.loop.caught_up()
    yield made
    made.loop.close()


class Answers:
    """A socket that keeps the last answer, and an audit that keeps refusals."""

    def __init__(self) -> None:
        self.last = b""
        self.refused_peers: list[str] = []

    def send(self, *frames: bytes) -> bool:
        self.last = frames[-1]
        return True

    def refused(self, what: str, why: str, *, peer: str = "", **_: str) -> None:
        self.refused_peers.append(peer)

    def done(self, *_: str, **__: str) -> None:
        pass


@pytest.mark.parametrize("who", KEYS)
@pytest.mark.parametrize("request_", MAY)
async def test_a_request_is_permitted_or_refused_and_audited(
    service: LiveService, request_: str, who: str
) -> None:
    kind, identity, answers = REQUESTS[request_], KEYS[who], Answers()
    if kind in FOLLOWER_RIGHTS:
        found = of_follower(service, example(kind), identity)
    else:
        service.server._socket, service.server._audit = answers, answers  # type: ignore[assignment]
        asked = Incoming((b"route", b"1", encode(example(kind))), identity)
        await service.server._answer(asked)
        reply = REPLY.decode(answers.last)
        failed = isinstance(reply, Failed) and reply.code in {"denied", "unknown_job"}
        found = reply.code if failed else "permitted"  # type: ignore[union-attr]
        refusals = answers.refused_peers
        assert refusals == [str(identity)] if failed else set(refusals) <= {str(identity)}

    assert found == expected(request_, who)


def of_follower(service: LiveService, request: Message, who: Identity) -> str:
    """Check a request of the port for output and files, where agents would answer."""
    try:
        permit(who, FOLLOWER_RIGHTS[type(request)], request, service.server._owners.of(A))
    except OnesError as error:
        return error.code
    return "permitted"


def test_the_matrix_has_every_request() -> None:
    assert set(MAY) == set(REQUESTS)
