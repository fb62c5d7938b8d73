"""Which bytes of the state each member sends in which step.

What travels beside the tensors, as bytes that nothing executes when they are read.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from elastic.collectives.process_group import as_byte_row
from elastic.state.tracked_states import plain_containers

IN_PLACE: Final = 16 << 10  # bytes; smaller pieces travel together, copied
MIN_BYTES_A_STEP: Final = 1 << 20  # that are sent in one step however short it is


def transfer_steps(state_bytes: int, step_s: float, bytes_per_s: float, units: int) -> int:
    """Over how many steps the state is sent, so that none waits for it.

    Args:
        bytes_per_s: that the transfer reaches beside training.
        units: pieces that cannot be divided; more steps than these make no sense.
    """
    in_a_step = max(MIN_BYTES_A_STEP, 0.5 * step_s * bytes_per_s)
    wanted = -(-state_bytes // int(in_a_step)) if state_bytes else 1
    return max(1, min(wanted, units, 64))


def portions(sizes: Sequence[int], steps: int) -> list[list[int]]:
    """Which units go in each of `steps` steps, of about equal bytes, in order.

    Parameters of one portion are sent in one step, after which the newcomer's optimizer keeps
    them: so each portion is of one moment, and needs not be that of the others.

    Args:
        sizes: bytes of each unit.
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
    """The part of `tensors`, seen as one row of bytes, that one member sends.

    Args:
        tensors: contiguous, in the order that all members agree on.
        member: rank of the sender.
    """
    flat = [as_byte_row(tensor) for tensor in tensors]
    total = sum(chunk.numel() for chunk in flat)
    begin, end = total * member // members, total * (member + 1) // members
    begin, end = begin // 64 * 64, end if member + 1 == members else end // 64 * 64
    large: list[torch.Tensor] = []
    small: list[torch.Tensor] = []
    at = 0
    for chunk in flat:
        low, high = max(begin - at, 0), min(end - at, chunk.numel())
        at += chunk.numel()
        if low < high:
            (large if high - low >= IN_PLACE else small).append(chunk[low:high])
    return ByteShare(large, small)


def contiguous_pairs(
    tensors: Sequence[torch.Tensor],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(what travels, what it stands for): the same, but for tensors with gaps.

    Yields:
        A contiguous tensor, and the one of `tensors` that it is, or is a copy of.
    """
    for tensor in tensors:
        yield (tensor if tensor.is_contiguous() else tensor.contiguous()), tensor


def encode_metadata(metadata: Mapping[str, Any]) -> bytes:
    """Bytes of `metadata`: tensors, numbers, text and their containers.

    Args:
        metadata: a named tuple in it is decoded as a tuple; what else can be pickled is encoded
            too, but `decode_metadata` refuses it.
    """
    out = io.BytesIO()
    torch.save(plain_containers(metadata), out)
    return out.getvalue()


def decode_metadata(data: bytes) -> dict[str, Any]:
    """The reverse of `encode_metadata`.

    Args:
        data: of another worker; nothing in it is executed.

    Returns:
        The metadata, its tensors on the host.
    """
    metadata: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return metadata
