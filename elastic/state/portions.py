"""Division of the state into portions: which worker sends which bytes in which step.

Metadata is the state other than tensors on the device. Decoding it executes nothing.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from elastic.collectives.process_group import as_byte_row
from elastic.state.tracked_states import plain_containers

MIN_IN_PLACE_BYTES: Final = 16 << 10  # bytes; smaller pieces are copied and sent together
MIN_BYTES_A_STEP: Final = 1 << 20  # minimum bytes sent in one step


def transfer_steps(state_bytes: int, step_s: float, bytes_per_s: float, units: int) -> int:
    """Return the number of steps in which the state is sent, so that no step waits for it.

    `bytes_per_s` is the rate of a transfer during training. `units` is the number of indivisible
    pieces, and the maximum number of useful steps.
    """
    in_a_step = max(MIN_BYTES_A_STEP, 0.5 * step_s * bytes_per_s)
    wanted = -(-state_bytes // int(in_a_step)) if state_bytes else 1
    return max(1, min(wanted, units, 64))


def portions(sizes: Sequence[int], steps: int) -> list[list[int]]:
    """Return the indices of the units in each step's portion, in order and of about equal bytes.

    A unit is a parameter with its optimizer state. It is sent in one step, and from that step on
    the newcomer's optimizer updates it. So each parameter is consistent.
    """
    total = sum(sizes) or 1
    found: list[list[int]] = [[] for _ in range(steps)]
    done = 0
    for index, size in enumerate(sizes):
        found[min(steps - 1, done * steps // total)].append(index)
        done += size
    return found


def byte_share(tensors: Sequence[torch.Tensor], member: int, members: int) -> list[torch.Tensor]:
    """Return the part of contiguous tensors that rank `member` sends, as pieces of byte rows."""
    flat = [as_byte_row(tensor) for tensor in tensors]
    total = sum(chunk.numel() for chunk in flat)
    begin, end = total * member // members, total * (member + 1) // members
    begin, end = begin // 64 * 64, end if member + 1 == members else end // 64 * 64
    pieces: list[torch.Tensor] = []
    at = 0
    for chunk in flat:
        low, high = max(begin - at, 0), min(end - at, chunk.numel())
        at += chunk.numel()
        if low < high:
            pieces.append(chunk[low:high])
    return pieces


def large_and_small(
    pieces: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the pieces that are sent in place, and those that are copied and sent together."""
    large = [piece for piece in pieces if piece.numel() >= MIN_IN_PLACE_BYTES]
    return large, [piece for piece in pieces if piece.numel() < MIN_IN_PLACE_BYTES]


def contiguous_pairs(
    tensors: Sequence[torch.Tensor],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (contiguous tensor, original). The first is a copy if the original has gaps."""
    for tensor in tensors:
        yield (tensor if tensor.is_contiguous() else tensor.contiguous()), tensor


def encode_metadata(metadata: Mapping[str, Any]) -> bytes:
    """Encode tensors, numbers, text and their containers; `decode_metadata` refuses all else."""
    out = io.BytesIO()
    torch.save(plain_containers(metadata), out)
    return out.getvalue()


def decode_metadata(data: bytes) -> dict[str, Any]:
    """Decode another worker's metadata without executing anything; tensors are on the host."""
    metadata: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return metadata
