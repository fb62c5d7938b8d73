"""Commands that run programs in containers."""

from __future__ import annotations

import pytest

from nodeagent.containers import container_name, engine_words, in_container
from nodeagent.errors import NodeStartError
from nodeagent.settings import Containers
from schemas.ids import JobId, Rank, Version

PODMAN = Containers(engine="podman", options=("--device=nvidia.com/gpu=all",))
NAME = container_name("0123456789ab", JobId("box-3"), Version(2), Rank(1))


def test_a_container_is_named_after_its_worker() -> None:
    assert NAME == "ones-01234567-box-3-v2-r1"


@pytest.mark.parametrize(
    ("uid", "tty", "more"),
    [
        (0, False, []),
        (1000, False, ["--userns=keep-id"]),
        (0, True, ["--interactive", "--tty"]),
    ],
)
def test_the_options_of_the_operator_come_last(uid: int, *, tty: bool, more: list[str]) -> None:
    words = engine_words(PODMAN, NAME, "/w", uid=uid, own_uid=False, tty=tty)

    assert list(words) == [
        "podman", "run", "--rm", "--init", "--name", NAME, "--cgroups=no-conmon",
        "--network=host", "--ipc=host", *more, "--workdir", "/w", "--volume=/w:/w",
        "--device=nvidia.com/gpu=all",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "own_uid", "hint"),
    [
        (Containers(), False, 'set engine = "podman" in [containers] of its agent'),
        (PODMAN, True, 'set jobs.run_as = "submitter" (or "agent") for its agent'),
    ],
)
def test_a_node_without_containers_refuses_an_image(
    settings: Containers, *, own_uid: bool, hint: str
) -> None:
    with pytest.raises(NodeStartError) as refused:
        engine_words(settings, NAME, "/w", uid=0, own_uid=own_uid, tty=False)

    assert refused.value.hint == hint


def test_values_of_variables_are_not_in_the_command() -> None:
    command = in_container(("podman", "run"), "debian:12", ("sh", "-c", "x"), {"B": "1", "A": "2"})

    assert command == ("podman", "run", "--env=A", "--env=B", "debian:12", "sh", "-c", "x")
