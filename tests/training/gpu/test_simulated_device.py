"""The simulated device refuses what a GPU refuses, and shows readers that do not wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.simgpu.processes import here, on_device

pytestmark = pytest.mark.slow
LATE_US = 50_000


def refused(kind: type[Exception], words: str, use: Callable[[], object]) -> None:
    with pytest.raises(kind, match=words):
        use()


@on_device
def test_tensors_of_two_devices_do_not_mix() -> None:
    ours = torch.ones(3, 2, device=here())
    other = torch.ones(3, 2, device=here(1))
    words = "two devices"

    refused(RuntimeError, words, lambda: ours + torch.ones(3, 2))
    refused(RuntimeError, words, lambda: ours.add_(other))
    refused(RuntimeError, words, lambda: torch.cat([ours, other]))
    refused(RuntimeError, words, lambda: nn.functional.linear(ours, torch.ones(4, 2)))
    refused(RuntimeError, words, lambda: nn.functional.conv1d(ours[None], torch.ones(1, 3, 1)))
    refused(TypeError, "numpy", ours.numpy)
    assert (ours + torch.tensor(1.0)).device == here()  # a number of the host may take part
    assert ours.to(here(1)).device == here(1)


@on_device
def test_gradients_arrive_in_a_device_thread() -> None:
    threads = []
    weight = torch.ones(2, device=here(), requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: threads.append(threading.get_ident()))
    (weight * 2).sum().backward()  # type: ignore[no-untyped-call]

    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


@on_device
def test_fresh_memory_is_not_zero() -> None:
    assert torch.empty(4, dtype=torch.uint8, device=here()).tolist() == [0xCB] * 4


@on_device
def test_a_forked_child_cannot_use_the_device() -> None:
    torch.zeros(1, device=here())
    child = os.fork()
    if child == 0:
        try:
            torch.zeros(1, device=here())
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(0)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# --- streams and events


@on_device
def test_an_event_on_a_blocked_stream_is_not_complete(simgpu: Any) -> None:
    first, second = torch.Stream(device=here()), torch.Stream(device=here())
    gate = simgpu.Gate()
    gate.block(first)
    event = first.record_event()
    second.wait_event(event)
    after = second.record_event()
    assert [first.query(), event.query(), second.query(), after.query()] == [False] * 4
    assert torch.accelerator.current_stream().query()

    gate.open()
    after.synchronize()
    second.synchronize()
    assert [first.query(), event.query(), second.query(), after.query()] == [True] * 4


@on_device
def test_a_kernel_runs_when_its_stream_is_unblocked(simgpu: Any) -> None:
    stream, gate = torch.Stream(device=here()), simgpu.Gate()
    gate.block(stream)
    entered, seen = threading.Event(), []

    def use() -> None:
        with stream:
            entered.set()
            seen.append(float(torch.ones(3, device=here()).sum()))

    thread = threading.Thread(target=use)
    thread.start()
    entered.wait()
    assert float(torch.ones(2, device=here()).sum()) == 2.0  # another stream goes on
    assert seen == []

    gate.open()
    thread.join()
    assert seen == [3.0]


@on_device
def test_threads_share_the_default_stream_and_its_blocks(simgpu: Any) -> None:
    gate, seen = simgpu.Gate(), []
    helper = threading.Thread(target=lambda: gate.block(torch.accelerator.current_stream()))
    helper.start()
    helper.join()
    training = threading.Thread(
        target=lambda: seen.append(float(torch.ones(3, device=here()).sum()))
    )
    training.start()
    training.join(0.1)
    assert seen == []

    gate.open()
    training.join()
    assert seen == [3.0]


@on_device
def test_a_device_wait_covers_all_streams(simgpu: Any) -> None:
    gate = simgpu.Gate()
    gate.block(torch.Stream(device=here()))
    waits = threading.Thread(target=torch.accelerator.synchronize)
    waits.start()
    waits.join(0.05)
    assert waits.is_alive()
    torch.accelerator.synchronize(1)  # another device has nothing to do

    gate.open()
    waits.join()


@on_device
def test_an_unawaited_copy_is_garbage(simgpu: Any) -> None:
    ours = torch.arange(4.0, device=here())
    pinned = torch.zeros(4).pin_memory()
    assert pinned.is_pinned()
    simgpu.set_late(copies_us=LATE_US)

    down = pinned.copy_(ours, non_blocking=True)
    fresh = ours.to("cpu", non_blocking=True)
    torn = [down.tolist(), fresh.tolist()]
    torch.accelerator.current_stream().synchronize()
    assert [0.0, 1.0, 2.0, 3.0] not in torn
    assert [down.tolist(), fresh.tolist()] == [[0.0, 1.0, 2.0, 3.0]] * 2


@on_device
def test_a_source_that_changes_too_early_is_torn(simgpu: Any) -> None:
    pinned = torch.ones(4).pin_memory()
    pageable = torch.ones(4)
    simgpu.set_late(copies_us=LATE_US)

    from_pinned = pinned.to(here(), non_blocking=True)
    from_pageable = pageable.to(here(), non_blocking=True)  # is read at once
    pinned.zero_()
    pageable.zero_()

    assert from_pinned.tolist() == [0.0] * 4
    assert from_pageable.tolist() == [1.0] * 4


@on_device
def test_a_copy_keeps_its_place_on_its_stream(simgpu: Any) -> None:
    stream = torch.Stream(device=here())
    pinned = torch.ones(4).pin_memory()
    simgpu.set_late(copies_us=LATE_US)
    with stream:
        ours = pinned.to(here(), non_blocking=True)
        doubled = ours * 2  # behind it
        assert doubled.tolist() == [2.0] * 4


@on_device
def test_unawaited_results_of_another_stream_are_garbage(simgpu: Any) -> None:
    weight = torch.ones(4, device=here())
    own = torch.Stream(device=here())
    simgpu.set_late(kernels_us=LATE_US)
    with own:
        weight.add_(1.0)
    torn = weight.tolist()
    torch.accelerator.current_stream().wait_stream(own)

    assert torn != [2.0] * 4
    assert weight.tolist() == [2.0] * 4


@on_device
def test_only_record_stream_keeps_memory_for_readers(simgpu: Any) -> None:
    seen = []
    for recorded in (False, True):
        reads, gate = torch.Stream(device=here()), simgpu.Gate()
        ours = torch.ones(4, device=here())
        pinned = torch.zeros(4).pin_memory()
        gate.block(reads)
        with reads:
            pinned.copy_(ours, non_blocking=True)
        if recorded:
            ours.record_stream(reads)
        del ours
        gate.open()
        reads.synchronize()
        seen.append(pinned.tolist())

    assert seen[0] != [1.0] * 4
    assert seen[1] == [1.0] * 4
