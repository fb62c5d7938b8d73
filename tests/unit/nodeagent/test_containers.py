"""Commands that run programs in containers."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from nodeagent import containers
from nodeagent.containers import (
    container_name,
    engine_words,
    in_container,
    passed_names,
    worker_volumes,
)
from nodeagent.errors import NodeStartError
from nodeagent.settings import Containers
from schemas.ids import JobId, Rank, Version
from schemas.jobs import JobSpec
from tests.support.builders import S0, A, assignment, job_spec, run

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
        "--log-driver=none", "--network=host", "--ipc=host", *more, "--workdir", "/w", "--volume=/w:/w",
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


def test_an_account_without_a_user_namespace_gets_no_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(containers, "_run_as", lambda *_: 125)

    with pytest.raises(NodeStartError, match="cannot open a user namespace for uid 1000"):
        containers.open_namespace("podman", 1000)


def test_values_of_variables_are_not_in_the_command() -> None:
    command = in_container(("podman", "run"), "debian:12", ("sh", "-c", "x"), {"B": "1", "A": "2"})

    assert command == ("podman", "run", "--env=A", "--env=B", "debian:12", "sh", "-c", "x")


ELASTIC = job_spec(env={"MINE": "1"})
GANG = job_spec(
    kind="torchrun", slots=1, script="", batch_size=0, command=("true",), env={"A": "1"}
)
DEVICE, THREADS, TOKEN = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TOKEN"


@pytest.mark.parametrize(
    ("spec", "passed"),
    [
        (ELASTIC, {"MINE", DEVICE, TOKEN, "PYTHONHASHSEED", "NCCL_SOCKET_IFNAME"}),
        (GANG, {"A", DEVICE, TOKEN}),
        (
            job_spec(env={"PATH": "/opt"}),
            {"PATH", DEVICE, TOKEN, "PYTHONHASHSEED", "NCCL_SOCKET_IFNAME"},
        ),
    ],
    ids=["an elastic worker", "a program", "its own path"],
)
def test_a_container_gets_the_variables_of_the_job_and_none_of_the_accounts(
    spec: JobSpec, passed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = ("PATH", "HOME", DEVICE, "PYTHONHASHSEED", "NCCL_SOCKET_IFNAME")
    for name in nodes:
        monkeypatch.setenv(name, "of the node")
    one = replace(
        assignment(replace(run(A, on={S0: 1}), spec=spec)),
        env={"PATH": "", DEVICE: "7", **spec.env},
    )

    assert set(passed_names(one, {*nodes, *one.env, TOKEN}, {TOKEN})) == passed


def test_an_elastic_worker_sees_its_folders_and_the_agents_socket(tmp_path: Path) -> None:
    given = {
        "checkpoints": f"{tmp_path}/c/a",
        "states": "",
        "socket": "ipc:///run/containers/agent.sock",
    }
    one = replace(assignment(run(A, on={S0: 1})), **given)

    volumes = worker_volumes(one, tmp_path)

    assert volumes == (
        f"--volume={tmp_path}:{tmp_path}",
        f"--volume={tmp_path}/c/a:{tmp_path}/c/a",
        "--volume=/run/containers:/run/containers:ro",
    )
    assert (tmp_path / "c" / "a").is_dir()  # an engine creates no missing folders
