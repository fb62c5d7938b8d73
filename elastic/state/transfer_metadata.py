"""What travels beside the tensors, as bytes that nothing executes when they are read."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from elastic.state.host_copy import plain_containers


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
