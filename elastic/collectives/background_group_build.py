"""A process group that is built in a thread, while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastic.collectives.process_group import ProcessGroup


class BackgroundBuild:
    """A group that is built in a thread of its own, while training goes on.

    Args:
        make: builds the group, in the new thread; may wait.
        failed: told why, in the same thread, unless the group was dropped before.
    """

    def __init__(self, make: Callable[[], ProcessGroup], failed: Callable[[str], None]) -> None:
        self._make = make
        self._failed = failed
        self.group: ProcessGroup | None = None
        self.over = threading.Event()  # it is there, or has failed
        self._dropped = False
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="build", daemon=True).start()

    @property
    def done(self) -> bool:
        """Whether the group can be used."""
        return self.group is not None

    def drop(self) -> None:
        """The group is not wanted any more."""
        with self._lock:
            self._dropped = True
            if self.group is not None:
                self.group.retire()
                self.group = None

    def _run(self) -> None:
        try:
            group = self._make()
        except Exception as error:  # noqa: BLE001 - a thread's end that nobody hears of is worse
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
