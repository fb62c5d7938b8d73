"""A job's state on its way to newcomers, over some steps, a portion in each.

Between two steps the state of all full members is equal. So the members share the work: each sends
its part, while the next step's forward and backward passes run, which do not change it. What is
small or no tensor travels as metadata through the group's store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from elastic.collectives.cancellable_waits import wait_for
from elastic.collectives.process_group import ProcessGroup
from elastic.state.host_staging import HostStaging
from elastic.state.portion_transfer import Receiving, Sending
from elastic.state.state_portions import portions
from elastic.state.state_tensors import ParameterState, TensorState
from elastic.state.transfer_metadata import decode_metadata, encode_metadata
from elastic.training_errors import BrokenGroupError

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
