"""A job's state on its way to newcomers, over some steps, a portion in each.

Between two steps the state of all full members is equal. So the members share the work: each sends
its part, while the next step's forward and backward passes run, which do not change it. What is
small or no tensor travels as metadata through the group's store.

One portion of the state on its way, in a thread beside training.

Copies of a device's tensors on the host, made beside training: the state travels over sockets.

On the CPU there is nothing to copy: a tensor is its own copy.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from elastic import fault_points
from elastic.collectives.backend_protocol import LONG, wait_for
from elastic.collectives.backends import finish_device_work, use_device
from elastic.collectives.process_group import ProcessGroup
from elastic.state.portions import (
    byte_share,
    contiguous_pairs,
    decode_metadata,
    encode_metadata,
    portions,
)
from elastic.state.state_tensors import ParameterState, TensorState
from elastic.training_errors import BrokenGroupError


def host_buffer(numbers: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room on the host, shape (numbers,), that `device` can copy to and from by itself.

    Args:
        device: CUDA's copies run beside the host only where the host's memory is pinned.
    """
    return torch.empty(numbers, dtype=dtype, pin_memory=device.type == "cuda")


class HostStaging:
    """One transfer's copies, on a stream of their own.

    The training thread marks what the copies have to follow: the stream that is current, and the
    one that parameters were changed on last, which a script may choose.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_host = device.type == "cpu"
        self._beside: Any = None if self._on_host else torch.Stream(device=device)
        self._training = self._updates = self._current()
        self.settle()  # whatever stream the script used so far

    def _current(self) -> Any:
        return None if self._on_host else torch.accelerator.current_stream(self.device)

    def settle(self) -> None:
        """Wait until the device is through with all that it was given."""
        finish_device_work(self.device)

    def note_update(self) -> None:
        """Parameters are about to change, on the stream that is current now."""
        self._updates = self._current()

    def mark(self) -> list[Any]:
        """Events behind all that the training thread has given the device so far."""
        if self._on_host:
            return []
        marks = []
        for stream in (self._current(), self._updates):
            event = torch.Event(self.device.type)
            event.record(stream)
            marks.append(event)
        return marks

    def to_host(self, tensors: Sequence[torch.Tensor], marks: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors' content on the host; blocks until it is there, in a helper thread.

        Args:
            tensors: contiguous, of one dimension; they must not change before this returns.
            marks: what `mark` gave when they had their content.
        """
        if self._on_host:
            return list(tensors)
        use_device(self.device)
        copies = [host_buffer(t.numel(), t.dtype, self.device) for t in tensors]
        with self._beside:
            for mark in marks:
                self._beside.wait_event(mark)
            for tensor, copy in zip(tensors, copies, strict=True):
                copy.copy_(tensor, non_blocking=True)
            self._beside.synchronize()
        return copies

    def as_training(self) -> contextlib.AbstractContextManager[Any]:
        """In a helper thread: what it gives the device follows what training gave it."""
        if self._on_host:
            return contextlib.nullcontext()
        use_device(self.device)
        stream: contextlib.AbstractContextManager[Any] = self._training
        return stream


class Transfer:
    """One portion on its way, in a thread of its own."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error = ""

    def _run(self, work: Any) -> None:
        try:
            work()
        except (RuntimeError, BrokenGroupError, fault_points.InjectedError) as error:
            self.error = str(error).partition("\n")[0][:300] or type(error).__name__
        self.done.set()

    def _start(self, work: Any, name: str) -> None:
        threading.Thread(target=self._run, args=(work,), name=name, daemon=True).start()


class Sending(Transfer):
    """This member's part of a portion, to every newcomer; buffers are rank 0's alone.

    Args:
        group: which members and newcomers are in.
        portion: parameters with what the optimizer keeps for them.
        members: ranks below this one send, about as many bytes each.
        newcomers: their ranks; each gets the whole portion.
        buffers: of the model, which travel with this portion; none: they travel with another.
    """

    def __init__(
        self,
        group: ProcessGroup,
        staging: HostStaging,
        portion: Sequence[ParameterState],
        members: int,
        newcomers: Sequence[int],
        *,
        buffers: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self.released = threading.Event()  # what is sent may change
        tensors = [tensor for unit in portion for tensor in unit.tensors]
        held = [travelling for travelling, _ in contiguous_pairs(tensors)]
        mine = byte_share(held, group.rank, members)
        if group.rank == 0:
            own = [travelling for travelling, _ in contiguous_pairs(buffers)]
            held += own
            mine = mine.and_then(byte_share(own, 0, 1))
        together = torch.cat(mine.small) if mine.small else None
        corrupt = fault_points.reach("handover.send", rank=group.rank, version=group.version)
        if corrupt and together is not None:
            together = -together - 1  # whatever it is, it is something else now
        marks = staging.mark()

        def work() -> None:
            chunks = [*mine.large, *([] if together is None else [together])]
            copies = staging.to_host(chunks, marks)
            if group.device.type != "cpu":
                self.released.set()  # before anybody has it: the copies are what travels
            for to in newcomers:
                for pending in [group.send(copy, to) for copy in copies]:
                    pending.wait(LONG)
            held.clear()

        self._start(work, "send")

    def _run(self, work: Any) -> None:
        super()._run(work)
        self.released.set()


class Receiving(Transfer):
    """A portion from all members, as far as possible into its place.

    Args:
        group: which members and newcomers are in.
        portion: parameters with what the optimizer keeps for them, to be written to.
        members: ranks below this one send, about as many bytes each.
        buffers: that rank 0 sends with this portion, to be written to.
    """

    def __init__(
        self,
        group: ProcessGroup,
        portion: Sequence[ParameterState],
        members: int,
        buffers: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        tensors = [tensor for unit in portion for tensor in unit.tensors]
        pairs = list(contiguous_pairs(tensors))
        received = [
            byte_share([to for to, _ in pairs], member, members) for member in range(members)
        ]
        device = group.device
        direct = device.type == "cpu"
        of_first = list(contiguous_pairs(buffers))
        received[0] = received[0].and_then(byte_share([to for to, _ in of_first], 0, 1))
        pairs += of_first
        together = [
            host_buffer(sum(p.numel() for p in part.small), torch.uint8, device)
            for part in received
        ]
        landing = [
            part.large if direct else [host_buffer(p.numel(), p.dtype, device) for p in part.large]
            for part in received
        ]
        self._pairs, self._received, self._together = pairs, received, together
        self._landing = landing

        def work() -> None:
            fault_points.reach("handover.receive", rank=group.rank, version=group.version)
            for member, part in enumerate(received):
                chunks = [*landing[member], *([together[member]] if part.small else [])]
                for pending in [group.receive(chunk, member) for chunk in chunks]:
                    pending.wait(LONG)

        self._start(work, "receive")

    def put_in_place(self) -> None:
        """Deal out what came together; on the training thread, when `done`."""
        for part, landed in zip(self._received, self._landing, strict=True):
            for chunk, came in zip(part.large, landed, strict=True):
                if chunk is not came:
                    chunk.copy_(came, non_blocking=True)
        for part, together in zip(self._received, self._together, strict=True):
            start = 0
            for chunk in part.small:
                chunk.copy_(together[start : start + chunk.numel()])
                start += chunk.numel()
        for travelled, stands_for in self._pairs:
            if travelled is not stands_for:
                stands_for.copy_(travelled)


METADATA: Final = "metadata"  # key in the group's store


class StateTransfer:
    """What both sides know of it: the group, the steps, and which portion goes in which."""

    def __init__(
        self, group: ProcessGroup, state: TensorState, *, senders: int, first: int, steps: int
    ) -> None:
        """Describe a transfer.

        Args:
            group: which incumbents and newcomers are members of.
            state: that is sent, or that the state is received into.
            senders: ranks below this one send.
            first: step in which the first portion travels.
            steps: how many, one portion in each.
        """
        self._group = group
        self._state = state
        self._senders = senders
        self._first = first
        self._steps = steps
        self._staging = HostStaging(group.device)
        self._order: list[list[int]] = []  # parameters of each portion
        self._buffers: list[torch.Tensor] = []

    def is_over(self, step: int) -> bool:
        """Whether nothing travels in `step` any more.

        Args:
            step: 1-based, of all epochs.
        """
        return step - self._first >= self._steps

    def _plan(self) -> None:
        sizes = [unit.size for unit in self._state.units(self._group.device)]
        self._order = portions(sizes, self._steps)

    def _portion(self, place: int) -> list[ParameterState]:
        units = self._state.units(self._group.device)
        return [units[index] for index in self._order[place]]

    def _buffers_of(self, place: int) -> list[torch.Tensor]:
        return self._buffers if place == 0 else []


class OutgoingState(StateTransfer):
    """The side of a member that has the whole state."""

    def __init__(
        self,
        group: ProcessGroup,
        state: TensorState,
        newcomers: Sequence[int],
        *,
        senders: int,
        first: int,
        steps: int,
    ) -> None:
        """Describe a transfer, and copy what forward passes change.

        Args:
            group: which incumbents and newcomers are members of.
            newcomers: their ranks.
            first: step in which the first portion travels.
            steps: how many, one portion in each.
        """
        super().__init__(group, state, senders=senders, first=first, steps=steps)
        self._newcomers = list(newcomers)
        self._sending: Sending | None = None
        self._plan()
        self._buffers = [buffer.clone() for buffer in state.buffers()]

    def post_metadata(self, metadata: dict[str, Any]) -> None:
        """Give the newcomers what is no tensor; rank 0 does.

        Args:
            metadata: what `TrainingState.metadata` gave; nobody changes it any more.
        """
        self._group.store.post(METADATA, lambda: encode_metadata(metadata))

    def begin_portion(self, step: int) -> None:
        """Begin to send what travels in `step`.

        Args:
            step: that comes, 1-based; one of the transfer's.
        """
        place = step - self._first
        self._sending = Sending(
            self._group,
            self._staging,
            self._portion(place),
            self._senders,
            self._newcomers,
            buffers=self._buffers_of(place),
        )

    def await_sent(self, called_off: threading.Event) -> None:
        """Wait until this step's portion is sent, because the optimizer is about to change it.

        Raises:
            CancelledError: if the wait was called off.
        """
        self._staging.note_update()
        if self._sending is not None:
            wait_for(self._sending.released, called_off)


class IncomingState(StateTransfer):
    """The side of a newcomer."""

    def __init__(
        self, group: ProcessGroup, state: TensorState, *, senders: int, first: int, steps: int
    ) -> None:
        """Wait for the metadata in a thread, make room, and begin to receive.

        Args:
            group: which incumbents and newcomers are members of.
            state: that is written to; its optimizer's state is replaced.
            senders: ranks below this one send.
            first: step in which the first portion travels.
            steps: how many, one portion in each.
        """
        super().__init__(group, state, senders=senders, first=first, steps=steps)
        self._metadata: dict[str, Any] | None = None
        self._described = threading.Event()  # the metadata is there, or an error
        self._error = ""
        self._receiving: Receiving | None = None
        self._received = 0  # step whose portion was taken
        threading.Thread(target=self._take_metadata, name=METADATA, daemon=True).start()

    def _take_metadata(self) -> None:
        try:
            metadata = decode_metadata(self._group.store.ask(METADATA))
            with self._staging.as_training():
                self._state.adopt(metadata["structure"], self._group.device)
                self._plan()
                self._metadata = metadata
                self._receive_portion(0)
        except Exception as error:  # noqa: BLE001 - the training thread waits, and says it
            self._error = str(error).partition("\n")[0] or type(error).__name__
        self._described.set()

    def begin_portion(self, step: int) -> None:
        """Begin to receive what travels in `step`; the first portion began by itself.

        Args:
            step: that comes, 1-based; one of the transfer's.
        """
        if step > self._first:
            self._receive_portion(step - self._first)

    def _receive_portion(self, place: int) -> None:
        portion = self._portion(place)
        if place == 0:
            self._buffers = [torch.empty_like(buffer) for buffer in self._state.buffers()]
        buffers = self._buffers_of(place)
        self._receiving = Receiving(self._group, portion, self._senders, buffers)

    def take_portion(
        self,
        step: int,
        called_off: threading.Event,
        take_metadata: Callable[[dict[str, Any]], None],
    ) -> None:
        """Wait for the portion of `step`, which the optimizer is to work on, and put it in place.

        Args:
            take_metadata: gets what is no tensor, behind the first portion.

        Raises:
            CancelledError: if the wait was called off.
            BrokenGroupError: if it did not arrive.
        """
        if self._received == step:
            return
        self._received = step
        wait_for(self._described, called_off)
        receiving = self._receiving
        if receiving is not None:
            wait_for(receiving.done, called_off)
        error = self._error or (receiving.error if receiving else "nothing came")
        if error or receiving is None:
            raise BrokenGroupError(f"the state did not arrive: {error}")
        receiving.put_in_place()
        if step == self._first and self._metadata is not None:
            for buffer, came in zip(self._state.buffers(), self._buffers, strict=True):
                buffer.copy_(came)
            take_metadata(self._metadata)
        self._staging.settle()  # a script may train on a stream of its own
