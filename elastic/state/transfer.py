"""A job's state on its way to newcomers, beside training.

Between two steps the state of all full members is equal. So the members share the work: each sends
its part, while the next step's forward and backward passes run, which do not change it. What is
small or no tensor travels as metadata through the group's store.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from elastic import testing
from elastic.collectives.process_group import LONG, ProcessGroup
from elastic.state.tensors import ParameterState, as_byte_row

IN_PLACE: Final = 16 << 10  # bytes; smaller pieces travel together, copied


def portions(sizes: Sequence[int], steps: int) -> list[list[int]]:
    """Which units go in each of `steps` steps, of about equal bytes, in order.

    Parameters of one portion are sent in one step, after which the newcomer's optimizer keeps
    them: so each portion is of one moment, and needs not be that of the others.

    Args:
        sizes: bytes of each unit.
        steps: over how many.
    """
    total = sum(sizes) or 1
    found: list[list[int]] = [[] for _ in range(steps)]
    done = 0
    for index, size in enumerate(sizes):
        found[min(steps - 1, done * steps // total)].append(index)
        done += size
    return found


@dataclass(frozen=True, slots=True)
class ByteShare:
    """What one member sends of a portion: large pieces as they lie, small ones together."""

    large: list[torch.Tensor]  # views of bytes
    small: list[torch.Tensor]

    def and_then(self, other: ByteShare) -> ByteShare:
        """Both, this one first."""
        return ByteShare([*self.large, *other.large], [*self.small, *other.small])


def byte_share(tensors: Sequence[torch.Tensor], member: int, members: int) -> ByteShare:
    """The part of `tensors`, seen as one row of bytes, that `member` of `members` sends."""
    flat = [as_byte_row(tensor) for tensor in tensors]
    total = sum(piece.numel() for piece in flat)
    begin, end = total * member // members, total * (member + 1) // members
    begin, end = begin // 64 * 64, end if member + 1 == members else end // 64 * 64
    large: list[torch.Tensor] = []
    small: list[torch.Tensor] = []
    at = 0
    for piece in flat:
        low, high = max(begin - at, 0), min(end - at, piece.numel())
        at += piece.numel()
        if low < high:
            (large if high - low >= IN_PLACE else small).append(piece[low:high])
    return ByteShare(large, small)


def contiguous_pairs(
    tensors: Sequence[torch.Tensor],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(what travels, what it stands for): the same, but for tensors with gaps."""
    for tensor in tensors:
        yield (tensor if tensor.is_contiguous() else tensor.contiguous()), tensor


class Transfer:
    """One portion on its way, in a thread of its own."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error = ""

    def _run(self, work: Any) -> None:
        try:
            work()
        except (RuntimeError, testing.InjectedError) as error:
            self.error = str(error).partition("\n")[0][:300] or type(error).__name__
        self.done.set()

    def _start(self, work: Any, name: str) -> None:
        threading.Thread(target=self._run, args=(work,), name=name, daemon=True).start()


class Sending(Transfer):
    """This member's part of a portion, to every newcomer; buffers are rank 0's alone."""

    def __init__(
        self,
        group: ProcessGroup,
        portion: Sequence[ParameterState],
        members: int,
        newcomers: Sequence[int],
        buffers: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        tensors = [tensor for unit in portion for tensor in unit.tensors]
        held = [travelling for travelling, _ in contiguous_pairs(tensors)]
        mine = byte_share(held, group.rank, members)
        if group.rank == 0:
            own = [travelling for travelling, _ in contiguous_pairs(buffers)]
            held += own
            mine = mine.and_then(byte_share(own, 0, 1))
        together = torch.cat(mine.small) if mine.small else None
        corrupt = testing.reach("handover.send", rank=group.rank, version=group.version)
        if corrupt and together is not None:
            together = -together - 1  # whatever it is, it is something else now

        def work() -> None:
            pieces = [*mine.large, *([] if together is None else [together])]
            for to in newcomers:
                for pending in [group.send(piece, to) for piece in pieces]:
                    pending.wait(LONG)
            held.clear()

        self._start(work, "send")


class Receiving(Transfer):
    """A portion from all members, as far as possible into its place."""

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
        of_first = list(contiguous_pairs(buffers))
        received[0] = received[0].and_then(byte_share([to for to, _ in of_first], 0, 1))
        pairs += of_first
        together = [
            torch.empty(sum(p.numel() for p in part.small), dtype=torch.uint8, device=group.device)
            for part in received
        ]
        self._pairs, self._received, self._together = pairs, received, together

        def work() -> None:
            testing.reach("handover.receive", rank=group.rank, version=group.version)
            for member, part in enumerate(received):
                pieces = [*part.large, *([together[member]] if part.small else [])]
                for pending in [group.receive(piece, member) for piece in pieces]:
                    pending.wait(LONG)

        self._start(work, "receive")

    def put_in_place(self) -> None:
        """Deal out what came together; on the training thread, when `done`."""
        for part, together in zip(self._received, self._together, strict=True):
            start = 0
            for piece in part.small:
                piece.copy_(together[start : start + piece.numel()])
                start += piece.numel()
        for travelled, stands_for in self._pairs:
            if travelled is not stands_for:
                stands_for.copy_(travelled)
