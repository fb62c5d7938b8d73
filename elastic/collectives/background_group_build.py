"""A process group that is built in a thread, while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastic.collectives.process_group import ProcessGroup
from elastic.training_errors import BrokenGroupError


class BackgroundBuild:
    """A group that is built in a thread of its own, while training goes on.

    Args:
        make: builds the group, in the new thread; may wait. It shows the group to what it is given
            before it meets anybody, so that it can be aborted while it does.
        failed: told why, in the same thread, unless the group was dropped before.
    """

    def __init__(
        self,
        make: Callable[[Callable[[ProcessGroup], None]], ProcessGroup],
        failed: Callable[[str], None],
    ) -> None:
        self._make = make
        self._failed = failed
        self.group: ProcessGroup | None = None
        self.over = threading.Event()  # it is there, or has failed
        self._meeting: ProcessGroup | None = None
        self._dropped = False
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="build", daemon=True).start()

    @property
    def done(self) -> bool:
        """Whether the group can be used."""
        return self.group is not None

    def drop(self) -> None:
        """The group is not wanted any more; whoever meets in it is freed."""
        with self._lock:
            self._dropped = True
            built, meeting = self.group, self._meeting
            self.group = None
        if meeting is not None:
            meeting.abort(limit_s=0)  # nobody uses it: whoever drops it need not wait
        if built is not None:
            built.retire()

    def _show(self, group: ProcessGroup) -> None:
        with self._lock:
            self._meeting = group
            if not self._dropped:
                return
        raise BrokenGroupError("the group is not wanted any more")

    def _run(self) -> None:
        try:
            group = self._make(self._show)
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
