"""Submissions with secret variables: what the controller keeps, and what it sends to nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from controlplane.client.archive import digest_of, pack
from controlplane.service.secret_store import SecretStore
from schemas.errors import BadFieldError
from schemas.jobs import JobSpec, SecretEnv
from schemas.wire.client import GetJob, PutSnapshot, RerunJob, SubmitJob
from tests.support.builders import A, job_spec
from tests.support.file_trees import PROJECT, tree
from tests.support.service import LiveService

VALUES: Final = {"TOKEN": "hunter2"}
NAMED: Final = SecretEnv(names=("TOKEN",))


@pytest.fixture
async def service(tmp_path: Path) -> Any:
    made = LiveService(tmp_path)
    yield made
    made.loop.close()


async def submit(
    service: LiveService, folder: Path, values: dict[str, str], secret_env: Any = NAMED
) -> Any:
    archive = pack(tree(folder / "workdir", PROJECT))
    digest = digest_of(archive)
    await service.ask(PutSnapshot(digest=digest, offset=0, data=archive, total=len(archive)))
    spec = job_spec("a", secret_env=secret_env)
    return await service.ask(SubmitJob(spec=spec, snapshot=digest, key="k", secrets=values))


def files(folder: Path) -> list[tuple[int, bytes]]:
    found = (folder / "secrets").glob("*")
    return [(path.stat().st_mode & 0o777, path.read_bytes()) for path in found]


def journal_has(folder: Path, *texts: bytes) -> list[bool]:
    journal = b"".join(path.read_bytes() for path in folder.glob("*.sqlite*"))
    return [text in journal for text in texts]


async def test_values_are_in_one_private_file_and_nowhere_else(
    service: LiveService, tmp_path: Path
) -> None:
    await submit(service, tmp_path, VALUES)
    await submit(service, tmp_path, VALUES)  # the same key: the same job

    shown = await service.ask(GetJob(job=A))
    kept = service.loop.reactor.state.jobs[A].spec
    assert files(tmp_path) == [(0o600, msgspec.msgpack.encode(VALUES))]
    assert (shown.spec.secret_names, b"hunter2" in msgspec.json.encode(shown)) == (
        ("TOKEN",), False,
    )  # fmt: skip
    assert SecretStore(tmp_path / "secrets").of(kept) == VALUES
    assert journal_has(tmp_path, b"TOKEN", b"hunter2") == [True, False]


@pytest.mark.parametrize(
    ("values", "secret_env", "problem"),
    [
        ({}, NAMED, "the values of TOKEN are needed"),
        ({"OTHER": "1"}, NAMED, "the values of TOKEN are needed"),
        ({"TOKEN": "a\0"}, NAMED, "a value has a NUL byte"),
        ({"TOKEN": "a" * 40_000}, NAMED, "more than 32768 bytes"),
        ({}, "secrets.env", "is a file of the client"),
        ({}, SecretEnv(names=(), id="../keys.json"), "has no variable"),
        ({"a b": "1"}, SecretEnv(names=("a b",)), "no variable name"),
    ],
)
async def test_values_that_do_not_fit_their_names_are_refused(
    service: LiveService, tmp_path: Path, values: dict[str, str], secret_env: Any, problem: str
) -> None:
    with pytest.raises(BadFieldError, match=problem):
        await submit(service, tmp_path, values, secret_env)

    assert files(tmp_path) == []


async def test_the_id_of_another_job_gives_no_access_to_its_values(
    service: LiveService, tmp_path: Path
) -> None:
    await submit(service, tmp_path, VALUES)
    other = service.loop.reactor.state.jobs[A].spec.secret_env

    again = await service.ask(RerunJob(job=A, secrets={"TOKEN": "mine"}))

    spec = service.loop.reactor.state.jobs[again.job].spec
    assert spec.secret_env != other
    assert SecretStore(tmp_path / "secrets").of(spec) == {"TOKEN": "mine"}


async def test_a_rerun_needs_the_values_again(service: LiveService, tmp_path: Path) -> None:
    await submit(service, tmp_path, VALUES)

    with pytest.raises(BadFieldError, match="the values of TOKEN are needed") as refused:
        await service.ask(RerunJob(job=A))

    assert refused.value.hint == "name their file with --secret-env FILE"


def test_values_go_with_the_last_live_job_that_has_them(tmp_path: Path) -> None:
    store = SecretStore(tmp_path / "secrets")
    spec, other, left = (
        JobSpec(name=name, script="t.py", batch_size=1, secret_env=store.put({"A": name}))
        for name in ("one", "other", "left")
    )
    trial = msgspec.structs.replace(spec, name="trial")

    store.forget(spec, [trial, other])
    assert store.of(trial) == {"A": "one"}
    store.forget(trial, [other])
    store.keep_only([other])

    assert [store.of(one) for one in (spec, trial, other, left)] == [{}, {}, {"A": "other"}, {}]
