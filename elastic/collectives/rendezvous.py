"""How the members of one version meet: at a store, then by every backend of their group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C._distributed_c10d import PrefixStore

from elastic.collectives.backend_protocol import Backend, Meeting
from elastic.collectives.cancellable_waits import first_line
from elastic.collectives.device_backends import CPU, backend_for, use_device
from elastic.collectives.gloo import GlooBackend
from elastic.collectives.process_group import Links, ProcessGroup
from elastic.collectives.rendezvous_store import GroupWords, connect_store
from elastic.training_errors import BrokenGroupError


def build_process_group(
    *,
    version: int,
    store: str,
    rank: int,
    size: int,
    address: str,
    device: torch.device,
    drawn_ahead: int = 0,
    publish: Callable[[ProcessGroup], None] = lambda _: None,
) -> ProcessGroup:
    """Meet the other members; blocks up to `BUILD_LIMIT_S` for each backend.

    Args:
        version: of the group; names its keys in the store.
        address: of this host, where the others reach it; binds the sockets.
        device: where gradients live, which chooses their backend.
        drawn_ahead: steps whose samples this worker's loader may have drawn already.
        publish: called with the group before it meets anybody, so that it can be aborted.

    Raises:
        BrokenGroupError: if they did not all come, or it was aborted.
    """
    if size == 1:
        return ProcessGroup(version, rank, size, device, drawn_ahead=drawn_ahead)

    def meeting(name: str, where: torch.device) -> Meeting:
        client = PrefixStore(name, connect_store(store, version))
        return Meeting(client, rank, size, address, where)

    training: Backend = backend_for(meeting("train", device))
    transfers = GlooBackend(meeting("state", CPU))
    words = training if device == CPU else GlooBackend(meeting("words", CPU))
    links = Links(training, transfers, words, GroupWords(store, version))
    group = ProcessGroup(version, rank, size, device, links)
    publish(group)
    try:
        use_device(device)
        for backend in links.backends():
            backend.connect()
        group.drawn_ahead = _most(words, rank, size, drawn_ahead)
    except (RuntimeError, ValueError) as error:
        group.abort()
        raise BrokenGroupError(first_line(error)) from None
    return group


def _most(words: Backend, rank: int, size: int, mine: int) -> int:
    """The largest number of all ranks; they all have connected when it is known."""
    said = torch.zeros(size, dtype=torch.int64)
    said[rank] = mine
    operation = words.all_reduce(said)
    while not operation.is_over():
        pass
    return int(said.max())
