"""Submissions with an image, which only some nodes can run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from schemas.errors import BadFieldError
from schemas.wire.client import CheckJob
from tests.support import builders
from tests.support.builders import N1, job_spec
from tests.support.service import LiveService, until


async def test_an_image_is_refused_until_a_node_runs_containers(tmp_path: Path) -> None:
    service = LiveService(tmp_path)
    greeting = builders.greeting(N1)
    service.take(greeting)
    rigid = {"script": "", "batch_size": 0, "command": ("true",)}
    asked = CheckJob(spec=job_spec(kind="command", slots=1, image="debian:12", **rigid))

    with pytest.raises(BadFieldError, match="no node of this cluster runs containers"):
        await service.ask(asked)
    able = msgspec.structs.replace(greeting.spec, containers="podman")
    service.take(msgspec.structs.replace(greeting, spec=able))

    nodes = service.loop.committed.state.nodes
    await until(lambda: any(node.spec == able for node in nodes.values()))

    assert "containers" not in str((await service.ask(asked)).notes)
    service.loop.close()
