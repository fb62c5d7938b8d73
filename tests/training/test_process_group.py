"""Process groups of several versions; every wait can be cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from elastic.collectives.backend_protocol import wait_for
from elastic.collectives.backends import GlooBackend
from elastic.collectives.process_group import GroupBackends, ProcessGroup
from elastic.collectives.rendezvous import BackgroundBuild
from elastic.collectives.rendezvous_store import GroupStore, StoreServer, connect_store
from elastic.training_errors import BrokenGroupError, CancelledError
from tests.training.peers import CPU, LIMIT_S, Parent, RendezvousInfo, each, peers


def _use_two_versions(meeting: RendezvousInfo) -> list[object]:
    first = meeting.group(1)
    second = meeting.group(2, size=2) if meeting.rank < 2 else None
    cancel, found = threading.Event(), list[object]()
    for group in (first, second, first, second):
        if group is not None:
            tensor = torch.full((2,), float(meeting.rank + 1))
            group.all_reduce(tensor, cancel)
            found.append(tensor.tolist())
    own = bytes([meeting.rank]) * 5
    found += [first.broadcast_bytes(own, cancel, source) for source in range(3)]
    found.append(first.broadcast_bytes(b"", cancel))
    found.append(first.gather_bytes(b"x" * meeting.rank, cancel))
    found.append(first.gather_bytes(b"", cancel))
    tensor = torch.arange(3.0) * meeting.rank
    first.broadcast(tensor, 2, cancel)
    first.retire()
    if second is not None:
        second.all_reduce(summed := torch.ones(2), cancel)
        found.append(summed.tolist())
    return [*found, tensor.tolist()]


@pytest.mark.slow
def test_versions_of_a_group_work_side_by_side() -> None:
    words = [b"\0" * 5, b"\1" * 5, b"\2" * 5, b"", [b"", b"x", b"xx"], [b"", b"", b""]]
    both = [[6.0, 6.0], [3.0, 3.0]] * 2

    assert each(_use_two_versions, 3) == [
        [*both, *words, [2.0, 2.0], [0.0, 2.0, 4.0]],
        [*both, *words, [2.0, 2.0], [0.0, 2.0, 4.0]],
        [*[[6.0, 6.0]] * 2, *words, [0.0, 2.0, 4.0]],
    ]


def _reduce_until_it_breaks(meeting: RendezvousInfo) -> str:
    group = meeting.group()
    Parent.hears("met")
    try:
        while True:
            group.all_reduce(torch.ones(4), threading.Event())
    except BrokenGroupError as error:
        return error.message


@pytest.mark.slow
def test_a_killed_peer_breaks_the_group_at_once() -> None:
    with peers(_reduce_until_it_breaks, 2) as made:
        assert [made.said(0), made.said(1)] == ["met", "met"]
        made.kill(1)

        assert made.said(0)


def _wait_for_nobody(meeting: RendezvousInfo) -> str:
    group = meeting.group()
    if meeting.rank:
        return str(Parent.says())
    cancel = threading.Event()

    def call_off() -> None:
        Parent.says()
        cancel.set()

    threading.Thread(target=call_off, daemon=True).start()
    Parent.hears("waits")
    try:
        group.all_reduce(torch.ones(4), cancel)
    except CancelledError:
        group.retire()  # with the operation under way, which would hold this thread up
        return "called off"
    return "reduced"


@pytest.mark.slow
def test_a_wait_for_a_missing_peer_can_be_cancelled() -> None:
    with peers(_wait_for_nobody, 2) as made:
        assert made.said(0) == "waits"
        made.tell(0, "enough")

        assert made.said(0) == "called off"
        made.tell(1, "bye")
        assert made.said(1) == "bye"


class _Idle(GlooBackend):
    """A backend that is not connected; `retire` waits for `go`, if given."""

    def __init__(self, go: threading.Event | None = None) -> None:
        self._group = None
        self.go = go
        self.retired, self.aborted = threading.Event(), threading.Event()

    def abort(self) -> None:
        self.aborted.set()

    def retire(self) -> None:
        if self.go is not None:
            self.go.wait(LIMIT_S)
        self.retired.set()


def _unconnected(training: _Idle) -> ProcessGroup:
    links = GroupBackends(training, _Idle(), training, GroupStore("127.0.0.1:1", 1))
    return ProcessGroup(1, 0, 2, CPU, links)


def test_a_group_retires_in_another_thread() -> None:
    backend = _Idle(threading.Event())

    _unconnected(backend).retire()

    assert not backend.retired.is_set()
    backend.go.set()
    assert backend.retired.wait(LIMIT_S)


def test_a_retired_group_refuses_operations() -> None:
    group = _unconnected(_Idle())
    group.retire()

    with pytest.raises(BrokenGroupError, match="was closed"):
        group.all_reduce(torch.ones(1), threading.Event())


def test_a_group_of_one_needs_no_backend() -> None:
    group = ProcessGroup(1, 0, 1, CPU)
    cancel = threading.Event()
    tensor = torch.ones(2)

    group.all_reduce(tensor, cancel)
    group.broadcast(tensor, 0, cancel)
    group.retire()

    assert tensor.tolist() == [1.0, 1.0]
    assert group.broadcast_bytes(b"word", cancel) == b"word"
    assert group.gather_bytes(b"word", cancel) == [b"word"]


def test_an_unreachable_store_is_an_error() -> None:
    with pytest.raises(BrokenGroupError, match="cannot reach the group's store"):
        connect_store("127.0.0.1:1", 1, limit_s=0.2)


def test_a_waiting_message_blocks_no_other() -> None:
    served = StoreServer("127.0.0.1")
    words, heard = GroupStore(f"127.0.0.1:{served.port}", 1), list[bytes]()
    late = threading.Thread(target=lambda: heard.append(words.fetch("late")), daemon=True)
    late.start()

    def speak() -> None:
        for word in ("first", "second", "third"):  # the last of them while `late` is waited for
            words.post(word, word.encode)
            heard.append(words.fetch(word))

    speaks = threading.Thread(target=speak, daemon=True)
    speaks.start()
    speaks.join(LIMIT_S / 8)
    before = list(heard)
    words.post("late", lambda: b"late")
    late.join(LIMIT_S / 8)
    del served  # whoever still waits is freed
    for thread in (late, speaks):
        thread.join(LIMIT_S / 8)

    assert (before, heard[3:]) == ([b"first", b"second", b"third"], [b"late"])


def test_a_dropped_build_is_retired() -> None:
    go, failures, backend = threading.Event(), list[str](), _Idle()
    group = _unconnected(backend)

    def make(publish: Callable[[ProcessGroup], None]) -> ProcessGroup:
        publish(group)
        go.wait(LIMIT_S)
        return group

    building = BackgroundBuild(make, failures.append)
    assert building.group is None
    building.drop()
    go.set()
    assert building.over.wait(LIMIT_S)

    assert backend.retired.wait(LIMIT_S)
    assert (building.group, failures) == (None, [])


def test_a_dropped_rendezvous_is_aborted() -> None:
    met, failures, backend = threading.Event(), list[str](), _Idle()

    def make(publish: Callable[[ProcessGroup], None]) -> ProcessGroup:
        publish(_unconnected(backend))
        met.set()
        backend.aborted.wait(LIMIT_S)
        raise BrokenGroupError("the group was aborted")

    building = BackgroundBuild(make, failures.append)
    assert met.wait(LIMIT_S)
    building.drop()

    assert building.over.wait(LIMIT_S)
    assert (building.group, failures) == (None, [])


def test_a_wait_ends_when_cancelled_or_late() -> None:
    ready, cancel = threading.Event(), threading.Event()
    with pytest.raises(CancelledError):
        wait_for(ready, cancel, limit_s=0.01)
    cancel.set()
    with pytest.raises(CancelledError):
        wait_for(ready, cancel)
    ready.set()
    wait_for(ready, cancel)
