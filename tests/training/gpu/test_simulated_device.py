"""The simulated device itself: what it computes as the host does, and what it refuses as a GPU does."""

from __future__ import annotations

import copy
import io
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.simgpu.processes import on_device

pytestmark = pytest.mark.slow
LATE_US = 50_000


def here(index: int = 0) -> torch.device:
    return torch.device("simgpu", index)


class Varied(nn.Module):
    """Many kinds of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.flat = nn.Linear(16, 16)
        self.words = nn.Embedding(10, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.last_norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(16, 5)

    def forward(self, images: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        seen = self.flat(torch.relu(self.norm(self.pixels(images))).flatten(1))
        mixed = (seen + self.words(words))[:, None]
        mixed, _ = self.attention(mixed, mixed, mixed)
        return self.last(self.dropout(self.last_norm(mixed[:, 0])))  # type: ignore[no-any-return]


def trained(device: str, make: Callable[..., torch.optim.Optimizer]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Varied().double()
    inputs = [(torch.randn(6, 1, 4, 4).double(), torch.randint(0, 10, (6,))) for _ in range(3)]
    targets = torch.arange(6) % 5
    model = model.to(device)
    model.dropout.p = 0.0
    optimizer = make(model.parameters())
    for images, words in inputs:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            model(images.to(device), words.to(device)), targets.to(device)
        )
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.slow
@on_device
def test_it_is_the_accelerator_of_its_process() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("simgpu")
    assert (torch.accelerator.is_available(), torch.accelerator.device_count()) == (True, 4)
    assert torch.get_device_module().__name__ == "torch.simgpu"
    assert torch.device("simgpu") != here()


@on_device
def test_training_gives_what_it_gives_on_the_host() -> None:
    for make in (
        lambda kept: torch.optim.SGD(kept, lr=0.1, momentum=0.9),
        lambda kept: torch.optim.AdamW(kept, lr=0.01),
        lambda kept: torch.optim.AdamW(kept, lr=0.01, foreach=True),
        lambda kept: torch.optim.AdamW(kept, lr=0.01, fused=True),
    ):
        pairs = zip(trained("simgpu:0", make), trained("cpu", make), strict=True)
        assert max(float((ours - theirs).abs().max()) for ours, theirs in pairs) < 1e-9


@on_device
def test_strides_and_views_are_its_own() -> None:
    image = torch.randn(2, 3, 4, 4, device=here()).to(memory_format=torch.channels_last)
    rows = torch.arange(6.0, device=here()).view(2, 3)
    rows[:, 1] = 7.0

    assert image.stride() == (48, 1, 12, 3)
    assert image.clone().stride() == image.stride()
    assert rows.t().stride() == (1, 3)
    assert rows.tolist() == [[0.0, 7.0, 2.0], [3.0, 7.0, 5.0]]
    assert rows.view(torch.uint8).device == here()


def refused(kind: type[Exception], words: str, use: Callable[[], object]) -> None:
    with pytest.raises(kind, match=words):
        use()


@on_device
def test_devices_do_not_mix() -> None:
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
def test_an_ordinal_that_is_not_there_is_refused() -> None:
    refused(RuntimeError, "invalid device ordinal", lambda: torch.empty(1, device=here(4)))
    refused(RuntimeError, "invalid device ordinal", lambda: torch.accelerator.set_device_index(4))


@on_device
def test_a_thread_begins_on_the_first_device_and_the_default_stream() -> None:
    seen = []
    torch.accelerator.set_device_index(2)
    with torch.Stream(device=here(2)):
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream()))
        thread.start()
        thread.join()
    torch.accelerator.set_device_index(0)

    assert [(stream.device_index, stream.stream_id) for stream in seen] == [(0, 0)]


@on_device
def test_gradients_come_in_a_thread_of_the_device() -> None:
    threads = []
    weight = torch.ones(2, device=here(), requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: threads.append(threading.get_ident()))
    (weight * 2).sum().backward()  # type: ignore[no-untyped-call]

    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


@on_device
def test_random_numbers_are_its_own() -> None:
    host = torch.get_rng_state()
    drawn = torch.rand(3, device=here())
    nn.functional.dropout(drawn)
    assert torch.equal(host, torch.get_rng_state())

    torch.manual_seed(5)
    first = torch.rand(3, device=here())
    kept = torch.get_device_module().get_rng_state()
    second = torch.rand(3, device=here())
    torch.get_device_module().set_rng_state(kept)
    assert torch.equal(second, torch.rand(3, device=here()))
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(3, device=here()))

    own = torch.Generator(device=here()).manual_seed(3)
    assert own.device == here()
    assert torch.equal(
        torch.rand(3, device=here(), generator=own),
        torch.rand(3, generator=torch.Generator().manual_seed(3)).to(here()),
    )
    refused(
        RuntimeError, "generator", lambda: torch.rand(1, device=here(), generator=torch.Generator())
    )


@on_device
def test_mixed_precision_and_a_scaler_work() -> None:
    model = nn.Linear(4, 2, device=here())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("simgpu", init_scale=8.0)
    before = copy.deepcopy(model.state_dict())
    with torch.autocast("simgpu", dtype=torch.bfloat16):
        out = model(torch.ones(3, 4, device=here()))
    assert out.dtype == torch.bfloat16

    scaler.scale(out.float().sum()).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert not torch.equal(before["weight"], model.weight)

    scaler.scale(model(torch.full((1, 4), float("inf"), device=here())).sum()).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0


@on_device
def test_memory_is_counted_and_limited() -> None:
    before = torch.accelerator.memory_allocated()
    kept = torch.zeros(1000, device=here())
    assert torch.accelerator.memory_allocated() - before == 4000
    del kept
    assert torch.accelerator.memory_allocated() == before

    os.environ["SIMGPU_MEMORY_BYTES"] = "100000"
    try:
        refused(
            torch.OutOfMemoryError, "out of memory", lambda: torch.zeros(100_000, device=here())
        )
    finally:
        del os.environ["SIMGPU_MEMORY_BYTES"]


@on_device
def test_fresh_memory_is_not_zero() -> None:
    assert torch.empty(4, dtype=torch.uint8, device=here()).tolist() == [0xCB] * 4


@on_device
def test_what_is_saved_is_loaded_where_it_was_or_on_the_host() -> None:
    file = io.BytesIO()
    torch.save({"row": torch.arange(3, device=here(1))}, file)
    found = []
    for where in (None, "cpu"):
        file.seek(0)
        found.append(torch.load(file, map_location=where, weights_only=True)["row"])

    assert [str(row.device) for row in found] == ["simgpu:1", "cpu"]
    assert [row.tolist() for row in found] == [[0, 1, 2]] * 2


@on_device
def test_it_is_refused_in_the_child_of_a_process_that_used_it() -> None:
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
def test_an_event_behind_a_blocked_stream_is_not_complete(simgpu: Any) -> None:
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
def test_a_kernel_runs_when_its_stream_is_not_blocked_any_more(simgpu: Any) -> None:
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
def test_waiting_for_the_device_waits_for_all_its_streams(simgpu: Any) -> None:
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
def test_a_copy_that_nobody_waits_for_is_garbage(simgpu: Any) -> None:
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
def test_a_source_that_changes_before_it_is_read_is_torn(simgpu: Any) -> None:
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
def test_what_another_stream_computes_is_garbage_before_it_is_waited_for(simgpu: Any) -> None:
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
def test_memory_that_a_stream_still_reads_is_kept_only_if_that_is_recorded(simgpu: Any) -> None:
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
