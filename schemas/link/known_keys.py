"""Who may connect at this moment: keys end by themselves when their time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from schemas.link.key_owners import Identity


class KnownKeys(Mapping[bytes, Identity]):
    """Public key (Z85) to its owner; a key beyond its time is not in it.

    Args:
        listed: all keys, those beyond their time, too.
        clock: seconds since the epoch.
    """

    def __init__(
        self, listed: Mapping[bytes, Identity], clock: Callable[[], float] = time.time
    ) -> None:
        self.listed = dict(listed)
        self._clock = clock

    def __getitem__(self, key: bytes) -> Identity:
        """The owner of a key that is valid now."""
        who = self.listed[key]
        if who.expires is not None and self._clock() >= who.expires:
            raise KeyError(key)
        return who

    def get(self, key: bytes, default: Any = None) -> Any:
        """The same; asked for with every message.

        Args:
            key: public, Z85.
            default: in its place if there is none.
        """
        who = self.listed.get(key)
        if who is None or (who.expires is not None and self._clock() >= who.expires):
            return default
        return who

    def __iter__(self) -> Iterator[bytes]:
        """Keys that are valid now."""
        return (key for key in self.listed if self.get(key) is not None)

    def __len__(self) -> int:
        """How many are valid now."""
        return sum(1 for _ in self)
