"""One portion of the state on its way, in a thread beside training."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from elastic import fault_points
from elastic.collectives.cancellable_waits import LONG
from elastic.collectives.process_group import ProcessGroup
from elastic.state.host_staging import HostStaging, host_buffer
from elastic.state.state_portions import byte_share, contiguous_pairs
from elastic.state.state_tensors import ParameterState
from elastic.training_errors import BrokenGroupError


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
