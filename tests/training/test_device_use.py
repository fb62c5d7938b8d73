"""The first use of a GPU waits for the slot."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
import torch._dynamo  # looks for what a GPU needs as it is imported, so before anybody believes in one
from torch import nn

from elastic.agent import ScalingAgent
from elastic.hooks import GPU_USED_EARLY, hold_device
from schemas.codec import encode
from schemas.wire.agent import ScriptReport, SlotAwaited
from schemas.wire.worker import SlotGranted
from tests.support.builders import A, assignment, run
from tests.training.peers import run_forked

DATA: Any = [(torch.ones(1), torch.ones(1))]


def believe_in_a_gpu() -> None:
    """Let torch believe in a device, as far as it gets without one."""
    c: Any = torch._C
    c._cuda_getDeviceCount = lambda: 1
    c._cuda_init = lambda: None
    torch.cuda._cudart = object()
    torch.cuda._queued_calls.clear()  # looks at the device's properties
    torch.cuda._lazy_seed_tracker = Mock(**{"get_calls.return_value": []})


def build_on(device: bool, granted: bool, folder: Path) -> None:  # noqa: FBT001
    believe_in_a_gpu()
    said: list[str] = []
    os.environ["ONES_WORKER"] = str(folder)
    given = msgspec.structs.replace(
        assignment(run(A), granted=granted), socket=f"ipc://{folder}/agent"
    )
    (folder / "assignment").write_bytes(encode(given))
    agent = ScalingAgent.from_env()
    reached = threading.Event()

    def grant() -> None:
        reached.wait(30)
        said.append("granted")
        agent._listener.receive(SlotGranted())

    threading.Thread(target=grant, daemon=True).start()
    write = agent._listener._report

    def report(kind: type[ScriptReport], **fields: Any) -> None:
        write(kind, **fields)
        if kind is SlotAwaited:
            said.append("waits")
            reached.set()

    agent._listener._report = report

    def build_model() -> nn.Module:
        said.append("building")
        if device:
            torch.cuda.init()
            said.append("on the GPU")
        else:
            said.append("on the host")
        return nn.Linear(1, 1)

    agent.load(build_model, lambda p: torch.optim.SGD(p, lr=0.1), DATA, batch_size=1)
    (folder / "said").write_text(" ".join(said))
    sys.stderr.flush()
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "granted", "events"), [
    (True, False, "building waits granted on the GPU"),
    (False, False, "building on the host waits granted"),
    (True, True, "building on the GPU"),
])  # fmt: skip
def test_the_first_use_of_the_gpu_waits_for_the_slot(
    tmp_path: Path, *, device: bool, granted: bool, events: str
) -> None:
    assert run_forked(build_on, device, granted, tmp_path) == 0
    assert (tmp_path / "said").read_text() == events


def test_a_device_in_use_is_logged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    hold_device(lambda: None)

    assert capsys.readouterr().err == GPU_USED_EARLY
