"""Rendezvous of the members of one version: at a store, then by every backend of the group."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch._C._distributed_c10d import PrefixStore

from elastic.collectives.backend_protocol import Backend, Meeting, first_line
from elastic.collectives.backends import CPU, GlooBackend, backend_for, use_device
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
    """Connect to the other members; blocks up to `BUILD_TIMEOUT_S` for each backend.

    `publish` is called with the group before it connects, so that it can be aborted.

    Raises:
        BrokenGroupError: if a member did not connect, or the group was aborted.
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
    """Return the largest number of all ranks, which have all connected by then."""
    said = torch.zeros(size, dtype=torch.int64)
    said[rank] = mine
    operation = words.all_reduce(said)
    while not operation.is_over():
        pass
    return int(said.max())


class BackgroundBuild:
    """Group that is built in a thread of its own, while training continues.

    `make` may wait, and publishes the group to its argument before it connects, so that it can be
    aborted. `failed` gets the reason in the same thread, unless the group was dropped.
    """

    def __init__(
        self,
        make: Callable[[Callable[[ProcessGroup], None]], ProcessGroup],
        failed: Callable[[str], None],
    ) -> None:
        self._make = make
        self._failed = failed
        self.group: ProcessGroup | None = None
        self.over = threading.Event()  # set when the group is built, or failed
        self._meeting: ProcessGroup | None = None
        self._dropped = False
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="build", daemon=True).start()

    @property
    def done(self) -> bool:
        """True if the group can be used."""
        return self.group is not None

    def drop(self) -> None:
        """Drop the group, and abort its rendezvous."""
        with self._lock:
            self._dropped = True
            built, meeting = self.group, self._meeting
            self.group = None
        if meeting is not None:
            meeting.abort(limit_s=0)  # unused, so the caller need not wait
        if built is not None:
            built.retire()

    def _show(self, group: ProcessGroup) -> None:
        with self._lock:
            self._meeting = group
            if not self._dropped:
                return
        raise BrokenGroupError("the group was dropped")

    def _run(self) -> None:
        try:
            group = self._make(self._show)
        except Exception as error:  # noqa: BLE001 - any error is reported, not lost with the thread
            if not self._dropped:
                self._failed(str(error) or type(error).__name__)
            self.over.set()
            return
        with self._lock:
            if self._dropped:
                group.retire()
            else:
                self.group = group
        self.over.set()
