"""The core's whole state as bytes and back: what a replay of all inputs up to there would give."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Final

import msgspec

from controlplane.core.reactor import Reactor
from controlplane.core.slot_index import IndexOrder
from controlplane.core.state import State
from controlplane.core.totals import Totals

FORMAT: Final = 2  # of the bytes; a field with a default may be added without a new one
NAN: Final = b"\xcb\x7f\xf8"  # as a number begins that is none


class _Image(msgspec.Struct, kw_only=True):
    state: State
    totals: Totals = msgspec.field(default_factory=Totals)
    order: IndexOrder = msgspec.field(default_factory=IndexOrder)


_images: Final = msgspec.msgpack.Decoder(_Image)


def image_of(reactor: Reactor) -> bytes:
    """Everything that `reactor` needs to go on elsewhere.

    Args:
        reactor: between two inputs; it is only read.

    Returns:
        MessagePack. What is derived from the state is not in it, but for its order.

    Raises:
        ValueError: if the state has something that cannot be written down, and so for whatever else
            is wrong with it (TypeError, OverflowError).
    """
    image = _Image(
        state=reactor.state,
        totals=reactor.totals,
        order=reactor.state.slot_index.order(),
    )
    return msgspec.msgpack.encode(image)


def reactor_from(image: bytes) -> Reactor:
    """A reactor that goes on where another one was.

    Args:
        image: as `image_of` made it, in this `FORMAT`.

    Raises:
        ValueError: if it is none.
    """
    with _uncollected():
        found: _Image = _images.decode(image)
        try:
            found.state.slot_index.arrange(found.order)
        except (LookupError, AttributeError) as error:
            raise ValueError(f"its parts do not fit together: {error!r}") from None
    return Reactor(found.state, found.totals)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Nothing that is made here is garbage: to look for it takes most of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def copy_of(reactor: Reactor) -> Reactor:
    """A second reactor in the same state.

    Args:
        reactor: between two inputs; it is only read.

    Raises:
        ValueError: if the state cannot be written down, and so TypeError and OverflowError.
    """
    return reactor_from(image_of(reactor))


def gives_back(image: bytes, reactor: Reactor) -> bool:
    """Whether an image is of the state of `reactor`, and of all of it."""
    again = reactor_from(image)
    if (again.state, again.totals) == (reactor.state, reactor.totals):
        return True
    return NAN in image and image_of(again) == image  # a number that is none equals nothing
