"""The table of rights: each role, each request, each relation to a job."""

from __future__ import annotations

import itertools
from typing import Any, Final, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.model.job import JobOwner
from controlplane.service.api.server import RequestServer
from controlplane.service.relay.log_relay import FOLLOWER_RIGHTS
from controlplane.service.rights import granted_topics, permit, sees_all, topics_of
from schemas.codec import READ_LOG, REQUEST
from schemas.errors import DeniedError, UnknownJobError
from schemas.transport.keys import Identity
from schemas.wire import client
from schemas.wire.client import AddKey, ListKeys, RevokeKey
from schemas.wire.feed import ReadLog
from schemas.wire.files import ListFiles, ReadFile
from schemas.wire.streams import FromClient, OpenStream
from tests.support.schemas_examples import EXAMPLES

DONE, DENIED, UNKNOWN = "done", "denied", "unknown"
MINE, TEAM, FOREIGN = JobOwner("ann", "vision"), JobOwner("bob", "vision"), JobOwner("eve", "eve")
WHO: Final = {
    "admin": Identity("admin", "ann"),
    "operator": Identity("operator", "ann"),
    "user": Identity("user", "ann", ("vision",)),
    "viewer": Identity("viewer", "ann", ("vision",)),
    "viewer of all": Identity("viewer", "ann"),
    "node": Identity("node", "ann"),
    "join": Identity("join", "ann"),
}
ASK: Final = (client.GetJob, client.WaitJob, client.ExplainJob, client.GetSweep, client.GetLedger)
CHANGE: Final = (
    client.CancelJob, client.ResizeJob, client.PauseJob, client.ResumeJob, client.HoldJob,
    client.ReleaseJob, client.ChangeSweep,
)  # fmt: skip
RERUN: Final = (client.RerunJob,)  # the new job has the values of the environment
FILES: Final = (ListFiles, ReadFile)
FREE: Final = (
    client.GetCluster, client.GetSearch, client.CheckJob, client.ListJobs, client.ListNodes,
    client.ReadEvents, client.GetUsage, client.GetSharing, client.GetPolicy,
)  # fmt: skip
OWN: Final = (client.PutSnapshot, client.SubmitJob)
ADD_KEY: Final = (AddKey,)  # own keys, for logins; keys of nodes
DRAINS: Final = (
    client.DrainNode, client.UndrainNode, client.ForgetNode, client.PauseScheduling,
    client.ReserveNodes, client.CancelReservation,
)  # fmt: skip
KEYS: Final = (ListKeys, RevokeKey, client.ChangeSharing, client.ChoosePolicy)
# of a job of his own, of one of his project, of a stranger's
ON_JOBS: Final[dict[str, dict[Any, str]]] = {
    "admin": {
        ASK: "+++",
        CHANGE: "+++",
        RERUN: "+--",
        (ReadLog,): "+++",
        FILES: "+++",
        (OpenStream,): "+--",
    },
    "operator": {
        ASK: "+++",
        CHANGE: "+--",
        RERUN: "+--",
        (ReadLog,): "+--",
        FILES: "+--",
        (OpenStream,): "+--",
    },
    "user": {
        ASK: "++?",
        CHANGE: "+-?",
        RERUN: "+-?",
        (ReadLog,): "++?",
        FILES: "++?",
        (OpenStream,): "+-?",
    },
    "viewer": {
        ASK: "++?",
        CHANGE: "---",
        RERUN: "--?",
        (ReadLog,): "++?",
        FILES: "--?",
        (OpenStream,): "--?",
    },
    "viewer of all": {
        ASK: "+++",
        CHANGE: "---",
        RERUN: "---",
        (ReadLog,): "---",
        FILES: "---",
        (OpenStream,): "---",
    },
    "node": {
        ASK: "---",
        CHANGE: "---",
        RERUN: "---",
        (ReadLog,): "---",
        FILES: "---",
        (OpenStream,): "---",
    },
}
ON_JOBS["join"] = ON_JOBS["node"]
WITHOUT: Final = {
    "admin": {FREE: "+", OWN: "+", ADD_KEY: "+", DRAINS: "+", KEYS: "+"},
    "operator": {FREE: "+", OWN: "+", ADD_KEY: "+", DRAINS: "+", KEYS: "-"},
    "user": {FREE: "+", OWN: "+", ADD_KEY: "+", DRAINS: "-", KEYS: "-"},
    "viewer": {FREE: "+", OWN: "-", ADD_KEY: "-", DRAINS: "-", KEYS: "-"},
    "viewer of all": {FREE: "+", OWN: "-", ADD_KEY: "-", DRAINS: "-", KEYS: "-"},
    "node": {FREE: "-", OWN: "-", ADD_KEY: "-", DRAINS: "-", KEYS: "-"},
    "join": {FREE: "-", OWN: "-", ADD_KEY: "+", DRAINS: "-", KEYS: "-"},
}
SIGNS: Final = {"+": DONE, "-": DENIED, "?": UNKNOWN}
NONE: Final[Any] = None
ROUTES: Final = RequestServer(
    commit_loop=NONE, plans=NONE, socket=NONE, feed=NONE, snapshots=NONE, secrets=NONE, telemetry=NONE,
    audit=NONE, notes=NONE, cluster_info=NONE, search_info=NONE, owners=NONE, limits=NONE,
    prepare_policy=NONE, keys=NONE, files_stored=NONE,
).routes  # fmt: skip
RIGHT_OF: Final = {kind: route.right for kind, route in ROUTES.items()} | {**FOLLOWER_RIGHTS}
MESSAGES: Final = {type(example): example for example in EXAMPLES.values()}
CASES: Final = [
    (role, kind, job, SIGNS[sign])
    for role, rights in ON_JOBS.items()
    for kinds, signs in rights.items()
    for kind in kinds
    for job, sign in zip((MINE, TEAM, FOREIGN), signs, strict=True)
] + [
    (role, kind, None, SIGNS[sign])
    for role, rights in WITHOUT.items()
    for kinds, sign in rights.items()
    for kind in kinds
]


def outcome(who: Identity, kind: type[Any], job: JobOwner | None) -> str:
    try:
        permit(who, RIGHT_OF[kind], MESSAGES[kind], job)
    except DeniedError:
        return DENIED
    except UnknownJobError:
        return UNKNOWN
    return DONE


def test_every_request_has_a_right() -> None:
    of_open_streams = {*get_args(FromClient)} - {OpenStream}
    kinds = {*REQUEST.kinds, *READ_LOG.kinds} - of_open_streams

    assert set(RIGHT_OF) == kinds
    for role in WHO:
        assert {kind for name, kind, _, _ in CASES if name == role} == kinds


@pytest.mark.parametrize("role", WHO)
def test_each_role_has_exactly_the_rights_of_the_table(role: str) -> None:
    mine = [case for case in CASES if case[0] == role]

    found = [(role, kind, job, outcome(WHO[role], kind, job)) for _, kind, job, _ in mine]

    assert found == mine


def test_an_invisible_job_is_refused_like_a_missing_job() -> None:
    def said(job: JobOwner | None, kind: type[Any]) -> tuple[str, ...]:
        with pytest.raises((UnknownJobError, DeniedError)) as refused:
            permit(WHO["user"], RIGHT_OF[kind], MESSAGES[kind], job)
        error = refused.value
        return type(error).__name__, error.message, error.hint, error.field

    for kind in (*ASK, *CHANGE, ReadLog, *FILES, OpenStream):
        assert said(FOREIGN, kind) == said(None, kind)


def test_a_user_without_a_project_has_a_personal_project() -> None:
    eve = Identity("user", "eve")

    assert [outcome(eve, ReadLog, job) for job in (MINE, TEAM, FOREIGN)] == [UNKNOWN, UNKNOWN, DONE]
    assert outcome(Identity("user", "dan", ("eve",)), ReadLog, FOREIGN) == DONE


def test_the_name_of_a_viewer_gives_no_ownership() -> None:
    assert outcome(Identity("viewer", "eve", ("vision",)), ReadLog, FOREIGN) == UNKNOWN


ALL: Final = (b"job/", b"node/", b"cluster")


@pytest.mark.parametrize(
    ("role", "asked", "granted"),
    [
        ("admin", b"", ALL),
        ("operator", b"job/a-1", (b"job/a-1",)),
        ("viewer of all", b"project/vision/", (b"project/vision/",)),
        ("user", b"", (b"project/vision/", b"node/", b"cluster")),
        ("user", b"job/", ()),
        ("user", b"project/", (b"project/vision/",)),
        ("user", b"project/vision/job/a-1", (b"project/vision/job/a-1",)),
        ("user", b"project/vision", (b"project/vision/",)),
        ("user", b"project/visionaries/", ()),
        ("viewer", b"project/eve/job/a-1", ()),
        ("viewer", b"n", (b"node/",)),
        ("node", b"", ()),
    ],
)
def test_a_subscription_is_granted_within_the_rights_of_its_key(
    role: str, asked: bytes, granted: tuple[bytes, ...]
) -> None:
    assert granted_topics(WHO[role], asked) == granted


NAMES: Final = st.sampled_from(["a", "ab", "a.b", "b", "job", "node"])
TOPICS: Final = st.one_of(
    st.binary(max_size=12),
    st.builds(
        lambda name, rest: f"project/{name}{rest}".encode(), NAMES, st.sampled_from(["", "/"])
    ),
    st.builds(lambda name: f"job/{name}-1".encode(), NAMES),
)


@given(st.lists(NAMES, min_size=1, max_size=3), TOPICS, NAMES, NAMES)
def test_no_granted_topic_covers_invisible_jobs(
    projects: list[str], asked: bytes, project: str, user: str
) -> None:
    who = Identity("user", "me", tuple(projects))
    topics = (f"project/{project}/job/{user}-1".encode(), f"job/{user}-1".encode())

    granted = granted_topics(who, asked)

    heard = [topic for topic in topics if any(topic.startswith(one) for one in granted)]
    assert not sees_all(who)
    assert heard == ([topics[0]] if project in projects and topics[0].startswith(asked) else [])
    for one, mine in itertools.product(granted, topics_of(who)):
        assert one.startswith(asked), (one, mine)
